"""What is in flight when rounds begin to be recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from revcompile.runtime.executor.stage_executor import StageExecutor
from revcompile.runtime.executor.transport import InProcess, Message, MessageKind
from revcompile.runtime.stage.stage import InFlight

__all__ = ["InFlightState", "held_by", "in_flight", "missing_room", "on_device"]


@dataclass
class InFlightState:
    """What is in flight: by stage and micro-batch, and the messages that wait."""

    kept: dict[int, dict[int, Any]]
    mail: dict[tuple[int, int, MessageKind], list[Message]]
    versions: dict[int, dict[int, Mapping[str, Tensor]]] = field(default_factory=dict)
    """Of stages that stash their weights: by how many updates ago they were."""
    set_aside: int = 0
    """Bytes of what is copied for a while during updates."""

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        messages = [(m.values, m.gradients) for found in self.mail.values() for m in found]
        leaves = pytree.tree_leaves((self.kept, messages, self.versions))
        return sum(t.numel() * t.element_size() for t in leaves if isinstance(t, Tensor))


def held_by(
    executors: Sequence[StageExecutor], transport: InProcess, flag: Tensor | None
) -> InFlightState | None:
    """All that is in flight; None if some of it is not what recorded rounds work with.

    Messages get a flag like the one given, which says that they are fine.
    """
    found = InFlightState({}, {})
    for executor in executors:
        ages = executor.stage.ages()
        for microbatch, held in executor.stage.in_flight.items():
            if held.buffers or held.original:
                return None
            found.kept.setdefault(executor.index, {})[microbatch] = held.kept
            if held.weights is not None:
                found.versions.setdefault(executor.index, {})[ages[microbatch]] = held.weights
    for (source, target, channel), queue in transport.queues.items():
        for message in queue:
            if message.void or message.scale is not None or channel is not MessageKind.DY:
                return None
            bad = None if flag is None else torch.zeros_like(flag)
            marked = Message(message.index, message.values, message.gradients, bad=bad)
            found.mail.setdefault((source, target, channel), []).append(marked)
    return found


def missing_room(held: InFlightState, device: torch.device) -> str | None:
    """Why recorded rounds would not fit into the device's memory; None if they do.

    They hold copies of what is in flight, and what one round takes twice: while it is called, and
    in the memory of its graph.
    """
    if device.type != "cuda":
        return None
    now = torch.cuda.memory_allocated(device)
    transient = torch.cuda.max_memory_allocated(device) - now
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - now
    need = held.size + 2 * (transient + held.set_aside)
    if need <= free:
        return None
    return f"they need about {need / 2**30:.1f} GiB more, but {free / 2**30:.1f} GiB are free"


def on_device(device: torch.device, tree: Any) -> Any:
    """Room for nested values on a device."""
    return pytree.tree_map_only(Tensor, lambda t: torch.empty_like(t.detach(), device=device), tree)


def in_flight(kept: tuple[Any, ...], weights: Mapping[str, Tensor] | None = None) -> InFlight:
    """A micro-batch of which a stage keeps this, and has these weights stashed."""
    versions = tuple(t._version if isinstance(t, Tensor) else 0 for t in kept)
    return InFlight(kept=kept, weights=weights, versions=versions)
