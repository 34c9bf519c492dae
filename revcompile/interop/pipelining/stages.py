"""A partition as one module per stage, each with copies of the weights that it reads."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from revcompile.errors import InputError
from revcompile.interop.pipelining.boundary import (
    Boundary,
    Size,
    check_sizes,
    compute_sizes,
    crossing_sizes,
)
from revcompile.interop.pipelining.module import StageModule
from revcompile.ir.module_tree import TreeReads
from revcompile.ir.program import Part, Partition
from revcompile.ir.types import Body, Coupling, Live, Segment
from revcompile.runtime.reversible.module import Reversible

# -- weights of a stage ---------------------------------------------------------------------------


def _refuse_shared(partition: Partition) -> None:
    """Raise if two stages share weights: they would be trained as two copies that drift apart."""
    root = partition.rewired.root
    for tie, names in partition.ties.items():
        trained = [name for name in names if root.get_parameter(name).requires_grad]
        if trained:
            raise InputError(_shared(f"the parameter {trained[0]!r}", tie.owner, tie.holder))
    first_stage: dict[str, int] = {}
    for part in partition.parts:
        graphs = [piece.graph for piece in part.pieces]
        for path, value in TreeReads(graphs, root).targets.items():
            first = first_stage.setdefault(path, part.index)
            if first != part.index and _has_statistics(value):
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


def _copy_of_read(root: nn.Module, segments: Iterable[Segment]) -> nn.Module:
    """A module with copies of only what the segments read, under the original names."""
    copied, memo = _container(root), dict[int, Any]()
    reads = TreeReads((segment.graph for segment in segments), root)
    for path in sorted(reads.targets):  # outer modules first
        owner, target = root, copied
        *outer, name = path.split(".")
        for step in outer:
            owner = getattr(owner, step)
            if step not in target._modules:
                target.add_module(step, _container(owner))
            target = getattr(target, step)
        members = {*target._modules, *target._parameters, *target._buffers, *target.__dict__}
        if name not in members:
            _register(target, owner, name, copy.deepcopy(getattr(owner, name), memo))
    for parameter in copied.parameters():
        parameter.grad = None
    return copied


def _container(like: nn.Module) -> nn.Module:
    empty = nn.Module()
    empty.training = like.training
    return empty


def _register(target: nn.Module, owner: nn.Module, name: str, value: Any) -> None:
    if isinstance(value, nn.Module):
        target.add_module(name, value)
    elif isinstance(value, nn.Parameter):
        target.register_parameter(name, value)
    elif isinstance(value, Tensor):
        persistent = name in owner._buffers and name not in owner._non_persistent_buffers_set
        target.register_buffer(name, value, persistent=persistent)
    else:
        setattr(target, name, value)


# -- stages ---------------------------------------------------------------------------------------


def pipeline_stages(
    partition: Partition, device: torch.device | str | None = None, reversible: bool = False
) -> tuple[StageModule, ...]:
    """Every stage of the partition as a module; see `StagedModel.to_pipeline_stages`."""
    _refuse_shared(partition)
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
    pieces = tuple(
        replace(piece, grid=None) if isinstance(piece, Coupling) else piece for piece in part.pieces
    )
    weights = _copy_of_read(root, pieces)
    takes_inputs = boundary.inputs == rewired.signature.placeholders
    names = {**dict(weights.named_parameters()), **dict(weights.named_buffers())}
    stage_model = replace(
        rewired,
        name=f"{rewired.name}, stage {part.index}",
        root=weights,
        body=Body(
            (*compute_sizes(boundary, sizes), *pieces, *check_sizes(boundary, sizes)),
            tuple(Live(name) for name in boundary.outputs),
            partition.types,
        ),
        signature=boundary.signature(),
        residuals=(),
        refusals=(),
        weight_expansions={
            name: growth for name, growth in rewired.weight_expansions.items() if name in names
        },
        guards=rewired.guards if takes_inputs else rewired.guards.without_inputs(),
    )
    tolerance = root.tolerance if isinstance(root, Reversible) else None
    stage = StageModule(stage_model, tolerance, boundary.described(partition.types))
    stage.reversible = reversible
    return stage if device is None else stage.to(device)
