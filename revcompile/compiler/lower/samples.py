"""Samples for the reconstruction check: programs that hand over the streams they rebuild."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor, fx

from revcompile.ir.program import StageProgram
from revcompile.ir.python_code import copied
from revcompile.ir.types import LIVE_VALUES, Coupling
from revcompile.schedule import Keep


def with_samples(
    program: StageProgram, graph: fx.Graph, take: Callable[[str, Tensor], None]
) -> fx.Graph:
    """A copy of a stage's forward or backward graph that passes streams to `take`, by name.

    These are the streams that enter the first coupling of each run of rebuilt couplings.
    """
    names, copy = frozenset(_entering(program)), copied(graph)
    for node in tuple(copy.nodes):
        for name in filter(names.__contains__, node.meta.get(LIVE_VALUES, ())):
            following = node.next
            while following.op == "placeholder":
                following = following.next
            with copy.inserting_before(following):
                copy.call_function(take, (name, node))
    return copy


def _entering(program: StageProgram) -> Iterator[str]:
    before = False
    for unit in program.units:
        first, is_rebuilt = unit.pieces[0], unit.keep is Keep.NOTHING and not unit.is_frozen
        if is_rebuilt and not before and isinstance(first, Coupling):
            yield from first.streams_in
        before = is_rebuilt
