"""What a stage holds: as its programs have it, and the paper's table."""

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import timm
import torch
from helpers import cases
from training import Plain, fresh

import revcompile
from revcompile.compiler.cost import MemoryModel, Workload
from revcompile.compiler.lower import lower
from revcompile.compiler.partition import Pieces, partition
from revcompile.ir.types import Rewired, TensorType
from revcompile.schedule import choose, window
from tests.support.accounting import ROWS, revnet50, table3

BATCH = 3


def test_the_first_stage_keeps_what_it_is_fed() -> None:
    net = fresh(Plain, 4)
    net.microbatch_size = BATCH
    assert net.facts()[0].memory.buffers == 4 * BATCH * 5 * 8  # four in flight, float64


@cases(
    "name, accumulation_steps, in_flight",
    ("ddg", 1, 3),
    ("1f1b", 1, 1),
    ("1f1b", 2, 2),
    ("1f1b", 8, 3),
)
def test_graphs_that_are_in_flight(name: str, accumulation_steps: int, in_flight: int) -> None:
    net, buffers = fresh(Plain, 4), []
    net.microbatch_size = BATCH
    for method in ("backprop", name):
        net.method = choose(method)
        workload = net.workload(accumulation_steps=accumulation_steps)
        buffers.append(net.facts(workload)[1].memory.buffers)
    assert buffers[1] == in_flight * buffers[0] > 0


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
    parts = partition(Pieces.of(on_meta(name)), stages, workload)
    counted = MemoryModel(parts, workload)
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
