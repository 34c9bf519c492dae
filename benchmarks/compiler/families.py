"""Petrafy the smallest model of every timm family and compare its gradients with autograd's.

    python -m benchmarks run families                       # all families, 4 stages, three steps
    python -m benchmarks run families resnet swin_transformer  # some, by family or model name

Three PETRA steps at learning rate 0, the last batch of another size: every parameter's gradient
must equal that of autograd on `net.module()`. Double precision up to `--double` million parameters,
float32 above (there the bar is what two float32 runs differ by, 1e-3).
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import timm
import torch
from rich.progress import track
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import revcompile
from benchmarks.compiler.coverage import smallest_of_each_family
from benchmarks.harness import show
from benchmarks.record import read
from benchmarks.registry import Benchmark, Row


class Recorder(torch.optim.SGD):
    """Changes nothing; keeps every gradient it is given."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.0)
        self.seen: list[list[Tensor | None]] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Keep the gradients."""
        groups = [p for group in self.param_groups for p in group["params"]]
        self.seen.append([None if p.grad is None else p.grad.clone() for p in groups])


def loss(output: Any, target: Tensor) -> Tensor:
    """A weighted mean of everything the model returns."""
    leaves = [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor)]
    terms = [
        (t * torch.cos(target[0] * torch.arange(t.numel()).to(t).view_as(t))).mean()
        for t in leaves
        if t.is_floating_point()
    ]
    return torch.stack(terms).sum() if len(terms) > 1 else terms[0]


def fixed_randomness(model: nn.Module) -> None:
    """No dropout: autograd could not draw the same masks."""
    for module in model.modules():
        for name in (
            "p",
            "drop_prob",
            "drop_rate",
            "drop_path_rate",
            "dropout",
            "dropout_p",
            "drop",
            "attn_drop",
        ):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def examine(
    name: str,
    stages: int,
    steps: int,
    double: float,
    device: str = "cpu",
    side: int | None = None,
) -> dict[str, Any]:
    """Petrafy a model, train some steps at rate 0, compare; `side` of images: the model's own."""
    torch.manual_seed(0)
    model: Any = timm.create_model(name)
    if side is not None and hasattr(model, "set_input_size"):  # transformers are built for one
        model.set_input_size(img_size=side)
    fixed_randomness(model)
    size = sum(p.numel() for p in model.parameters())
    dtype = torch.float64 if size <= double * 1e6 else torch.float32
    model = model.to(device, dtype)
    shape = model.default_cfg.get("input_size", (3, 224, 224))
    shape = shape if side is None else (shape[0], side, side)
    batches = [
        torch.randn(2 if i < steps - 1 else 3, *shape).to(device, dtype) for i in range(steps)
    ]
    start = time.perf_counter()
    net = revcompile.petrafy(model, stages, batches[0], check="off")
    spent = time.perf_counter() - start
    del model
    trainer = net.trainer(Recorder, loss)
    targets = [torch.tensor([0.1 * (i + 1)], device=device) for i in range(steps)]
    for x, y in zip(batches, targets, strict=True):
        trainer.step(x, y)
    trainer.flush()
    reference = net.module()
    reference.reversible = False  # type: ignore[assignment]
    error = max(
        gradient_error(trainer, reference.train(), index, x, y)
        for index, (x, y) in enumerate(zip(batches, targets, strict=True))
    )
    work = [sum(c.forward + c.backward for c in part.costs) for part in net.partition.parts]
    return {
        "parameters": size,
        "dtype": str(dtype).removeprefix("torch."),
        "seconds": round(spent, 1),
        "reversible": sum(part.reversible for part in net.partition.parts),
        "couplings": sum(p.reversible for part in net.partition.parts for p in part.pieces),
        "balance": max(work) * len(work) / sum(work),
        "error": error,
        "ok": error <= (1e-10 if dtype is torch.float64 else 1e-3),
    }


def gradient_error(trainer: Any, reference: nn.Module, index: int, x: Any, y: Tensor) -> float:
    """The worst gradient of a micro-batch (a tensor, or keyword arguments) beside autograd's."""
    reference.zero_grad()
    output = reference(**x) if isinstance(x, dict) else reference(x)
    loss(output, y).backward()
    expected = {name: p.grad for name, p in reference.named_parameters()}
    largest = max(float(g.abs().max()) for g in expected.values() if g is not None)
    worst = 0.0
    for executor in trainer.executors:
        if executor.updater.optimizer is None:
            continue
        seen = executor.updater.optimizer.seen[index]
        for name, got in zip(executor.updater.parameters, seen, strict=True):
            want = expected[name]
            if got is None and want is None:
                continue
            want = torch.zeros_like(got) if want is None else want
            got = torch.zeros_like(want) if got is None else got
            # A gradient that is zero in exact arithmetic is noise: measure against the largest.
            scale = max(float(want.abs().max()), 1e-4 * largest)
            error = float((got - want).abs().max()) / scale
            # max() passes over a nan, which would then count as no error at all
            worst = max(worst, error if math.isfinite(error) else math.inf)
    return worst


def arguments(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    parser.add_argument("names", nargs="*", help="families or models (default: all families)")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--double", type=float, default=60, help="million parameters")
    parser.add_argument("--families", type=Path, help="JSON of [family, model] pairs, to save time")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shard", default="0/1", help="i/n: every n-th model, beginning at i")


def main(options: argparse.Namespace) -> Iterator[Row]:
    """Print the table; rows that a file of --json has are taken from there."""
    shard, shards = map(int, options.shard.split("/"))
    rows: list[dict[str, Any]] = []
    if options.json and options.json.exists():
        rows = read(options.json)["rows"]
    yield from rows
    done = {row["model"] for row in rows}
    for family, name in track([*wanted(options).items()][shard::shards], "petrafying"):
        if name in done:
            continue
        row: dict[str, Any] = {"family": family, "model": name}
        try:
            with warnings.catch_warnings(action="ignore"):
                row |= examine(name, options.stages, options.steps, options.double, options.device)
            row |= {} if row["ok"] else {"failed": f"worst gradient {row['error']:.1e}"}
        except (revcompile.RevcompileError, RuntimeError) as error:
            row |= {"failed": f"{type(error).__name__}: {error}"}
        rows.append(row)
        gc.collect()
        yield row
    right = sum(bool(row.get("ok")) for row in rows)
    columns = ("family", "model", "petrafy s", "reversible", "balance", "worst gradient")
    lines = [_cells(row) for row in sorted(rows, key=lambda row: row["family"])]
    show(f"{right} of {len(rows)} equal autograd", columns, lines)


def wanted(options: argparse.Namespace) -> dict[str, str]:
    """Family (or what it is called by) -> model."""
    models = {name: name for name in options.names if timm.is_model(name)}
    if options.names and set(options.names) == set(models):
        return models
    pairs = dict(json.loads(options.families.read_text())) if options.families else None
    families = pairs or smallest_of_each_family()
    return {f: m for f, m in families.items() if not options.names or f in options.names} | models


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
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


BENCHMARK = Benchmark("families", arguments, main, smallest=("test_resnet", "--stages", "2"))
