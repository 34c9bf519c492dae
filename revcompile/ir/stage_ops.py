"""What stage programs call besides torch.

Programs start with autograd off and running statistics frozen. The code of a stage
(`ir.stage_code`), as it is printed, calls the functions of the last section. In the flat graphs
that run their steps are inlined, with `recording` to switch autograd and statistics.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from revcompile.ir import ops
from revcompile.kernels.autocast import LOW_PRECISION
from revcompile.kernels.exact_sum import add, grid_for, rounded, subtract

__all__ = [
    "accumulate_vjp",
    "call_norm",
    "detached",
    "enter_chain",
    "is_seeded_elsewhere",
    "laid_out_like",
    "largest",
    "leaf",
    "minus",
    "mix",
    "plus",
    "recompute_vjp",
    "record",
    "recording",
    "reseed",
    "seed_of",
    "seeding",
    "total",
    "uncouple",
    "vjp",
    "wide",
    "zeros_if_none",
]

_WORD: Final = (1 << 64) - 1
_Gradient = TypeVar("_Gradient", Tensor, Tensor | None)
_seeder: Callable[[int, int], None] | None = None


def recording(on: bool) -> None:
    """Switch autograd on or off; running statistics move only while it is on."""
    torch._C._set_grad_enabled(on)
    ops.statistics_frozen = not on


def call_norm(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a layer that holds batch norms; running statistics move only while recording.

    A branch runs twice for each micro-batch, in forward and in backward, and is recorded once.
    """
    if not ops.statistics_frozen:
        return module(*args, **kwargs)
    moving = [
        norm
        for norm in module.modules()
        if isinstance(norm, _BatchNorm) and norm.training and norm.track_running_stats
    ]
    for norm in moving:
        norm.__dict__["track_running_stats"] = False
    try:
        return module(*args, **kwargs)
    finally:
        for norm in moving:
            norm.__dict__["track_running_stats"] = True


def leaf(x: Any) -> Any:
    """The value as a leaf of a new autograd graph."""
    if isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()):
        return x.detach().requires_grad_()
    return x


def detached(x: Any) -> Any:
    """The value without its graph."""
    return x.detach() if isinstance(x, Tensor) else x


def vjp(
    outputs: Sequence[Any],
    gradients: Sequence[Tensor | None],
    inputs: Sequence[Any],
    parameters: Sequence[Tensor],
) -> tuple[Tensor | None, ...]:
    """Gradients of inputs and parameters, from gradients of outputs (PETRA, Eq. 2 and 3).

    >>> x = leaf(torch.tensor([2.0, 3.0]))
    >>> vjp((x * x,), (torch.ones(2),), (x,), ())
    (tensor([4., 6.]),)
    """
    seeds = [
        (output, gradient.to(output.dtype))
        for output, gradient in zip(outputs, gradients, strict=True)
        if gradient is not None and isinstance(output, Tensor) and output.requires_grad
    ]
    targets = [
        (index, tensor)
        for index, tensor in enumerate((*inputs, *parameters))
        if isinstance(tensor, Tensor) and tensor.requires_grad
    ]
    results: list[Tensor | None] = [None] * (len(inputs) + len(parameters))
    if seeds and targets:
        ends, given = zip(*seeds, strict=True)
        grads = torch.autograd.grad(ends, [t for _, t in targets], given, allow_unused=True)
        for (index, tensor), grad in zip(targets, grads, strict=True):
            results[index] = laid_out_like(tensor, grad) if index < len(inputs) else grad
    return tuple(results)


def laid_out_like(value: Tensor, gradient: _Gradient) -> _Gradient:
    """A gradient in the memory format of its value.

    Pooling returns gradients in another format, which every layer before it would convert again.
    """
    if gradient is None or not gradient.is_cuda or gradient.stride() == value.stride():
        return gradient
    if gradient.is_sparse or value.shape != gradient.shape:
        return gradient
    return torch.empty_like(value, dtype=gradient.dtype, requires_grad=False).copy_(gradient)


def total(*gradients: Tensor | None) -> Tensor | None:
    """The sum of the gradients that are not None."""
    present = [gradient for gradient in gradients if gradient is not None]
    return functools.reduce(operator.add, present) if present else None


def zeros_if_none(gradient: Tensor | None, like: Tensor) -> Tensor:
    """A gradient as a tensor, zeros where the loss does not depend on the value."""
    return torch.zeros_like(like) if gradient is None else gradient


def wide(x: Tensor) -> Tensor:
    """A stream in float32 at least: bf16 streams drift."""
    return x.float() if x.dtype in LOW_PRECISION else x


def enter_chain(
    a: Tensor, b: Tensor, cast: torch.dtype | None, convolves: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The streams of a chain of couplings: in float32 at least, and rounded to a fixed-point grid
    (the third result) where branches are computed too imprecisely for `y - F(b)` to give `a` back.
    """
    a, b = wide(a), wide(b)
    grid = grid_for(a, b, cast, convolves)
    return rounded(a, grid), rounded(b, grid), grid


def largest(x: Tensor) -> Tensor:
    """The largest magnitude of a stream, which decides the spacing of its grid."""
    return torch.linalg.vector_norm(x.detach(), float("inf")).reshape(1) if x.is_cuda else x


def plus(stream: Tensor, addend: Tensor, grid: Tensor | None) -> Tensor:
    """`a + F(b)`, exact on the grid if there is one."""
    return add(stream, addend, grid)


def minus(stream: Tensor, addend: Tensor, grid: Tensor | None) -> Tensor:
    """`y - F(b)`, exact on the grid if there is one; neither's autograd graph is continued."""
    return subtract(stream.detach(), addend.detach(), grid)


def mix(key: int, number: int) -> int:
    """A new key from a key and a number; keys that differ a little give unrelated ones.

    >>> mix(1, 2) != mix(2, 1)
    True
    """
    word = (key * 0x9E3779B97F4A7C15 + number + 0x632BE59BD9B4E019) & _WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)


def seed_of(key: int, place: int) -> int:
    """The random seed of one piece of a stage."""
    return mix(key, place) >> 1


def reseed(key: int, place: int) -> None:
    """Seed the random numbers of one piece, the same in forward and backward."""
    if _seeder is None:
        torch.manual_seed(seed_of(key, place))
    else:
        _seeder(key, place)


def is_seeded_elsewhere() -> bool:
    """Is `seeding` in effect, so that the global random state need not be saved?"""
    return _seeder is not None


@contextmanager
def seeding(seeder: Callable[[int, int], None]) -> Iterator[None]:
    """Have `seeder(key, place)` called by `reseed`: a captured step seeds its own generators."""
    global _seeder
    before, _seeder = _seeder, seeder
    try:
        yield
    finally:
        _seeder = before


# -- calls of higher order -------------------------------------------------------------------------


def record(function: Callable[..., Any], model: nn.Module, *inputs: Any) -> Any:
    """`function(model, *inputs)` with autograd on."""
    recording(True)
    outputs = function(model, *inputs)
    recording(False)
    return outputs


def accumulate_vjp(
    model: nn.Module,
    outputs: Sequence[Any],
    gradients: Sequence[Tensor | None],
    inputs: Sequence[Any],
    grads: dict[str, Tensor],
) -> tuple[Tensor | None, ...]:
    """Gradients of the inputs; those of the model's parameters are added to `grads`, by name."""
    parameters = dict(model.named_parameters())
    results = vjp(outputs, gradients, inputs, list(parameters.values()))
    for name, gradient in zip(parameters, results[len(inputs) :], strict=True):
        if gradient is not None:
            grads[name] = grads[name] + gradient if name in grads else gradient
    return results[: len(inputs)]


def recompute_vjp(
    function: Callable[..., Any],
    model: nn.Module,
    inputs: Sequence[Any],
    gradients: Sequence[Tensor | None],
    grads: dict[str, Tensor],
) -> tuple[Tensor | None, ...]:
    """Run `function` again from its kept inputs, and pull the gradients of its outputs back."""
    outputs = record(function, model, *inputs)
    outputs = (outputs,) if len(gradients) == 1 else outputs
    return accumulate_vjp(model, outputs, gradients, inputs, grads)


def uncouple(
    branch: Callable[..., Any],
    model: nn.Module,
    a: Tensor,
    b: Tensor,
    da: Tensor | None,
    db: Tensor | None,
    grid: Tensor | None,
    grads: dict[str, Tensor],
    *sides: Any,
    extras: Sequence[Tensor | None] = (),
) -> tuple[Any, ...]:
    """Undo `a, b = b, a + F(b)` and pull the gradient back, with one autograd graph of F.

    PETRA, Eq. 4 and 5:

        a, b    ->  b - F(a), a
        da, db  ->  db, da + VJP of F at a, applied to db

    Args:
        branch: F.
        model: What holds F's parameters.
        a: The first stream behind the coupling: what F was applied to.
        b: The second stream behind the coupling.
        da: Gradient of `a`.
        db: Gradient of `b`.
        grid: What the chain's sums are rounded to (`enter_chain`).
        grads: Gradients of parameters, to which F's are added.
        sides: F's further arguments; those made by `leaf` get gradients.
        extras: Gradients of F's further results.

    Returns:
        `a, b, da, db` before the coupling, then a gradient (or None) for each side.
    """
    x = leaf(a)
    outputs = record(branch, model, x, *sides)
    outputs = outputs if extras else (outputs,)
    rebuilt = minus(b, outputs[0], grid)
    of_x, *of_sides = accumulate_vjp(model, outputs, (db, *extras), (x, *sides), grads)
    return rebuilt, a, db, total(da, of_x), *of_sides
