"""Costs by the clock: every piece runs a few times on real tensors, on the model's own device.

Updates are those of SGD with momentum, one for every micro-batch.

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
from torch import Tensor, fx, nn

from revcompile.compiler.capture.isolation import (
    preserve_attributes,
    preserve_model,
    seed_all,
    set_mode,
)
from revcompile.compiler.cost.run import Code, Given, Ran, bare, walk
from revcompile.errors import InputError
from revcompile.ir.module_tree import device_of_model, parameters_read
from revcompile.ir.program import Piece
from revcompile.ir.types import Cost, Rewired, TensorType

__all__ = ["Clock", "measured_costs"]

WARM_UP: Final = 2
REPEATS: Final = 5
IN_A_ROW: Final = 4
"""Calls in one graph: starting the graph itself must not count."""
BESIDE: Final = 2
"""Backward passes side by side in a recorded round."""

Run = Callable[[], object]


class Clock(enum.Enum):
    """What is timed."""

    CALL = "measured"
    """A call from Python, until the device has done it."""
    REPLAY = "replayed"
    """The kernels of a call, repeated as a CUDA graph, forward passes beside backward passes."""


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
    passes, timed = (_called, _call) if clock is Clock.CALL else (_replayed, _replay)
    seconds: list[tuple[float, float, float]] = []
    counted: set[int] = set()

    def visit(piece: Piece, given: Given) -> Ran:
        wanted = [t for t in given.inputs if isinstance(t, Tensor) and t.requires_grad]
        wanted += [p for p in parameters_read(piece.segment.graph, root) if p.requires_grad]

        def forward() -> Ran:
            with torch.no_grad():
                return given.forward()

        def backward() -> None:
            with torch.enable_grad():
                _differentiate(given.forward().results, wanted)

        own = [p for p in wanted if isinstance(p, nn.Parameter) and id(p) not in counted]
        counted.update(map(id, own))
        updating = timed(_update(own), device) if own else 0.0
        seconds.append((*passes(forward, backward, device), updating))
        return forward()

    with preserve_model(root), preserve_attributes(root):
        set_mode(root, root, training=True)
        seed_all(0)
        values = _example(rewired, types, device)
        walk(pieces, values, lambda graph: _code(root, graph), visit)
    return tuple(
        replace(cost, forward=forward, backward=backward, update=update)
        for cost, (forward, backward, update) in zip(analytic, seconds, strict=True)
    )


def _code(root: nn.Module, graph: fx.Graph) -> Code:
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


def _update(parameters: Sequence[Tensor]) -> Run:
    """An update of copies: what SGD with momentum does."""
    weights, gradients, means = (
        [torch.zeros_like(parameter) for parameter in parameters] for _ in range(3)
    )

    def run() -> None:
        torch._foreach_mul_(means, 0.9)
        torch._foreach_add_(means, gradients)
        torch._foreach_add_(weights, means, alpha=-0.1)

    return run


def _call(run: Run, device: torch.device) -> float:
    """Seconds of a call, with a warm cache."""
    for _ in range(WARM_UP):
        run()
    return _median(run, device)


def _called(forward: Run, backward: Run, device: torch.device) -> tuple[float, float]:
    """Seconds of each, one after the other."""
    return _call(forward, device), _call(backward, device)


def _replay(run: Run, device: torch.device) -> float:
    """Seconds of the kernels of a call."""
    here = torch.cuda.Stream(device)
    here.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(here):
        for _ in range(WARM_UP):
            run()
    return _recorded(run, here, device)


def _replayed(forward: Run, backward: Run, device: torch.device) -> tuple[float, float]:
    """Seconds of the kernels, where backward passes run in pairs, beside forward passes.

    That is how recorded rounds use the device. What forward passes add counts as theirs.
    """
    here, *lanes = (torch.cuda.Stream(device) for _ in range(1 + BESIDE))
    here.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(here):
        for _ in range(WARM_UP):
            forward()
            backward()

    def pair(ahead: int) -> None:
        for lane in lanes:
            lane.wait_stream(here)
            with torch.cuda.stream(lane):
                backward()
        for _ in range(ahead):
            forward()
        for lane in lanes:
            here.wait_stream(lane)

    alone = _recorded(lambda: pair(0), here, device) / BESIDE
    together = _recorded(lambda: pair(BESIDE), here, device) / BESIDE
    return max(together - alone, 0.0), alone


def _recorded(run: Run, stream: torch.cuda.Stream, device: torch.device) -> float:
    _wait(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(IN_A_ROW):
            run()
    graph.replay()
    return _median(graph.replay, device) / IN_A_ROW


def _median(run: Run, device: torch.device) -> float:
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
