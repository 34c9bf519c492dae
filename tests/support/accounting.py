"""PETRA's Table 3: the memory of RevNet-50 under each choice of buffers.

The paper counts the model, the input buffers and the parameter buffers of all 18 stages, and does
not say how in detail. The reading below is the one under which our stages give its figures, in
units of 10^9 bytes:

- A stage with an input buffer holds every micro-batch in flight, the one at work included. One
  without (a reversible stage, or the last) holds the input of the one at work.
- A reversible stage needs one of its two streams, the one its branch reads.
- A parameter buffer holds the versions in flight besides the latest.
- The first stage gets its input from the dataset where inputs are not buffered. The paper's text
  leaves that buffer out altogether, but its two figures with input buffers have it in: without
  it they would be 43.1 and 42.3.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

import timm
import torch

import revcompile
from revcompile.compiler.cost import MemoryModel, Workload, segment_costs
from revcompile.ir.program import Part, Partition
from revcompile.ir.types import Rewired
from revcompile.schedule import Keep, Method, Weights, choose

STAGES: Final = 18
BATCH: Final = 64


@dataclass(frozen=True)
class Row:
    """One configuration: what is buffered, in which order, and the bytes of all stages."""

    inputs: bool
    parameters: bool
    in_flight_per_stage: float
    expected: float
    """Gigabytes, as in the paper or in our design."""
    buffer_dtype: torch.dtype | None = None
    total: int = 0

    @property
    def method(self) -> Method:
        """The method that keeps this."""
        keep = Keep.INPUT if self.inputs else Keep.NOTHING
        weights = Weights.STASHED if self.parameters else Weights.LATEST
        return replace(
            choose("petra", in_flight_per_stage=self.in_flight_per_stage),
            keep=keep,
            weights=weights,
        )


ROWS: Final = (
    Row(inputs=True, parameters=True, in_flight_per_stage=2, expected=44.5),
    Row(inputs=True, parameters=False, in_flight_per_stage=2, expected=43.6),
    Row(inputs=False, parameters=True, in_flight_per_stage=2, expected=21.2),
    Row(inputs=False, parameters=False, in_flight_per_stage=2, expected=20.3),
    Row(inputs=False, parameters=False, in_flight_per_stage=1, expected=11.2),
    Row(False, False, 1, 6.6, buffer_dtype=torch.bfloat16),
)


def revnet50() -> Rewired:
    """The model of the paper, on the meta device."""
    with torch.device("meta"):
        model = timm.create_model("resnet50")
    return revcompile.reversify(model, check="off").rewired


def table3(rewired: Rewired, batch: int = BATCH) -> Iterator[Row]:
    """The rows of the table with their totals: one segment a stage."""
    pieces = zip(rewired.body.segments, segment_costs(rewired), strict=True)
    parts = tuple(Part(i, (piece,), (), (), (cost,)) for i, (piece, cost) in enumerate(pieces))
    for row in ROWS:
        buffer_bytes = row.buffer_dtype.itemsize if row.buffer_dtype else None
        workload = Workload(row.method, batch, buffer_bytes=buffer_bytes)
        keeps = (row.method.keep,) * len(parts)
        model = _AsInThePaper(Partition(rewired, parts, rewired.body.types, {}, keeps), workload)
        model.is_first_input_free = not row.inputs
        yield replace(row, total=sum(_counted(model, stage) for stage in range(len(parts))))


class _AsInThePaper(MemoryModel):
    """Stages of one piece, of whose inputs only those count that gradients depend on.

    The first stage may read its input from the dataset again.
    """

    is_first_input_free = True

    def needed(self, stage: int) -> set[str]:
        is_free = self.is_first_input_free and stage == 0
        return set() if is_free else self._needed(stage, stage + 1)

    def _kept(self, index: int, names: Iterable[str]) -> int:
        return super()._kept(index, self.needed(index).intersection(names))


def _counted(model: _AsInThePaper, stage: int) -> int:
    """Model, parameter buffer and input buffer of one stage; the input at work in any case."""
    memory = model.stage(stage, stage, stage + 1)
    at_work = model._sum(model.needed(stage))
    return memory.parameters + memory.stashed + max(memory.buffers, at_work)
