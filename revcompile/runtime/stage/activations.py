"""How a stage that is not reversible keeps its inputs until backward.

As they are; in fewer bits, so that backward computes with rounded values; or in the memory of the
host. Inputs of the last stage, and of methods with one micro-batch in the pipeline at a time, are
not kept while others pass, and stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from revcompile.errors import InputError
from revcompile.ir.program import StageProgram
from revcompile.runtime.stage.pinned_pool import OffloadedTensor, PinnedPool
from revcompile.schedule import Keep, Order

__all__ = ["ActivationStore", "Buffers", "BuffersLike", "Scaled", "buffers_of"]

_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)
_MARKED: Final = ({"values"}, {"values", "scale"}, {"away"})
"""What checkpoints name in an input that waits otherwise than it was."""


@dataclass(frozen=True)
class Buffers:
    """In which precision (None: their own) and where inputs wait for their backward pass.

    Only float32 is turned into something smaller.
    """

    dtype: torch.dtype | None = None
    offload: bool = False
    """In the host's memory, if the stage is on a GPU; nothing is moved on the CPU."""

    def __post_init__(self) -> None:
        if self.dtype not in (None, *_DTYPES):
            raise InputError(
                f"buffers={self.dtype}; use torch.bfloat16, torch.float16, torch.float8_e4m3fn, "
                '"offload" or None (as they are)'
            )

    def __str__(self) -> str:
        kind = "as they are" if self.dtype is None else f"in {str(self.dtype).split('.')[1]}"
        if not self.offload:
            return kind
        return "on the host" if self.dtype is None else f"{kind} on the host"

    @property
    def bytes_each(self) -> int | None:
        """What an element of a float32 input that waits takes on the device; None: all of it."""
        if self.offload:
            return 0
        return self.dtype.itemsize if self.dtype is not None else None


BuffersLike = torch.dtype | Literal["offload"] | Buffers | None
"""What `buffers=` may be."""


def buffers_of(given: BuffersLike) -> Buffers:
    """What `buffers=` means.

    >>> buffers_of(torch.bfloat16).bytes_each, buffers_of("offload").bytes_each
    (2, 0)
    """
    if isinstance(given, Buffers):
        return given
    if given == "offload":
        return Buffers(offload=True)
    return Buffers(given)


class Scaled(NamedTuple):
    """A tensor in eight bits, and what its elements are multiplied with."""

    values: Tensor
    scale: Tensor


def narrowed(value: Tensor, dtype: torch.dtype) -> Tensor | Scaled:
    """A float32 tensor in fewer bits; with eight, so that its largest element is the type's.

    >>> narrowed(torch.tensor([7.0, -0.5]), torch.float8_e4m3fn).values.float()
    tensor([448., -32.])
    """
    if dtype is not torch.float8_e4m3fn:
        return value.to(dtype)
    limits = torch.finfo(torch.float32)
    scale = (value.abs().amax() / torch.finfo(dtype).max).clamp(min=limits.tiny)
    return Scaled((value / scale).to(dtype), scale)


def widened(value: Tensor | Scaled) -> Tensor:
    """In float32 again."""
    return value.values.float() * value.scale if isinstance(value, Scaled) else value.float()


class ActivationStore:
    """What one stage keeps of the micro-batches in flight, in the form in which it waits."""

    def __init__(self, program: StageProgram, how: Buffers) -> None:
        self._how, self._kept = how, program.kept
        self._names = _inputs_kept(program) if how != Buffers() else frozenset()
        self._is_first = program.index == 0
        self.shelf: PinnedPool | None = None
        """Where inputs are while they are not on the device."""

    @property
    def offloads(self) -> bool:
        """Are inputs to wait in the host's memory?"""
        return self._how.offload

    def stored(self, kept: tuple[Any, ...]) -> tuple[Any, ...]:
        """What a forward pass keeps, as it waits."""
        if not self._names:
            return kept
        pairs = zip(self._kept, kept, strict=True)
        return tuple(self._put(v) if name in self._names else v for name, v in pairs)

    def _put(self, value: Any) -> Any:
        # Single numbers stay as they are: grids, for one, must be exact.
        if not isinstance(value, Tensor) or value.numel() < 2 or not value.is_floating_point():
            return value
        dtype = self._how.dtype
        small = narrowed(value, dtype) if dtype and value.dtype == torch.float32 else value
        shelf = self._shelf(value.device)
        return small if shelf is None else shelf.put(small)

    def _shelf(self, device: torch.device) -> PinnedPool | None:
        if self._how.offload and self.shelf is None and device.type == "cuda":
            # Whoever feeds the first stage may write into the batch once the step is over.
            self.shelf = PinnedPool(device, waits=self._is_first)
        return self.shelf

    def taken(self, kept: tuple[Any, ...]) -> tuple[Any, ...]:
        """What waits, as a backward pass computes with it."""
        if not self._names:
            return kept
        pairs = zip(self._kept, kept, strict=True)
        return tuple(self._take(v) if name in self._names else v for name, v in pairs)

    def _take(self, value: Any) -> Any:
        if isinstance(value, OffloadedTensor):
            assert self.shelf is not None
            value = self.shelf.take(value)
        return widened(value) if isinstance(value, Scaled) or self._is_narrow(value) else value

    def _is_narrow(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.dtype == self._how.dtype

    def announce(self, kept: tuple[Any, ...]) -> None:
        """This is what the next backward pass will want: let it be on its way."""
        if self.shelf is not None:
            for value in kept:
                if isinstance(value, OffloadedTensor):
                    self.shelf.bring(value)

    # -- checkpoints --------------------------------------------------------------------------

    def plain(self, kept: tuple[Any, ...]) -> list[Any]:
        """What waits, as tensors and plain values that say what they are."""
        pairs = zip(self._kept, kept, strict=True)
        return [self._plain(v) if name in self._names else v for name, v in pairs]

    def _plain(self, value: Any) -> Any:
        if isinstance(value, OffloadedTensor):
            assert self.shelf is not None
            return {"away": self._plain(self.shelf.look(value))}
        if isinstance(value, Scaled):
            return value._asdict()
        return {"values": value} if self._is_narrow(value) else value

    def restored(self, saved: list[Any], device: torch.device) -> tuple[Any, ...]:
        """What `plain` gave, here or elsewhere, as it waits at a stage on this device."""
        return tuple(self._restored(value, device) for value in saved)

    def _restored(self, value: Any, device: torch.device) -> Any:
        if not isinstance(value, dict) or value.keys() not in _MARKED:
            return value
        if "away" not in value:
            small = Scaled(**value) if "scale" in value else value["values"]
            return small if value["values"].dtype == self._how.dtype else widened(small)
        found, shelf = self._restored(value["away"], device), self._shelf(device)
        if shelf is not None:
            return shelf.put(found)
        return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), found)


def _inputs_kept(program: StageProgram) -> frozenset[str]:
    """Inputs that are computed with again, and kept while other micro-batches pass."""
    if program.index == program.stages - 1 or program.method.order is Order.LOCKED:
        return frozenset()
    read = (name for unit in program.units if unit.keep is Keep.INPUT for name in unit.inputs)
    return frozenset(read) & frozenset(program.kept)
