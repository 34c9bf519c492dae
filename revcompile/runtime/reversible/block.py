"""One coupling of a chain as it runs: its branch F, what F reads, and how streams are combined.

Added          y = a + F(b)
Averaged       y = b + gamma (a - b) + (1 + gamma) F(b)     gamma = 0 in eval mode
FixedAverage   the same in fixed point, which can be undone    gamma = ±1/16 in training
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from revcompile.errors import InputError
from revcompile.ir.compiled import Compiler, Step, step_of
from revcompile.ir.coupling_ops import detached, stream_leaf
from revcompile.ir.module_tree import convolves, repeated_layers
from revcompile.ir.precision_rewrites import match_dtypes
from revcompile.ir.python_code import function_of
from revcompile.ir.types import Coupling, TensorType
from revcompile.kernels.exact_sum import add_or_subtract, rounded
from revcompile.kernels.fixed_point import (
    average,
    average_gradients,
    in_units,
    undo_average,
    unit_of,
)
from revcompile.kernels.layout import alike, like
from revcompile.kernels.repeatable import Repeated, repeatable
from revcompile.runtime.reversible.bindings import Bindings
from revcompile.runtime.reversible.piece import Piece, ends_low
from revcompile.runtime.reversible.replay import ReplayContext

_Pair = tuple[Tensor, Tensor]
_Lost = tuple[Tensor, ...]
"""Tensors that only the inverse of a sum needs, which autograd saves."""


class Graph(NamedTuple):
    """The autograd graph of a branch."""

    x: Tensor
    """The stream that F reads, as a leaf."""
    sides: list[Any]
    """The other inputs of F, tensors as leaves."""
    results: tuple[Tensor, ...]
    """F(x), or the sum of a compiled step, and the extras."""


_Sum = tuple[Tensor, _Lost]
"""A sum, and what its inverse needs besides."""


class Added:
    """`y = a + F(b)`, the addend on a grid if there is one."""

    def __init__(self, grid: Tensor | None) -> None:
        self.grid = grid

    def enter(self, a: Tensor, b: Tensor) -> _Pair:
        """The input streams of a chain, rounded as its couplings need them."""
        return alike(rounded(a, self.grid), rounded(b, self.grid))

    def add(self, index: int, a: Tensor, b: Tensor, addend: Tensor) -> _Sum:
        """The sum of block `index`."""
        return add_or_subtract(a, addend, self.grid, False, False)[0], ()

    def undo(self, index: int, y: Tensor, b: Tensor, addend: Tensor, lost: _Lost) -> Tensor:
        """`a` of block `index`."""
        return add_or_subtract(y, addend, self.grid, True, False)[0]

    def gradients(
        self, index: int, of_b: Tensor, of_y: Tensor, dtype: torch.dtype, may_overwrite: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of `a`, of `b` without the path through F, and of F(b), which has `dtype`."""
        return of_y, of_b, of_y


class Averaged(Added):
    """`y = b + gamma (a - b) + (1 + gamma) F(b)` in floating point.

    Args:
        signs: 2 gamma, by block and sample; None for gamma = 0.
        batch_dims: For each block, the streams' dimension that counts samples, if there is one.
    """

    def __init__(self, signs: Tensor | None, batch_dims: tuple[int | None, ...]) -> None:
        super().__init__(None)
        self.signs, self.batch_dims = signs, batch_dims

    def sign(self, index: int, like: Tensor) -> Tensor:
        """2 gamma of a block, in a shape that broadcasts to its streams."""
        assert self.signs is not None
        signs, dim = self.signs[index], self.batch_dims[index]
        shape = [1] * like.ndim
        if dim is None:
            return signs[:1].view(shape)
        shape[dim] = size = like.shape[dim]
        drawn = signs.shape[0]
        if size != drawn:  # a rearrangement has split samples into windows, or joined them
            rows = torch.arange(size, device=signs.device)
            signs = signs[rows * drawn // max(size, 1)]
        return signs.view(shape)

    def add(self, index: int, a: Tensor, b: Tensor, addend: Tensor) -> _Sum:
        if self.signs is None:
            return b + addend, ()
        half = self.sign(index, b) / 2
        return half * a + (1 - half) * b + (1 + half) * addend, ()

    def undo(self, index: int, y: Tensor, b: Tensor, addend: Tensor, lost: _Lost) -> Tensor:
        assert self.signs is None, "only fixed-point averages can be undone"
        return b  # `a` was equal to `b`, or is not needed

    def gradients(
        self, index: int, of_b: Tensor, of_y: Tensor, dtype: torch.dtype, may_overwrite: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert self.signs is None, "of other averages autograd computes the gradients"
        return torch.zeros_like(of_y), of_b + of_y, of_y


class FixedAverage(Averaged):
    """The same in fixed point, which can be undone."""

    def enter(self, a: Tensor, b: Tensor) -> _Pair:
        self._unit = unit_of(a, b)
        of_b = in_units(b, self._unit)
        return alike(of_b if a is b else in_units(a, self._unit), of_b)

    def add(self, index: int, a: Tensor, b: Tensor, addend: Tensor) -> _Sum:
        y, lost, _ = average(a, b, addend, self.sign(index, b), self._unit)
        return y, (lost,)

    def undo(self, index: int, y: Tensor, b: Tensor, addend: Tensor, lost: _Lost) -> Tensor:
        (bits,) = lost
        return undo_average(y, b, addend, self.sign(index, b), self._unit, bits)[0]

    def gradients(
        self, index: int, of_b: Tensor, of_y: Tensor, dtype: torch.dtype, may_overwrite: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        return average_gradients(of_b, of_y, self.sign(index, of_y), dtype, may_overwrite)


# -- the coupling ---------------------------------------------------------------------------------


class Block:
    """An executable coupling.

    Args:
        coupling: A coupling of a chain.
        root: The module that has the modules its branch reads.
        position: The position of each side value among the sides of the chain.
        kind: The type of the coupling's streams, if it is known.
    """

    def __init__(
        self,
        coupling: Coupling,
        root: nn.Module,
        position: Mapping[str, int],
        kind: TensorType | None,
    ) -> None:
        self.name = coupling.name
        self.leaves_checked = False
        """Whether a backward pass has shown that F depends on its inputs and parameters alone."""
        branch, rearrange = coupling.branch, coupling.rearrange
        generated = partial(function_of, root=root, name=coupling.name)
        branch = match_dtypes(branch)
        self.branch = generated(branch)
        """F, as `branch(b, *sides)`; with `has_extras` it returns `(F(b), *extras)`."""
        self.sides = [position[name] for name in coupling.sides]
        self.has_extras = bool(coupling.extras)
        """Whether F also returns values read outside the block. Only a chain's last block may."""
        self.rearrange = generated(rearrange.forward) if rearrange else None
        """`rearrange(stream, *sizes) -> (stream, shapes)`: permutes elements before the block."""
        self.undo_rearrange = generated(rearrange.inverse) if rearrange else None
        """`undo_rearrange(stream, shapes) -> stream`."""
        self.rearrange_sides = [position[name] for name in rearrange.sides] if rearrange else []
        """Positions of the sizes that `rearrange` takes."""
        self.bindings = bindings = Bindings(branch, root)
        """What F reads from the module tree."""
        self.replay_context = ReplayContext.of(coupling, root, list(bindings.modules))
        self.sharded = bindings.sharded
        self.batch_dim = None if kind is None else kind.batch_dim
        """The streams' dimension that counts samples, if there is one."""
        self.averaged, self.convolves = coupling.averaged, convolves(branch, root)
        self.repeated = repeated_layers(branch, root) if coupling.averaged else Repeated()
        """Layers of F that must give the same bits in the rebuild."""
        is_plain = not (self.averaged or rearrange or self.has_extras or self.sharded)
        self.can_keep_input = is_plain and ends_low(branch, root)
        """Whether the block can run on streams in low precision (`Chain.keeps_inputs`)."""
        self._piece = partial(Piece, coupling, root, bindings, self.replay_context, True)
        self._step = partial(
            step_of,
            *(branch, root, coupling.name),
            adds=not coupling.averaged,
            has_extras=self.has_extras,
            by_sample=self.batch_dim == 0,
        )

    @functools.cached_property
    def piece(self) -> Piece:
        """F as ordinary operations, which backward computes again."""
        return self._piece()

    @functools.cached_property
    def step(self) -> Step:
        """F and the sum as one function, to be compiled."""
        return self._step()


_NOTHING: Final = nullcontext()


class Compiled(NamedTuple):
    """A block's step in compiled form, for its two runs in one call of the chain."""

    step: Step
    run: Callable[..., Any]
    signs: tuple[Tensor, Tensor]
    """+1 and -1."""

    def results(
        self, block: Block, sums: Added, stream: Tensor, x: Tensor, used: Sequence[Any], sign: int
    ) -> tuple[Tensor, ...]:
        """The sum (F(x) alone if the block is averaged) and the extras."""
        between = () if block.averaged else (stream,)
        after = () if block.averaged else (self.signs[sign], sums.grid)
        masks = self.step.masks(stream)
        result = self.run(self.step.function.modules, *between, x, *after, *used, *masks)
        return tuple(result) if block.has_extras else (result,)


def compiled_block(
    block: Block, compiler: Compiler | None, signs: Any, a: Tensor, b: Tensor, used: Sequence[Any]
) -> Compiled | None:
    """The compiled step for these inputs; None if the block runs eagerly."""
    if compiler is None or not block.replay_context.stateful.may_compile:
        return None
    run = compiler.compiled(block.step.function, (a, b, *used))
    return None if run is None else Compiled(block.step, run, signs)


def arranged(
    block: Block, a: Tensor, b: Tensor, sides: Sequence[Any]
) -> tuple[Tensor, Tensor, Any]:
    """The streams as a block reads them, and the argument of `Block.undo_rearrange`."""
    if block.rearrange is None:
        return a, b, ()
    sizes = [sides[i] for i in block.rearrange_sides]
    a, shapes = block.rearrange(a, *sizes)
    return a, block.rearrange(b, *sizes)[0], shapes


def couple(
    block: Block,
    index: int,
    a: Tensor,
    b: Tensor,
    used: Sequence[Any],
    cast: torch.dtype | None,
    sums: Added,
    compiled: Compiled | None = None,
    *,
    is_rebuilt: bool = True,
    keeps: bool = False,
) -> tuple[Tensor, tuple[Tensor, ...], torch.dtype, _Lost, Graph | None]:
    """`y = a + F(b)`, the extras, the dtype of what is differentiated, what `y` loses of `a`, and
    the graph if it is kept.

    Args:
        block: The block.
        index: Its position in the chain.
        a: The first stream, as the block reads it.
        b: The second one.
        used: The other inputs of F.
        cast: The model's own dtype, if streams have more bits.
        sums: How the chain adds.
        compiled: The compiled step, if the block does not run eagerly.
        is_rebuilt: Whether this is one of two runs that must give the same bits.
        keeps: Whether the run has a graph of its own, which is kept.
    """
    graph = None
    # Both runs of a compiled step are the same artifact only if autograd is on in both.
    if keeps or (is_rebuilt and compiled is not None):
        with torch.enable_grad():
            x = stream_leaf(b, dtype=cast, is_viewed=False)
            leaves = [_as_leaf(value) for value in used]
            if compiled is None:
                addend, extras = run_branch(block, x, leaves, cast)
            else:
                addend, *rest = compiled.results(block, sums, a.detach(), x, leaves, 0)
                extras = tuple(rest)
        if keeps:
            graph = Graph(x, leaves, (addend, *extras))
        addend, extras = addend.detach(), tuple(map(detached, extras))
    elif compiled is None:
        addend, extras = run_branch(block, b, used, cast, is_rebuilt)
    else:
        addend, *rest = compiled.results(block, sums, a, _read(b, cast), used, 0)
        extras = tuple(rest)
    if addend.shape != a.shape and (is_rebuilt or isinstance(sums, FixedAverage)):
        _refuse_broadcast(block, a, addend)
    if compiled is None or block.averaged:
        y, lost = sums.add(index, a, b, addend)
    else:
        y, lost = like(a, addend), ()
    return y, extras, addend.dtype, lost, graph


def _as_leaf(value: Any) -> Any:
    """A side value as in the rebuild."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad)


def _refuse_broadcast(block: Block, a: Tensor, addend: Tensor) -> None:
    """Raise if the sum broadcasts `a`: backward could not rebuild it in its own shape."""
    if torch.broadcast_shapes(a.shape, addend.shape) != a.shape:
        raise InputError(
            f"the reversible block {block.name} adds {list(addend.shape)} to its shortcut "
            f"{list(a.shape)}. In the example both had the same shape, and backward cannot rebuild "
            "a shortcut that is broadcast. Expand the smaller input before the call, or compile "
            "the model with example inputs of these sizes"
        )


def rebuild(
    block: Block,
    index: int,
    y: Tensor,
    x: Tensor,
    b: Tensor,
    used: Sequence[Any],
    cast: torch.dtype | None,
    sums: Added,
    lost: _Lost,
    compiled: Compiled | None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """`a`, and what is differentiated: F(x) or the sum, and the extras. `x` is `b` as a leaf."""
    with torch.enable_grad():
        if compiled is None:
            addend, extras = run_branch(block, x, used, cast)
        else:
            addend, *rest = compiled.results(block, sums, y.detach(), x, used, 1)
            extras = tuple(rest)
    if compiled is None or block.averaged:
        return sums.undo(index, y, b, addend, lost), (addend, *extras)
    return like(y, addend.detach()), (addend, *extras)


def _read(b: Tensor, cast: torch.dtype | None) -> Tensor:
    return b if cast is None else b.to(cast)


def run_branch(
    block: Block, b: Tensor, sides: Sequence[Any], cast: torch.dtype | None, is_rebuilt: bool = True
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """F(b) and the extras (arguments as of `couple`)."""
    with repeatable(block.repeated) if is_rebuilt and any(block.repeated) else _NOTHING:
        result = block.branch(_read(b, cast), *sides)
    return (result[0], tuple(result[1:])) if block.has_extras else (result, ())


def before_rearrange(block: Block, shapes: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Undo a block's rearrangement, for values or for their gradients.

    A rearrangement permutes elements, so its inverse is right for gradients, too.
    """
    if block.undo_rearrange is None:
        return tensors
    return tuple(block.undo_rearrange(tensor, shapes) for tensor in tensors)
