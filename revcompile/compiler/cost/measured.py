"""Measured costs: every piece runs a few times on real tensors, on the model's own device.

Updates are those of SGD with momentum, one for every micro-batch.

A GPU may spend less time on a piece than Python does on launching its kernels. Launches count where
stages run action by action (eager); in captured steps only the kernels do.
"""

from __future__ import annotations

import enum
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from revcompile.compiler.capture.isolation import (
    preserve_attributes,
    preserve_model,
    seed_all,
    set_mode,
)
from revcompile.compiler.cost.run_pieces import (
    PieceCall,
    PieceResult,
    run_pieces,
    submodules_only,
)
from revcompile.errors import InputError
from revcompile.ir.module_tree import device_of_model, parameters_read
from revcompile.ir.python_code import compile_graph
from revcompile.ir.types import Cost, Rewired, Segment, TensorType

WARM_UP: Final = 2
REPEATS: Final = 5
CALLS_A_GRAPH: Final = 4
"""Calls in one CUDA graph, so that launching the graph itself hardly counts."""
CONCURRENT: Final = 2
"""Backward passes at the same time in a captured step."""

Run = Callable[[], object]


class Clock(enum.Enum):
    """What is timed."""

    CALL = "measured"
    """A call from Python, until the device has done it."""
    REPLAY = "replayed"
    """Kernels alone, replayed as a CUDA graph, forward passes concurrent with backward passes."""


def measured_costs(
    rewired: Rewired,
    pieces: Sequence[Segment],
    types: Mapping[str, Any],
    analytic: Sequence[Cost],
    clock: Clock = Clock.CALL,
) -> tuple[Cost, ...]:
    """The analytic costs with seconds as work. The model is left exactly as it was."""
    root = submodules_only(rewired.root)
    device = device_of_model(root)
    if device.type == "meta":
        raise InputError(
            f"cost: {rewired.name} is on the meta device, where nothing can be measured; move it "
            'to a real device first, or use cost="analytic"'
        )
    if clock is Clock.REPLAY and device.type != "cuda":
        raise InputError(
            f"cost: {rewired.name} is on {device}, where no kernels can be replayed; move it to "
            'a CUDA device first, or use cost="measured"'
        )
    time_passes, time_run = (
        (_time_calls, _time_call) if clock is Clock.CALL else (_time_replays, _time_replay)
    )
    seconds: list[tuple[float, float, float]] = []
    counted_parameters: set[int] = set()

    def run(piece: Segment, call: PieceCall) -> PieceResult:
        sources = [t for t in call.inputs if isinstance(t, Tensor) and t.requires_grad]
        sources += [p for p in parameters_read(piece.graph, root) if p.requires_grad]

        def forward() -> PieceResult:
            with torch.no_grad():
                return call.forward()

        def backward() -> None:
            with torch.enable_grad():
                _differentiate(call.forward().results, sources)

        parameters = [p for p in sources if isinstance(p, nn.Parameter)]
        new = [p for p in parameters if id(p) not in counted_parameters]
        counted_parameters.update(map(id, new))
        update = time_run(_update(new), device) if new else 0.0
        seconds.append((*time_passes(forward, backward, device), update))
        return forward()

    with preserve_model(root), preserve_attributes(root):
        set_mode(root, root, training=True)
        seed_all(0)
        values = _example(rewired, types, device)
        # Generated code: an interpreter's own time would be measured too.
        run_pieces(pieces, values, lambda g: partial(compile_graph(g, "cost"), root), run)
    return tuple(
        replace(cost, forward=forward, backward=backward, update=update)
        for cost, (forward, backward, update) in zip(analytic, seconds, strict=True)
    )


def _example(rewired: Rewired, types: Mapping[str, Any], device: torch.device) -> dict[str, Tensor]:
    """Random inputs; integers are 0, a valid index of every embedding."""
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


def _differentiate(outputs: Sequence[Any], sources: Sequence[Tensor]) -> None:
    """Compute gradients without leaving any on the parameters."""
    tensors = [out for out in outputs if isinstance(out, Tensor) and out.requires_grad]
    if tensors and sources:
        ones = [torch.ones_like(tensor) for tensor in tensors]
        torch.autograd.grad(tensors, sources, ones, allow_unused=True)


def _update(parameters: Sequence[Tensor]) -> Run:
    """What SGD with momentum does in an update, on copies."""
    weights, gradients, momenta = (
        [torch.zeros_like(parameter) for parameter in parameters] for _ in range(3)
    )

    def run() -> None:
        torch._foreach_mul_(momenta, 0.9)
        torch._foreach_add_(momenta, gradients)
        torch._foreach_add_(weights, momenta, alpha=-0.1)

    return run


def _time_call(run: Run, device: torch.device) -> float:
    """Seconds of a call, with a warm cache."""
    for _ in range(WARM_UP):
        run()
    return _median(run, device)


def _time_calls(forward: Run, backward: Run, device: torch.device) -> tuple[float, float]:
    """Seconds of each, one after the other."""
    return _time_call(forward, device), _time_call(backward, device)


def _time_replay(run: Run, device: torch.device) -> float:
    """Seconds of the kernels of a call."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            run()
    return _time_graph(run, stream, device)


def _time_replays(forward: Run, backward: Run, device: torch.device) -> tuple[float, float]:
    """Seconds of the kernels, where backward passes run in pairs, concurrently with forward ones.

    Captured steps use the device like this. The time that forward passes add counts as theirs.
    """
    main, *side_streams = (torch.cuda.Stream(device) for _ in range(1 + CONCURRENT))
    main.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(main):
        for _ in range(WARM_UP):
            forward()
            backward()

    def passes(forwards: int) -> None:
        for side in side_streams:
            side.wait_stream(main)
            with torch.cuda.stream(side):
                backward()
        for _ in range(forwards):
            forward()
        for side in side_streams:
            main.wait_stream(side)

    backward_only = _time_graph(lambda: passes(0), main, device) / CONCURRENT
    both = _time_graph(lambda: passes(CONCURRENT), main, device) / CONCURRENT
    return max(both - backward_only, 0.0), backward_only


def _time_graph(run: Run, stream: torch.cuda.Stream, device: torch.device) -> float:
    _synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(CALLS_A_GRAPH):
            run()
    graph.replay()
    return _median(graph.replay, device) / CALLS_A_GRAPH


def _median(run: Run, device: torch.device) -> float:
    times = []
    for _ in range(REPEATS):
        _synchronize(device)
        start = time.perf_counter()
        run()
        _synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
