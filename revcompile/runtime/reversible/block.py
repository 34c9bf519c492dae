"""One coupling of a chain as it runs: its branch F, what F reads, and how streams are combined.

Added          y = a + F(b)
Averaged       y = b + gamma (a - b) + (1 + gamma) F(b)     gamma = 0 in eval mode
FixedAverage   the same in fixed point, which can be undone    gamma = ±1/16 in training
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, fx, nn

from revcompile.errors import InputError
from revcompile.ir.module_tree import convolves, has_autocast_consumer, is_cast, repeated_layers
from revcompile.ir.precision_rewrites import for_chains
from revcompile.ir.python_code import compile_with_modules
from revcompile.ir.types import Coupling, TensorType
from revcompile.kernels.autocast import converted
from revcompile.kernels.exact_sum import add_or_subtract, rounded
from revcompile.kernels.fixed_point import (
    average,
    average_gradients,
    in_units,
    undo_average,
    unit_of,
)
from revcompile.kernels.layout import alike
from revcompile.kernels.repeatable import Repeated, repeatable
from revcompile.runtime.reversible.bindings import Bindings
from revcompile.runtime.reversible.replay import ReplayContext

_Pair = tuple[Tensor, Tensor]
_Lost = tuple[Tensor, ...]
"""Tensors that only the inverse of a sum needs, which autograd saves."""
_Sum = tuple[Tensor, Tensor | None, _Lost]
"""A sum, its cast copy if one kernel wrote both, and what its inverse needs besides."""


class Added:
    """`y = a + F(b)`, the addend on a grid if there is one."""

    casts = True
    """Whether a kernel may also write `y` in the dtype of autocast."""
    casts_to_read = False
    """Whether a kernel may also write `y` in the model's own dtype, if streams have more bits."""

    def __init__(self, grid: Tensor | None) -> None:
        self.grid = grid

    def enter(self, a: Tensor, b: Tensor) -> _Pair:
        """The input streams of a chain, rounded as its couplings need them."""
        return alike(rounded(a, self.grid), rounded(b, self.grid))

    def add(self, index: int, a: Tensor, b: Tensor, addend: Tensor, with_cast: bool) -> _Sum:
        """The sum of block `index`."""
        return *add_or_subtract(a, addend, self.grid, False, with_cast), ()

    def undo(
        self, index: int, y: Tensor, b: Tensor, addend: Tensor, lost: _Lost, with_cast: bool
    ) -> tuple[Tensor, Tensor | None]:
        """`a` of block `index`, and its cast copy if one kernel wrote both."""
        return add_or_subtract(y, addend, self.grid, True, with_cast)

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

    casts = False

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

    def add(self, index: int, a: Tensor, b: Tensor, addend: Tensor, with_cast: bool) -> _Sum:
        if self.signs is None:
            return b + addend, None, ()
        half = self.sign(index, b) / 2
        return half * a + (1 - half) * b + (1 + half) * addend, None, ()

    def undo(
        self, index: int, y: Tensor, b: Tensor, addend: Tensor, lost: _Lost, with_cast: bool
    ) -> tuple[Tensor, Tensor | None]:
        assert self.signs is None, "only fixed-point averages can be undone"
        return b, None  # `a` was equal to `b`, or is not needed

    def gradients(
        self, index: int, of_b: Tensor, of_y: Tensor, dtype: torch.dtype, may_overwrite: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert self.signs is None, "of other averages autograd computes the gradients"
        return torch.zeros_like(of_y), of_b + of_y, of_y


class FixedAverage(Averaged):
    """The same in fixed point, which can be undone. Branches read streams in `read_dtype`."""

    casts_to_read = True

    def __init__(
        self, signs: Tensor, batch_dims: tuple[int | None, ...], read_dtype: torch.dtype
    ) -> None:
        super().__init__(signs, batch_dims)
        self._read_dtype = read_dtype

    def enter(self, a: Tensor, b: Tensor) -> _Pair:
        self._unit = unit_of(a, b)
        of_b = in_units(b, self._unit)
        return alike(of_b if a is b else in_units(a, self._unit), of_b)

    def add(self, index: int, a: Tensor, b: Tensor, addend: Tensor, with_cast: bool) -> _Sum:
        dtype = self._read_dtype if with_cast else None
        y, lost, copy = average(a, b, addend, self.sign(index, b), self._unit, dtype)
        return y, copy, (lost,)

    def undo(
        self, index: int, y: Tensor, b: Tensor, addend: Tensor, lost: _Lost, with_cast: bool
    ) -> tuple[Tensor, Tensor | None]:
        (bits,) = lost
        dtype = self._read_dtype if with_cast else None
        return undo_average(y, b, addend, self.sign(index, b), self._unit, bits, dtype)

    def gradients(
        self, index: int, of_b: Tensor, of_y: Tensor, dtype: torch.dtype, may_overwrite: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        return average_gradients(of_b, of_y, self.sign(index, of_y), dtype, may_overwrite)


# -- the coupling ---------------------------------------------------------------------------------


class BlockWeights:
    """Converts the parameters of a branch that autocast would convert, all of them together.

    Autocast converts each weight, in forward and again in the rebuild, and each weight's gradient
    by a kernel of its own. On a GPU, launching that kernel takes the host as long as a convolution.
    Here the weights are converted together for each of a block's two runs. Stages keep such copies
    from one update to the next (`stage.weights`). A chain does not: it would need half as much
    memory again as its weights take.

    Some weights are left to autocast: those of layers that are called twice, whose gradients it
    adds in float32; those of branches with forward hooks, which may look at them; sharded ones.
    """

    def __init__(
        self, branch: fx.Graph, root: nn.Module, bindings: Bindings, is_sharded: bool
    ) -> None:
        called = [root.get_submodule(str(n.target)) for n in branch.find_nodes(op="call_module")]
        calls = Counter(id(inner) for module in called for inner in module.modules())
        read = [str(node.target).rpartition(".")[0] for node in branch.find_nodes(op="get_attr")]
        calls.update(id(root.get_submodule(path)) for path in read)
        owners = {id(m._parameters) for m in called if is_cast(m) and calls[id(m)] == 1}
        slots = enumerate(() if bindings.hooked or is_sharded else bindings.slots)
        self._positions = [i for i, (owner, _) in slots if id(owner) in owners]

    def converted(
        self, parameters: Sequence[Tensor | None], dtype: torch.dtype | None
    ) -> dict[int, Tensor]:
        """Copies of parameters in `dtype`, by the parameters' ids; none if that does not pay.

        `parameters` are those of the branch, in the order of its bindings. If the branch uses one
        of them twice, all are left to autocast.
        """
        if dtype is None or len(self._positions) < 2:
            return {}
        used = [id(p) for p in parameters if p is not None]
        if len(set(used)) < len(used):
            return {}
        present = [parameters[i] for i in self._positions]
        chosen = [p for p in present if type(p) is nn.Parameter and p.dtype == torch.float32]
        return dict(zip(map(id, chosen), converted(chosen, [dtype] * len(chosen)), strict=True))


_NOTHING: Final = nullcontext()


def to_dtypes_of(
    parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Convert the gradients of cast copies to the dtypes of the parameters."""
    result, pairs = list(gradients), zip(gradients, parameters, strict=True)
    other = {i: g for i, (g, p) in enumerate(pairs) if g is not None and g.dtype != p.dtype}
    copies = converted(list(other.values()), [parameters[i].dtype for i in other])
    for i, copy in zip(other, copies, strict=True):
        result[i] = copy
    return result


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
        compiled = partial(compile_with_modules, root=root, name=coupling.name)
        self.branch = compiled(for_chains(branch, root))
        """F, as `branch(b, *sides)`; with `has_extras` it returns `(F(b), *extras)`."""
        self.sides = [position[name] for name in coupling.sides]
        self.has_extras = bool(coupling.extras)
        """Whether F also returns values read outside the block. Only a chain's last block may."""
        self.rearrange = compiled(rearrange.forward) if rearrange else None
        """`rearrange(stream, *sizes) -> (stream, shapes)`: permutes elements before the block."""
        self.undo_rearrange = compiled(rearrange.inverse) if rearrange else None
        """`undo_rearrange(stream, shapes) -> stream`."""
        self.rearrange_sides = [position[name] for name in rearrange.sides] if rearrange else []
        """Positions of the sizes that `rearrange` takes."""
        self.bindings = bindings = Bindings(branch, root)
        """What F reads from the module tree."""
        self.replay_context = ReplayContext.of(coupling, root, list(bindings.modules))
        self.has_autocast_consumer = has_autocast_consumer(branch, root)
        """Whether the only reader of `b` in F is a layer whose input autocast casts."""
        self.sharded = bindings.sharded
        self.batch_dim = None if kind is None else kind.batch_dim
        """The streams' dimension that counts samples, if there is one."""
        self.weights = BlockWeights(branch, root, bindings, bool(self.sharded))
        """The weights that autocast would convert one by one."""
        self.averaged, self.convolves = coupling.averaged, convolves(branch, root)
        self.repeated = repeated_layers(branch, root) if coupling.averaged else Repeated()
        """Layers of F that must give the same bits in the rebuild."""


class Coupled(NamedTuple):
    b: Tensor
    y: Tensor
    shapes: Any
    """The argument of `Block.undo_rearrange`."""
    extras: tuple[Tensor, ...]
    addend_dtype: torch.dtype
    cast_copy: Tensor | None
    """`y` in the dtype of autocast, if `with_cast` and if one kernel wrote both."""
    lost: _Lost


def couple(
    block: Block,
    index: int,
    a: Tensor,
    b: Tensor,
    sides: Sequence[Any],
    cast: torch.dtype | None,
    sums: Added,
    *,
    cast_b: Tensor | None = None,
    with_cast: bool = False,
    is_rebuilt: bool = True,
) -> Coupled:
    """`(a, b) -> (b, a + F(b))`, after the block's rearrangement; F may read a cast copy of b."""
    shapes: Any = ()
    if block.rearrange is not None:
        sizes = [sides[i] for i in block.rearrange_sides]
        a, shapes = block.rearrange(a, *sizes)
        b, _ = block.rearrange(b, *sizes)
    read = b if cast_b is None else cast_b
    used = [sides[i] for i in block.sides]
    addend, extras = run_branch(block, read, used, cast, is_rebuilt)
    if addend.shape != a.shape and (is_rebuilt or isinstance(sums, FixedAverage)):
        _refuse_broadcast(block, a, addend)
    y, cast_copy, lost = sums.add(index, a, b, addend, with_cast)
    return Coupled(b, y, shapes, extras, addend.dtype, cast_copy, lost)


def _refuse_broadcast(block: Block, a: Tensor, addend: Tensor) -> None:
    """Raise if the sum broadcasts `a`: backward could not rebuild it in its own shape."""
    if torch.broadcast_shapes(a.shape, addend.shape) != a.shape:
        raise InputError(
            f"the reversible block {block.name} adds {list(addend.shape)} to its shortcut "
            f"{list(a.shape)}. In the example both had the same shape, and backward cannot rebuild "
            "a shortcut that is broadcast. Expand the smaller input before the call, or compile "
            "the model with example inputs of these sizes"
        )


def run_branch(
    block: Block, b: Tensor, sides: Sequence[Any], cast: torch.dtype | None, is_rebuilt: bool = True
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """F(b) and the extras.

    Args:
        block: The block that has F.
        b: The stream that F reads.
        sides: The other inputs of F.
        cast: The model's own dtype, if streams have more bits.
        is_rebuilt: Whether this is one of two runs that must give the same bits.
    """
    read = b if cast is None else b.to(cast)
    with repeatable(block.repeated) if is_rebuilt and any(block.repeated) else _NOTHING:
        result = block.branch(read, *sides)
    return (result[0], tuple(result[1:])) if block.has_extras else (result, ())


def before_rearrange(block: Block, shapes: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Undo a block's rearrangement, for values or for their gradients.

    A rearrangement permutes elements, so its inverse is right for gradients, too.
    """
    if block.undo_rearrange is None:
        return tensors
    return tuple(block.undo_rearrange(tensor, shapes) for tensor in tensors)
