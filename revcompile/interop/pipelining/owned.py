"""Which weights a stage owns, and what stages may not share."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from revcompile.errors import InputError
from revcompile.ir.module_tree import TreeReads
from revcompile.ir.program import Partition
from revcompile.ir.types import Segment

__all__ = ["owned", "refuse_shared"]


def refuse_shared(partition: Partition) -> None:
    """What two stages share would be trained as two copies that drift apart."""
    root = partition.rewired.root
    for tie, names in partition.ties.items():
        trained = [name for name in names if root.get_parameter(name).requires_grad]
        if trained:
            raise InputError(_shared(f"the parameter {trained[0]!r}", tie.owner, tie.holder))
    home: dict[str, int] = {}
    for part in partition.parts:
        for path, value in _reads(root, [piece.segment for piece in part.pieces]).targets.items():
            first = home.setdefault(path, part.index)
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


def _reads(root: nn.Module, segments: Iterable[Segment]) -> TreeReads:
    """Everything of the root module that the segments read (rearrangements read nothing)."""
    return TreeReads((segment.graph for segment in segments), root)


def owned(root: nn.Module, segments: Iterable[Segment]) -> nn.Module:
    """Copies of just what the segments read, under the original names."""
    twin, memo = _container(root), dict[int, Any]()
    for path in sorted(_reads(root, segments).targets):  # outer modules first
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
