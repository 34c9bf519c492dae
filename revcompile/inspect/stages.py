"""Stages for people: the facts of each, and a table of all."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from rich import box
from rich.console import JustifyMethod
from rich.table import Table

from revcompile.inspect.facts import Memory, stages_of
from revcompile.inspect.tables import refusals, render
from revcompile.inspect.words import amount, bytes_of, counted, size, span
from revcompile.ir.program import Partition, StageProgram
from revcompile.ir.types import Rewired
from revcompile.ir.weight_expansion import WeightExpansion

__all__ = ["StageFacts", "short_range", "stage_facts", "stage_table"]


class Working(Memory, Protocol):
    """With what a pass needs while it runs."""

    @property
    def working(self) -> int: ...
    @property
    def stashed(self) -> int: ...
    @property
    def newest(self) -> int: ...


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
    weights: int
    """Copies of parameters, where they are stashed."""
    memory: int
    batch: int


def stage_facts(
    partition: Partition, programs: Sequence[StageProgram], memory: Sequence[Working], batch: int
) -> tuple[StageFacts, ...]:
    """The facts of every stage; `memory` at the same batch size."""
    stages = stages_of(partition, programs, batch, memory)
    flops = _total(stage.flops for stage in stages)
    work = _total(stage.work for stage in stages)
    found = []
    for stage, held in zip(stages, memory, strict=True):
        kinds = [port.type for port in stage.outputs if port.type is not None]
        found.append(
            StageFacts(
                index=stage.index,
                pieces=tuple(block.name for block in stage.blocks),
                modules=tuple(dict.fromkeys(m for block in stage.blocks for m in block.modules)),
                reversible=stage.reversible,
                opaque=tuple((b.name, b.why) for b in stage.blocks if not b.reversible),
                parameters=stage.parameters,
                flops_share=stage.flops / flops,
                work_share=stage.work / work,
                sends=counted(kinds),
                sent_bytes=sum(bytes_of(kind, batch) for kind in kinds),
                window=stage.window,
                delay=stage.delay,
                buffers=held.buffers,
                working=held.working,
                weights=held.stashed + held.newest,
                memory=held.total,
                batch=batch,
            )
        )
    return tuple(found)


def _total(numbers: Iterable[float]) -> float:
    return math.fsum(numbers) or 1.0


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
    copies = sum(stage.weights for stage in facts)
    stashed = f", and {size(copies)} of stashed weights" if copies else ""
    counted = amount(flops)
    counted += " " * counted[-1].isdigit()
    held = sum(stage.memory for stage in facts)
    worst = max(facts, key=lambda stage: stage.memory)
    lines = [
        f"{parameters:,} parameters ({before:,} before rewiring: {grown}), "
        f"{counted}FLOPs forward a sample",
        f"memory with gradients and SGD's momentum{stashed}: {size(worst.memory)} at most (stage "
        f"{worst.index}), {size(held)} in all",
    ]
    if plain is not None:
        lines[-1] += f"; by backprop on one device {size(plain.total)}"
    return lines


def plain_parameters(rewired: Rewired) -> int:
    """How many parameters the model had before rewiring made some larger."""
    total = 0
    for name, parameter in rewired.root.named_parameters():
        growth = rewired.weight_expansions.get(name)
        if growth is None or growth[1] is WeightExpansion.REVIVE_ZERO_INIT:
            total += parameter.numel()
        elif growth[1] is not WeightExpansion.COPY:
            total += parameter.numel() // 2
    return total
