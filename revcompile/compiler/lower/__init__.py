"""lower: parts -> stage programs, the code each device runs.

Stages are lowered from the first to the last: a stage's backward program decides which values the
next stage must send back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from revcompile.compiler.gradient_paths import frozen_values, trained_parameters
from revcompile.compiler.lower.code import Printed, Printer, Program, Value
from revcompile.compiler.lower.programs import BackwardWriter, forward_program
from revcompile.compiler.lower.trace import trace
from revcompile.compiler.lower.writer import StageUnits
from revcompile.errors import InputError
from revcompile.ir.program import GraphFunction, Partition, Port, StageCode, StageProgram
from revcompile.ir.types import TensorType
from revcompile.schedule import Keep, Method, Order, Weights

__all__ = ["lower"]


def lower(
    partition: Partition, method: Method, keeps: Sequence[Keep] | None = None
) -> tuple[StageProgram, ...]:
    """Generate the programs of all stages.

    Args:
        partition: The stages.
        method: How they are trained.
        keeps: What each stage keeps for backward, where that is not what the method says.

    Returns:
        A program for each stage.

    Raises:
        InputError: The method rebuilds averaged couplings with other weights than forward had.
    """
    keeps = keeps or [method.keep] * len(partition.parts)
    _refuse_amplified_errors(partition, method, keeps)
    partition = replace(partition, frozen=frozen_values(partition))
    trained = frozenset(trained_parameters(partition.rewired))
    programs: list[StageProgram] = []
    sends_back: tuple[str, ...] = ()

    def port(name: str) -> Port:
        kind = partition.types.get(name)
        tensor = kind if isinstance(kind, TensorType) else None
        return Port(name, tensor, partition.requires_grad(name))

    for part, keep in zip(partition.parts, keeps, strict=True):
        stage = StageUnits(partition, part, keep)
        walk = BackwardWriter(stage)
        backward = walk.write(sends_back)
        forward = forward_program(stage, walk.kept.values())
        code, graphs = _code(stage, walk.parameters, forward, backward)
        programs.append(
            StageProgram(
                index=part.index,
                stages=len(partition.parts),
                method=method,
                units=stage.units,
                inputs=tuple(map(port, part.inputs)),
                outputs=tuple(map(port, part.outputs)),
                kept=tuple(walk.kept),
                needs_back=tuple(walk.needs_back),
                sends_back=sends_back,
                parameters=walk.parameters,
                trained=trained.intersection(walk.parameters),
                code=code,
                **graphs,
            )
        )
        sends_back = tuple(walk.needs_back)
    return tuple(programs)


def _code(
    stage: StageUnits, parameters: Sequence[str], *programs: Program
) -> tuple[StageCode, dict[str, fx.Graph]]:
    """The programs as text, and the graphs traced from this text, by program name."""
    functions, runs = stage.functions, list(stage.runs.values())
    has_key = any(unit.random for unit in stage.units)
    printer = Printer(stage.partition, stage.names, has_key)
    printed = {program: printer.print(program) for program in (*runs, *programs)}
    called: list[GraphFunction | Printed] = [*functions, *(printed[run] for run in runs)]
    graphs = {
        program.name: trace(
            printed[program], program.arguments, called, stage.partition, parameters
        )
        for program in programs
    }
    texts = tuple(one.text for one in printed.values())
    held = printed[programs[0]].variables
    ports = (*stage.part.inputs, *stage.part.outputs)
    variables = {name: held[Value(name)] for name in ports}
    return StageCode(functions, texts, variables), graphs


def _refuse_amplified_errors(partition: Partition, method: Method, keeps: Sequence[Keep]) -> None:
    """Refuse changed weights: undoing averaged couplings amplifies changes of F in every block."""
    is_late = method.order is Order.CONTINUOUS and len(partition.parts) > 1
    if method.weights is Weights.STASHED or not is_late or Keep.NOTHING not in keeps:
        return
    if any(coupling.averaged for coupling in partition.rewired.couplings):
        raise InputError(
            f"method {method.name!r} with weights={method.weights.value!r} rebuilds inputs with "
            'other weights than the forward pass had. The couplings of policy="pretrained" would '
            "multiply that difference in every block; use weights='stashed', or a method without "
            "delay such as 'reversible_backprop'"
        )
