"""What a stage holds: by hand on a small row of pieces, and the paper's table."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import timm
import torch
from torch import fx

import revcompile
from revcompile.compiler.cost import MemoryModel, Workload
from revcompile.compiler.lower import lower
from revcompile.compiler.partition import partition
from revcompile.ir.types import Cost, Coupling, Opaque, ResidualKind, Rewired, Segment, TensorType
from revcompile.schedule import Method, choose, window
from tests.support.accounting import ROWS, revnet50, table3

EMPTY = fx.Graph()
BATCH = 3


def tensor(width: int, dtype: torch.dtype = torch.float32) -> TensorType:
    return TensorType((2, width), (1, 0), dtype, batch=2)


def opaque(name: str, inputs: str, outputs: str) -> Segment:
    return Opaque(name, tuple(inputs.split()), tuple(outputs.split()), EMPTY, "by hand")


def coupling(name: str, inputs: str, outputs: str, sides: str = "") -> Segment:
    (a, b), (c, d) = inputs.split(), outputs.split()
    kind = ResidualKind.IDENTITY
    return Coupling(name, kind, (a, b), (c, d), tuple(sides.split()), EMPTY, grid="grid")


PIECES = (
    opaque("stem", "x", "a0 b0"),
    coupling("c1", "a0 b0", "a1 b1"),
    coupling("c2", "a1 b1", "a2 b2"),
    opaque("down", "a2 b2", "mid"),
    opaque("up", "mid", "a3 b3"),
    coupling("c3", "a3 b3", "a4 b4"),
    opaque("head", "a4 b4", "y"),
)
WIDTHS = {"x": 7, "mid": 5, "y": 1}
WIDTHS |= {f"{stream}{i}": 10 for stream in "ab" for i in range(3)}
WIDTHS |= {f"{stream}{i}": 4 for stream in "ab" for i in (3, 4)}
TYPES = {name: tensor(width) for name, width in WIDTHS.items()}
COSTS = tuple(
    Cost(
        flops=1,
        parameters=100 + i,
        saved=2 * 1000 * (i + 1),
        shared=2 * 100,
        weights=400 + i,
        trained=40 + i,
        batch=2,
    )
    for i in range(len(PIECES))
)
STREAM = BATCH * 10 * 4  # bytes of one wide stream
IMAGE = BATCH * 7 * 4


def saved(first: int, *rest: int) -> int:
    """What pieces in one graph save at the batch size: neighbours share a part of it."""
    alone = sum(BATCH * 1000 * (i + 1) for i in (first, *rest))
    return alone - BATCH * 100 * len(rest)


def model(method: Method, stages: int = 4, **options: Any) -> MemoryModel:
    return MemoryModel(PIECES, TYPES, COSTS, stages, Workload(method, BATCH, **options))


PETRA = choose("petra")


def test_the_first_stage_keeps_what_it_is_fed() -> None:
    assert model(PETRA).stage(0, 0, 2).buffers == 4 * IMAGE
    assert model(PETRA).stage(0, 0, 4).buffers == 4 * (IMAGE + 2 * STREAM)


def test_a_stage_that_keeps_its_graph_has_one_for_every_micro_batch_in_flight() -> None:
    memory = model(choose("ddg")).stage(1, 1, 4)
    assert memory.buffers == 3 * saved(1, 2, 3)
    assert memory.working == 0


@pytest.mark.parametrize(("accumulation_steps", "buffered"), [(1, 1), (2, 2), (8, 3)])
def test_flushing_methods_hold_a_group_at_most(accumulation_steps: int, buffered: int) -> None:
    memory = model(choose("1f1b"), accumulation_steps=accumulation_steps).stage(1, 1, 3)
    assert memory.buffers == buffered * saved(1, 2)


@pytest.mark.parametrize(("accumulation_steps", "versions"), [(1, 6), (2, 3), (4, 2), (6, 1)])
def test_stashed_parameters_are_the_versions_in_flight(
    accumulation_steps: int, versions: int
) -> None:
    memory = model(choose("delayed"), accumulation_steps=accumulation_steps).stage(0, 0, 2)
    assert memory.stashed == versions * memory.gradients  # frozen ones are not copied


def bytes_of(types: Mapping[str, Any], names: Iterable[str]) -> int:
    """Bytes of values at the batch size; graphs, shapes and grids are no values."""
    kinds = [types.get(name) for name in set(names)]
    shapes = [(torch.Size(k.at(BATCH)), k.dtype) for k in kinds if isinstance(k, TensorType)]
    return sum(shape.numel() * dtype.itemsize for shape, dtype in shapes)


@functools.cache
def on_meta(name: str) -> Rewired:
    options: dict[str, Any] = {"vit_tiny_patch16_224": {"depth": 6}}.get(name, {})
    with torch.device("meta"):
        return revcompile.reversify(timm.create_model(name, **options), check="off").rewired


@pytest.mark.parametrize("name", ["resnet18", "vit_tiny_patch16_224", "vgg11"])
@pytest.mark.parametrize("method", ["petra", "dsp"])
def test_buffers_and_messages_are_those_of_the_programs(name: str, method: str) -> None:
    stages, chosen = 4, choose(method)
    workload = Workload(chosen, BATCH)
    parts = partition(on_meta(name), stages, workload)
    counted = MemoryModel.of(parts, workload)
    end = 0
    for part, program in zip(parts.parts, lower(parts, chosen), strict=True):
        start, end = end, end + len(part.pieces)
        memory = counted.stage(part.index, start, end)
        kept = bytes_of(parts.types, (name.split(" leaf")[0] for name in program.kept))
        assert memory.buffers == window(chosen, stages, part.index) * kept
        arriving = [port.name for port in program.inputs] if part.index else []
        back = (program.needs_back, program.outputs_with_grad) if part.index < stages - 1 else ()
        messages = sum(bytes_of(parts.types, names) for names in (arriving, *back))
        assert memory.messages == messages


def test_the_table_of_the_paper() -> None:
    rewired = revnet50()
    assert len(rewired.body.segments) == 18
    totals = [row.total / 1e9 for row in table3(rewired)]
    assert totals == pytest.approx([row.expected for row in ROWS], abs=0.1)
    assert [row.expected for row in ROWS] == [44.5, 43.6, 21.2, 20.3, 11.2, 6.6]
