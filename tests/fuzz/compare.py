"""What is observed of a call, and how two observations are compared."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from revcompile.ir.coupling_ops import seed_torch
from revcompile.runtime.reversible import coupling
from revcompile.runtime.reversible.block import Averaged
from tests.recorded import dense

Values = dict[str, Tensor | None]
TOLERANCE: Final = {"float64": 1e-8, "float32": 2e-3, "bfloat16": 6e-2}
"""Relative to the largest element of a value, or to what is noise if that is larger.

Streams are rebuilt to 1e-9 in float64, or it is an error; gradients may have lost a digit more.
"""
NOISE: Final = {"float64": 1e-4, "float32": 1e-2, "bfloat16": 0.3}
"""Of the largest of all values. A bias before a batch norm has a gradient of 0 but for rounding."""

AMPLIFIED: Final = 100.0
"""The factor by which an error may exceed that of rounding alone.

A rebuilt value has passed through more roundings than a stored one. Where they are amplified (a
batch norm of equal rows divides by the root of its eps), autograd's own gradients are as inexact.
"""


@dataclass(frozen=True)
class Call:
    """Arguments of one call and the seed it is made with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    seed: int = 0


@dataclass(frozen=True)
class Seen:
    """Everything observed of one call."""

    outputs: Values
    gradients: Values
    buffers: Values


def loss(output: Any, target: Tensor) -> Tensor:
    """A weighted mean of all a net returns, different for every target."""
    terms = []
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
            real = torch.view_as_real(leaf) if leaf.is_complex() else leaf
            if not real.requires_grad:
                continue
            weights = torch.cos(target * torch.arange(real.numel(), dtype=target.dtype) + target)
            terms.append((real * weights.to(real).view_as(real)).mean())
    return torch.stack([term.double() for term in terms]).sum()


@contextlib.contextmanager
def autocasting(precision: str) -> Iterator[None]:
    """What a net of this precision runs under."""
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
        yield


def observe(
    module: nn.Module,
    calls: Sequence[Call],
    precision: str,
    *,
    run: Callable[..., Any] | None = None,
    rate: float = 0.0,
) -> list[Seen]:
    """Calls one after the other, each with its gradients and the buffers afterwards.

    Between two calls the parameters move by `rate` times their gradient.
    """
    seen = []
    for index, call in enumerate(calls):
        leaves, spec = pytree.tree_flatten((call.args, call.kwargs))
        inputs = [leaf.detach().clone() for leaf in leaves]
        for tensor in inputs:
            tensor.requires_grad_(module.training and tensor.is_floating_point())
        # a net may write into what it is given, which then must not be a leaf
        args, kwargs = pytree.tree_unflatten(
            [t * 1 if t.requires_grad else t for t in inputs], spec
        )
        module.zero_grad()
        seed_torch(call.seed)
        with autocasting(precision), torch.set_grad_enabled(module.training):
            output = (run or module)(*args, **kwargs)
        outputs = {
            f"output {i}": leaf.detach().clone()
            for i, leaf in enumerate(pytree.tree_leaves(output))
            if isinstance(leaf, Tensor)
        }
        gradients: Values = {}
        if module.training:
            loss(output, torch.tensor(0.1 * (index + 1))).backward()
            gradients = {f"input {i}": t.grad for i, t in enumerate(inputs) if t.requires_grad}
            gradients |= {
                name: None if p.grad is None else dense(p.grad)
                for name, p in module.named_parameters()
            }
        buffers: Values = {name: b.detach().clone() for name, b in module.named_buffers()}
        seen.append(Seen(outputs, gradients, buffers))
        with torch.no_grad():
            for parameter in module.parameters() if rate else ():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=rate)
    return seen


def difference(
    want: Mapping[str, Tensor | None],
    have: Mapping[str, Tensor | None],
    precision: str,
    rounding: float = 0.0,
) -> str | None:
    """The worst difference of what `want` names, or None; other names of `have` do not count.

    Args:
        want: the expected values.
        have: the values to check.
        precision: of the net, which decides the tolerance.
        rounding: the error that rounding alone makes in these values, if that is known.
    """
    error, text = distance(want, have, precision)
    return text if not error <= max(TOLERANCE[precision], AMPLIFIED * rounding) else None


def distance(
    want: Mapping[str, Tensor | None], have: Mapping[str, Tensor | None], precision: str
) -> tuple[float, str | None]:
    """The largest relative error, and a text that names its value; infinite if values are lost."""
    present = [v for v in want.values() if v is not None and v.numel() and not _counts(v)]
    largest = max((float(v.nan_to_num().abs().max()) for v in present), default=0.0)
    worst, text = 0.0, None
    for name, expected in want.items():
        actual = have.get(name)
        if expected is None or actual is None:
            if (expected is None) != (actual is None):
                lost = "missing" if actual is None else "there but should not be"
                return float("inf"), f"{name} is {lost}"
            continue
        if expected.shape != actual.shape:
            shapes = f"{tuple(actual.shape)}, not {tuple(expected.shape)}"
            return float("inf"), f"{name} has shape {shapes}"
        if expected.dtype != actual.dtype:
            return float("inf"), f"{name} is {actual.dtype}, not {expected.dtype}"
        error = _distance(expected, actual, NOISE[precision] * largest)
        if not error <= worst:
            worst, text = error, f"{name} differs by {error:.1e}"
    return worst, text


@contextlib.contextmanager
def rounded_outputs(module: nn.Module) -> Iterator[None]:
    """Change the outputs of all layers by a few units in the last place, as rounding might.

    So are the streams that couplings read, unless their sums are exact: numbers that `round` or
    `clamp` has made equal are not when they are rebuilt, and `max` picks another.
    """
    generator = torch.Generator().manual_seed(0)

    def change(_: nn.Module, __: Any, output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return None
        noise = torch.randn(output.shape, generator=generator, dtype=torch.float64)
        return output * (1 + 4 * torch.finfo(output.dtype).eps * noise).to(output.dtype)

    couple = coupling.couple  # type: ignore[attr-defined]

    def couple_rounded(
        block: Any, index: int, a: Tensor, b: Tensor, *given: Any, **how: Any
    ) -> Any:
        sums = given[2]
        if sums.grid is None and not isinstance(sums, Averaged) and b.numel():
            noise = torch.randn(b.shape, generator=generator, dtype=torch.float64).to(b.dtype)
            b = b + 4 * torch.finfo(b.dtype).eps * b.detach().abs().max() * noise
        return couple(block, index, a, b, *given, **how)

    layers = [inner for inner in module.modules() if not list(inner.children())]
    handles = [layer.register_forward_hook(change) for layer in layers]
    try:
        with mock.patch.object(coupling, "couple", couple_rounded):
            yield
    finally:
        for handle in handles:
            handle.remove()


def _counts(value: Tensor) -> bool:
    return not (value.is_floating_point() or value.is_complex())


def _distance(expected: Tensor, actual: Tensor, noise: float) -> float:
    if not expected.numel():
        return 0.0
    if _counts(expected):
        return float((expected != actual).any())
    if not torch.equal(expected.isfinite(), actual.isfinite()):
        return float("inf")
    expected, actual = expected.nan_to_num(), actual.nan_to_num()
    scale = max(float(expected.abs().max()), noise, 1e-30)
    return float((expected - actual).abs().max()) / scale
