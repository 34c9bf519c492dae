"""Capture and rewire the smallest model of every timm family; report what became reversible.

    python -m benchmarks.coverage --markdown docs/coverage.md    # all families
    python -m benchmarks.coverage --check full       # compare every capture with its original
    python -m benchmarks.coverage resnet convnext_atto         # some, by family or name

Shares are of the original model's parameters and forward FLOPs (policy "same_parameters", which
adds none). timm's `test_*` models are skipped. `--torchvision` examines torchvision's classifiers.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import timm
import torch
from rich.progress import track
from timm.models._registry import _model_to_module
from torch import nn

import revcompile
from benchmarks.harness import Row, parser_of, save, show
from revcompile.compiler.capture import capture
from revcompile.compiler.cost import segment_costs
from revcompile.compiler.find import find
from revcompile.compiler.rewire import rewire
from revcompile.compiler.verify import verify_rewired
from revcompile.ir.policy import Policy
from revcompile.ir.types import Coupling

GROUPS: Final = (
    (90, "90 % or more"),
    (80, "80 to 90 %"),
    (50, "50 to 80 %"),
    (1e-9, "less than 50 %"),
    (0, "none"),
    (-1, "not captured"),
)
"""The least share of a group, and the group's name on the page."""


def smallest_of_each_family() -> dict[str, str]:
    """Family (timm's module) -> its model with the fewest parameters."""
    sizes: dict[str, tuple[int, str]] = {}
    for name in track(timm.list_models(exclude_filters="test_*"), "counting parameters"):
        family = _model_to_module[name]
        try:
            with torch.device("meta"):
                size = sum(p.numel() for p in timm.create_model(name).parameters())
        except (RuntimeError, NotImplementedError, TypeError):
            continue  # some need real values to be built; others of the family stand in
        sizes[family] = min(sizes.get(family, (size, name)), (size, name))
    return {family: name for family, (_, name) in sorted(sizes.items())}


def chosen(names: list[str], of_torchvision: bool) -> Iterator[tuple[str, str, nn.Module, Any]]:
    """Family, name, model and example inputs of each model to examine."""
    if of_torchvision:
        import torchvision

        for name in torchvision.models.list_models(module=torchvision.models):
            if not names or name in names:
                options: dict[str, Any] = {"weights": None}
                if name in ("googlenet", "inception_v3"):
                    options["init_weights"] = False
                size = 299 if name == "inception_v3" else 224
                model = torchvision.models.get_model(name, **options)
                yield "torchvision", name, model, torch.randn(2, 3, size, size)
        return
    known = set(timm.list_models())
    families = smallest_of_each_family() if not set(names) <= known or not names else {}
    for family, name in families.items():
        if not names or family in names:
            yield family, name, timm.create_model(name), None
    for name in names:
        if name in known:
            yield _model_to_module[name], name, timm.create_model(name), None


def examine(model: nn.Module, example: Any, check: str) -> dict[str, Any]:
    """One row of the report."""
    start = time.perf_counter()
    captured = capture(model, example, check=check)
    found = find(captured)
    rewired = rewire(captured, found, Policy.SAME_PARAMETERS)
    verify_rewired(captured, rewired)
    spent = time.perf_counter() - start
    cost = list(zip(rewired.body.segments, segment_costs(rewired), strict=True))
    flops = sum(c.flops for _, c in cost)
    parameters = sum(c.parameters for _, c in cost)
    inside = [c for segment, c in cost if isinstance(segment, Coupling)]
    reasons: dict[str, int] = {}
    for refusal in rewired.refusals:
        text = "".join("#" if c.isdigit() else c for c in refusal.reason)
        reasons[text] = reasons.get(text, 0) + 1
    return {
        "leaves": len(captured.leaf_modules),
        "seconds": round(spent, 1),
        "segments": len(rewired.body.segments),
        "reversible": len(rewired.couplings),
        "flops_share": 100 * sum(c.flops for c in inside) / max(flops, 1),
        "parameter_share": 100 * sum(c.parameters for c in inside) / max(parameters, 1),
        "refused": reasons,
    }


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command-line options."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("names", nargs="*", help="families or models; all families if there are none")
    add("--check", default="fast", choices=["full", "fast", "off"])
    add("--torchvision", action="store_true")
    add("--markdown", type=Path, help="write the table here")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, and write it if asked to; returns 1 if a model was not captured."""
    args = parse_args(argv)
    torch.manual_seed(0)
    rows: list[Row] = []
    for family, name, model, example in chosen(args.names, args.torchvision):
        row: Row = {"family": family, "model": name}
        try:
            with warnings.catch_warnings(action="ignore"):
                row |= examine(model, example, args.check)
        except revcompile.RevcompileError as error:
            row["failed"] = str(error)
        rows.append(row)
        print(*_cells(row), sep="  ", flush=True)
        save(args, rows)
    captured = sum("failed" not in row for row in rows)
    columns = ("family", "model", "FLOPs", "parameters", "blocks", "most frequent refusal")
    show(f"captured {captured}/{len(rows)}", columns, [_cells(row) for row in rows])
    if args.markdown:
        args.markdown.write_text(markdown(rows))
    return int(captured < len(rows))


def markdown(rows: list[dict[str, Any]]) -> str:
    """The rows as a page: families grouped by the share of their smallest model."""
    groups: dict[str, list[str]] = {}
    for row in sorted(rows, key=lambda row: (-row.get("flops_share", -1.0), row["family"])):
        share = row.get("flops_share", -1.0)
        name = next(name for least, name in GROUPS if share >= least)
        groups.setdefault(name, []).append(row["family"])
    lines = [
        "# What becomes reversible",
        "",
        f"This table groups timm's {len(rows)} families by the share of forward FLOPs inside",
        "reversible blocks, in the smallest model of each family. Deeper models can have more.",
        "`revcompile inspect MODEL` gives the share of your model and the reasons for the rest.",
        "`python -m benchmarks.coverage` makes the table.",
        "",
        "| reversible FLOPs | families |",
        "|---|---|",
    ]
    lines += [f"| {g}: {len(found)} | {', '.join(sorted(found))} |" for g, found in groups.items()]
    return "\n".join(lines) + "\n"


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    if "failed" in row:
        return row["family"], row["model"], "failed", "", "", row["failed"].splitlines()[0]
    most = max(row["refused"], key=row["refused"].__getitem__, default="")
    return (
        row["family"],
        row["model"],
        f"{row['flops_share']:.1f} %",
        f"{row['parameter_share']:.1f} %",
        f"{row['reversible']}/{row['segments']}",
        f"{row['refused'][most]}x {most}" if most else "",
    )


if __name__ == "__main__":
    sys.exit(main())
