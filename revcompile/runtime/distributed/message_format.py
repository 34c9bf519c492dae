"""Messages as bytes: a header of a few numbers, a description when it changes, the tensors.

Descriptions are JSON and never unpickled. Tensors arrive with the strides they were sent with:
kernels choose by them, and results are to be the same to the bit wherever a stage lives.
"""

from __future__ import annotations

import enum
import json
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from revcompile.errors import InputError
from revcompile.runtime.checkpoint.codec import decode, encode
from revcompile.runtime.executor.fingerprints import Fingerprint
from revcompile.runtime.executor.transport import Message, MessageKind

__all__ = ["HEADER", "Describer", "Description", "Flag", "Form", "Header", "described"]

HEADER: Final = 8
"""How many int64 a header has."""
_CHANNELS: Final = tuple(MessageKind)


class Flag(enum.IntFlag):
    """What a header announces besides its tensors."""

    VOID = 1
    """The micro-batch was lost."""
    DESCRIBED = 2
    """A description follows; without it, the last one of the channel holds."""
    END = 4
    """Nothing comes any more."""
    ABORT = 8
    """The sender stops; the description says why."""
    APART = 16
    """The tensors do not come with the header but after it."""


_NONE: Final = Flag(0)


@dataclass(frozen=True)
class Header:
    """The first part of a message, of fixed size."""

    channel: MessageKind
    index: int
    flags: Flag = _NONE
    length: int = 0
    """Bytes of the description."""
    sequence: int = 0
    """The number of the message on its link."""
    scale: float | None = None
    """The message's."""
    fingerprint: Fingerprint | None = None
    """The message's."""

    def numbers(self) -> list[int]:
        """As int64."""
        code = _CHANNELS.index(self.channel)
        (scale,) = struct.unpack("q", struct.pack("d", self.scale or 0.0))
        data = self.fingerprint or Fingerprint()
        plain = [code, self.index, int(self.flags), self.length, self.sequence, scale]
        return [*plain, data.inputs, data.target]

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Header:
        """Read what `numbers` gave."""
        code, index, flags, length, sequence, bits, inputs, target = numbers
        (scale,) = struct.unpack("d", struct.pack("q", bits))
        data = Fingerprint(inputs, target) if inputs or target else None
        return cls(_CHANNELS[code], index, Flag(flags), length, sequence, scale or None, data)


@dataclass(frozen=True)
class Form:
    """Everything about a tensor but its elements."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    on_host: bool = False
    """A tensor in the CPU's memory although the stage computes elsewhere."""

    @classmethod
    def of(cls, tensor: Tensor, device: torch.device) -> Form:
        """A tensor's form, as seen from a stage's device."""
        if tensor.layout is not torch.strided:
            raise InputError(
                f"a value of layout {tensor.layout} crosses from one rank to another; only dense "
                "tensors do: place both stages on one rank with places=, or use .to_dense()"
            )
        on_host = tensor.device.type == "cpu" and device.type != "cpu"
        stride = tuple(tensor.stride())
        if not _apart(_core(tensor.shape, stride), stride):  # a sliding window, say
            stride = torch.empty(tensor.shape, device="meta").stride()
        return cls(tensor.dtype, tuple(tensor.shape), stride, on_host)

    @property
    def core(self) -> tuple[int, ...]:
        """The shape of what is there only once, however often it is repeated."""
        return _core(self.shape, self.stride)

    @property
    def numel(self) -> int:
        """Elements to send."""
        return math.prod(self.core)

    def flat(self, tensor: Tensor) -> Tensor:
        """The bytes to send, without a copy where the elements lie without gaps."""
        tensor = tensor.detach().resolve_conj().resolve_neg()
        if tuple(tensor.stride()) == self.stride:
            core = tensor.as_strided(self.core, self.stride)
            if self._dense:
                return core.as_strided((self.numel,), (1,)).view(torch.uint8)
            tensor = core
        return tensor.contiguous().reshape(-1).view(torch.uint8)

    def room(self, device: torch.device) -> Tensor:
        """Where the bytes go."""
        return torch.empty(self.numel, dtype=self.dtype, device=device).view(torch.uint8)

    def filled(self, room: Tensor) -> Tensor:
        """The tensor, from its bytes."""
        elements = room.view(self.dtype)
        if self.on_host:
            elements = elements.cpu()
        if not self._dense:
            spread = elements.new_empty(_span(self.core, self.stride))
            spread.as_strided(self.core, self.stride).copy_(elements.view(self.core))
            elements = spread
        return elements.as_strided(self.shape, self.stride)

    @property
    def _dense(self) -> bool:
        return _span(self.core, self.stride) == self.numel


def _core(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Dimensions along which nothing moves in memory count once."""
    return tuple(
        min(size, 1) if step == 0 else size for size, step in zip(shape, stride, strict=True)
    )


def _span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _apart(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Is every element at a place of its own?"""
    reach = 0
    for step, size in sorted((p, s) for s, p in zip(shape, stride, strict=True) if s > 1):
        if step <= reach:
            return False
        reach += (size - 1) * step
    return True


def described(message: Message, device: torch.device) -> tuple[bytes, list[tuple[Form, Tensor]]]:
    """A message's description, and its tensors in the order it names them."""
    tensors: list[tuple[Form, Tensor]] = []

    def special(value: Any) -> dict[str, Any] | None:
        if not isinstance(value, Tensor):
            return None
        form = Form.of(value, device)
        tensors.append((form, value))
        dtype = str(form.dtype).removeprefix("torch.")
        return {"tensor": [dtype, list(form.shape), list(form.stride), form.on_host]}

    try:
        found = [encode(dict(part), special) for part in (message.values, message.gradients)]
    except InputError as error:
        raise InputError(
            f"{error} crosses from one rank to another; only tensors and plain values do: place "
            "both stages on one rank with places="
        ) from None
    return json.dumps(found).encode(), tensors


class Describer:
    """Descriptions of one channel's messages, each written once and told when it changes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last = b""
        self._outline: tuple[Any, ...] | None = None
        self._forms: list[Form] = []

    def describe(self, message: Message) -> tuple[bytes, list[tuple[Form, Tensor]]]:
        """A description if it is another than the last one, and the message's tensors."""
        outline = _outline(message)
        if outline is not None and outline == self._outline:
            parts = (message.values, message.gradients)
            found = [v for part in parts for v in part.values() if isinstance(v, Tensor)]
            return b"", list(zip(self._forms, found, strict=True))
        text, tensors = described(message, self._device)
        self._outline, self._forms = outline, [form for form, _ in tensors]
        if text == self._last:
            return b"", tensors
        self._last = text
        return text, tensors


def _outline(message: Message) -> tuple[Any, ...] | None:
    """What a message's description depends on, as far as this can be told without writing it."""
    found: list[Any] = []
    for part in (message.values, message.gradients):
        for name, value in part.items():
            if isinstance(value, Tensor) and value.layout is torch.strided:
                found += (name, value.dtype, value.shape, value.stride(), value.device)
            elif value is None or type(value) in (bool, int):
                found += (name, type(value), value)
            else:
                return None
        found.append(None)
    return tuple(found)


class Description:
    """What a message will hold: parsed once, used for every message of the same form."""

    def __init__(self, text: bytes) -> None:
        self._parts = json.loads(text)
        self.forms = tuple(_forms(self._parts))

    def message(self, header: Header, rooms: Sequence[Tensor], device: torch.device) -> Message:
        """The message, from the bytes of its tensors."""
        left = iter(zip(self.forms, rooms, strict=True))

        def tensor(_: Any) -> Tensor:
            form, room = next(left)
            return form.filled(room).data  # a version of its own: tensors may share a packet

        def here(name: str) -> torch.device:
            return torch.device("cpu") if torch.device(name).type == "cpu" else device

        special = {"tensor": tensor, "device": here}
        values, gradients = (decode(part, special) for part in self._parts)
        return Message(
            header.index, values, gradients, scale=header.scale, fingerprint=header.fingerprint
        )


def _forms(part: Any) -> Iterator[Form]:
    """The forms of the tensors in a description, in the order they are read."""
    if isinstance(part, list):
        for item in part:
            yield from _forms(item)
    elif isinstance(part, dict):
        for tag, content in part.items():
            if tag == "tensor":
                dtype, shape, stride, on_host = content
                yield Form(getattr(torch, dtype), tuple(shape), tuple(stride), on_host)
            else:
                yield from _forms(content)
