"""What enters and leaves a stage."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils import _pytree as pytree

from revcompile.ir.program import Part, Partition
from revcompile.ir.types import Live, Signature, TensorType

__all__ = ["Boundary"]


@dataclass(frozen=True)
class Boundary:
    """What enters and leaves a stage: tensors travel, sizes are worked out anew."""

    part: Part
    stages: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    sizes_read: tuple[str, ...]
    """Of earlier stages."""
    made: tuple[str, ...]
    """All values made here that some later stage reads, or the model returns."""
    gauge: tuple[str, TensorType, int] | None
    """An input, and which of its dimensions tells the batch size."""

    @staticmethod
    def of(partition: Partition, part: Part) -> Boundary:
        """The boundary of one part."""
        types, is_last = partition.types, part is partition.parts[-1]
        inputs = _tensors(part.inputs, types)
        results = [leaf.name for leaf in partition.rewired.body.result if isinstance(leaf, Live)]
        outputs = _tensors(results if is_last else part.outputs, types)
        read = {name for piece in part.pieces for name in piece.inputs}
        made = {name for piece in part.pieces for name in piece.outputs}
        gauges = [
            (name, types[name], dim)
            for name in inputs
            for dim, step in enumerate(types[name].per_sample)
            if step
        ]
        return Boundary(
            part,
            len(partition.parts),
            inputs,
            outputs,
            tuple(name for name in _plain(partition, part.inputs) if name in read),
            tuple(name for name in part.outputs if name in made),
            gauges[0] if gauges else None,
        )

    def signature(self) -> Signature:
        """Positional tensors in, a tuple (or the only output of the last stage) out."""
        labels = tuple(
            name if name.isidentifier() else f"value_{index}"
            for index, name in enumerate(self.inputs)
        )
        kind = inspect.Parameter.POSITIONAL_ONLY
        is_alone = len(self.outputs) == 1 and self.part.index == self.stages - 1
        return Signature(
            forward=inspect.Signature([inspect.Parameter(label, kind) for label in labels]),
            given=(),
            in_spec=pytree.tree_structure(((0,) * len(labels), {})),
            fixed=(),
            placeholders=self.inputs,
            labels=labels,
            out_spec=pytree.tree_structure(0 if is_alone else (0,) * len(self.outputs)),
        )

    def described(self, types: Mapping[str, Any]) -> str:
        """The stage in one line."""
        inputs, outputs = (
            ", ".join(f"{name}: {types[name]}" for name in names)
            for names in (self.inputs, self.outputs)
        )
        return f"stage {self.part.index} of {self.stages}: ({inputs}) -> ({outputs})"


def _tensors(names: Iterable[str], types: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(name for name in names if isinstance(types.get(name), TensorType))


def _plain(partition: Partition, names: Sequence[str]) -> tuple[str, ...]:
    """The values that are no tensors. A chain's grid stays behind: every stage makes its own."""
    grids = {piece.grid for part in partition.parts for piece in part.pieces}
    tensors = _tensors(names, partition.types)
    return tuple(name for name in names if name not in tensors and name not in grids)
