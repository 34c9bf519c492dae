"""Stages for people: the facts of each, and a table of all."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from rich import box
from rich.console import JustifyMethod
from rich.table import Table

from revcompile.inspect.drawing.words import amount, bytes_of, dtype, shape, size, span
from revcompile.inspect.tables import refusals, render
from revcompile.ir import PATH, Growth, Opaque, Rewired, TensorType
from revcompile.program import Part, Partition, Piece, StageProgram
from revcompile.schedule import delay, window

__all__ = ["StageFacts", "modules_of", "short_range", "stage_facts", "stage_table", "work_of"]


class Memory(Protocol):
    """What a stage holds at its peak, in bytes."""

    @property
    def buffers(self) -> int: ...
    @property
    def working(self) -> int: ...
    @property
    def total(self) -> int: ...


@dataclass(frozen=True)
class StageFacts:
    """All that is told of one stage; sizes at `batch` samples a micro-batch, in bytes."""

    index: int
    pieces: tuple[str, ...]
    modules: tuple[str, ...]
    """Paths of the modules whose code the stage runs."""
    reversible: bool
    opaque: tuple[tuple[str, str], ...]
    """Pieces that are not reversible, and why."""
    parameters: int
    flops_share: float
    work_share: float
    sends: tuple[str, ...]
    sent_bytes: int
    window: int
    delay: int
    buffers: int
    working: int
    memory: int
    batch: int


def stage_facts(
    partition: Partition, programs: Sequence[StageProgram], memory: Sequence[Memory], batch: int
) -> tuple[StageFacts, ...]:
    """The facts of every stage; `memory` at the same batch size."""
    flops = _total(cost.flops for part in partition.parts for cost in part.costs)
    work = _total(work_of(part) for part in partition.parts)
    found = []
    for part, program, held in zip(partition.parts, programs, memory, strict=True):
        kinds = [port.type for port in program.outputs if port.type is not None]
        found.append(
            StageFacts(
                index=part.index,
                pieces=tuple(piece.name for piece in part.pieces),
                modules=tuple(dict.fromkeys(m for piece in part.pieces for m in modules_of(piece))),
                reversible=part.reversible,
                opaque=tuple(
                    (piece.name, piece.segment.reason)
                    for piece in part.pieces
                    if isinstance(piece.segment, Opaque)
                ),
                parameters=sum(cost.parameters for cost in part.costs),
                flops_share=sum(cost.flops for cost in part.costs) / flops,
                work_share=work_of(part) / work,
                sends=_counted(kinds),
                sent_bytes=sum(bytes_of(kind, batch) for kind in kinds),
                window=window(program.method, len(programs), part.index),
                delay=delay(program.method, len(programs), part.index),
                buffers=held.buffers,
                working=held.working,
                memory=held.total,
                batch=batch,
            )
        )
    return tuple(found)


def modules_of(piece: Piece) -> tuple[str, ...]:
    """Paths of the modules in a piece, in the order they run."""
    segment = piece.segment
    graph = segment.graph if isinstance(segment, Opaque) else segment.branch
    called = (node for node in graph.nodes if node.op.startswith("call"))
    paths = (str(node.meta.get(PATH, "")) for node in called)
    return tuple(dict.fromkeys(path for path in paths if path))


def work_of(part: Part) -> float:
    """Forward and backward work of a stage."""
    return math.fsum(cost.forward + cost.backward for cost in part.costs)


def _total(numbers: Iterable[float]) -> float:
    return math.fsum(numbers) or 1.0


def _counted(kinds: Sequence[TensorType]) -> tuple[str, ...]:
    """`2×f32[B,64,56,56]` for two equal ones."""
    counted = Counter(dtype(kind) + shape(kind) for kind in kinds)
    return tuple(f"{n}×{text}" if n > 1 else text for text, n in counted.items())


# -- the table ------------------------------------------------------------------------------------

_COLUMNS: Final[tuple[tuple[str, JustifyMethod], ...]] = (
    ("#", "right"),
    ("holds", "left"),
    ("reversible", "left"),
    ("parameters\nof FLOPs", "right"),
    ("sends\nbytes", "left"),
    ("in flight\ndelay", "right"),
    ("kept\nworking", "right"),
)
_SENT: Final = 2
"""Most kinds of tensors that a cell lists."""


def stage_table(
    partition: Partition, facts: Sequence[StageFacts], method: str, plain: Memory | None = None
) -> str:
    """All stages: what they hold and compute, what they send and keep, and why.

    `plain` is what one device would hold to train the whole model by backpropagation.
    """
    letters = _letters(facts)
    batch = facts[0].batch
    title = f"{partition.rewired.name}: {len(facts)} stages, {method}, micro-batches of {batch}"
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title_justify="left")
    for column, side in _COLUMNS:
        table.add_column(column, justify=side, no_wrap=column != "holds", overflow="fold")
    for stage in facts:
        kept = size(stage.buffers) if stage.buffers else "nothing"
        table.add_row(
            str(stage.index),
            _holds(stage),
            _kind(stage, letters),
            f"{amount(stage.parameters)}\n{100 * stage.flops_share:.1f} %",
            _sends(stage),
            f"{stage.window}\n{stage.delay}",
            f"{kept}\n{size(stage.working)}",
        )
    return render(table, *_below(partition, facts, letters, plain))


def _letters(facts: Sequence[StageFacts]) -> dict[str, str]:
    """A letter for every reason, in the order the stages give them."""
    reasons = dict.fromkeys(reason for stage in facts for _, reason in stage.opaque)
    return {reason: _letter(number) for number, reason in enumerate(reasons)}


def _letter(number: int) -> str:
    """a, b, ... z, a1, b1, ..."""
    again, letter = divmod(number, 26)
    return chr(ord("a") + letter) + (str(again) if again else "")


def _kind(stage: StageFacts, letters: dict[str, str]) -> str:
    if stage.reversible:
        return "yes"
    why = ",".join(sorted({letters[reason] for _, reason in stage.opaque}))
    blocks = len(stage.pieces) - len(stage.opaque)
    return (f"{blocks} of {len(stage.pieces)}" if blocks else "no") + f" ({why})"


def _holds(stage: StageFacts) -> str:
    """The range of pieces; one that is not named after a module with the modules in it."""
    shown = short_range(stage.pieces)
    inside = any(f"{module}.".startswith(f"{shown}.") for module in stage.modules)
    if len(stage.pieces) > 1 or inside or not stage.modules:
        return shown
    return f"{shown}: {short_range(stage.modules)}"


def short_range(names: Sequence[str]) -> str:
    """Names in a row as the first and what is different in the last, and how many they are.

    >>> short_range(["layers.0.blocks.1.attn", "layers.0.blocks.1.mlp", "layers.0.blocks.2.attn"])
    'layers.0.blocks.1.attn – 2.attn (3)'
    >>> short_range(["layer1.0", "layer1.1"])
    'layer1.0 – layer1.1 (2)'
    """
    plain = [name.rpartition(": ")[2] for name in names]
    if len(plain) == 1:
        return plain[0]
    numbered = plain[-1].rpartition(".")[2].isdigit()  # a number alone would not say of what
    shown = f"{plain[0]} – {plain[-1]}" if numbered else span(plain)
    return f"{shown} ({len(plain)})"


def _sends(stage: StageFacts) -> str:
    more = len(stage.sends) - _SENT
    shown = [*stage.sends[:_SENT], *([f"and {more} more"] if more > 0 else [])]
    return "\n".join([*shown, size(stage.sent_bytes)])


def _below(
    partition: Partition, facts: Sequence[StageFacts], letters: dict[str, str], plain: Memory | None
) -> list[str]:
    """Why stages are not reversible, the balance, the totals, notes."""
    lines = []
    for reason, letter in letters.items():
        where = [short_range([n]) for stage in facts for n, why in stage.opaque if why == reason]
        shown = ", ".join(where[:3]) + (f" and {len(where) - 3} more" if len(where) > 3 else "")
        lines.append(f"({letter}) {reason}: {shown}")
    lines += [_balance(facts), *_totals(partition, facts, plain)]
    for tie, names in partition.ties.items():
        lines.append(f"stages {tie.owner} and {tie.holder} share {', '.join(names)}")
    return [*lines, *refusals(partition.rewired), *partition.rewired.notes]


def _balance(facts: Sequence[StageFacts]) -> str:
    reversible = sum(stage.reversible for stage in facts)
    largest = max(facts, key=lambda stage: stage.work_share)
    return (
        f"{len(facts)} stages, {reversible} reversible; balance: the largest (stage "
        f"{largest.index}) has {largest.work_share * len(facts):.2f}x the mean work"
    )


def _totals(partition: Partition, facts: Sequence[StageFacts], plain: Memory | None) -> list[str]:
    parameters = sum(stage.parameters for stage in facts)
    before = plain_parameters(partition.rewired)
    grown = f"{100 * (parameters / before - 1):+.1f} %" if parameters != before else "as many"
    costs = [cost for part in partition.parts for cost in part.costs]
    flops = sum(cost.flops / cost.batch for cost in costs)
    held = sum(stage.memory for stage in facts)
    worst = max(facts, key=lambda stage: stage.memory)
    lines = [
        f"{parameters:,} parameters ({before:,} before rewiring: {grown}), "
        f"{amount(flops)}FLOPs forward a sample",
        f"memory with gradients and SGD's momentum: {size(worst.memory)} at most (stage "
        f"{worst.index}), {size(held)} in all",
    ]
    if plain is not None:
        lines[-1] += f"; by backprop on one device {size(plain.total)}"
    return lines


def plain_parameters(rewired: Rewired) -> int:
    """How many parameters the model had before rewiring made some larger."""
    total = 0
    for name, parameter in rewired.root.named_parameters():
        growth = rewired.growths.get(name)
        if growth is None or growth[1] is Growth.WAKE:
            total += parameter.numel()
        elif growth[1] is not Growth.COPY:
            total += parameter.numel() // 2
    return total
