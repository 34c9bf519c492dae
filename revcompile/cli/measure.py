"""revcompile measure: memory and time of training steps."""

from __future__ import annotations

import argparse
import copy
import gc
from collections.abc import Iterator, Mapping
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, Final

import torch
import torch._dynamo
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from revcompile.arguments import check_device
from revcompile.cli import Answer
from revcompile.cli.baselines import checkpointed, compile_blocks, within
from revcompile.cli.models import Loaded, load, rewired
from revcompile.cli.step_memory import measure_memory
from revcompile.errors import InputError
from revcompile.inspect import drawing
from revcompile.units import format_size

_BAR: Final = 24
_FRACTIONS: Final = (0.1, 0.2, 0.3, 0.5, 0.7)
"""Of torch's `activation_memory_budget`."""
_BETWEEN: Final = 5
"""Budgets between the least and everything kept."""

Row = dict[str, Any]
"""Bytes (the peak of activations) and seconds of a step, or why it failed."""


def run(args: argparse.Namespace) -> Answer:
    """A row with a bar for each way to train; the picture."""
    device = check_device("measure", args.device) or torch.device("cpu")
    on_gpu = device.type == "cuda"
    args.compile = on_gpu if args.compile is None else args.compile
    args.precision = args.precision or ("bf16" if on_gpu else "fp32")
    if args.plot is not None and args.compile and not on_gpu:
        raise InputError(
            "memory of compiled steps is counted on GPUs only; use --compile or --plot, not both"
        )
    loaded = load(args, microbatch_size=args.batch_size, device=str(device))
    where = torch.cuda.get_device_name(device) if on_gpu else str(device)
    title = f"{loaded.name}: a training step with {args.batch_size} samples on {where}"
    rows = _Measuring(loaded, device, args).rows()
    weights = format_size(2 * sum(p.nbytes for p in loaded.model.parameters()))
    lines = [
        f"{title}, {args.precision}",
        f"peak of activations, beside {weights} of parameters and gradients; median time",
        *_bars(rows),
    ]
    if args.plot is not None:
        about = f"{args.precision}, {'compiled' if args.compile else 'eager'}"
        picture = partial(drawing.frontier_svg, title, about, _panel(rows), time="ms per step")
        drawing.write("measure", args.plot, {".svg": picture})
    facts = {"model": loaded.name, "batch_size": args.batch_size, "rows": rows}
    return Answer("\n".join(lines), facts | {"device": where, "precision": args.precision})


def _bars(rows: Mapping[str, Row]) -> Iterator[str]:
    most = max(row.get("bytes", 0) for row in rows.values())
    wide = max(map(len, rows))
    for name, row in rows.items():
        size = row.get("bytes")
        bar = "█" * max(1, round(_BAR * size / most)) if size else ""
        time = f"{1e3 * row['seconds']:.0f} ms" if "seconds" in row else row["failed"]
        yield f"{name:{wide}} {format_size(size) if size else '':>10} {bar:{_BAR}} {time:>9}"


def _panel(rows: Mapping[str, Row]) -> drawing.Panel:
    """Compiled ways, or all if none was compiled."""
    kind = ", compiled" if "plain, compiled" in rows else ""
    points = {
        name.removesuffix(kind): (float(row["bytes"]), 1e3 * row["seconds"])
        for name, row in rows.items()
        if "bytes" in row and (name.endswith(kind) or name + kind not in rows)
    }
    curve = sorted(point for name, point in points.items() if name.startswith("reversible"))
    if not curve:
        raise InputError("--plot: no reversible step could be measured; see the command without it")
    labelled = {name: point for name, point in points.items() if " in " not in name}
    rivals = [name for name in labelled if name.startswith("torch")]
    return drawing.Panel(labelled, curve, rivals=rivals)


class _Measuring:
    """Measures one way after another; all budgets have one reversible module."""

    def __init__(self, loaded: Loaded, device: torch.device, args: argparse.Namespace) -> None:
        self.loaded, self.device, self.args = loaded, device, args
        self.kinds = ("", ", compiled") if args.compile else ("",)

    def rows(self) -> dict[str, Row]:
        """The figures by name, behind a progress bar on a terminal."""
        total = 3 * len(self.kinds)
        if self.args.plot is not None:
            total += 2 + _BETWEEN + len(_FRACTIONS) * self.args.compile
        console = Console(stderr=True, force_jupyter=False)
        bar = Progress(console=console, transient=True, disable=not console.is_terminal)
        found = {}
        with bar, torch._dynamo.config.patch(recompile_limit=256, accumulated_recompile_limit=4096):
            task = bar.add_task(f"measure {self.loaded.name}", total=total)
            for name, row in self._ways():
                bar.update(task, advance=1)
                if row is not None:
                    found[name] = row
        return found

    def _ways(self) -> Iterator[tuple[str, Row | None]]:
        net: Any = None
        for kind in self.kinds:
            fraction = 1.0 if kind else None
            yield f"plain{kind}", self._baseline(fraction)
            yield f"checkpointing{kind}", self._baseline(fraction, checkpoints=True)
            net = net or rewired(self.loaded, self.args)
            if kind:
                net.compile()
            yield f"reversible{kind}", self._measured(net, bool(kind))
        if self.args.plot is None:
            return
        bounds = []
        for name, budget in (("least", "least"), ("all kept", 2**60)):
            net.memory_budget = budget
            row = self._measured(net, self.args.compile)
            bounds.append(row.get("bytes", 0))
            yield f"reversible, {name}", row
        low, high = bounds
        for step in range(1, _BETWEEN + 1) if 0 < low < high else ():
            net.memory_budget = budget = round(low * (high / low) ** (step / (_BETWEEN + 1)))
            try:
                row = self._measured(net, self.args.compile)
            except InputError:  # planned from an estimate, on a CPU
                row = {"failed": "estimated to need more"}
            yield f"reversible in {format_size(budget)}", row
        for fraction in _FRACTIONS if self.args.compile else ():
            yield f"torch {fraction:g}", self._baseline(fraction)

    def _baseline(self, fraction: float | None, checkpoints: bool = False) -> Row | None:
        """The model itself; its blocks are compiled under a budget of torch, if one is given."""
        model = copy.deepcopy(self.loaded.model)
        if checkpoints and checkpointed(model) is None:
            return None
        if fraction is None:
            return self._measured(model, compiled=False)
        compile_blocks(model, within(fraction))
        try:
            return self._measured(model, compiled=True)
        except Exception as error:  # of a compiler that is not ours
            return {"failed": f"{type(error).__name__}"}

    def _measured(self, model: nn.Module, compiled: bool) -> Row:
        model.train()
        example = self.loaded.example
        inputs = () if example is None else example if isinstance(example, tuple) else (example,)
        low = self.args.precision == "bf16"

        def forward() -> Tensor:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=low):
                outputs = pytree.tree_leaves(model(*inputs, **self.loaded.kwargs))
            floats = [t for t in outputs if isinstance(t, Tensor) and t.requires_grad]
            return torch.stack([t.float().square().mean() for t in floats]).sum()

        def seconds() -> float:
            start = perf_counter()
            forward().backward()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            model.zero_grad()
            return perf_counter() - start

        row: Row = {}
        try:
            forward().backward()  # compiles; a mode that counts would stop that
            if self.device.type == "cuda" or not compiled:
                row["bytes"] = measure_memory(forward, self.device).peak
            model.zero_grad()
            row["seconds"] = median(seconds() for _ in range(self.args.steps))
        except torch.OutOfMemoryError:
            return {"failed": "out of memory"}
        finally:
            model.zero_grad()
            gc.collect()  # cycles of models that are done
        return row
