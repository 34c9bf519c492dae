"""Messages between ranks as bytes.

    header        int64: number, kind, micro-batch, flags, sizes, fingerprint
    description   JSON: names, dtypes, shapes, strides, plain values; sent only when it changes
    payload       all tensors in one buffer, each where torch could have allocated it

Tensors arrive with the strides they were sent with: kernels are chosen by them, and results must
not depend on which rank a stage is on.
"""

from __future__ import annotations

import enum
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from revcompile.errors import InputError
from revcompile.runtime.checkpoint.tree import decode, encode
from revcompile.runtime.executor.fingerprints import Fingerprint
from revcompile.runtime.executor.messages import Message, MessageKind
from revcompile.runtime.stage.slots import Layout
from revcompile.runtime.stage.tensors import aligned, overlap

_KINDS: Final = tuple(MessageKind)
_CODES: Final = {kind: code for code, kind in enumerate(_KINDS)}


class Flag(enum.IntFlag):
    """What a header says in one bit."""

    VOID = 1
    """See `Message.void`."""
    EXACT = 2
    """See `Message.is_exact`."""
    END = 4
    """The last message. Its text is the cause if the sender has failed."""


class Header(NamedTuple):
    """The first part of a message: what it is, and the sizes of what follows."""

    number: int
    """Counts the messages of a channel."""
    code: int = 0
    microbatch: int = 0
    """Or the update."""
    flags: int = 0
    length: int = 0
    """Bytes of the text: the description, or the cause at the end."""
    size: int = 0
    """Bytes of the payload."""
    inputs: int = 0
    target: int = 0
    room: int = 0
    """The largest payload that the next message has in one packet with its header, over gloo."""

    @classmethod
    def of(cls, message: Message, kind: MessageKind, **numbers: int) -> Header:
        flags = Flag.VOID * message.void | Flag.EXACT * message.is_exact
        data, code = message.fingerprint, _CODES[kind]
        return cls(
            code=code,
            microbatch=message.index,
            flags=flags,
            inputs=data.inputs,
            target=data.target,
            **numbers,
        )

    @classmethod
    def read(cls, packet: Tensor) -> Header:
        return cls(*_NUMBERS.unpack_from(packet.numpy().data))

    def packed(self) -> Tensor:
        return self.write(torch.zeros(HEADER_BYTES, dtype=torch.uint8))

    def write(self, packet: Tensor) -> Tensor:
        """The packet, which begins with the header now."""
        _NUMBERS.pack_into(packet.numpy().data, 0, *self)
        return packet

    @property
    def kind(self) -> MessageKind:
        return _KINDS[self.code]

    def message(self, **parts: Any) -> Message:
        """The message, with these parts."""
        return Message(
            self.microbatch,
            void=bool(self.flags & Flag.VOID),
            fingerprint=Fingerprint(self.inputs, self.target),
            is_exact=bool(self.flags & Flag.EXACT),
            **parts,
        )


_NUMBERS: Final = struct.Struct(f"{len(Header._fields)}q")
HEADER_BYTES: Final = 128
"""A payload after it is aligned."""


class _Form:
    """Everything about a tensor but its elements, which lie in the payload without gaps.

    Of an expanded tensor (stride 0) the payload has every element once: `core` is its shape there.
    """

    def __init__(
        self, dtype: str, shape: Sequence[int], stride: Sequence[int], on_host: bool
    ) -> None:
        self.dtype: torch.dtype = getattr(torch, dtype.removeprefix("torch."))
        if overlap(_core(shape, stride), stride):
            stride = torch.empty(shape, device="meta").stride()
        self.shape, self.stride, self.on_host = tuple(shape), tuple(stride), on_host
        self.core = _core(shape, stride)
        like = torch.empty_strided(self.core, stride, dtype=self.dtype, device="meta")
        self.dense, self.nbytes = torch.empty_like(like).stride(), like.numel() * like.itemsize

    def view(self, payload: Tensor, offset: int) -> Tensor:
        """The elements in the payload, from this byte on."""
        elements = payload.view(self.dtype)
        first = elements.storage_offset() + offset // self.dtype.itemsize
        return elements.as_strided(self.core, self.dense, first)

    def read(self, payload: Tensor, offset: int) -> Tensor:
        elements = self.view(payload, offset)
        if self.on_host:
            elements = elements.cpu()
        if self.dense != self.stride:
            elements = elements.new_empty_strided(self.core, self.stride).copy_(elements)
        if self.core != self.shape:
            elements = elements.expand(self.shape)
        return elements.data  # a version counter of its own: tensors share the payload's memory


def _core(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """The shape with every dimension of stride 0 as 1."""
    pairs = zip(shape, stride, strict=True)
    return tuple(min(size, 1) if step == 0 else size for size, step in pairs)


class Description:
    """The form of a message: both ends make it of the same JSON."""

    def __init__(self, plain: Any) -> None:
        self._plain = plain
        forms: list[_Form] = []
        decode(plain, {"tensor": lambda content: forms.append(_Form(*content))})
        offsets, self.size = aligned(form.nbytes for form in forms)
        self._parts = list(zip(forms, offsets, strict=True))
        self.layout: Layout = tuple(
            None if form.on_host else (offset, form.dtype, form.shape, form.stride)
            for form, offset in self._parts
        )

    def pack(self, tensors: Sequence[Tensor], payload: Tensor) -> None:
        """Copy the tensors of a message to its payload."""
        for (form, offset), tensor in zip(self._parts, tensors, strict=True):
            core = tensor.detach().as_strided(form.core, tensor.stride())
            form.view(payload, offset).copy_(core)

    def unpack(self, header: Header, payload: Tensor, device: torch.device) -> Message:
        """The message, with tensors in the memory of its payload."""
        parts = iter(self._parts)

        def next_tensor(_: Any) -> Tensor:
            form, offset = next(parts)
            return form.read(payload, offset)

        def device_here(parts: Sequence[str]) -> torch.device:
            return torch.device("cpu") if torch.device(*parts).type == "cpu" else device

        special = {"tensor": next_tensor, "device": device_here}
        values, gradients, scale, found_inf = decode(self._plain, special)
        return header.message(
            values=dict(values), gradients=dict(gradients), scale=scale, found_inf=found_inf
        )


class Describer:
    """Describes messages of one kind between stages on `device`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._text = ""
        self._packed: Any = None
        """The form of packets that are laid out as the description says."""
        self.description = Description([])
        """That of the last message."""

    def describe(self, message: Message) -> tuple[bytes, Tensor]:
        """The description's text if it is not the last one; the payload.

        On a CPU there is space for the header before it. On a GPU it may be the message's packet.
        """
        packet = message.packet if self._device.type == "cuda" else None
        if packet is not None and packet.form is self._packed:
            return b"", packet.memory
        plain, tensors = self._encoded(message)
        text = json.dumps(plain)
        if text == self._text:
            text = ""
        else:
            self._text, self._packed, self.description = text, None, Description(json.loads(text))
        if packet is not None and packet.form.layout == self.description.layout:
            self._packed = packet.form
            return text.encode(), packet.memory
        before = 0 if self._device.type == "cuda" else HEADER_BYTES
        size = before + self.description.size
        memory = torch.empty(size, dtype=torch.uint8, device=self._device)
        self.description.pack(tensors, memory[before:])
        return text.encode(), memory

    def _encoded(self, message: Message) -> tuple[Any, list[Tensor]]:
        """The message's form as JSON, and the tensors in its order."""
        tensors: list[Tensor] = []

        def special(value: Any, _: str) -> dict[str, Any] | None:
            if not isinstance(value, Tensor):
                return None
            if value.layout is not torch.strided:
                raise InputError(f"a value of layout {value.layout}")
            tensors.append(value)
            on_host = value.device.type == "cpu" and self._device.type != "cpu"
            return {"tensor": (str(value.dtype), value.shape, value.stride(), on_host)}

        def named(part: Mapping[str, Any]) -> list[Any]:
            return [[name, encode(value, special)] for name, value in part.items()]

        try:
            parts = [named(message.values), named(message.gradients)]
            parts += [encode(value, special) for value in (message.scale, message.found_inf)]
        except InputError as error:
            raise InputError(
                f"{error} crosses from one rank to another; only dense tensors and plain values "
                "do: put both stages on one rank with stage_to_rank="
            ) from None
        return parts, tensors
