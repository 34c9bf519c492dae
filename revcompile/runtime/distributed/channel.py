"""One direction between two stages on different ranks, and what travels there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

import torch
from torch import Tensor, distributed

from revcompile.runtime.distributed.message_format import Form, Header
from revcompile.runtime.executor.transport import Message, MessageKind

__all__ = ["Arrival", "Channel", "Parcel"]

_PATIENCE: Final = timedelta(days=365)
"""Receives are posted long before a message is due: the one who waits for it has the timeout."""


@dataclass(frozen=True)
class Channel:
    """From a stage to a stage, each on its rank; `payload` carries tensors of a GPU."""

    source: int
    target: int
    ranks: tuple[int, int]
    control: Any
    payload: Any
    device: torch.device

    @property
    def uses_cuda(self) -> bool:
        """Do tensors travel by NCCL?"""
        return self.device.type == "cuda"

    def exchange(self, tensors: list[Tensor], sends: bool) -> None:
        """Send or receive a GPU's tensors by NCCL."""
        peer = self.ranks[1] if sends else self.ranks[0]
        call = distributed.isend if sends else distributed.irecv
        ops = [distributed.P2POp(call, tensor, peer, self.payload) for tensor in tensors]
        for work in distributed.batch_isend_irecv(ops) if ops else []:
            work.wait()

    def control_exchange(self, tensor: Tensor, sends: bool) -> None:
        """Send or receive bytes by gloo."""
        peer = self.ranks[1] if sends else self.ranks[0]
        call = distributed.isend if sends else distributed.irecv
        work: Any = call(tensor, peer, group=self.control)
        work.wait(_PATIENCE)


@dataclass(frozen=True)
class Arrival:
    """A message that has come; `event`: when its tensors are there, on a GPU."""

    channel: MessageKind
    message: Message
    event: Any = None

    def ready(self) -> Message:
        """The message, once the current stream is told to wait for it."""
        if self.event is not None:
            stream = torch.cuda.current_stream()
            stream.wait_event(self.event)
            for tensor in _tensors(self.message):
                if tensor.is_cuda:
                    tensor.record_stream(stream)
        return self.message


def _tensors(message: Message) -> Iterator[Tensor]:
    for part in (message.values, message.gradients):
        leaves = torch.utils._pytree.tree_leaves(dict(part))
        yield from (leaf for leaf in leaves if isinstance(leaf, Tensor))


@dataclass
class Parcel:
    """Something to send."""

    header: Header
    text: bytes = b""
    tensors: list[tuple[Form, Tensor]] = field(default_factory=list)
    event: Any = None

    def text_bytes(self) -> Tensor:
        """The description as a tensor."""
        return torch.frombuffer(bytearray(self.text), dtype=torch.uint8)
