"""A rank's share of the weights: what its stages use; what only others use takes no memory here.

A tensor of another rank stays in the module tree with its name, type and shape, on the meta device.
It comes back when a state dict is loaded into the model (to the host's memory), and for as long as
somebody keeps what `whole` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, distributed, nn

from revcompile.errors import InputError
from revcompile.ir.module_tree import copy_module
from revcompile.ir.program import StageProgram
from revcompile.runtime.distributed.collectives import gather_plain
from revcompile.runtime.distributed.process_groups import Ranks
from revcompile.runtime.distributed.weight_owners import homes, named_tensors, used
from revcompile.runtime.reversible.module import Reversible

__all__ = ["Share", "deal", "last_device", "whole"]

_META: Final = torch.device("meta")
_HOST: Final = torch.device("cpu")
_ABSENT, _BORROWED, _OWN = "012"
"""What a rank has of a tensor: nothing, a copy of another rank's, the current value."""


@dataclass
class Share:
    """Who has which tensor, seen from one rank."""

    ranks: Ranks
    device: torch.device
    homes: Mapping[str, int]
    """From a tensor's first name to the stage that has its current value."""
    borrowed: set[str] = field(default_factory=set)
    """Used here too, but another rank has the current value."""
    guard: Callable[[], AbstractContextManager[None]] = nullcontext
    """Around what all ranks do together: tells who is gone."""

    def adopt(self, model: nn.Module, copies: Mapping[str, Tensor]) -> None:
        """Let the model have a stage's own copies of tied parameters instead of one more."""
        tensors = named_tensors(model)
        _replace(model, {id(tensors[n]): t for n, t in copies.items() if n in self.borrowed})

    def whole(self, model: Reversible, device: torch.device | None = None) -> Reversible:
        """A copy of the model with the current weights of all ranks. Every rank calls it."""
        twin: Reversible = copy_module(model)
        device = device or self.device
        changes: dict[int, Tensor] = {}
        for name, tensor in named_tensors(twin).items():
            owner = self.ranks.owner(self.homes[name])
            sent = _bytes(tensor, self.device, has_it=owner == self.ranks.rank)
            with self.guard():
                if sent.numel():
                    distributed.broadcast(sent, owner, group=self.ranks.pipeline)
            changes[id(tensor)] = _filled(tensor, sent, device)
        _replace(twin, changes)
        return twin


_shares: Final[WeakKeyDictionary[nn.Module, Share]] = WeakKeyDictionary()
"""How a model's weights were dealt out last."""


def last_device(model: nn.Module) -> torch.device | None:
    """This rank's device for a model whose weights are on several ranks."""
    return _shares[model].device if model in _shares else None


def whole(model: Reversible, device: torch.device | None = None) -> Reversible:
    """A copy with all current weights; where several ranks train the model each calls it."""
    share = _shares.get(model)
    if share is not None:
        return share.whole(model, device)
    twin: Reversible = copy_module(model)
    return twin if device is None else twin.to(device)


def deal(
    model: Reversible, programs: Sequence[StageProgram], ranks: Ranks, device: torch.device
) -> Share:
    """Every rank gets what its stages use, on its device, and lets go of the rest.

    All start with rank 0's weights; what rank 0 has let go of for an earlier trainer comes from
    the rank that has it.
    """
    tensors, layout = named_tensors(model), ranks.layout
    places: dict[str, set[int]] = {}
    for program in programs:
        for name in used(model, program):
            places.setdefault(name, set()).add(layout.places[program.index])
    home = homes(model, programs)
    # What no stage uses never changes; it stays with the first one.
    share = Share(ranks, device, {name: home.get(name, 0) for name in tensors})
    sources = _sources(model, tensors, ranks)
    changes: dict[int, Tensor] = {}
    for (name, tensor), source in zip(tensors.items(), sources, strict=True):
        users = places.get(name, {layout.places[0]})
        found = _dealt(tensor, source, users, ranks)
        if ranks.rank % layout.width not in users:
            changes[id(tensor)] = _like(tensor, _META)
        elif found is not None or tensor.device != device:
            changes[id(tensor)] = _filled(tensor, tensor if found is None else found, device)
        if ranks.owner(share.homes[name]) != ranks.rank:
            share.borrowed.add(name)
    _replace(model, changes)
    if model not in _shares:
        model.register_load_state_dict_pre_hook(_bring_back)  # type: ignore[no-untyped-call]
    _shares[model] = share
    return share


def _sources(model: nn.Module, tensors: Mapping[str, Tensor], ranks: Ranks) -> list[int]:
    """For each tensor the rank to take it from: the first that has the current value."""
    last = _shares.get(model)
    borrowed = last.borrowed if last is not None else set()
    mine = "".join(
        _ABSENT if tensor.is_meta else _BORROWED if name in borrowed else _OWN
        for name, tensor in tensors.items()
    )
    found = gather_plain(mine, ranks.control)
    sources = []
    for index, name in enumerate(tensors):
        has = [one[index] for one in found]
        if max(has) == _ABSENT:
            raise InputError(
                f"trainer: no rank has the values of {name} (it is on the meta device); load "
                "weights into net.model on rank 0 first"
            )
        sources.append(has.index(max(has)))
    return sources


def _dealt(tensor: Tensor, source: int, users: set[int], ranks: Ranks) -> Tensor | None:
    """Pass one tensor from the rank that has it to those that use it: what has come here."""
    layout = ranks.layout
    targets = [r for r in range(layout.world) if r % layout.width in users and r != source]
    if not tensor.numel() or not (ranks.rank == source or ranks.rank in targets):
        return None
    sent = _bytes(tensor, _HOST, has_it=ranks.rank == source)
    if ranks.rank != source:
        distributed.recv(sent, source, group=ranks.control)
        return sent
    for target in targets:
        distributed.send(sent, target, group=ranks.control)
    return None


def _bytes(tensor: Tensor, device: torch.device, has_it: bool) -> Tensor:
    """A tensor's elements in a row, or room for them."""
    if has_it:
        return tensor.detach().to(device).contiguous().reshape(-1).view(torch.uint8)
    return torch.empty(tensor.numel(), dtype=tensor.dtype, device=device).view(torch.uint8)


def _like(tensor: Tensor, device: torch.device) -> Tensor:
    """One of the same kind and form elsewhere, its values to be filled in."""
    fresh = torch.empty_like(tensor.detach(), device=device)
    return nn.Parameter(fresh, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fresh


def _filled(tensor: Tensor, elements: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device with other values: itself, as quietly as an optimizer writes."""
    found = tensor if tensor.device == device else _like(tensor, device)
    with torch.no_grad():
        if elements.dtype != found.dtype or elements.shape != found.shape:
            elements = elements.view(found.dtype).view(found.shape)
        found.detach().copy_(elements)
    return found


def _replace(model: nn.Module, changes: Mapping[int, Tensor]) -> None:
    """Other tensors in all their places in the tree, by the identity of those there now."""
    for module in model.modules():
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for table in tables:
            for name, tensor in table.items():
                if id(tensor) in changes:
                    table[name] = changes[id(tensor)]
    if isinstance(model, Reversible):
        model._plans.clear()  # chains hold the parameters they were made with


def _bring_back(module: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
    """Make room for those values of a state dict that other ranks have had."""
    tensors = named_tensors(module, every_name=True)
    there = {name: t for name, t in tensors.items() if prefix + name in state}
    _replace(module, {id(t): _like(t, _HOST) for t in there.values() if t.is_meta})
    if module in _shares:
        _shares[module].borrowed -= there.keys()
