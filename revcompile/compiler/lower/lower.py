"""lower: every part becomes a program, from the first stage to the last.

The order matters: what a stage wants back from the next one, the next one has to provide.
"""

from __future__ import annotations

from collections.abc import Sequence

from revcompile.compiler.lower.backward import backward
from revcompile.compiler.lower.emit import Emitter
from revcompile.compiler.lower.forward import forward_graph
from revcompile.compiler.lower.inverse import inverse_graph
from revcompile.compiler.lower.units import groups
from revcompile.ir.program import Partition, Port, StageProgram
from revcompile.ir.types import TensorType
from revcompile.schedule import Keep, Method

__all__ = ["lower"]


def lower(
    partition: Partition, method: Method, keeps: Sequence[Keep] | None = None
) -> tuple[StageProgram, ...]:
    """The programs of all stages for a method; `keeps` has stages keep something else than it."""
    keeps = keeps or [method.keep] * len(partition.parts)
    programs: list[StageProgram] = []
    returned: tuple[str, ...] = ()
    emitter = Emitter(partition)

    def port(name: str) -> Port:
        kind = partition.types.get(name)
        return Port(name, kind if isinstance(kind, TensorType) else None, emitter.graded(name))

    for part, keep in zip(partition.parts, keeps, strict=True):
        units = groups(partition, part, keep)
        back = backward(partition, part, units, returned)
        programs.append(
            StageProgram(
                index=part.index,
                stages=len(partition.parts),
                method=method,
                units=tuple(unit.unit() for unit in units),
                inputs=tuple(map(port, part.inputs)),
                outputs=tuple(map(port, part.outputs)),
                kept=back.kept,
                wanted=back.wanted,
                returned=returned,
                parameters=back.parameters,
                forward=forward_graph(partition, part, units, back.kept),
                backward=back.graph,
                inverse=inverse_graph(partition, part, units, back),
            )
        )
        returned = back.wanted
    return tuple(programs)
