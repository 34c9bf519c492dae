"""Costs by the clock: every piece runs a few times on real tensors, on the model's own device.

A GPU may spend less time on a piece than Python does on starting its kernels. What Python needs
counts where stages run action by action; where whole rounds are recorded only the kernels do.
"""

from __future__ import annotations

import enum
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, fx

from revcompile.compiler.capture.check import model_unchanged
from revcompile.compiler.capture.copies import attributes_kept, set_mode
from revcompile.compiler.capture.rng import seed_all
from revcompile.compiler.cost.run import (
    Code,
    Given,
    Ran,
    bare,
    graph_of,
    walk,
)
from revcompile.errors import InputError
from revcompile.ir import Cost, Rewired, TensorType
from revcompile.program import Piece
from revcompile.tree import device_of_model, parameters_read

__all__ = ["Clock", "measured_costs"]

WARM_UP: Final = 2
REPEATS: Final = 5
IN_A_ROW: Final = 4
"""Calls in one graph: starting the graph itself must not count."""


class Clock(enum.Enum):
    """What is timed."""

    CALL = "measured"
    """A call from Python, until the device has done it."""
    REPLAY = "replayed"
    """The kernels of a call, repeated as a CUDA graph."""


def measured_costs(
    rewired: Rewired,
    pieces: Sequence[Piece],
    types: Mapping[str, Any],
    analytic: Sequence[Cost],
    clock: Clock = Clock.CALL,
) -> tuple[Cost, ...]:
    """The analytic costs with seconds as work. The model is left exactly as it was."""
    root = bare(rewired.root)
    device = device_of_model(root)
    if device.type == "meta":
        raise InputError(
            f"cost: {rewired.name} is on the meta device, where nothing can be measured; move it "
            'to a real device first, or use how="analytic"'
        )
    if clock is Clock.REPLAY and device.type != "cuda":
        raise InputError(
            f"cost: {rewired.name} is on {device}, where no kernels can be replayed; move it to "
            'a CUDA device first, or use how="measured"'
        )
    timed = _called if clock is Clock.CALL else _replayed
    seconds: list[tuple[float, float]] = []

    def visit(piece: Piece, given: Given) -> Ran:
        wanted = [t for t in given.inputs if isinstance(t, Tensor) and t.requires_grad]
        wanted += [p for p in parameters_read(graph_of(piece), root) if p.requires_grad]

        def forward() -> Ran:
            with torch.no_grad():
                return given.forward()

        def backward() -> None:
            with torch.enable_grad():
                _differentiate(given.forward().results, wanted)

        seconds.append((timed(forward, device), timed(backward, device)))
        return forward()

    with model_unchanged(root), attributes_kept(root):
        set_mode(root, root, training=True)
        seed_all(0)
        values = _example(rewired, types, device)
        walk(pieces, values, lambda graph: _code(root, graph), visit)
    return tuple(
        replace(cost, forward=forward, backward=backward)
        for cost, (forward, backward) in zip(analytic, seconds, strict=True)
    )


def _code(root: torch.nn.Module, graph: fx.Graph) -> Code:
    """Generated code: an interpreter's own time would be measured too."""
    code = graph.python_code("self")
    namespace = dict(code.globals)
    exec(compile(code.src, "<revcompile cost>", "exec"), namespace)
    function: Code = namespace["forward"].__get__(root)
    return function


def _example(rewired: Rewired, types: Mapping[str, Any], device: torch.device) -> dict[str, Tensor]:
    """Random inputs; integers are 0, which every table can look up."""
    values: dict[str, Tensor] = {}
    for name in rewired.signature.placeholders:
        kind = types[name]
        if not isinstance(kind, TensorType):
            continue
        if kind.dtype.is_floating_point or kind.dtype.is_complex:
            values[name] = torch.randn(kind.shape, dtype=kind.dtype, device=device)
        else:
            values[name] = torch.full(
                kind.shape, kind.dtype is torch.bool, dtype=kind.dtype, device=device
            )
    return values


def _differentiate(outputs: Sequence[Any], wanted: Sequence[Tensor]) -> None:
    """Gradients, without leaving any on the parameters."""
    ends = [out for out in outputs if isinstance(out, Tensor) and out.requires_grad]
    if ends and wanted:
        seeds = [torch.ones_like(end) for end in ends]
        torch.autograd.grad(ends, wanted, seeds, allow_unused=True)


def _called(run: Callable[[], object], device: torch.device) -> float:
    for _ in range(WARM_UP):
        run()
    return _median(run, device)


def _replayed(run: Callable[[], object], device: torch.device) -> float:
    """Seconds that the kernels of a call take."""
    aside = torch.cuda.Stream(device)
    aside.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(aside):
        for _ in range(WARM_UP):
            run()
    _wait(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=aside):
        for _ in range(IN_A_ROW):
            run()
    graph.replay()
    return _median(graph.replay, device) / IN_A_ROW


def _median(run: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(REPEATS):
        _wait(device)
        start = time.perf_counter()
        run()
        _wait(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
