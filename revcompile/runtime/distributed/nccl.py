"""Messages by NCCL: tensors go from GPU to GPU, headers by gloo.

The header travels after the tensors' send was enqueued, and the receive is enqueued after the
header has come. So whatever a device waits for was enqueued earlier, somewhere: no circle can
close, whichever calls block a device in between. Memory for what comes is torch's caching
allocator's: it knows the streams that still read, and asks the driver for nothing once it is warm.
"""

from __future__ import annotations

import torch

from revcompile.runtime.distributed.channel import Arrival, Channel, Parcel
from revcompile.runtime.distributed.message_format import HEADER, Description, Header

__all__ = ["DeviceReceiver", "DeviceSender"]


class DeviceSender:
    """The sending end of a link between two GPUs."""

    def __init__(self, link: Channel) -> None:
        self._link = link
        self._stream = torch.cuda.Stream(link.device)

    def send(self, parcel: Parcel) -> None:
        """Enqueue the tensors, then send what announces them."""
        with torch.cuda.device(self._link.device), torch.cuda.stream(self._stream):
            if parcel.event is not None:
                self._stream.wait_event(parcel.event)
            moved = [(f, t.to(self._link.device)) for f, t in parcel.tensors if f.numel]
            self._link.exchange([form.flat(tensor) for form, tensor in moved], sends=True)
            for _, tensor in moved:
                tensor.record_stream(self._stream)
        self._link.control_exchange(torch.tensor(parcel.header.numbers()), sends=True)
        if parcel.text:
            self._link.control_exchange(parcel.text_bytes(), sends=True)


class DeviceReceiver:
    """The receiving end of a link between two GPUs."""

    def __init__(self, link: Channel) -> None:
        self._link = link
        self._stream = torch.cuda.Stream(link.device)

    def header(self) -> Header:
        """Wait for the next message's announcement."""
        numbers = torch.empty(HEADER, dtype=torch.int64)
        self._link.control_exchange(numbers, sends=False)
        return Header.of(numbers.tolist())

    def arrival(self, header: Header, description: Description) -> Arrival:
        """The message a header announces, its tensors on their way."""
        device = self._link.device
        with torch.cuda.device(device), torch.cuda.stream(self._stream):
            rooms = [form.room(device) for form in description.forms]
            self._link.exchange([room for room in rooms if room.numel()], sends=False)
            message = description.message(header, rooms, device)
            event = self._stream.record_event()
        return Arrival(header.channel, message, event)
