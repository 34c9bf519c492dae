"""One coupling of a chain as it runs: its branch F, what F reads, and `(a, b) -> (b, a + F(b))`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, fx, nn

from revcompile.ir.module_tree import is_cast
from revcompile.kernels.autocast import converted
from revcompile.kernels.repeatable import Repeated, repeatable
from revcompile.runtime.reversible.bindings import Bindings
from revcompile.runtime.reversible.hooks import ShardedModule
from revcompile.runtime.reversible.replay import ReplayContext
from revcompile.runtime.reversible.slots import filled
from revcompile.runtime.reversible.stream_sums import Sums


class BlockWeights:
    """The parameters of one branch that only layers read for which autocast converts them.

    Autocast converts every weight by itself, in forward and again in the rebuild, and every
    gradient of one, each by a kernel of its own: on a GPU launching those takes the host as long as
    a convolution. Here they are converted together for each of a block's two runs. Stages have such
    copies too, and keep them from one update to the next (`stage.weights`). A chain does not: it
    would need half as much memory again as its weights take.

    A layer that is called twice is left to autocast, which adds the gradients of both calls in
    float32, and so is a branch with forward hooks, which may look at the weights.
    """

    def __init__(self, slots: Sequence[tuple[int, dict[str, Any], str]] = ()) -> None:
        self._slots = slots

    @classmethod
    def of(cls, branch: fx.Graph, root: nn.Module, bindings: Bindings) -> BlockWeights:
        """Those of a branch, by what it reads of the module tree."""
        called = [root.get_submodule(str(n.target)) for n in branch.find_nodes(op="call_module")]
        calls = Counter(id(inner) for module in called for inner in module.modules())
        read = [str(node.target).rpartition(".")[0] for node in branch.find_nodes(op="get_attr")]
        calls.update(id(root.get_submodule(path)) for path in read)
        owners = {id(m._parameters) for m in called if is_cast(m) and calls[id(m)] == 1}
        slots = enumerate(() if bindings.hooked else bindings.slots)
        return cls([(i, *slot) for i, slot in slots if id(slot[0]) in owners])

    def converted(
        self, parameters: Sequence[Tensor | None], dtype: torch.dtype | None
    ) -> dict[int, Tensor]:
        """Copies by the ids of what they are copies of, if `dtype` is given, and if that pays.

        `parameters` are those of the branch, in the order of its bindings. If it uses one twice,
        all are left to autocast.
        """
        if dtype is None or len(self._slots) < 2:
            return {}
        used = [id(p) for p in parameters if p is not None]
        if len(set(used)) < len(used):
            return {}
        present = [parameters[i] for i, _, _ in self._slots]
        chosen = [p for p in present if type(p) is nn.Parameter and p.dtype == torch.float32]
        return dict(zip(map(id, chosen), converted(chosen, [dtype] * len(chosen)), strict=True))

    def replaced_by(self, copies: Mapping[int, Tensor]) -> AbstractContextManager[None]:
        """Let the layers read the copies."""
        if not copies:
            return _NOTHING
        pairs = [((owner, name), copies.get(id(owner[name]))) for _, owner, name in self._slots]
        return filled([(slot, copy) for slot, copy in pairs if copy is not None])


_NOTHING: Final = nullcontext()


def to_dtypes_of(
    parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Gradients of copies in the dtypes of the parameters themselves."""
    result, pairs = list(gradients), zip(gradients, parameters, strict=True)
    other = {i: g for i, (g, p) in enumerate(pairs) if g is not None and g.dtype != p.dtype}
    copies = converted(list(other.values()), [parameters[i].dtype for i in other])
    for i, copy in zip(other, copies, strict=True):
        result[i] = copy
    return result


@dataclass(frozen=True)
class Block:
    """An executable coupling."""

    name: str
    branch: Callable[..., Any]
    """F, as `branch(b, *sides)`; with `has_extras` it returns `(F(b), *extras)`."""
    sides: tuple[int, ...] = ()
    """Positions of the block's side values among those of the chain."""
    has_extras: bool = False
    """Does F also return values that are read outside the block? Only a chain's last block may."""
    rearrange: Callable[..., tuple[Tensor, Any]] | None = None
    """`rearrange(stream, *sizes) -> (stream, shapes)`: permutes elements before the block."""
    undo_rearrange: Callable[..., Tensor] | None = None
    """`undo_rearrange(stream, shapes) -> stream`."""
    rearrange_sides: tuple[int, ...] = ()
    """Positions of the sizes that `rearrange` takes."""
    bindings: Bindings = field(default_factory=Bindings)
    """What F reads of the module tree."""
    replay_context: ReplayContext = field(default_factory=ReplayContext)
    has_autocast_consumer: bool = False
    """Is the only reader of `b` in F a layer whose input autocast casts?"""
    sharded: tuple[ShardedModule, ...] = ()
    """FSDP2 modules that its layers belong to, outermost first."""
    batch_dim: int | None = 0
    """The streams' dimension that counts samples, if there is one."""
    weights: BlockWeights = field(default_factory=BlockWeights)
    """What autocast would convert one by one."""
    repeated: Repeated = field(default_factory=Repeated)
    """Layers of F that have to give the same bits in the rebuild."""


class Coupled(NamedTuple):
    b: Tensor
    y: Tensor
    shapes: Any
    """For `Block.undo_rearrange`."""
    extras: tuple[Tensor, ...]
    addend_dtype: torch.dtype
    cast_copy: Tensor | None
    """`y` in the dtype of autocast, if that was asked for and one kernel wrote both."""


def couple(
    block: Block,
    index: int,
    a: Tensor,
    b: Tensor,
    sides: Sequence[Any],
    cast: torch.dtype | None,
    sums: Sums,
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
    y, cast_copy = sums.add(index, a, b, addend, with_cast)
    return Coupled(b, y, shapes, extras, addend.dtype, cast_copy)


def run_branch(
    block: Block,
    b: Tensor,
    sides: Sequence[Any],
    cast: torch.dtype | None,
    is_rebuilt: bool = True,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """F(b) and the extras.

    Args:
        block: Whose F it is.
        b: What F reads.
        sides: What else it reads.
        cast: The model's own dtype, where streams have more bits.
        is_rebuilt: Is this one of two runs that must give the same bits?
    """
    read = b if cast is None else b.to(cast)
    with repeatable(block.repeated) if is_rebuilt and any(block.repeated) else _NOTHING:
        result = block.branch(read, *sides)
    return (result[0], tuple(result[1:])) if block.has_extras else (result, ())


def before_rearrange(block: Block, shapes: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Values, or gradients of them, as they were before a block's rearrangement.

    It permutes elements, so a gradient goes back the way the values do.
    """
    if block.undo_rearrange is None:
        return tensors
    return tuple(block.undo_rearrange(tensor, shapes) for tensor in tensors)
