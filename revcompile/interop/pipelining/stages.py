"""A partition -> its stages as modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from revcompile.interop.pipelining.boundary import Boundary
from revcompile.interop.pipelining.module import StageModule
from revcompile.interop.pipelining.owned import owned, refuse_shared
from revcompile.interop.pipelining.sizes import Size, arriving, crossing_sizes, leaving
from revcompile.ir.program import Part, Partition
from revcompile.ir.types import Body, Live
from revcompile.runtime.reversible.module import Reversible

__all__ = ["pipeline_stages"]


def pipeline_stages(
    partition: Partition, device: torch.device | str | None = None, reversible: bool = False
) -> tuple[StageModule, ...]:
    """Every stage of the partition as a module; see `StagedModel.to_pipeline_stages`."""
    refuse_shared(partition)
    sizes = crossing_sizes(partition)
    return tuple(_stage(partition, part, sizes, device, reversible) for part in partition.parts)


def _stage(
    partition: Partition,
    part: Part,
    sizes: Mapping[str, tuple[Size, Size]],
    device: torch.device | str | None,
    reversible: bool,
) -> StageModule:
    rewired, root = partition.rewired, partition.rewired.root
    boundary = Boundary.of(partition, part)
    pieces = tuple(piece.segment for piece in part.pieces)
    mine = owned(root, pieces)
    takes_inputs = boundary.inputs == rewired.signature.placeholders
    names = {**dict(mine.named_parameters()), **dict(mine.named_buffers())}
    found = replace(
        rewired,
        name=f"{rewired.name}, stage {part.index}",
        root=mine,
        body=Body(
            (*arriving(boundary, sizes), *pieces, *leaving(boundary, sizes)),
            tuple(Live(name) for name in boundary.outputs),
            partition.types,
        ),
        signature=boundary.signature(),
        residuals=(),
        refusals=(),
        weight_expansions={
            name: growth for name, growth in rewired.weight_expansions.items() if name in names
        },
        guards=rewired.guards if takes_inputs else rewired.guards.of_attributes(),
    )
    tolerance = root.tolerance if isinstance(root, Reversible) else None
    stage = StageModule(found, tolerance, boundary.described(partition.types))
    stage.reversible = reversible
    return stage if device is None else stage.to(device)
