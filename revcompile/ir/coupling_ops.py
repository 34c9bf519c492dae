"""The steps of couplings, for chains and stage programs, and the other functions programs call.

    couple      plus(a, F(b), grid)
    uncouple    x = stream_leaf(b), F(x) with autograd on; minus(y, F(x), grid); branch_vjp(x, ...)

Programs start with autograd off and running statistics frozen. The printed code of a stage calls
the functions of the last section. `compiler.lower.trace` inlines these: the flat graphs that run
contain their steps, and calls of `recording` that switch autograd and running statistics.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from types import FunctionType
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import has_torch_function

from revcompile.errors import InputError
from revcompile.ir import ops
from revcompile.ir.module_tree import is_cast
from revcompile.ir.reached import reached
from revcompile.kernels import fixed_point
from revcompile.kernels.autocast import wide_dtype
from revcompile.kernels.batch_norm import bn_relu
from revcompile.kernels.exact_sum import add_or_subtract, grid_for, rounded
from revcompile.kernels.fixed_point import (
    couple_average,
    enter_average,
    uncouple_average,
    uncouple_gradients,
)
from revcompile.kernels.fixed_point import draw_sign as draw_sign  # printed code calls it
from revcompile.kernels.gradient_sum import GradientSum, add_gradients
from revcompile.kernels.layout import alike

_CALLED: Final = (ops.__name__, __name__, fixed_point.__name__)
_WORD: Final = (1 << 64) - 1
_engine: Final = torch.autograd.Variable._execution_engine
_Gradient = TypeVar("_Gradient", Tensor, Tensor | None)
_Set = TypeVar("_Set")


def recording(on: bool) -> None:
    """Switch autograd on or off in this thread; running statistics move only while it is on."""
    torch._C._set_grad_enabled(on)
    ops.statistics_frozen.set(not on)


def call_norm(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a layer that holds batch norms; running statistics move only while recording.

    A branch may run twice per micro-batch, in forward and in backward; only one run is recorded.
    """
    return _with_statistics(module, module, *args, **kwargs)


def call_bn_relu(norm: nn.BatchNorm2d, relu: nn.Module | None, x: Tensor) -> Tensor:
    """`relu(call_norm(norm, x))`, in one pass over memory where that pays, captured or not.

    A CUDA graph may capture only the forward or only the backward pass of a micro-batch, and on
    some ranks neither. All must use the same kernels.
    """
    out: Tensor = _with_statistics(norm, bn_relu, norm, relu, x, True)
    return out


def _with_statistics(
    module: nn.Module, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    if not ops.statistics_frozen.get():
        return function(*args, **kwargs)
    moving = [
        norm
        for norm in module.modules()
        if isinstance(norm, _BatchNorm) and norm.training and norm.track_running_stats
    ]
    for norm in moving:
        norm.__dict__["track_running_stats"] = False
    try:
        return function(*args, **kwargs)
    finally:
        for norm in moving:
            norm.__dict__["track_running_stats"] = True


def leaf(x: Any) -> Any:
    """The value as a leaf of a new autograd graph."""
    if isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()):
        return x.detach().requires_grad_()
    return x


def stream_leaf(
    b: Tensor,
    reader: nn.Module | bool = False,
    copy: Tensor | None = None,
    dtype: torch.dtype | None = None,
    is_viewed: bool = True,
) -> Tensor:
    """The stream that a branch reads, as the beginning of a new autograd graph for `branch_vjp`.

    It has the dtype in which the branch reads it. Its gradient then comes in that dtype, and is
    converted to float32 only when it is added to others.

    Args:
        b: The stream.
        reader: The stream's only reader, if autocast casts the stream for it: a layer, or True for
            a function.
        copy: The stream in the dtype of autocast, if there is such a copy.
        dtype: The model's own dtype, if streams have more bits.
        is_viewed: Whether to return a view instead of the leaf. Only module hooks need that: those
            of torch's FlopCounterMode fail on a leaf in `autograd.grad`.
    """
    x = read_stream(b, reader, copy).detach()
    if dtype is not None and x.dtype == torch.float32:
        x = x.to(dtype)
    x.requires_grad_()
    if is_viewed:
        is_on = torch.is_grad_enabled()
        torch._C._set_grad_enabled(True)
        try:
            x = x[...]  # `view_as` would change the strides of sizes of 1
        finally:
            torch._C._set_grad_enabled(is_on)
    return GradientSum().attach(x)


def read_stream(b: Tensor, reader: nn.Module | bool, copy: Tensor | None) -> Tensor:
    """A stream in the dtype in which its only reader reads it (arguments as in `stream_leaf`)."""
    if reader is False or (reader is not True and not is_cast(reader)):
        return b
    return ops.as_read(b) if copy is None else copy


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
    grads = _gradients(outputs, gradients, (*inputs, *parameters))
    return *map(laid_out_like, inputs, grads), *grads[len(inputs) :]


def branch_vjp(
    x: Tensor,
    own: Tensor | None,
    outputs: Sequence[Any],
    gradients: Sequence[Tensor | None],
    inputs: Sequence[Any],
    parameters: Sequence[Tensor],
    dtype: torch.dtype | None = None,
) -> tuple[Tensor | None, ...]:
    """Gradients through a branch that reads the stream `x`, made by `stream_leaf`.

    Args:
        x: The stream.
        own: The stream's own gradient, to which the gradient through the branch is added.
        outputs: The outputs of the branch.
        gradients: The gradients of `outputs`.
        inputs: The branch's other inputs.
        parameters: The branch's parameters.
        dtype: A second dtype for the gradient of the stream.

    Returns:
        The gradient of the stream, its copy in the second dtype (None unless one kernel wrote
        both), and the gradients of `inputs` and of `parameters`.
    """
    if x._backward_hooks or x.retains_grad:  # hooks on a stream see its whole gradient
        outputs, gradients, own = (*outputs, x), (*gradients, own), None
    total = GradientSum.of(x) or GradientSum()
    total.begin(own, dtype)
    through, *others = _gradients(outputs, gradients, (x, *inputs, *parameters))
    of_x, copy = total.finish(laid_out_like(x, through) if own is None else through)
    if inputs:
        others[: len(inputs)] = map(laid_out_like, inputs, others)
    return of_x, copy, *others


def _gradients(
    outputs: Sequence[Any], gradients: Sequence[Tensor | None], inputs: Sequence[Any]
) -> Sequence[Tensor | None]:
    ends, seeds = [], []
    for output, gradient in zip(outputs, gradients, strict=True):
        if gradient is not None and isinstance(output, Tensor) and output.requires_grad:
            ends.append(output)
            is_cast = gradient.dtype != output.dtype
            seeds.append(gradient.to(output.dtype) if is_cast else gradient)
    targets = [t for t in inputs if isinstance(t, Tensor) and t.requires_grad]
    if (name := _checked.get()) is not None:
        refuse_other_leaves(name, ends, targets)
    if not ends or not targets:
        return [None] * len(inputs)
    grads = _differentiated(tuple(ends), tuple(targets), tuple(seeds))
    if len(grads) == len(inputs):
        return grads
    remaining = iter(grads)
    is_target = (isinstance(t, Tensor) and t.requires_grad for t in inputs)
    return [next(remaining) if given else None for given in is_target]


def _differentiated(
    outputs: tuple[Tensor, ...], inputs: tuple[Tensor, ...], seeds: tuple[Tensor, ...]
) -> tuple[Tensor | None, ...]:
    """`torch.autograd.grad` with `allow_unused`, for seeds that have the outputs' shapes.

    Skips torch's checks in Python, which take as long as differentiating a small layer.
    """
    if has_torch_function((*outputs, *inputs)):
        return torch.autograd.grad(outputs, inputs, seeds, _retains.get(), allow_unused=True)
    grads: tuple[Tensor | None, ...] = _engine.run_backward(
        outputs, seeds, _retains.get(), False, inputs, True, accumulate_grad=False
    )
    return grads


_checked: Final[ContextVar[str | None]] = ContextVar("_checked", default=None)


@contextmanager
def _set_to(variable: ContextVar[_Set], value: _Set) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def refusing_other_leaves(name: str) -> AbstractContextManager[None]:
    """Inside, raise if a differentiated graph has leaves other than its inputs and parameters.

    The gradients of such leaves would be lost. `name` names the graph in the error.
    """
    return _set_to(_checked, name)


def refuse_other_leaves(name: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """Raise if `outputs` depend on a leaf that requires a gradient and is not among `inputs`."""
    known, ends = {id(tensor) for tensor in inputs}, {None, *(t.grad_fn for t in inputs)}
    starts: list[Any] = [t.grad_fn for t in outputs if t.grad_fn not in ends]

    def before(node: Any) -> list[Any]:
        return [source for source, _ in node.next_functions if source not in ends]

    for node in reached(starts, before):
        found = node.variable if type(node).__name__ == "AccumulateGrad" else None
        if found is not None and id(found) not in known:
            raise InputError(
                f"{name} depends on a tensor {list(found.shape)} that requires a gradient and is "
                "neither its input nor a parameter that its layers trained in forward: it comes "
                "from a forward hook, an attribute, a global, or a layer that was unfrozen between "
                "forward and backward, and its gradient would be lost. Register it as a parameter "
                "of a layer, pass it to the model as an argument, or detach it; unfreeze layers "
                "before the forward pass"
            )


_retains: Final[ContextVar[bool]] = ContextVar("_retains", default=False)


def retaining() -> AbstractContextManager[None]:
    """Retain the autograd graphs that are differentiated inside."""
    return _set_to(_retains, True)


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
    return functools.reduce(lambda a, b: add_gradients(a, b)[0], present) if present else None


def zeros_if_none(gradient: Tensor | None, like: Tensor) -> Tensor:
    """A gradient as a tensor, zeros where the loss does not depend on the value."""
    return torch.zeros_like(like) if gradient is None else gradient


def wide(x: Tensor) -> Tensor:
    """A stream in float32 at least: bf16 streams drift."""
    return x.to(wide_dtype(x.dtype))


def enter_chain(
    a: Tensor, b: Tensor, cast: torch.dtype | None, convolves: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The streams of a chain of couplings, in float32 at least, and the chain's grid or None.

    With a grid, streams are rounded to it: branches are too imprecise for `y - F(b)` to be `a`.
    """
    a, b = wide(a), wide(b)
    grid = grid_for(a, b, cast, convolves)
    return *alike(rounded(a, grid), rounded(b, grid)), grid


def plus(stream: Tensor, addend: Tensor, grid: Tensor | None) -> Tensor:
    """`a + F(b)`, exact on the grid if there is one."""
    return add_or_subtract(stream, addend, grid, False, False)[0]


def minus(stream: Tensor, addend: Tensor, grid: Tensor | None) -> Tensor:
    """`y - F(b)`, exact on the grid if there is one; both arguments are detached."""
    return add_or_subtract(stream.detach(), addend.detach(), grid, True, False)[0]


def plus_and_cast(
    stream: Tensor, addend: Tensor, grid: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """`plus`, also in the dtype of autocast if one kernel writes both."""
    return add_or_subtract(stream, addend, grid, False, True)


def minus_and_cast(
    stream: Tensor, addend: Tensor, grid: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """`minus`, also in the dtype of autocast if one kernel writes both."""
    return add_or_subtract(stream.detach(), addend.detach(), grid, True, True)


def cast_gradient(gradient: Tensor, copy: Tensor | None, output: Any) -> Tensor:
    """The gradient of an output, as its copy if that has the output's dtype."""
    return gradient if copy is None or copy.dtype != output.dtype else copy


def mix(key: int, number: int) -> int:
    """A new key from a key and a number; similar keys give unrelated ones.

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


def seed_torch(seed: int) -> None:
    """`torch.manual_seed`, but quick where no accelerator is in use.

    For each kind of device without a context, torch formats the stack in case seeding fails later.
    That takes longer than running many layers.
    """
    device = torch.accelerator.current_accelerator()
    if device is None or (device.type == "cuda" and not torch.cuda.is_initialized()):
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def _seed_default(key: int, place: int) -> None:
    seed_torch(seed_of(key, place))


Seeder = Callable[[int, int], None]
"""Seeds the random numbers of the piece at a place, by a key."""
_seeder: Final[ContextVar[Seeder]] = ContextVar("_seeder", default=_seed_default)


def reseed(key: int, place: int) -> None:
    """Seed the random numbers of one piece, the same in forward and backward."""
    _seeder.get()(key, place)


def current_seeder() -> Seeder:
    """The function that `reseed` calls in this thread."""
    return _seeder.get()


def is_seeded_elsewhere() -> bool:
    """Whether `seeding` is in effect. Then the global random state need not be saved."""
    return _seeder.get() is not _seed_default


def seeding(seeder: Seeder) -> AbstractContextManager[None]:
    """Inside, `reseed` calls `seeder(key, place)`: a captured step seeds its own generators."""
    return _set_to(_seeder, seeder)


# -- calls of higher order -------------------------------------------------------------------------


def record(function: Callable[..., Any], model: nn.Module, *inputs: Any) -> Any:
    """`function(model, *inputs)` with autograd on."""
    recording(True)
    try:
        return function(model, *inputs)
    finally:
        recording(False)


def accumulate_vjp(
    model: nn.Module,
    outputs: Sequence[Any],
    gradients: Sequence[Tensor | None],
    inputs: Sequence[Any],
    grads: dict[str, Tensor | None],
) -> tuple[Tensor | None, ...]:
    """Gradients of the inputs; gradients of the model's parameters are added to `grads` by name."""
    parameters = dict(model.named_parameters())
    results = vjp(outputs, gradients, inputs, tuple(parameters.values()))
    _accumulate(parameters, results[len(inputs) :], grads)
    return results[: len(inputs)]


def _accumulate(
    names: Iterable[str], gradients: Sequence[Tensor | None], grads: dict[str, Tensor | None]
) -> None:
    for name, gradient in zip(names, gradients, strict=True):
        if gradient is not None:
            grads[name] = total(grads[name], gradient) if name in grads else gradient


def recompute_vjp(
    function: Callable[..., Any],
    model: nn.Module,
    inputs: Sequence[Any],
    gradients: Sequence[Tensor | None],
    grads: dict[str, Tensor | None],
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
    grads: dict[str, Tensor | None],
    *sides: Any,
    extras: Sequence[Tensor | None] = (),
    averaged: tuple[Tensor, Tensor] | None = None,
) -> tuple[Any, ...]:
    """Undo `a, b = b, a + F(b)` and pull the gradient back, with one autograd graph of F.

    PETRA, Eq. 4 and 5:

        a, b    ->  b - F(a), a
        da, db  ->  db, da + VJP of F at a, applied to db

    Args:
        branch: F.
        model: The module that has F's parameters.
        a: The first stream after the coupling, which is the input of F.
        b: The second stream after the coupling.
        da: Gradient of `a`.
        db: Gradient of `b`.
        grid: The chain's grid, if it has one (`enter_chain`).
        grads: Gradients of parameters, to which F's are added.
        sides: F's other arguments; those made by `leaf` get gradients.
        extras: Gradients of F's other results.
        averaged: The signs and the lost bits, if the coupling was a `couple_average`.

    Returns:
        `a, b, da, db` before the coupling, then a gradient (or None) for each side.
    """
    x = stream_leaf(a)
    outputs = record(branch, model, x, *sides)
    outputs = outputs if extras else (outputs,)
    of_branch = db
    if averaged is None:
        rebuilt = minus(b, outputs[0], grid)
    else:
        assert grid is not None
        sign, lost = averaged
        rebuilt = uncouple_average(b, a, outputs[0], sign, grid, lost)
        if db is not None:
            db, da, of_branch = uncouple_gradients(da, db, sign)
    given, parameters = (of_branch, *extras), dict(model.named_parameters())
    of_x, _, *results = branch_vjp(x, da, outputs, given, sides, tuple(parameters.values()))
    _accumulate(parameters, results[len(sides) :], grads)
    return rebuilt, a, db, of_x, *results[: len(sides)]


HELPERS: Final = frozenset(
    name
    for name, value in (*vars(ops).items(), *globals().items())
    if isinstance(value, FunctionType) and name[0] != "_" and value.__module__ in _CALLED
)
"""Functions that printed code calls; no variable may have the name of one."""
COMPOSED: Final = (record, accumulate_vjp, _accumulate, recompute_vjp, uncouple)
"""Functions that are traced through; all others are single nodes of the graphs that run."""
PURE: Final = frozenset(
    [
        *(uncouple_gradients, couple_average, uncouple_average, enter_average, enter_chain),
        *(detached, leaf, stream_leaf, plus, minus, total, zeros_if_none),
    ]
)
"""Functions without side effects: a call whose result is not read can be left out."""
