"""Messages that wait when a trainer goes over to captured steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from revcompile.runtime.executor.stage_executor import StageExecutor
from revcompile.runtime.executor.transport import (
    InProcess,
    Message,
    MessageKind,
    Route,
    Transport,
)

Messages = dict[Route, list[Message]]


def waiting_messages(
    executors: Sequence[StageExecutor], transport: Transport, flag: Tensor | None
) -> Messages | None:
    """The messages that wait for these stages; None if a captured step cannot work with one.

    Args:
        flag: If given, messages get flags `found_inf` like this one, which are not set.
    """
    waiting: Messages = {}
    for executor in executors[:-1]:
        route = executor.index + 1, executor.index, MessageKind.DY
        for message in transport.queued(executor.index, MessageKind.DY):
            if message.void:
                return None
            if message.scale is not None:
                scale = torch.tensor(message.scale, dtype=torch.float64)
                message = replace(message, scale=scale.to(executor.stage._device()))
            waiting.setdefault(route, []).append(flagged(message, flag))
    for route in tied_routes(executors):
        assert isinstance(transport, InProcess)
        waiting[route] = [
            flagged(message, flag) if route[2] is MessageKind.TIED_GRAD else message
            for message in transport.queues.get(route, ())
        ]
    return waiting


def _nbytes(tree: Any) -> int:
    tensors = (leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor))
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def tied_routes(executors: Sequence[StageExecutor]) -> list[Route]:
    """Those on which parameters that these stages share, and their gradients, are exchanged."""
    here = [executor.index for executor in executors]
    pairs = [(e.index, holder) for e in executors for holder in e.tied_replicas if holder in here]
    return [
        *((holder, owner, MessageKind.TIED_GRAD) for owner, holder in pairs),
        *((owner, holder, MessageKind.TIED_WEIGHT) for owner, holder in pairs),
    ]


def flagged(message: Message, flag: Tensor | None) -> Message:
    """The message with a flag `found_inf` like this one, which is not set unless it was."""
    if flag is None or message.found_inf is not None:
        return message
    return replace(message, found_inf=torch.zeros_like(flag))


def missing_memory(messages: Messages, snapshots: int, device: torch.device) -> str | None:
    """Why captured steps would not fit into the device's memory; None if they do.

    They need copies of messages that wait, and twice what one step allocates for itself: in the
    ordinary pool during the warm-up, and in the pool of the graphs.

    Args:
        snapshots: Bytes that updates copy to be able to restore them.
    """
    if device.type != "cuda":
        return None
    allocated = torch.cuda.memory_allocated(device)
    transient = torch.cuda.max_memory_allocated(device) - allocated
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - allocated
    copies = _nbytes([[(m.values, m.gradients) for m in queue] for queue in messages.values()])
    need = copies + 2 * (transient + snapshots)
    if need <= free:
        return None
    return f"they need about {need / 2**30:.1f} GiB more, but {free / 2**30:.1f} GiB are free"


def empty_on(device: torch.device, tree: Any) -> Any:
    """Nested values with uninitialised tensors on a device instead of their own."""
    return pytree.tree_map_only(Tensor, lambda t: torch.empty_like(t.detach(), device=device), tree)
