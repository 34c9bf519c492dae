"""Calls that are transformed or traced, in which chains run as plain operations.

Under `torch.func` and forward-mode AD (`is_transformed`) chains run as plain operations with stored
activations, which every transform can differentiate. Differentiating a backward pass that has
already happened is an error that says what to do. Programs made by `torch.export` and
`torch.jit.trace` have no backward pass of ours either.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes

from revcompile.errors import InputError

_ADVICE: Final = (
    "set net.reversible = False before the forward pass: chains then store their activations and "
    "can be differentiated by any means"
)


def is_transformed() -> bool:
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def outside_transforms() -> AbstractContextManager[list[Any]]:
    """Inside, no transform of `torch.func` is active; gives the list of those that were."""
    return temporarily_clear_interpreter_stack()


@contextmanager
def outside_tracers() -> Iterator[None]:
    """Inside, no tracer records operations, and sizes are numbers for `torch.jit.trace`, too."""
    state = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            yield
    finally:
        torch._C._set_tracing_state(state)  # type: ignore[attr-defined]


def differentiable_once(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Decorate the backward of an autograd function: differentiating its gradients is an error.

    Otherwise a gradient penalty would silently treat them as constants. They count as functions of
    the given gradients and of `ctx.outputs`, if the backward sets that.
    """

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        if torch._C._are_functorch_transforms_active():
            raise InputError(
                "a backward pass through a reversible chain cannot be run inside a torch.func "
                f"transform; {_ADVICE}"
            )
        is_recorded = torch.is_grad_enabled()
        with torch.no_grad() if is_recorded else nullcontext():
            result = backward(ctx, *grads)
        outputs = ctx.__dict__.pop("outputs", ())  # a reference cycle: they hold the node and ctx
        if not is_recorded:
            return result
        tensors = [i for i, gradient in enumerate(result) if isinstance(gradient, Tensor)]
        leaves = [result[i].detach().requires_grad_() for i in tensors]
        known = [s for s in (*grads, *outputs) if isinstance(s, Tensor) and s.requires_grad]
        refusing = dict(zip(tensors, _Refusing.apply(len(leaves), *leaves, *known), strict=True))
        return tuple(refusing.get(i, gradient) for i, gradient in enumerate(result))

    return run


class _Refusing(torch.autograd.Function):
    """The identity on the first `count` tensors; differentiating it is an error."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.clone() if t.is_sparse else t.view_as(t) for t in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise InputError(
            "a gradient through a reversible chain is differentiated a second time "
            f"(create_graph=True), but a chain is rebuilt for one backward pass only; {_ADVICE}"
        )
