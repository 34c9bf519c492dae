"""revcompile measure: memory and time of training steps."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from revcompile.arguments import check_device
from revcompile.cli import Answer
from revcompile.cli.live_storages import LiveStorages
from revcompile.cli.models import load, rewired
from revcompile.units import format_size

_BAR = 30


def run(args: argparse.Namespace) -> Answer:
    """A row with a bar for each way to train."""
    device = check_device("measure", args.device)
    loaded = load(args, microbatch_size=args.batch_size, device=str(device))
    makers: dict[str, Callable[[], nn.Module | None]] = {
        "plain": lambda: copy.deepcopy(loaded.model),
        "checkpointed": lambda: _checkpointed(copy.deepcopy(loaded.model)),
        "reversible": lambda: rewired(loaded, args),
    }
    rows = {}
    for name, make in makers.items():
        if (model := make()) is not None:
            rows[name] = _measured(model.train(), loaded.example, str(device), args.steps)
    most = max(row["bytes"] for row in rows.values())
    lines = [f"{loaded.name}: a training step with {args.batch_size} samples on {device}"]
    for name, row in rows.items():
        bar = "█" * max(1, round(_BAR * row["bytes"] / most))
        memory, time = format_size(int(row["bytes"])), f"{1e3 * row['seconds']:.0f} ms"
        lines.append(f"{name:12} {memory:>10} {bar:{_BAR}} {time:>9}")
    facts = {"model": loaded.name, "batch_size": args.batch_size, "rows": rows}
    return Answer("\n".join(lines), facts)


def _checkpointed(model: nn.Module) -> nn.Module | None:
    for switch in ("set_grad_checkpointing", "gradient_checkpointing_enable"):
        if hasattr(model, switch):
            getattr(model, switch)()
            return model
    return None


def _measured(model: nn.Module, example: Any, device: str, steps: int) -> dict[str, float]:
    """Peak bytes allocated in a training step, and mean seconds per step."""
    inputs = example if isinstance(example, tuple) else (example,)
    on_gpu = device.startswith("cuda")

    def step() -> None:
        outputs = pytree.tree_leaves(model(*inputs))
        floats = [t for t in outputs if isinstance(t, torch.Tensor) and t.requires_grad]
        torch.stack([t.float().square().mean() for t in floats]).sum().backward()
        if on_gpu:
            torch.cuda.synchronize(device)

    step()  # warm-up
    model.zero_grad()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
        step()
        most = torch.cuda.max_memory_allocated(device)
    else:
        tensors = (*model.parameters(), *model.buffers())
        with LiveStorages() as live:
            step()
        most = live.peak + sum(t.nbytes for t in tensors)
    start = perf_counter()
    for _ in range(steps):
        model.zero_grad()
        step()
    return {"bytes": float(most), "seconds": (perf_counter() - start) / steps}
