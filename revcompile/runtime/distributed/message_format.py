"""Messages as bytes: a header of a few numbers, a description when it changes, the tensors.

Descriptions are JSON and never unpickled. Tensors arrive with the strides they were sent with:
kernels are chosen by them, and results must not depend on which rank a stage is on.
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

from revcompile.errors import InputError, VerificationError
from revcompile.runtime.checkpoint.tree import decode, encode
from revcompile.runtime.executor.fingerprints import Fingerprint
from revcompile.runtime.executor.transport import Message, MessageKind
from revcompile.runtime.stage.static_buffers import Layout
from revcompile.runtime.stage.tensors import aligned, keeps_strides, span

HEADER: Final = 8
"""How many int64 a header has."""
_KINDS: Final = tuple(MessageKind)
_CODES: Final = {kind: code for code, kind in enumerate(_KINDS)}
_MOST_TEXT: Final = 1 << 26
"""Bytes of a description."""
_MOST_BYTES: Final = 1 << 44
"""Bytes of a message: no machine has as much memory."""


class Flag(enum.IntFlag):
    """What a header announces besides its tensors."""

    VOID = 1
    """The micro-batch was lost."""
    DESCRIBED = 2
    """A description follows; without it, the last one of this kind of message holds."""
    END = 4
    """The last message."""
    ABORT = 8
    """The sender stops; the description says why."""
    SEPARATE = 16
    """The tensors follow in a packet of their own."""
    EXACT = 32
    """The values are those of the forward pass, but for rounding."""


NO_FLAG: Final = Flag(0)
_NO_FINGERPRINT: Final = Fingerprint()
_ALL_FLAGS: Final = sum(Flag)


@dataclass(frozen=True)
class Header:
    """The first part of a message, of fixed size."""

    kind: MessageKind
    index: int
    flags: Flag = NO_FLAG
    length: int = 0
    """Bytes of the description."""
    sequence: int = 0
    """The number of the message on its channel."""
    scale: float | None = None
    fingerprint: Fingerprint | None = None

    def numbers(self) -> list[int]:
        """The header as `HEADER` numbers of int64."""
        scale = struct.unpack("q", struct.pack("d", self.scale))[0] if self.scale else 0
        data, code = self.fingerprint or _NO_FINGERPRINT, _CODES[self.kind]
        plain = [code, self.index, int(self.flags), self.length, self.sequence, scale]
        return [*plain, data.inputs, data.target]

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Header:
        """Read what `numbers` gave."""
        code, index, flags, length, sequence, bits, inputs, target = numbers
        (scale,) = struct.unpack("d", struct.pack("q", bits))
        data = Fingerprint(inputs, target) if inputs or target else None
        is_known = 0 <= code < len(_KINDS) and 0 <= flags <= _ALL_FLAGS
        if not (is_known and 0 <= length <= _MOST_TEXT and index >= 0 and 0 <= scale < math.inf):
            raise VerificationError(
                f"a message's header is {numbers}; either the ranks run different versions of "
                "revcompile, or something else sends to their ports"
            )
        return cls(_KINDS[code], index, Flag(flags), length, sequence, scale or None, data)

    def message(self, **parts: Any) -> Message:
        """The message, with these parts."""
        flags, data = self.flags, self.fingerprint
        is_void, is_exact = Flag.VOID in flags, Flag.EXACT in flags
        return Message(
            self.index, void=is_void, scale=self.scale, fingerprint=data, is_exact=is_exact, **parts
        )


@dataclass(frozen=True)
class TensorFormat:
    """Everything about a tensor but its elements.

    Of an expanded tensor (stride 0) the repeated elements are sent once: `core` is its shape
    without the repetition.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    on_host: bool = False
    """Is it on the CPU although the stage computes on another device?"""

    @classmethod
    def of(cls, tensor: Tensor, device: torch.device) -> TensorFormat:
        """The format of a tensor of a stage on `device`."""
        if tensor.layout is not torch.strided:
            raise InputError(
                f"a value of layout {tensor.layout} crosses from one rank to another; only dense "
                "tensors do: put both stages on one rank with stage_to_rank=, or use .to_dense()"
            )
        on_host = tensor.device.type == "cpu" and device.type != "cpu"
        stride = tuple(tensor.stride())
        core = _core(tensor.shape, stride)
        if not keeps_strides(core, stride):  # a sliding window
            stride = torch.empty(tensor.shape, device="meta").stride()
        return cls(tensor.dtype, tuple(tensor.shape), stride, on_host)

    @property
    def core(self) -> tuple[int, ...]:
        return _core(self.shape, self.stride)

    @property
    def numel(self) -> int:
        """Elements to send."""
        return math.prod(self.core)

    def to_bytes(self, tensor: Tensor) -> Tensor:
        """The bytes to send; not copied if the elements are without gaps in memory."""
        tensor = tensor.detach().resolve_conj().resolve_neg()
        if tuple(tensor.stride()) == self.stride:
            core = tensor.as_strided(self.core, self.stride)
            if self._dense:
                return core.as_strided((self.numel,), (1,)).view(torch.uint8)
            tensor = core
        return tensor.contiguous().reshape(-1).view(torch.uint8)

    def from_bytes(self, buffer: Tensor) -> Tensor:
        """The tensor whose bytes `to_bytes` gave."""
        elements = buffer.view(self.dtype)
        if self.on_host:
            elements = elements.cpu()
        if not self._dense:
            spread = elements.new_empty(span(self.core, self.stride))
            spread.as_strided(self.core, self.stride).copy_(elements.view(self.core))
            elements = spread
        return elements.as_strided(self.shape, self.stride)

    @property
    def _dense(self) -> bool:
        return span(self.core, self.stride) == self.numel

    @property
    def is_plain(self) -> bool:
        """Are its bytes the tensor as it lies in memory?"""
        return self._dense and not self.on_host and self.core == self.shape


def _core(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """The shape with every dimension of stride 0 as 1."""
    return tuple(
        min(size, 1) if step == 0 else size for size, step in zip(shape, stride, strict=True)
    )


@dataclass(frozen=True)
class Packing:
    """Where in a buffer of `size` bytes the tensors of a message are."""

    formats: tuple[TensorFormat, ...]
    slices: tuple[slice, ...]
    size: int
    layout: Layout

    @classmethod
    def of(cls, formats: Sequence[TensorFormat]) -> Packing:
        sizes = [form.numel * form.dtype.itemsize for form in formats]
        offsets, end = aligned(sizes)
        layout = tuple(
            (offset, form.dtype, form.shape, form.stride) if form.is_plain else None
            for form, offset in zip(formats, offsets, strict=True)
        )
        slices = (slice(o, o + size) for o, size in zip(offsets, sizes, strict=True))
        return cls(tuple(formats), tuple(slices), end, layout)

    def pack(self, tensors: Sequence[Tensor], buffer: Tensor) -> None:
        for part, form, tensor in zip(self.slices, self.formats, tensors, strict=True):
            if form.numel:
                buffer[part].copy_(form.to_bytes(tensor))


def describe(
    message: Message, device: torch.device
) -> tuple[bytes, list[tuple[TensorFormat, Tensor]]]:
    """A message's description, and its tensors in the order of the description."""
    tensors: list[tuple[TensorFormat, Tensor]] = []

    def special(value: Any, _: str) -> dict[str, Any] | None:
        if not isinstance(value, Tensor):
            return None
        form = TensorFormat.of(value, device)
        tensors.append((form, value))
        dtype = str(form.dtype).removeprefix("torch.")
        return {"tensor": [dtype, list(form.shape), list(form.stride), form.on_host]}

    try:
        parts = [encode(dict(part), special) for part in message.parts]
    except InputError as error:
        raise InputError(
            f"{error} crosses from one rank to another; only tensors and plain values do: put "
            "both stages on one rank with stage_to_rank="
        ) from None
    return json.dumps(parts).encode(), tensors


class Describer:
    """Describes messages of one kind; a description is sent only when it changes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last = b""
        self._signature: tuple[Any, ...] | None = None
        self._form: Any = None
        """The form of packets that the last description fits."""
        self.packing = Packing.of(())

    def describe(self, message: Message) -> tuple[bytes, Tensor | list[Tensor]]:
        """The description, empty if it is the last one; the message's bytes, or its tensors.

        There are bytes if the message has a packet that is laid out as `packing` says.
        """
        text, packet = b"", message.packet
        if packet is not None and packet.form is self._form:
            return text, packet.memory
        signature = _signature(message)
        if signature is not None and signature == self._signature:
            tensors = [v for part in message.parts for v in part.values() if isinstance(v, Tensor)]
        else:
            text, described = describe(message, self._device)
            tensors = [tensor for _, tensor in described]
            self._signature = signature
            if text == self._last:
                text = b""
            else:
                self._last, self._form = text, None
                self.packing = Packing.of([form for form, _ in described])
        if packet is not None and packet.form.layout == self.packing.layout:
            self._form = packet.form
            return text, packet.memory
        return text, tensors


def _signature(message: Message) -> tuple[Any, ...] | None:
    """A cheap key of a message's description; None for nested values, which have none."""
    key: list[Any] = []
    for part in message.parts:
        for name, value in part.items():
            if isinstance(value, Tensor) and value.layout is torch.strided:
                key += (name, value.dtype, value.shape, value.stride(), value.device)
            elif value is None or type(value) in (bool, int):
                key += (name, type(value), value)
            else:
                return None
        key.append(None)
    return tuple(key)


class Description:
    """A received description: parsed once, used for every message that follows it."""

    def __init__(self, text: bytes) -> None:
        self._parts = json.loads(text)
        formats = list(_formats(self._parts))
        size = sum(form.numel * form.dtype.itemsize for form in formats)
        if size > _MOST_BYTES:
            raise InputError(f"a message announces {size} bytes")
        self.packing = Packing.of(formats)

    @property
    def layout(self) -> Layout:
        return self.packing.layout

    def message(self, header: Header, memory: Tensor, device: torch.device) -> Message:
        """The message, from the bytes of its tensors."""
        pairs = iter(zip(self.packing.formats, self.packing.slices, strict=True))

        def next_tensor(_: Any) -> Tensor:
            form, part = next(pairs)
            # .data: a version counter of its own, because tensors share a packet's memory
            return form.from_bytes(memory[part]).data

        def device_here(name: str) -> torch.device:
            return torch.device("cpu") if torch.device(name).type == "cpu" else device

        special = {"tensor": next_tensor, "device": device_here}
        parts = [decode(part, special) for part in self._parts]
        if not all(isinstance(part, dict) for part in parts):
            raise InputError(f"expected values by name, got {self._parts!r:.80}")
        values, gradients, flag = parts
        found_inf = flag.get("found_inf")
        return header.message(values=values, gradients=gradients, found_inf=found_inf)


def _formats(part: Any) -> Iterator[TensorFormat]:
    """The tensors of a description, in the order in which they are read."""
    if isinstance(part, list):
        for item in part:
            yield from _formats(item)
    elif isinstance(part, dict):
        for tag, content in part.items():
            if tag == "tensor":
                yield _format(content)
            else:
                yield from _formats(content)


def _format(content: Any) -> TensorFormat:
    """A tensor's format, if it is one that `TensorFormat.of` makes."""
    try:
        name, shape, stride, on_host = content
        dtype = vars(torch)[name]
        form = TensorFormat(dtype, tuple(shape), tuple(stride), on_host)
        sizes = (*form.shape, *form.stride)
        is_known = isinstance(dtype, torch.dtype) and type(on_host) is bool
        is_known &= all(type(size) is int and 0 <= size < _MOST_BYTES for size in sizes)
        if is_known and keeps_strides(form.core, stride):
            return form
    except (TypeError, ValueError, KeyError):
        pass
    raise InputError(f"a message announces a tensor {content!r:.80}")
