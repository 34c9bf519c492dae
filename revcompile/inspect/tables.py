"""Tables as plain text: the segments of a rewired model, the stages of a cut model."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from rich import box
from rich.console import Console, JustifyMethod
from rich.table import Table

from revcompile.inspect.formatting import amount, first_few, listed, plural, share, size, span
from revcompile.inspect.views import ModelView, StageView
from revcompile.ir.program import StageMemory
from revcompile.ir.types import Cost, Coupling, Opaque, Rewired, Segment, TensorType
from revcompile.ir.weight_expansion import WeightExpansion


def text_width() -> int:
    """The terminal's width, between 80 and 120 columns; 100 without a terminal."""
    return max(80, min(120, shutil.get_terminal_size((100, 24)).columns))


def render(*parts: object) -> str:
    """Rich renderables as plain text, `text_width()` columns wide.

    `force_jupyter=False`: in a notebook rich would display the text itself, besides returning it.
    """
    console = Console(
        width=text_width(),
        record=True,
        file=io.StringIO(),
        force_terminal=False,
        force_jupyter=False,
        emoji=False,  # "hf:llama:"
    )
    for part in parts:
        console.print(part, highlight=False, markup=False)
    lines = console.export_text().rstrip().split("\n")
    return "\n".join(line.rstrip() for line in lines)


def summary_text(rewired: Rewired, costs: Sequence[Cost], verbose: bool) -> str:
    """How much of a rewired model is reversible, and why the rest is not.

    With `verbose`, a table of all segments, and all reasons.
    """
    segments = zip(rewired.body.segments, costs, strict=True)
    inside = [cost for segment, cost in segments if isinstance(segment, Coupling)]
    flops, parameters = sum(cost.flops for cost in costs), sum(cost.parameters for cost in costs)
    title = f"{rewired.name}: {plural(len(costs), 'segment')}"
    table = table_of(title, _SEGMENT_COLUMNS, "segment")
    opaque = [(s.name, s.reason) for s in rewired.body.segments if isinstance(s, Opaque)]
    letters = _letters(opaque)
    for segment, cost in zip(rewired.body.segments, costs, strict=True):
        table.add_row(
            segment.name,
            share(cost.flops, flops),
            amount(cost.parameters),
            _shape(rewired, segment),
            f"opaque ({letters[segment.reason]})" if isinstance(segment, Opaque) else "reversible",
        )
    totals = (
        f"reversible: {len(rewired.couplings)} blocks with "
        f"{share(sum(cost.flops for cost in inside), flops)} of the forward FLOPs and "
        f"{share(sum(cost.parameters for cost in inside), parameters)} of {parameters:,} parameters"
    )
    remarks = _remarks(rewired, verbose)
    if verbose:
        below = totals, *_reasons(opaque, letters), *remarks
        return render(function_of(rewired), "", table, "", *below)
    opaque_lines = (f"not reversible: {line}" for line in _reasons(opaque, letters))
    following = [_NEXT_OF_MODULE] if rewired.couplings else []
    return render(function_of(rewired), totals, *opaque_lines, *remarks, *following)


def function_of(rewired: Rewired) -> str:
    """What a rewired model computes, in a line."""
    if not rewired.couplings:
        return f"{rewired.name}: the original's function, as nothing became reversible"
    if rewired.policy.averaged:
        return f"{rewired.name} in two streams: in eval mode the original's function"
    return f"{rewired.name} in two streams: a new function, to be trained from scratch"


def table_of(title: str, columns: Mapping[str, JustifyMethod], wraps: str = "holds") -> Table:
    """An empty table; only the column whose name begins with `wraps` wraps its lines."""
    table = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )
    for name, side in columns.items():
        table.add_column(name, justify=side, overflow="fold", no_wrap=not name.startswith(wraps))
    return table


_SEGMENT_COLUMNS: Final[Mapping[str, JustifyMethod]] = {
    "segment": "left",
    "FLOPs": "right",
    "parameters": "right",
    "gives": "left",
    "kind": "left",
}


def _shape(rewired: Rewired, segment: Segment) -> str:
    """The type of the last output, of features if it has any: a stem also returns positions."""
    kinds = [rewired.body.types.get(name) for name in segment.outputs]
    tensors = [kind for kind in kinds if isinstance(kind, TensorType)]
    features = [kind for kind in tensors if kind.dtype.is_floating_point]
    return listed((features or tensors)[-1:])


def refusals(rewired: Rewired) -> list[str]:
    """The reasons why sums were not rewired, the most frequent first, with some of the places.

    Sums inside a reversible block, such as those of rotary embeddings, are left out.
    """
    blocks = (block for block in rewired.residuals if not block.is_projected)
    inside = {name for block in blocks for name in block.branch}
    by_reason: dict[str, dict[str, None]] = {}
    for refusal in rewired.refusals:
        if refusal.node not in inside:
            by_reason.setdefault(refusal.reason, {})[refusal.path or "(top level)"] = None
    frequent = sorted(by_reason.items(), key=lambda entry: -len(entry[1]))
    return [f"{first_few([*paths])}: {reason}" for reason, paths in frequent]


def _remarks(rewired: Rewired, verbose: bool) -> list[str]:
    lines = [f"not rewired: {line}" for line in refusals(rewired)]
    more = 0 if verbose else len(lines) - _REASONS
    if more > 0:
        lines[_REASONS:] = [f"and {plural(more, 'more reason')}: summary(verbose=True)"]
    return [*lines, *rewired.notes]


def invertibility_table(errors: Sequence[tuple[str, float]], tolerance: float) -> str:
    """Reconstruction errors block by block."""
    table = table_of("", {"block": "left", "relative error": "left", "": "left"}, "")
    for name, error in errors:
        table.add_row(name, f"{error:.1e}", "ok" if error <= tolerance else "TOO LARGE")
    return render(f"reconstruction error (tolerance {tolerance:.0e})", table)


# -- stages ---------------------------------------------------------------------------------------

_NEXT_OF_MODULE: Final = "net.summary(verbose=True) lists all segments; train it as any nn.Module"
_NEXT_OF_STAGES: Final = (
    "next: net.trainer(optimizer, loss) trains it, net.explain(NAME) tells about a module, "
    'net.draw("net.html") shows it'
)
_LEGEND: Final = (
    "work: estimated time of forward and backward; delay: updates, at accumulation_steps=1; kept: "
    "for all micro-batches in flight; working: the most that one pass holds besides"
)
_STAGE_COLUMNS: Final[Mapping[str, JustifyMethod]] = {
    "#": "right",
    "holds\nreversible": "left",
    "work\nparameters": "right",
    "sends\nbytes": "left",
    "in flight\ndelay": "right",
    "kept\nworking": "right",
}
_REASONS: Final = 3
"""The most reasons that a short summary lists."""
_SENT: Final = 2
"""The most tensor types that a cell lists."""


def stage_table(view: ModelView, method: str, plain: StageMemory, verbose: bool) -> str:
    """All stages: what they compute, send and keep, and why some are not reversible.

    `plain` is the memory of training the whole model on one device by backpropagation.
    """
    opaque = [entry for stage in view.stages for entry in stage.opaque]
    letters = _letters(opaque)
    stages = plural(len(view.stages), "stage")
    table = table_of(
        f"{view.name}: {stages}, {method}, micro-batches of {view.batch}", _STAGE_COLUMNS
    )
    for stage in view.stages:
        table.add_row(
            str(stage.index),
            f"{_holds(stage)}\n{_kind(stage, letters)}",
            f"{100 * stage.work_share:.1f} %\n{amount(stage.parameters)}",
            _sends(stage),
            f"{stage.window}\n{stage.delay}",
            f"{stage.keeps}\n{size(stage.memory.working)}",
        )
    ties = (
        f"stages {tie.owner} and {tie.holder} share {', '.join(names)}"
        for tie, names in view.ties.items()
    )
    below = _LEGEND, *_reasons(opaque, letters), *_totals(view, plain), *ties
    remarks = _remarks(view.rewired, verbose)
    return render(function_of(view.rewired), "", table, "", *below, *remarks, _NEXT_OF_STAGES)


def _letters(opaque: Iterable[tuple[str, str]]) -> dict[str, str]:
    """A letter for every reason, in order of appearance."""
    reasons = dict.fromkeys(reason for _, reason in opaque)
    return {reason: f"{chr(97 + n % 26)}{n // 26 or ''}" for n, reason in enumerate(reasons)}


def _reasons(opaque: Sequence[tuple[str, str]], letters: dict[str, str]) -> list[str]:
    """Lines that explain the letters: the reason, and the pieces it applies to."""
    lines = []
    for reason, letter in letters.items():
        where = [span([name]) for name, why in opaque if why == reason]
        lines.append(f"({letter}) {reason}: {first_few(where)}")
    return lines


def _kind(stage: StageView, letters: dict[str, str]) -> str:
    if stage.reversible:
        return "yes"
    why = ",".join(sorted({letters[reason] for _, reason in stage.opaque}))
    blocks = len(stage.pieces) - len(stage.opaque)
    return (f"{blocks} of {len(stage.pieces)}" if blocks else "no") + f" ({why})"


def _holds(stage: StageView) -> str:
    """The range of pieces; a single piece not named after a module is shown with its modules."""
    shown = counted_span(stage.pieces)
    inside = any(f"{module}.".startswith(f"{shown}.") for module in stage.modules)
    if len(stage.pieces) > 1 or inside or not stage.modules:
        return shown
    return f"{shown}: {counted_span(stage.modules)}"


def counted_span(names: Sequence[str]) -> str:
    """The first and the last of several names, and how many there are."""
    return span(names) + (f" ({len(names)})" if len(names) > 1 else "")


def _sends(stage: StageView) -> str:
    more = len(stage.sends) - _SENT
    shown = [*stage.sends[:_SENT], *([f"and {more} more"] if more > 0 else [])]
    return "\n".join([*shown, size(stage.sent_bytes)])


def _totals(view: ModelView, plain: StageMemory) -> Iterator[str]:
    inside = [block.cost.flops for block in view.blocks if block.reversible]
    flops = sum(block.cost.flops for block in view.blocks)
    each = flops / view.blocks[0].cost.batch
    yield (
        f"reversible: {len(inside)} of {plural(len(view.blocks), 'piece')}, "
        f"{share(sum(inside), flops)} of {amount(each)}{' ' * (each < 999.5)}FLOPs per sample in "
        "forward"
    )
    largest = max(view.stages, key=lambda stage: stage.work_share)
    if len(view.stages) > 1:
        yield f"balance: the largest stage ({largest.index}) has {view.balance:.2f}x the mean work"
    parameters, before = sum(s.parameters for s in view.stages), plain_parameters(view.rewired)
    grown = "as before rewiring"
    if parameters != before:
        grown = f"{before:,} before rewiring: {100 * (parameters / before - 1):+.1f} %"
    yield f"{parameters:,} parameters ({grown})"
    memories = [stage.memory for stage in view.stages]
    copies, totals = sum(m.stashed + m.newest for m in memories), [m.total for m in memories]
    yield (
        "memory with gradients and SGD's momentum"
        + (f", and {size(copies)} of copies of weights" if copies else "")
        + f": {size(max(totals))} at most (stage {totals.index(max(totals))}), "
        f"{size(sum(totals))} in all; by backprop on one device {size(plain.total)}"
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
