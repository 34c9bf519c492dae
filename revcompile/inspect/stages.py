"""Stages for people: a table of all, and the generated code of one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from rich.console import JustifyMethod
from rich.table import Table
from torch import fx

from revcompile.inspect.tables import render
from revcompile.ir import TensorType
from revcompile.program import Part, Partition, StageProgram
from revcompile.schedule import delay, window

__all__ = ["code_text", "stage_table"]

_RESULTLESS: Final = re.compile(r"_\w* = ((?:recording|reseed)\([^)]*\));  _\w* = None")
_COLUMNS: Final[tuple[tuple[str, JustifyMethod], ...]] = (
    ("#", "right"),
    ("pieces", "left"),
    ("kind", "left"),
    ("parameters", "right"),
    ("work", "right"),
    ("sends", "left"),
    ("keeps", "right"),
    ("delay", "right"),
)


def stage_table(
    partition: Partition, programs: Sequence[StageProgram], batch: int | None = None
) -> str:
    """All stages: what they hold and compute, what they send and keep."""
    name, count = partition.rewired.name, len(programs)
    table = Table(title=f"{name}: {count} stages, {programs[0].method.name}")
    for column, side in _COLUMNS:
        table.add_column(
            column, justify=side, no_wrap=column in ("#", "parameters", "work", "sends")
        )
    work = [_work(part) for part in partition.parts]
    for part, program in zip(partition.parts, programs, strict=True):
        w = window(program.method, count, part.index)
        kept = sum(_bytes(partition.types.get(n.split(" ")[0]), batch) for n in program.kept)
        table.add_row(
            str(part.index),
            _pieces(part),
            _kind(part),
            f"{sum(cost.parameters for cost in part.costs):,}",
            f"{100 * work[part.index] / max(sum(work), 1):.1f} %",
            _sends(program),
            f"{w} × {kept / 2**20:.1f} MiB" if kept else "nothing",
            str(delay(program.method, count, part.index)),
        )
    return render(table, _totals(partition, work), *partition.rewired.notes)


def _totals(partition: Partition, work: Sequence[float]) -> str:
    parts = partition.parts
    parameters = sum(cost.parameters for part in parts for cost in part.costs)
    reversible = sum(part.reversible for part in parts)
    mean = sum(work) / len(work)
    lines = [
        f"{len(parts)} stages, {reversible} reversible, {parameters:,} parameters; "
        f"largest stage {max(work) / max(mean, 1e-30):.2f}x the mean"
    ]
    for tie, names in partition.ties.items():
        lines.append(f"stages {tie.owner} and {tie.holder} share {', '.join(names)}")
    return "\n".join(lines)


def _work(part: Part) -> float:
    return sum(cost.forward + cost.backward for cost in part.costs)


def _pieces(part: Part) -> str:
    names = [piece.name for piece in part.pieces]
    return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)})"


def _kind(part: Part) -> str:
    blocks = sum(piece.reversible for piece in part.pieces)
    if part.reversible:
        return "reversible"
    return f"{blocks}/{len(part.pieces)} reversible" if blocks else "opaque"


def _sends(program: StageProgram) -> str:
    tensors = [_short(port.type) for port in program.outputs if port.type is not None]
    counted = {text: tensors.count(text) for text in dict.fromkeys(tensors)}
    return ", ".join(f"{n}×{text}" if n > 1 else text for text, n in counted.items())


def _short(kind: TensorType) -> str:
    """`float32[B, 64, 56, 56]` as `f32[B,64,56,56]`."""
    return str(kind).replace(", ", ",").replace("bfloat", "bf").replace("float", "f")


def _bytes(kind: Any, batch: int | None) -> int:
    if not isinstance(kind, TensorType):
        return 0
    shape = kind.at(batch) if batch is not None else kind.shape
    elements = 1
    for size in shape:
        elements *= size
    return elements * kind.dtype.itemsize


def code_text(program: StageProgram) -> str:
    """Forward, inverse (where there is one) and backward as generated."""
    kept = ", ".join(program.kept) or "nothing"
    head = [f"# stage {program.index} of {program.stages}, {program.method.name}"]
    head += [f"#   takes  {port}" for port in program.inputs]
    head += [f"#   gives  {port}" for port in program.outputs]
    head += [f"#   keeps  {kept}"]
    programs = (("forward", program.forward), ("inverse", program.inverse))
    code = [_source(graph, name) for name, graph in programs if graph is not None]
    return "\n\n".join(["\n".join(head), *code, _source(program.backward, "backward")])


def _source(graph: fx.Graph, name: str) -> str:
    text = graph.python_code("self").src.strip()
    text = text.replace("revcompile_steps_", "").replace("revcompile_ops_", "")
    text = _RESULTLESS.sub(r"\1", text)
    return text.replace("def forward(", f"def {name}(", 1)
