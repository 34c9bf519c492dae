"""Messages by gloo: header and tensors in one packet, received into memory that is used again.

    | header | tensor | tensor | ...        each at a multiple of 64 bytes, as torch allocates them

A receive is posted before anybody sends, so both ends must know the size of the next packet. The
rule: after two messages of one form a third is expected. What comes instead fills a packet of the
expected size with its header alone, and its tensors follow apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from revcompile.runtime.distributed.channel import Arrival, Channel, Parcel
from revcompile.runtime.distributed.message_format import HEADER, Description, Flag, Form, Header
from revcompile.runtime.executor.transport import MessageKind
from revcompile.runtime.stage.buffer_pool import BufferPool

__all__ = ["PacketReceiver", "PacketSender"]

_STEP: Final = 64
_MOST: Final = 64
"""How many received packets of one size are remembered to be used again."""
_SILENT: Final = Flag.VOID | Flag.END | Flag.ABORT
"""Messages without tensors."""

Kind = tuple[MessageKind, int]
"""A channel's so-and-so-manieth form."""


@dataclass(frozen=True)
class _Packing:
    """Where in a packet the tensors of a message are."""

    places: tuple[slice, ...]
    size: int

    @classmethod
    def of(cls, forms: Sequence[Form]) -> _Packing:
        places, end = [], _STEP
        for form in forms:
            size = form.numel * form.dtype.itemsize
            places.append(slice(end, end + size))
            end += -(-size // _STEP) * _STEP
        return cls(tuple(places), end)


_HEADER_ALONE: Final = _Packing((), _STEP)


class _Expected:
    """The next packet of a link; both ends keep count and come to the same result."""

    def __init__(self) -> None:
        self.kind: Kind | None = None
        self.size = _STEP
        self._last: Kind | None = None
        self._forms: dict[MessageKind, tuple[int, _Packing]] = {}

    def described(self, channel: MessageKind, forms: Sequence[Form]) -> None:
        """Messages of a channel have another form from now on."""
        number, _ = self._forms.get(channel, (0, _HEADER_ALONE))
        self._forms[channel] = number + 1, _Packing.of(forms)

    def form(self, channel: MessageKind) -> tuple[Kind, _Packing]:
        """A channel's present form."""
        number, packing = self._forms[channel]
        return (channel, number), packing

    def came(self, kind: Kind, packing: _Packing) -> None:
        """A message with tensors has passed."""
        is_steady, self._last = kind == self._last, kind
        self.kind, self.size = (kind, packing.size) if is_steady else (None, _STEP)


class PacketSender:
    """The sending end of a link between two hosts' memories."""

    def __init__(self, link: Channel) -> None:
        self._link = link
        self._expected = _Expected()
        self._staging = torch.empty(_STEP, dtype=torch.uint8)

    def send(self, parcel: Parcel) -> None:
        """Send, and wait until all of it is on its way."""
        header, expected = parcel.header, self._expected
        if header.flags & Flag.DESCRIBED:
            expected.described(header.channel, [form for form, _ in parcel.tensors])
        kind, packing = None, _HEADER_ALONE
        if not header.flags & _SILENT:
            kind, packing = expected.form(header.channel)
        is_apart = kind is not None and kind != expected.kind
        if is_apart:
            header = replace(header, flags=header.flags | Flag.APART)
        if len(self._staging) != expected.size:
            self._staging = torch.empty(expected.size, dtype=torch.uint8)
        numbers = torch.tensor(header.numbers()).view(torch.uint8)
        self._staging[: len(numbers)].copy_(numbers)
        if kind is not None and not is_apart:
            _pack(self._staging, packing, parcel)
        self._link.control_exchange(self._staging, sends=True)
        if parcel.text:
            self._link.control_exchange(parcel.text_bytes(), sends=True)
        if is_apart:
            apart = torch.empty(packing.size, dtype=torch.uint8)
            _pack(apart, packing, parcel)
            self._link.control_exchange(apart, sends=True)
        if kind is not None:
            expected.came(kind, packing)


def _pack(packet: Tensor, packing: _Packing, parcel: Parcel) -> None:
    for place, (form, tensor) in zip(packing.places, parcel.tensors, strict=True):
        if form.numel:
            packet[place].copy_(form.flat(tensor))


class PacketReceiver:
    """The receiving end of a link between two hosts' memories."""

    def __init__(self, link: Channel) -> None:
        self._link = link
        self._expected = _Expected()
        self.packets = BufferPool(limit=_MOST)
        self._size = 0
        self._packet = torch.empty(0, dtype=torch.uint8)

    def header(self) -> Header:
        """Wait for the next message, whose tensors may have come with it."""
        size = self._expected.size
        if size != self._size:
            self._size = size
            self.packets.clear()
        # The last packet belongs to its message now: do not hold it while the next one is chosen.
        self._packet = torch.empty(0, dtype=torch.uint8)
        self._packet = self.packets.take(size, lambda: torch.empty(size, dtype=torch.uint8))
        self._link.control_exchange(self._packet, sends=False)
        numbers = self._packet[: 8 * HEADER].view(torch.int64).tolist()
        return Header.of(numbers)

    def arrival(self, header: Header, description: Description) -> Arrival:
        """The message a header announces."""
        expected = self._expected
        if header.flags & Flag.DESCRIBED:
            expected.described(header.channel, description.forms)
        kind, packing = expected.form(header.channel)
        packet = self._packet
        if header.flags & Flag.APART:
            packet = torch.empty(packing.size, dtype=torch.uint8)
            self._link.control_exchange(packet, sends=False)
        rooms = [packet[place] for place in packing.places]
        message = description.message(header, rooms, self._link.device)
        expected.came(kind, packing)
        return Arrival(header.channel, message)
