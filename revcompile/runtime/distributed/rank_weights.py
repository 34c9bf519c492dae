"""A rank's part of the weights: the rank holds only the tensors that its stages use.

A tensor of another rank stays in the module tree with its name, dtype and shape, on the meta
device. It gets values again when a state dict is loaded into the model (on the CPU), and in the
copies that `whole_model` returns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, distributed, nn
from torch.nn.modules.batchnorm import _NormBase

from revcompile.errors import InputError
from revcompile.ir.module_tree import Contents, TreeReads, child_path, copy_module
from revcompile.ir.program import StageProgram
from revcompile.runtime.distributed.layout import Layout, Ranks, gather_plain
from revcompile.runtime.distributed.transport import DistributedTransport
from revcompile.runtime.reversible.module import Reversible
from revcompile.runtime.reversible.replay import BufferSnapshot
from revcompile.runtime.stage.settings import Task

_META: Final = torch.device("meta")
_CPU: Final = torch.device("cpu")
_ABSENT, _BORROWED, _OWN = "012"
"""What a rank has of a tensor: nothing, a copy of another rank's, the current value."""


# -- which stage uses and owns a tensor -----------------------------------------------------------


def _named_tensors(model: nn.Module, every_name: bool = False) -> dict[str, Tensor]:
    """Parameters and buffers, under their first names or under all of them."""
    parameters = model.named_parameters(remove_duplicate=not every_name)
    return {**dict(parameters), **dict(model.named_buffers(remove_duplicate=not every_name))}


def using_stages(model: nn.Module, programs: Sequence[StageProgram]) -> dict[str, list[int]]:
    """Maps each name of a parameter or buffer to the stages that use it.

    The first of them has its current value. A tensor that no stage uses never changes; the first
    stage has it.
    """
    named, stages = _named_tensors(model, every_name=True), dict[int, list[int]]()
    for program in programs:
        # Buffers of the layers that a stage calls, and buffers that its code reads directly.
        read = {id(tensor) for _, tensor in TreeReads(program.forward, model).tensors()}
        used = {id(named[name]) for name in program.parameters}
        for key in used | {id(buffer) for buffer in model.buffers() if id(buffer) in read}:
            stages.setdefault(key, []).append(program.index)
    return {name: stages.get(id(tensor), [0]) for name, tensor in named.items()}


class SharedBuffers:
    """Buffers that stages on several ranks use. If one changed, the ranks' copies would differ."""

    def __init__(self, model: nn.Module, programs: Sequence[StageProgram], layout: Layout) -> None:
        self._model, self._ranks = model, layout.stage_to_rank
        users = using_stages(model, programs)
        self._stages: dict[str, tuple[int, int]] = {}
        """For each name of a shared buffer, two stages that use it."""
        for name, _ in model.named_buffers(remove_duplicate=False):
            first, *others = users[name]
            for stage in others:
                if self._ranks[stage] != self._ranks[first]:
                    self._stages[name] = first, stage
            if isinstance(model.get_submodule(name.rpartition(".")[0]), _NormBase):
                self._refuse(name)  # running statistics, which every forward pass changes

    def check_changed(self, snapshots: Sequence[BufferSnapshot]) -> None:
        """Refuse other shared buffers, if a forward pass has changed them."""
        if self._stages and snapshots:
            paths = {id(module): path for path, module in self._model.named_modules()}
            for saved in snapshots:
                self._refuse(child_path(paths[id(saved.module)], saved.name))

    def _refuse(self, name: str) -> None:
        if name in self._stages:
            first, second = self._stages[name]
            raise InputError(
                f"trainer: {name} belongs to a layer that stages {first} and {second} share, "
                f"on ranks {self._ranks[first]} and {self._ranks[second]}, and that changes "
                "it; put them on one rank with stage_to_rank="
            )


# -- every rank's tensors -------------------------------------------------------------------------


@dataclass
class RankWeights:
    """Which rank has which tensor, seen from one rank."""

    ranks: Ranks
    device: torch.device
    owners: Mapping[str, int]
    """Maps each name of a tensor to the rank of this replica that has its current value."""
    borrowed: set[str] = field(default_factory=set)
    """Names of tensors whose current value another rank has."""
    transport: DistributedTransport = field(init=False)
    """Set later: it names a rank that is gone, and tells other ranks about an error here."""

    def adopt(self, model: nn.Module, copies: Mapping[str, Tensor]) -> None:
        """Have the model hold a stage's copies of tied parameters instead of a second copy."""
        tensors = _named_tensors(model)
        _replace(model, {id(tensors[n]): t for n, t in copies.items() if n in self.borrowed})

    def whole_model(self, model: Reversible) -> Reversible:
        """A copy of the model with the current weights of all ranks. Every rank calls it."""
        changes: dict[int, Tensor] = {}
        try:
            twin: Reversible = copy_module(model)
            for name, tensor in _named_tensors(twin).items():
                owner = self.owners[name]
                sent = _as_bytes(tensor, self.device, has_values=owner == self.ranks.rank)
                with self.transport.collective():
                    if sent.numel():
                        distributed.broadcast(sent, owner, group=self.ranks.pipeline)
                changes[id(tensor)] = _with_values(tensor, sent, self.device)
            _replace(twin, changes)
        except BaseException as error:
            self.transport.stop_all(error)
            raise
        return twin


_last: Final[WeakKeyDictionary[nn.Module, RankWeights]] = WeakKeyDictionary()
"""How each model's weights were distributed last."""


def last_device(model: nn.Module) -> torch.device | None:
    """This rank's device for a model whose weights are on several ranks."""
    return _last[model].device if model in _last else None


def whole_model(model: Reversible) -> Reversible:
    """A copy with all current weights. Where several ranks train the model, each calls it."""
    twin: Reversible = _last[model].whole_model(model) if model in _last else copy_module(model)
    return twin


def distribute(task: Task, ranks: Ranks, device: torch.device, undo: ExitStack) -> RankWeights:
    """Move the tensors that a rank's stages use to its device; free the rest. Every rank calls it.

    All ranks start with rank 0's weights. If an earlier trainer has left the current value of a
    tensor on another rank, it comes from there. `undo` gets callbacks that restore the model.
    """
    model, programs = task.model, task.programs
    undo.callback(_restore, model, Contents(model), _last.get(model))
    tensors, layout, users = _named_tensors(model), ranks.layout, using_stages(model, programs)
    owners = {name: ranks.owner(stages[0]) for name, stages in users.items()}
    weights = RankWeights(ranks, device, owners)
    sources = _sources(model, tensors, ranks)
    changes: dict[int, Tensor] = {}
    for (name, tensor), source in zip(tensors.items(), sources, strict=True):
        using = {layout.stage_to_rank[stage] for stage in users[name]}
        received = _send_to_users(tensor, source, using, ranks)
        if ranks.rank % layout.width not in using:
            changes[id(tensor)] = _empty_like(tensor, _META)
        elif received is not None or tensor.device != device:
            values = tensor if received is None else received
            if tensor.device == device:  # written to in place
                undo.callback(tensor.detach().copy_, tensor.detach().clone())
            changes[id(tensor)] = _with_values(tensor, values, device)
        if weights.owners[name] != ranks.rank:
            weights.borrowed.add(name)
    _replace(model, changes)
    if model not in _last:
        model.register_load_state_dict_pre_hook(_bring_back)  # type: ignore[no-untyped-call]
    _last[model] = weights
    return weights


def _restore(model: nn.Module, contents: Contents, last: RankWeights | None) -> None:
    """Restore a model's tensors and hooks, and the record of where its weights are."""
    contents.restore(model)
    _last.pop(model, None)
    if last is not None:
        _last[model] = last


def _sources(model: nn.Module, tensors: Mapping[str, Tensor], ranks: Ranks) -> list[int]:
    """For each tensor, the first rank that has its current value, or else a copy of it."""
    last = _last.get(model)
    borrowed = last.borrowed if last is not None else set()
    have = "".join(
        _ABSENT if tensor.is_meta else _BORROWED if name in borrowed else _OWN
        for name, tensor in tensors.items()
    )
    of_ranks = gather_plain(have, ranks.control)
    sources = []
    for index, name in enumerate(tensors):
        of_tensor = [have[index] for have in of_ranks]
        if max(of_tensor) == _ABSENT:
            raise InputError(
                f"trainer: no rank has the values of {name} (it is on the meta device); load "
                "weights into net.model on rank 0 first"
            )
        sources.append(of_tensor.index(max(of_tensor)))
    return sources


def _send_to_users(tensor: Tensor, source: int, users: set[int], ranks: Ranks) -> Tensor | None:
    """Send a tensor from the rank that has it to those that use it; returns what was received."""
    layout = ranks.layout
    targets = [r for r in range(layout.world) if r % layout.width in users and r != source]
    if not tensor.numel() or not (ranks.rank == source or ranks.rank in targets):
        return None
    buffer = _as_bytes(tensor, _CPU, has_values=ranks.rank == source)
    if ranks.rank != source:
        distributed.recv(buffer, source, group=ranks.control)
        return buffer
    for target in targets:
        distributed.send(buffer, target, group=ranks.control)
    return None


# -- tensors and the module tree ------------------------------------------------------------------


def _as_bytes(tensor: Tensor, device: torch.device, has_values: bool) -> Tensor:
    """A tensor's elements as bytes, or an empty buffer for them."""
    if has_values:
        # .data: a thread that has sent a view may hold it, and a view would hold the tensor
        return tensor.data.to(device).contiguous().reshape(-1).view(torch.uint8)
    return torch.empty(tensor.numel(), dtype=tensor.dtype, device=device).view(torch.uint8)


def _empty_like(tensor: Tensor, device: torch.device) -> Tensor:
    """An empty tensor (or parameter) of the same form on another device."""
    empty = torch.empty_like(tensor.detach(), device=device)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _with_values(tensor: Tensor, elements: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device with these values; in place if it is there already."""
    target = tensor if tensor.device == device else _empty_like(tensor, device)
    with torch.no_grad():
        if elements.dtype != target.dtype or elements.shape != target.shape:
            elements = elements.view(target.dtype).view(target.shape)
        # Elements that are the tensor's own need no copy. torch would refuse one if strides differ
        # (channels_last with 1x1 kernels).
        if elements.data_ptr() != target.data_ptr():
            target.detach().copy_(elements)
    return target


def _replace(model: nn.Module, changes: Mapping[int, Tensor]) -> None:
    """Replace tensors everywhere in the module tree; `changes` has the ids of the old ones."""
    for module in model.modules():
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for table in tables:
            for name, tensor in table.items():
                if id(tensor) in changes:
                    table[name] = changes[id(tensor)]
    if isinstance(model, Reversible):
        model._plans.clear()  # chains hold the parameters they were made with
        model._place_constants()


def _bring_back(module: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
    """Before a state dict is loaded: allocate its tensors that are on the meta device here."""
    tensors = _named_tensors(module, every_name=True)
    loaded = {name: t for name, t in tensors.items() if prefix + name in state}
    _replace(module, {id(t): _empty_like(t, _CPU) for t in loaded.values() if t.is_meta})
    if module in _last:
        _last[module].borrowed -= loaded.keys()
