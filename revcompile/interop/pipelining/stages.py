"""SDOC"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from revcompile.errors import InputError
from revcompile.interop.pipelining.boundary import Boundary, Size, arriving, crossing_sizes, leaving
from revcompile.interop.pipelining.module import StageModule
from revcompile.ir.ops import attribute
from revcompile.ir.program import Part, Partition
from revcompile.ir.types import Body, Coupling, Live, Segment
from revcompile.runtime.reversible.module import Reversible

__all__ = ["pipeline_stages"]

# -- weights of a stage ----------------------------------------------------------------------------


def refuse_shared(partition: Partition) -> None:
    """What two stages share would be trained as two copies that drift apart."""
    root = partition.rewired.root
    for tie, names in partition.ties.items():
        trained = [name for name in names if root.get_parameter(name).requires_grad]
        if trained:
            raise InputError(_shared(f"the parameter {trained[0]!r}", tie.owner, tie.holder))
    home: dict[str, int] = {}
    for part in partition.parts:
        for path in _paths([piece.segment for piece in part.pieces]):
            first = home.setdefault(path, part.index)
            if first != part.index and _has_statistics(attribute(root, path)):
                raise InputError(_shared(f"the running statistics of {path!r}", first, part.index))


def _shared(what: str, first: int, second: int) -> str:
    return (
        f"to_pipeline_stages: stages {first} and {second} share {what}, and "
        "torch.distributed.pipelining would train two copies that drift apart. Choose a num_stages "
        "that keeps both uses in one stage, give the model a layer for each, or train with "
        "net.trainer(...), which keeps the copies equal"
    )


def _has_statistics(value: Any) -> bool:
    inner = value.modules() if isinstance(value, nn.Module) else ()
    return any(isinstance(m, _BatchNorm) and m.running_mean is not None for m in inner)


def _paths(segments: Iterable[Segment]) -> list[str]:
    """Everything of the root module that the segments read, outer modules first."""
    found: set[str] = set()
    for segment in segments:
        for graph in _graphs(segment):
            nodes = [n for n in graph.nodes if n.op in ("call_module", "get_attr")]
            found |= {str(node.target) for node in nodes}
    return sorted(found)


def _graphs(segment: Segment) -> tuple[fx.Graph, ...]:
    if not isinstance(segment, Coupling):
        return (segment.graph,)
    rearrangements = (
        (segment.rearrange.forward, segment.rearrange.inverse) if segment.rearrange else ()
    )
    return (segment.branch, *rearrangements)


def owned(root: nn.Module, segments: Iterable[Segment]) -> nn.Module:
    """Copies of just what the segments read, under the original names."""
    twin, memo = _container(root), dict[int, Any]()
    for path in _paths(segments):
        owner, home = root, twin
        *outer, name = path.split(".")
        for step in outer:
            owner = getattr(owner, step)
            if step not in home._modules:
                home.add_module(step, _container(owner))
            home = getattr(home, step)
        there = {*home._modules, *home._parameters, *home._buffers, *home.__dict__}
        if name not in there:
            _adopt(home, owner, name, copy.deepcopy(getattr(owner, name), memo))
    for parameter in twin.parameters():
        parameter.grad = None
    return twin


def _container(like: nn.Module) -> nn.Module:
    made = nn.Module()
    made.training = like.training
    return made


def _adopt(home: nn.Module, owner: nn.Module, name: str, value: Any) -> None:
    if isinstance(value, nn.Module):
        home.add_module(name, value)
    elif isinstance(value, nn.Parameter):
        home.register_parameter(name, value)
    elif isinstance(value, Tensor):
        saved = name in owner._buffers and name not in owner._non_persistent_buffers_set
        home.register_buffer(name, value, persistent=saved)
    else:
        setattr(home, name, value)


# -- stages ----------------------------------------------------------------------------------------


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
