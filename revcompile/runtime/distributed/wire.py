"""Messages between ranks as bytes.

    header        int64: number, kind, micro-batch, flags, sizes
    description   JSON: names, dtypes, shapes, strides, plain values; sent only when it changes
    payload       all tensors in one buffer, each aligned as torch would have allocated it

Tensors arrive with the strides they were sent with: the choice of kernels depends on strides, and
results must not depend on which rank a stage is on.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from revcompile.errors import InputError
from revcompile.runtime.checkpoint.tree import decode, encode
from revcompile.runtime.executor.messages import Message, MessageKind
from revcompile.runtime.stage.slots import Layout
from revcompile.runtime.stage.tensors import aligned, overlap

_KINDS: Final = tuple(MessageKind)


class Header(NamedTuple):
    """The first part of a message: what it is, and the sizes of what follows. All are integers."""

    number: int
    """Counts the messages of a channel."""
    code: int = 0
    microbatch: int = 0
    """The micro-batch, or the update."""
    void: int = 0
    is_exact: int = 0
    is_end: int = 0
    """Set in the last message. Its text is the cause if the sender has failed."""
    length: int = 0
    """Bytes of the text: the description, or the cause at the end."""
    size: int = 0
    """Bytes of the payload."""

    @classmethod
    def of(cls, message: Message, kind: MessageKind, **numbers: int) -> Header:
        return cls(
            code=_KINDS.index(kind),
            microbatch=message.index,
            void=message.void,
            is_exact=message.is_exact,
            **numbers,
        )

    @classmethod
    def read(cls, packet: Tensor) -> Header:
        return cls(*_NUMBERS.unpack(packet.numpy().data))

    def packed(self) -> Tensor:
        return torch.frombuffer(bytearray(_NUMBERS.pack(*self)), dtype=torch.uint8)

    @property
    def kind(self) -> MessageKind:
        return _KINDS[self.code]

    def message(self, **parts: Any) -> Message:
        """The message, with these parts."""
        return Message(
            self.microbatch,
            void=bool(self.void),
            is_exact=bool(self.is_exact),
            **parts,
        )


_NUMBERS: Final = struct.Struct(f"{len(Header._fields)}q")
HEADER_BYTES: Final = _NUMBERS.size


class _Form:
    """A tensor's form; its elements are in the payload without gaps.

    The payload has each element of an expanded tensor (stride 0) once: `core` is the shape there.
    """

    def __init__(self, name: str, shape: list[int], stride: list[int], on_host: bool) -> None:
        self.dtype: torch.dtype = getattr(torch, name)
        self.shape, self.stride, self.on_host = tuple(shape), tuple(stride), on_host
        self.core = _core(shape, stride)
        like = torch.empty_strided(self.core, stride, dtype=self.dtype, device="meta")
        self.dense, self.nbytes = torch.empty_like(like).stride(), like.numel() * like.itemsize

    def view(self, memory: Tensor) -> Tensor:
        """The elements in their part of the payload."""
        return memory.view(self.dtype).as_strided(self.core, self.dense)

    def read(self, memory: Tensor) -> Tensor:
        elements = self.view(memory)
        if self.on_host:
            elements = elements.cpu()
        if self.dense != self.stride:
            elements = elements.new_empty_strided(self.core, self.stride).copy_(elements)
        # .data: a version counter of its own, because tensors share the payload's memory
        return elements.expand(self.shape).data


def _core(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """The shape with every dimension of stride 0 as 1."""
    pairs = zip(shape, stride, strict=True)
    return tuple(min(size, 1) if step == 0 else size for size, step in pairs)


def _form(tensor: Tensor, device: torch.device) -> list[Any]:
    """The arguments of `_Form` for a tensor; its stage is on `device`."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise InputError(f"a value of layout {'nested' if tensor.is_nested else tensor.layout}")
    stride = tensor.stride()
    if overlap(_core(tensor.shape, stride), stride):
        stride = torch.empty(tensor.shape, device="meta").stride()
    on_host = tensor.device.type == "cpu" and device.type != "cpu"
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), list(stride), on_host]


def check_sendable(value: Any) -> None:
    """Raise an `InputError` that names the first part of a value that cannot go to another rank."""
    device = torch.device("cpu")
    encode(value, lambda v, _: {"tensor": _form(v, device)} if isinstance(v, Tensor) else None)


class Description:
    """The form of a message: both ends make it from the same JSON."""

    def __init__(self, plain: Any) -> None:
        self._plain = plain
        self._forms: list[_Form] = []
        """The forms of its tensors, in the order in which they are decoded."""
        decode(plain, {"tensor": lambda content: self._forms.append(_Form(*content))})
        offsets, self.size = aligned(form.nbytes for form in self._forms)
        pairs = list(zip(self._forms, offsets, strict=True))
        self._slices = [slice(offset, offset + form.nbytes) for form, offset in pairs]
        self.layout: Layout = tuple(
            None if form.on_host else (offset, form.dtype, form.shape, form.stride)
            for form, offset in pairs
        )

    def pack(self, tensors: Sequence[Tensor], payload: Tensor) -> None:
        """Copy the tensors of a message to its payload."""
        for form, part, tensor in zip(self._forms, self._slices, tensors, strict=True):
            core = tensor.detach().as_strided(form.core, tensor.stride())
            form.view(payload[part]).copy_(core)

    def unpack(self, header: Header, payload: Tensor, device: torch.device) -> Message:
        """The message, with tensors in the memory of its payload."""
        pairs = iter(zip(self._forms, self._slices, strict=True))

        def next_tensor(_: Any) -> Tensor:
            form, part = next(pairs)
            return form.read(payload[part])

        def device_here(parts: Sequence[str]) -> torch.device:
            return torch.device("cpu") if torch.device(*parts).type == "cpu" else device

        special = {"tensor": next_tensor, "device": device_here}
        values, gradients, found_inf = decode(self._plain, special)
        parts = {"values": dict(values), "gradients": dict(gradients), "found_inf": found_inf}
        return header.message(**parts)


class Describer:
    """Describes messages of one kind between stages on `device`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._text = b""
        self._packed: Any = None
        """The form of packets that are laid out like the description."""
        self.description = Description([])
        """The description of the last message."""

    def describe(self, message: Message) -> tuple[bytes, Tensor | list[Tensor]]:
        """The description's text, empty if it has not changed, and the tensors to pack.

        On a GPU the message's packet may be the payload already: then its memory is returned
        instead of tensors.
        """
        packet = message.packet if self._device.type == "cuda" else None
        if packet is not None and packet.form is self._packed:
            return b"", packet.memory
        plain, tensors = self._encoded(message)
        text = json.dumps(plain).encode()
        if text == self._text:
            text = b""
        else:
            self._text, self._packed, self.description = text, None, Description(plain)
        if packet is not None and packet.form.layout == self.description.layout:
            self._packed = packet.form
            return text, packet.memory
        return text, tensors

    def _encoded(self, message: Message) -> tuple[Any, list[Tensor]]:
        """The message's form as JSON, and the tensors in its order."""
        tensors: list[Tensor] = []

        def special(value: Any, _: str) -> dict[str, Any] | None:
            if not isinstance(value, Tensor):
                return None
            tensors.append(value)
            return {"tensor": _form(value, self._device)}

        def named(part: Mapping[str, Any]) -> list[Any]:
            return [[name, encode(value, special)] for name, value in part.items()]

        try:
            parts = [named(message.values), named(message.gradients)]
            parts.append(encode(message.found_inf, special))
        except InputError as error:
            raise InputError(
                f"{error} crosses from one rank to another; only dense tensors and plain values "
                "do: put both stages on one rank with stage_to_rank="
            ) from None
        return parts, tensors
