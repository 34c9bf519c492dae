"""Measured costs: every piece runs a few times on real tensors, on the model's own device.

Updates are those of SGD with momentum, one for every micro-batch.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from revcompile.compiler.capture.isolation import preserve_model, seed_all, set_mode
from revcompile.compiler.cost.run_pieces import PieceCall, run_pieces, submodules_only
from revcompile.errors import InputError
from revcompile.ir.module_tree import device_of_model, parameters_read
from revcompile.ir.types import Cost, Rewired, Segment, TensorType

WARM_UP: Final = 2
REPEATS: Final = 5


def measured_costs(
    rewired: Rewired,
    pieces: Sequence[Segment],
    types: Mapping[str, Any],
    analytic: Sequence[Cost],
) -> tuple[Cost, ...]:
    """The analytic costs with seconds as work. The model is left exactly as it was."""
    root = submodules_only(rewired.root)
    device = device_of_model(root)
    if device.type == "meta":
        raise InputError(
            f"cost: {rewired.name} is on the meta device, where nothing can be measured; move it "
            'to a real device first, or use cost="analytic"'
        )
    seconds: list[tuple[float, float, float]] = []
    counted: set[int] = set()

    def run(piece: Segment, call: PieceCall) -> tuple[Any, ...]:
        sources = [t for t in call.inputs if isinstance(t, Tensor) and t.requires_grad]
        sources += [p for p in parameters_read(piece.graph, root) if p.requires_grad]
        new = [p for p in sources if isinstance(p, nn.Parameter) and id(p) not in counted]
        counted.update(map(id, new))

        def forward() -> tuple[Any, ...]:
            with torch.no_grad():
                return call.outputs(call.run())

        def backward() -> None:
            with torch.enable_grad():
                _differentiate(call.run(), sources)

        update = _time(_update(new), device) if new else 0.0
        seconds.append((_time(forward, device), _time(backward, device), update))
        return forward()

    with preserve_model(root):
        set_mode(root, root, training=True)
        seed_all(0)
        run_pieces(pieces, _example(rewired, types, device), root, run)
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


def _update(parameters: Sequence[Tensor]) -> Callable[[], object]:
    """An update of SGD with momentum, on copies of the parameters."""
    copies = [nn.Parameter(torch.zeros_like(parameter)) for parameter in parameters]
    for copy in copies:
        copy.grad = torch.zeros_like(copy)
    return torch.optim.SGD(copies, lr=0.1, momentum=0.9).step


def _time(run: Callable[[], object], device: torch.device) -> float:
    """Median seconds of a call, including its work on the device."""
    times = []
    for _ in range(WARM_UP + REPEATS):
        _synchronize(device)
        start = time.perf_counter()
        run()
        _synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[WARM_UP:])


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
