"""Petrafy the smallest model of every timm family and compare its gradients with autograd's.

    python -m benchmarks.families                       # all families, 4 stages, three steps
    python -m benchmarks.families resnet swin_transformer  # some, by family or model name

Each model runs three PETRA steps at learning rate 0, the last with another batch size. Every
parameter's gradient must equal that of autograd on `net.to_module()`. Models of up to `--double`
million parameters run in double precision, larger ones in float32 (with a bar of 1e-3, which is how
much two float32 runs differ).
"""

from __future__ import annotations

import argparse
import gc
import sys
import warnings
from collections.abc import Sequence

import timm
from rich.progress import track

import revcompile
from benchmarks.coverage import smallest_of_each_family
from benchmarks.harness import Row, parser_of, save, show
from tests.support.comparing import examine_timm


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command-line options."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("names", nargs="*", help="families or models; all families if there are none")
    add("--stages", type=int, default=4)
    add("--steps", type=int, default=3)
    add("--double", type=float, default=60, help="million parameters")
    add("--device", default="cpu")
    add("--shard", default="0/1", help="i/n: every n-th model, beginning at i")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; returns 1 if a gradient differs."""
    args = parse_args(argv)
    shard, shards = map(int, args.shard.split("/"))
    models = {name: name for name in args.names if timm.is_model(name)}
    if not args.names or set(args.names) != set(models):
        families = smallest_of_each_family()
        models |= {f: m for f, m in families.items() if not args.names or f in args.names}
    rows: list[Row] = []
    for family, name in track(sorted(models.items())[shard::shards], "petrafying"):
        row: Row = {"family": family, "model": name}
        try:
            with warnings.catch_warnings(action="ignore"):
                row |= examine_timm(name, args.stages, args.steps, args.double, args.device)
            row |= {} if row["ok"] else {"failed": f"worst gradient {row['error']:.1e}"}
        except (revcompile.RevcompileError, RuntimeError) as error:
            row["failed"] = f"{type(error).__name__}: {error}"
        rows.append(row)
        save(args, rows)
        gc.collect()
    wrong = sum("failed" in row for row in rows)
    columns = ("family", "model", "petrafy s", "reversible", "balance", "worst gradient")
    show(f"{len(rows) - wrong} of {len(rows)} equal autograd", columns, list(map(_cells, rows)))
    return int(wrong > 0)


def _cells(row: Row) -> tuple[str, ...]:
    if "error" not in row:
        return row["family"], row["model"], "", "", "", row["failed"][:60]
    return (
        row["family"],
        row["model"],
        f"{row['seconds']}",
        f"{row['couplings']} blocks, {row['reversible']} stages",
        f"{row['balance']:.2f}",
        f"{row['error']:.1e} ({row['dtype']})" + ("" if row["ok"] else "  TOO LARGE"),
    )


if __name__ == "__main__":
    sys.exit(main())
