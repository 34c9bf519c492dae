"""Tables as plain text: a rewired model's segments, the stages of one that is cut."""

from __future__ import annotations

import io
import math
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from rich import box
from rich.console import Console, JustifyMethod
from rich.table import Table

from revcompile.inspect.formatting import (
    amount,
    bytes_of,
    counted,
    dtype,
    first_few,
    plural,
    shape,
    share,
    size,
    span,
)
from revcompile.inspect.views import refusals_by_reason, stage_views
from revcompile.ir.program import Partition, StageMemory, StageProgram
from revcompile.ir.types import Cost, Coupling, Opaque, Rewired, Segment, TensorType
from revcompile.ir.weight_expansion import WeightExpansion


def text_width() -> int:
    """The terminal's width, between 80 and 120 columns; 100 without a terminal."""
    return max(80, min(120, shutil.get_terminal_size((100, 24)).columns))


def render(*parts: object) -> str:
    """Rich renderables as plain text of that width.

    `force_jupyter=False`: in a notebook rich would display the text itself, besides returning it.
    """
    console = Console(
        width=text_width(),
        record=True,
        file=io.StringIO(),
        force_terminal=False,
        force_jupyter=False,
    )
    for part in parts:
        console.print(part, highlight=False, markup=False)
    lines = console.export_text().rstrip().split("\n")
    return "\n".join(line.rstrip() for line in lines)


def summary_text(rewired: Rewired, costs: Sequence[Cost]) -> str:
    """The segments of a rewired model: how much they compute, and why some are not reversible."""
    flops = max(sum(cost.flops for cost in costs), 1)
    parameters = max(sum(cost.parameters for cost in costs), 1)
    table = _table(f"{rewired.name}: {plural(len(rewired.body.segments), 'segment')}")
    for column, side in _SEGMENT_COLUMNS:
        table.add_column(column, justify=side, overflow="fold", no_wrap=column != "segment")
    inside = Cost(0, 0)
    opaque = [(s.name, s.reason) for s in rewired.body.segments if isinstance(s, Opaque)]
    letters = _letters(opaque)
    for segment, cost in zip(rewired.body.segments, costs, strict=True):
        reversible = isinstance(segment, Coupling)
        if reversible:
            inside = Cost(inside.flops + cost.flops, inside.parameters + cost.parameters)
        table.add_row(
            segment.name,
            f"{100 * cost.flops / flops:.1f} %",
            amount(cost.parameters),
            _shape(rewired, segment),
            f"opaque ({letters[segment.reason]})" if isinstance(segment, Opaque) else "reversible",
        )
    totals = (
        f"reversible: {len(rewired.couplings)} blocks with "
        f"{100 * inside.flops / flops:.1f} % of the forward FLOPs and "
        f"{100 * inside.parameters / parameters:.1f} % of {parameters:,} parameters"
    )
    below = totals, *_reasons(opaque, letters), *refusals(rewired), *rewired.notes
    return render(function_of(rewired), "", table, "", *below, _NEXT_OF_MODULE)


def function_of(rewired: Rewired) -> str:
    """What a rewired model computes, in a line."""
    if not rewired.couplings:
        return f"{rewired.name}: the original's function, as nothing became reversible"
    if rewired.policy.averaged:
        return f"{rewired.name} in two streams: in eval mode the original's function"
    return f"{rewired.name} in two streams: a new function, to be trained from scratch"


def _table(title: str) -> Table:
    return Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )


_SEGMENT_COLUMNS: Final[tuple[tuple[str, JustifyMethod], ...]] = (
    ("segment", "left"),
    ("FLOPs", "right"),
    ("parameters", "right"),
    ("gives", "left"),
    ("kind", "left"),
)


def _shape(rewired: Rewired, segment: Segment) -> str:
    kind = rewired.body.types.get(segment.outputs[-1]) if segment.outputs else None
    return f"{dtype(kind)}{shape(kind)}" if isinstance(kind, TensorType) else ""


def refusals(rewired: Rewired) -> list[str]:
    """Sums that were not rewired, grouped by reason."""
    by_reason = refusals_by_reason(rewired).items()
    return [f"not rewired: {first_few(paths)}: {reason}" for reason, paths in by_reason]


def most_frequent_refusals(rewired: Rewired, count: int) -> list[str]:
    """The reasons why most sums were not rewired, each with some of the places."""
    by_reason = refusals_by_reason(rewired).items()
    frequent = sorted(by_reason, key=lambda entry: -len(entry[1]))[:count]
    return [f"{first_few(paths)}: {reason}" for reason, paths in frequent]


def invertibility_table(errors: Sequence[tuple[str, float]], tolerance: float) -> str:
    """Reconstruction errors block by block."""
    table = _table("")
    for column in ("block", "relative error", ""):
        table.add_column(column, overflow="fold")
    for name, error in errors:
        table.add_row(name, f"{error:.1e}", "ok" if error <= tolerance else "TOO LARGE")
    return render(f"reconstruction error (tolerance {tolerance:.0e})", table)


# -- stages ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StageFacts:
    """What tables and JSON show of one stage; sizes in bytes, at `batch` samples a micro-batch."""

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
    """Copies of parameters, where they are stashed or predicted."""
    memory: int
    batch: int


def stage_facts(
    partition: Partition,
    programs: Sequence[StageProgram],
    memory: Sequence[StageMemory],
    batch: int,
) -> tuple[StageFacts, ...]:
    """The facts of every stage; `memory` is given at the same batch size."""
    stages = stage_views(partition, programs, batch, memory)
    flops = _total(stage.flops for stage in stages)
    work = _total(stage.work for stage in stages)
    facts = []
    for stage, held in zip(stages, memory, strict=True):
        kinds = [port.type for port in stage.outputs if port.type is not None]
        facts.append(
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
    return tuple(facts)


def _total(numbers: Iterable[float]) -> float:
    return math.fsum(numbers) or 1.0


# -- the table ------------------------------------------------------------------------------------

_NEXT_OF_MODULE: Final = (
    "next: train it as any nn.Module; check_invertible(net, *inputs) measures it"
)
_NEXT_OF_STAGES: Final = (
    "next: net.trainer(optimizer, loss) trains it, net.explain(NAME) tells about a module, "
    'net.draw("net.html") shows it'
)
_LEGEND: Final = (
    "work: estimated time of forward and backward; delay: updates, at accumulation_steps=1; kept: "
    "for all micro-batches in flight; working: the most that one pass holds besides"
)
_STAGE_COLUMNS: Final[tuple[tuple[str, JustifyMethod], ...]] = (
    ("#", "right"),
    ("holds\nreversible", "left"),
    ("work\nparameters", "right"),
    ("sends\nbytes", "left"),
    ("in flight\ndelay", "right"),
    ("kept\nworking", "right"),
)
_SENT: Final = 2
"""Most kinds of tensors that a cell lists."""


def stage_table(
    partition: Partition, facts: Sequence[StageFacts], method: str, plain: StageMemory | None = None
) -> str:
    """All stages: what they compute, send and keep, and why some are not reversible.

    `plain` is the memory of training the whole model on one device by backpropagation.
    """
    letters = _letters([entry for stage in facts for entry in stage.opaque])
    batch = facts[0].batch
    stages = plural(len(facts), "stage")
    title = f"{partition.rewired.name}: {stages}, {method}, micro-batches of {batch}"
    table = _table(title)
    for column, side in _STAGE_COLUMNS:
        names = column.startswith("holds")
        table.add_column(column, justify=side, no_wrap=not names, overflow="fold")
    for stage in facts:
        kept = size(stage.buffers) if stage.buffers else "nothing"
        table.add_row(
            str(stage.index),
            f"{_holds(stage)}\n{_kind(stage, letters)}",
            f"{100 * stage.work_share:.1f} %\n{amount(stage.parameters)}",
            _sends(stage),
            f"{stage.window}\n{stage.delay}",
            f"{kept}\n{size(stage.working)}",
        )
    return render(
        function_of(partition.rewired), "", table, "", *_below(partition, facts, letters, plain)
    )


def _letters(opaque: Iterable[tuple[str, str]]) -> dict[str, str]:
    """A letter for every reason, in the order in which they come."""
    reasons = dict.fromkeys(reason for _, reason in opaque)
    return {reason: _letter(number) for number, reason in enumerate(reasons)}


def _reasons(opaque: Sequence[tuple[str, str]], letters: dict[str, str]) -> list[str]:
    """What the letters mean, and what they stand at."""
    lines = []
    for reason, letter in letters.items():
        where = [short_range([name]) for name, why in opaque if why == reason]
        lines.append(f"({letter}) {reason}: {first_few(where)}")
    return lines


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
    """The range of pieces; a single piece that is not named after a module, with its modules."""
    shown = short_range(stage.pieces)
    inside = any(f"{module}.".startswith(f"{shown}.") for module in stage.modules)
    if len(stage.pieces) > 1 or inside or not stage.modules:
        return shown
    return f"{shown}: {short_range(stage.modules)}"


def short_range(names: Sequence[str]) -> str:
    """Several names as the first, what differs in the last, and their number.

    >>> short_range(["layers.0.blocks.1.attn", "layers.0.blocks.1.mlp", "layers.0.blocks.2.attn"])
    'layers.0.blocks.1.attn – 2.attn (3)'
    >>> short_range(["layer1.0", "layer1.1"])
    'layer1.0 – layer1.1 (2)'
    """
    plain = [name.rpartition(": ")[2] for name in names]
    if len(plain) == 1:
        return plain[0]
    numbered = plain[-1].rpartition(".")[2].isdigit()  # "layer1.0 – 1" would be unclear
    shown = f"{plain[0]} – {plain[-1]}" if numbered else span(plain)
    return f"{shown} ({len(plain)})"


def _sends(stage: StageFacts) -> str:
    more = len(stage.sends) - _SENT
    shown = [*stage.sends[:_SENT], *([f"and {more} more"] if more > 0 else [])]
    return "\n".join([*shown, size(stage.sent_bytes)])


def _below(
    partition: Partition,
    facts: Sequence[StageFacts],
    letters: dict[str, str],
    plain: StageMemory | None,
) -> list[str]:
    """What columns mean, why stages are not reversible, the totals, notes, what to do next."""
    lines = [_LEGEND, *_reasons([entry for stage in facts for entry in stage.opaque], letters)]
    lines += _totals(partition, facts, plain)
    for tie, names in partition.ties.items():
        lines.append(f"stages {tie.owner} and {tie.holder} share {', '.join(names)}")
    return [*lines, *refusals(partition.rewired), *partition.rewired.notes, _NEXT_OF_STAGES]


def _totals(
    partition: Partition, facts: Sequence[StageFacts], plain: StageMemory | None
) -> Iterator[str]:
    pieces = [
        (piece.reversible, cost.flops / cost.batch)
        for part in partition.parts
        for piece, cost in zip(part.pieces, part.costs, strict=True)
    ]
    flops, inside = sum(f for _, f in pieces), [f for reversible, f in pieces if reversible]
    yield (
        f"reversible: {len(inside)} of {plural(len(pieces), 'piece')}, {share(sum(inside), flops)} "
        f"of {amount(flops)}{' ' * (flops < 999.5)}FLOPs per sample in forward"
    )
    largest = max(facts, key=lambda stage: stage.work_share)
    if len(facts) > 1:
        much = largest.work_share * len(facts)
        yield f"balance: the largest stage ({largest.index}) has {much:.2f}x the mean work"
    parameters, before = sum(s.parameters for s in facts), plain_parameters(partition.rewired)
    grown = f"{before:,} before rewiring: {100 * (parameters / before - 1):+.1f} %"
    yield f"{parameters:,} parameters ({grown if parameters != before else 'as before rewiring'})"
    copies, held = sum(stage.weights for stage in facts), sum(stage.memory for stage in facts)
    worst = max(facts, key=lambda stage: stage.memory)
    yield (
        "memory with gradients and SGD's momentum"
        + (f", and {size(copies)} of copies of weights" if copies else "")
        + f": {size(worst.memory)} at most (stage {worst.index}), {size(held)} in all"
        + ("" if plain is None else f"; by backprop on one device {size(plain.total)}")
    )


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
