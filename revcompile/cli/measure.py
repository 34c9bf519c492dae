"""revcompile measure: memory and time of training steps."""

from __future__ import annotations

import argparse
import copy
import gc
from collections.abc import Callable
from time import perf_counter

import torch
from torch import nn
from torch.utils import _pytree as pytree

from revcompile.arguments import check_device
from revcompile.cli import Answer
from revcompile.cli.models import Loaded, load, rewired
from revcompile.cli.step_memory import LiveStorages
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
        if (row := _measured(make, loaded, str(device), args.steps)) is not None:
            rows[name] = row
    most = max(row["bytes"] for row in rows.values())
    lines = [
        f"{loaded.name}: a training step with {args.batch_size} samples on {device}",
        "peak memory of parameters, gradients and activations; mean time",
    ]
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


def _measured(
    make: Callable[[], nn.Module | None], loaded: Loaded, device: str, steps: int
) -> dict[str, float] | None:
    """Peak bytes of a model in a training step, and mean seconds per step.

    On a GPU without what it held before: the loaded model, of which `make` returns a copy.
    """
    on_gpu = device.startswith("cuda")
    held = 0
    if on_gpu:
        gc.collect()  # cycles of the model before
        held = torch.cuda.memory_allocated(device)
    made = make()
    if made is None:
        return None
    model = made.train()
    example = loaded.example
    inputs = () if example is None else example if isinstance(example, tuple) else (example,)

    def step() -> None:
        outputs = pytree.tree_leaves(model(*inputs, **loaded.kwargs))
        floats = [t for t in outputs if isinstance(t, torch.Tensor) and t.requires_grad]
        torch.stack([t.float().square().mean() for t in floats]).sum().backward()
        if on_gpu:
            torch.cuda.synchronize(device)

    step()  # warm-up
    model.zero_grad()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
        step()
        most = torch.cuda.max_memory_allocated(device) - held
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
