"""How a stage that is not reversible stores its inputs until backward.

Unchanged; in fewer bits, so that backward computes with rounded values; or in the host's memory.
The last stage, and methods with one micro-batch in the pipeline at a time, have nothing in flight
while other micro-batches pass, and store inputs unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from revcompile.errors import InputError
from revcompile.ir.precision_rewrites import declared_wide
from revcompile.ir.program import StageProgram
from revcompile.kernels.autocast import in_dtype
from revcompile.runtime.stage.static_buffers import BufferPool
from revcompile.schedule import Keep, Order


@dataclass(eq=False)
class OffloadedTensor:
    """Nested values whose tensors are in the host's memory, or on their way back from it."""

    host: Any
    back: Any = None
    event: torch.cuda.Event | None = None
    """When what is on its way has arrived."""


class PinnedPool:
    """Pinned memory that is allocated once and used again, and a stream to copy on.

    All copies are on one stream, so that memory can be given out again as soon as its tensor has
    been asked back. `waits`: the device computes on only when what was put away is here. On the
    CPU a copy is just made.

    >>> pool = PinnedPool(torch.device("cpu"))
    >>> offloaded = pool.put(torch.ones(2))
    >>> pool.take(offloaded)
    tensor([1., 1.])
    """

    def __init__(self, device: torch.device, waits: bool = False) -> None:
        self._device, self._waits = device, waits
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pool = BufferPool()

    @property
    def buffers(self) -> int:
        """How many pinned buffers have been allocated."""
        return len(self._pool)

    def put(self, values: Any) -> OffloadedTensor:
        """Have them copied; nobody waits for it."""
        with self._beside(follows=True):
            away = OffloadedTensor(pytree.tree_map_only(Tensor, self._copied, values))
        if self._waits and self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return away

    def bring(self, away: OffloadedTensor) -> None:
        """Have them copied back; nobody waits for it."""
        if away.back is not None:
            return
        with self._beside():
            away.back = pytree.tree_map_only(
                Tensor, lambda t: t.to(self._device, non_blocking=True, copy=True), away.host
            )
            away.event = self._stream.record_event() if self._stream is not None else None

    def take(self, away: OffloadedTensor) -> Any:
        """The values on the device; what the device computes next waits for them."""
        self.bring(away)
        if away.event is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(away.event)
            pytree.tree_map_only(Tensor, lambda t: t.record_stream(stream), away.back)
        return away.back

    def look(self, away: OffloadedTensor) -> Any:
        """The values in the host's memory, once they are there."""
        if self._stream is not None:
            self._stream.synchronize()
        return away.host

    def _copied(self, tensor: Tensor) -> Tensor:
        buffer = self._pool.take(
            (tensor.shape, tensor.stride(), tensor.dtype),
            lambda: torch.empty_like(
                tensor, device="cpu", pin_memory=self._stream is not None, requires_grad=False
            ),
        )
        buffer.copy_(tensor, non_blocking=True)
        if self._stream is not None and tensor.is_cuda:
            tensor.record_stream(self._stream)
        return buffer

    @contextmanager
    def _beside(self, follows: bool = False) -> Iterator[None]:
        """On the stream for copies; `follows`: after what the device has been given so far."""
        if self._stream is None:
            yield
            return
        if follows:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield


BUFFER_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)
_STATE_KEYS: Final = ({"values"}, {"values", "scale"}, {"away"})
"""Keys of the dicts by which a checkpoint describes a compressed or offloaded tensor."""


@dataclass(frozen=True)
class Buffers:
    """The dtype (None: their own) and the place in which inputs are stored until backward.

    Only float32 is compressed.
    """

    dtype: torch.dtype | None = None
    offload: bool = False
    """Store them in the host's memory; on the CPU this does nothing."""

    def __post_init__(self) -> None:
        if self.dtype not in (None, *BUFFER_DTYPES):
            raise InputError(
                f"buffers={self.dtype!r}; use torch.bfloat16, torch.float16, torch.float8_e4m3fn, "
                '"offload" or None (as they are)'
            )

    def __str__(self) -> str:
        kind = "as they are" if self.dtype is None else f"in {str(self.dtype).split('.')[1]}"
        if not self.offload:
            return kind
        return "on the host" if self.dtype is None else f"{kind} on the host"

    @property
    def bytes_each(self) -> int | None:
        """Bytes on the device for an element of a stored float32 input; None: unchanged."""
        if self.offload:
            return 0
        return self.dtype.itemsize if self.dtype is not None else None


BuffersLike = torch.dtype | Literal["offload"] | Buffers | None
"""Accepted by `buffers=`."""


def buffers_of(given: BuffersLike) -> Buffers:
    """The settings for a value of `buffers=`.

    >>> buffers_of(torch.bfloat16).bytes_each, buffers_of("offload").bytes_each
    (2, 0)
    """
    if isinstance(given, Buffers):
        return given
    if given == "offload":
        return Buffers(offload=True)
    return Buffers(given)


class Scaled(NamedTuple):
    """A float8 tensor, and the factor that its elements were divided by."""

    values: Tensor
    scale: Tensor


def compress(value: Tensor, dtype: torch.dtype) -> Tensor | Scaled:
    """A float32 tensor in fewer bits; float8 is scaled so that the largest element fits exactly.

    >>> compress(torch.tensor([7.0, -0.5]), torch.float8_e4m3fn).values.float()
    tensor([448., -32.])
    """
    if dtype is not torch.float8_e4m3fn:
        return in_dtype(value, dtype)
    limits = torch.finfo(torch.float32)
    scale = (value.abs().amax() / torch.finfo(dtype).max).clamp(min=limits.tiny)
    return Scaled((value / scale).to(dtype), scale)


def decompress(value: Tensor | Scaled) -> Tensor:
    return value.values.float() * value.scale if isinstance(value, Scaled) else value.float()


class ActivationStore:
    """Stores and loads what one stage keeps of the micro-batches in flight."""

    def __init__(self, program: StageProgram, settings: Buffers) -> None:
        self._settings, self._kept = settings, program.kept
        self._names = _inputs_kept(program) if settings != Buffers() else frozenset()
        self.low = self._names & declared_wide(program)
        """Inputs that a compiled program takes as they are stored."""
        self.sent = self.low & frozenset(program.sends_back)
        """Those of them that every program does: they are sent to the stage before that way."""
        self._is_first = program.index == 0
        self.pool: PinnedPool | None = None
        """The host memory for offloaded inputs, from the first one on."""

    @property
    def offloads(self) -> bool:
        return self._settings.offload

    @property
    def is_lossy(self) -> bool:
        """Does backward compute with rounded inputs?"""
        return bool(self._names) and self._settings.dtype is not None

    def store(self, kept: tuple[Any, ...]) -> tuple[Any, ...]:
        """The values that a forward pass keeps, compressed and offloaded as configured."""
        return self._mapped(kept, lambda _, value: self._store(value))

    def _mapped(
        self, kept: tuple[Any, ...], function: Callable[[str, Any], Any]
    ) -> tuple[Any, ...]:
        """A function of name and value applied to those that are not stored as they are."""
        if not self._names:
            return kept
        pairs = zip(self._kept, kept, strict=True)
        return tuple(function(name, v) if name in self._names else v for name, v in pairs)

    def _store(self, value: Any) -> Any:
        # Single numbers stay unchanged: a grid must be exact.
        if not isinstance(value, Tensor) or value.numel() < 2 or not value.is_floating_point():
            return value
        dtype = self._settings.dtype
        small = compress(value, dtype) if dtype and value.dtype == torch.float32 else value
        pool = self._pool_for(value.device)
        return small if pool is None else pool.put(small)

    def _pool_for(self, device: torch.device) -> PinnedPool | None:
        if self._settings.offload and self.pool is None and device.type == "cuda":
            # The caller may write into the first stage's batch once the step is over.
            self.pool = PinnedPool(device, waits=self._is_first)
        return self.pool

    def load(self, kept: tuple[Any, ...], as_stored: bool = False) -> tuple[Any, ...]:
        """Stored values as a backward program takes them: those in `sent`, or in `low`, as they are
        stored, but for float8, which has no meaning without its scale.
        """
        unchanged = self.low if as_stored else self.sent
        return self._mapped(kept, lambda name, value: self._load(value, name in unchanged))

    def _load(self, value: Any, as_stored: bool) -> Any:
        if isinstance(value, OffloadedTensor):
            assert self.pool is not None
            value = self.pool.take(value)
        is_low = isinstance(value, Scaled) or (self._is_compressed(value) and not as_stored)
        return decompress(value) if is_low else value

    def are_read_in(self, dtype: torch.dtype | None) -> bool:
        """Are values stored, here or at the next stage, as layers read them under autocast?"""
        return dtype is not None and dtype == self._settings.dtype

    def _is_compressed(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.dtype == self._settings.dtype

    def prefetch(self, kept: tuple[Any, ...]) -> None:
        """Start to copy back what the next backward pass will load."""
        if self.pool is not None:
            for value in kept:
                if isinstance(value, OffloadedTensor):
                    self.pool.bring(value)

    # -- checkpoints --------------------------------------------------------------------------

    def state(self, kept: tuple[Any, ...]) -> list[Any]:
        """Stored values as tensors, and dicts that say how they are stored."""
        return list(self._mapped(kept, lambda _, value: self._state_of(value)))

    def _state_of(self, value: Any) -> Any:
        if isinstance(value, OffloadedTensor):
            assert self.pool is not None
            return {"away": self._state_of(self.pool.look(value))}
        if isinstance(value, Scaled):
            return value._asdict()
        return {"values": value} if self._is_compressed(value) else value

    def load_state(self, saved: list[Any], device: torch.device) -> tuple[Any, ...]:
        """Stored values from a `state`, perhaps of another machine, for a stage on this device."""
        return tuple(self._from_state(value, device) for value in saved)

    def _from_state(self, value: Any, device: torch.device) -> Any:
        if not isinstance(value, dict) or value.keys() not in _STATE_KEYS:
            return value
        if "away" not in value:
            small = Scaled(**value) if "scale" in value else value["values"]
            return small if value["values"].dtype == self._settings.dtype else decompress(small)
        offloaded, pool = self._from_state(value["away"], device), self._pool_for(device)
        if pool is not None:
            return pool.put(offloaded)
        return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), offloaded)


def _inputs_kept(program: StageProgram) -> frozenset[str]:
    """Inputs that backward computes with again, and that are in flight for a while."""
    if program.is_last or program.method.order is Order.LOCKED:
        return frozenset()
    read = (name for unit in program.units if unit.keep is Keep.INPUT for name in unit.inputs)
    return frozenset(read) & frozenset(program.kept)
