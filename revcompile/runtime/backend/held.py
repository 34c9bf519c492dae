"""What is in flight when rounds begin to be recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from revcompile.runtime.stage import InFlight
from revcompile.runtime.transport import Channel, InProcess, Message
from revcompile.runtime.worker import Actor

__all__ = ["Held", "held_by", "in_flight", "on_device"]


@dataclass
class Held:
    """What is in flight: by stage and micro-batch, and the messages that wait."""

    kept: dict[int, dict[int, Any]]
    mail: dict[tuple[int, int, Channel], list[Message]]


def held_by(actors: Sequence[Actor], transport: InProcess, flag: Tensor | None) -> Held | None:
    """All that is in flight; None if some of it is not what recorded rounds work with.

    Messages get a flag like the one given, which says that they are fine.
    """
    found = Held({}, {})
    for actor in actors:
        for microbatch, held in actor.stage.in_flight.items():
            if held.weights is not None or held.buffers or held.original:
                return None
            found.kept.setdefault(actor.index, {})[microbatch] = held.kept
    for (source, target, channel), queue in transport.queues.items():
        for message in queue:
            if message.void or channel is not Channel.DY:
                return None
            bad = None if flag is None else torch.zeros_like(flag)
            marked = Message(message.index, message.values, message.gradients, bad=bad)
            found.mail.setdefault((source, target, channel), []).append(marked)
    return found


def on_device(device: torch.device, tree: Any) -> Any:
    """Room for nested values on a device."""
    return pytree.tree_map_only(Tensor, lambda t: torch.empty_like(t.detach(), device=device), tree)


def in_flight(kept: tuple[Any, ...]) -> InFlight:
    """A micro-batch of which a stage keeps this."""
    versions = tuple(t._version if isinstance(t, Tensor) else 0 for t in kept)
    return InFlight(kept=kept, versions=versions)
