"""Do inputs and targets of a micro-batch belong together? A fingerprint of what a rank was given.

The rank of the first stage reads inputs, that of the last stage targets. Each is usually given
both: the first sends a fingerprint of its target with the micro-batch, and the last compares it
with the target it is about to use. Without a target at the first rank, inputs are compared instead.

A fingerprint covers types, shapes and a sample of at most a few thousand elements, which reaches
every sample of a micro-batch of up to 128. It depends on their order, and is the same on every
device and in every process. Tensors on a GPU would make the host wait for the device: of these only
the first micro-batches and then every 64th are looked at.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from revcompile.errors import InputError

__all__ = ["Fingerprint", "compared", "fingerprint", "mixed_up"]

_ROWS: Final = 128
_COLUMNS: Final = 16
_ELEMENTS: Final = _ROWS * _COLUMNS
_FIRST: Final = 8
_EVERY: Final = 64
_MASK: Final = (1 << 63) - 1
_WHOLE_NUMBERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Fingerprint:
    """Of the data of a micro-batch, as its first stage was given it; 0 for what is not known."""

    inputs: int = 0
    target: int = 0

    @classmethod
    def of(cls, inputs: Any, target: Any, microbatch: int) -> Fingerprint:
        """Of the target; of the inputs where there is none."""
        found = fingerprint(target, microbatch)
        return cls(target=found) if found else cls(inputs=fingerprint(inputs, microbatch))


def compared(sent: Fingerprint, inputs: Any, target: Any, microbatch: int) -> str | None:
    """What was given to the last stage and is not what came with the micro-batch, or None.

    A loss without a target cannot be given a wrong one. Random augmentation may change inputs on
    every rank in its own way as long as the targets agree: those of other ranks are not used.
    """
    if target is None:
        return None
    for name, known, given in (("targets", sent.target, target), ("inputs", sent.inputs, inputs)):
        here = fingerprint(given, microbatch) if known else 0
        if known and here and known != here:
            return name
    return None


def mixed_up(where: str, what: str, first: str, last: str) -> InputError:
    """What to say where two ranks were given data of different samples."""
    return InputError(
        f"{where}: {last} was given other {what} than {first}, which reads the inputs: the model "
        "would see inputs with the targets of other samples. The ranks of one pipeline need the "
        "same batches in the same order, but a DistributedSampler, or shuffle=True without a seed, "
        "gives every rank its own. Write `for x, y in trainer.loader(dataset_or_dataloader, "
        "batch_size, epoch=epoch)`, which gives every rank the right batches"
    )


def fingerprint(tree: Any, microbatch: int) -> int:
    """A positive number; 0 where there is nothing to look at, or nothing to be looked at now."""
    leaves = [leaf for leaf in pytree.tree_leaves(tree) if leaf is not None]
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    is_due = microbatch < _FIRST or microbatch % _EVERY == 0
    on_device = any(tensor.device.type != "cpu" for tensor in tensors)
    if not leaves or (on_device and not is_due):
        return 0
    total = 17
    for leaf in leaves:
        total = (total * 1_000_003 + _of_leaf(leaf)) & _MASK
    return total or 1


def _of_leaf(leaf: Any) -> int:
    if not isinstance(leaf, Tensor):
        return zlib.crc32(repr(leaf).encode()) if isinstance(leaf, bool | int | float | str) else 0
    if leaf.is_nested:  # has no shape
        return zlib.crc32(f"{leaf.dtype}".encode())
    about = zlib.crc32(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
    is_plain = type(leaf) in (Tensor, nn.Parameter) and leaf.layout is torch.strided
    if not is_plain or leaf.is_meta or leaf.is_quantized or not leaf.numel():
        return about
    return about + _of_elements(leaf.detach())


def _of_elements(tensor: Tensor) -> int:
    """A weighted sum of the sampled elements' bits: of whole numbers, so the same everywhere."""
    found = _sample(tensor).resolve_conj().resolve_neg().contiguous()
    if found.is_complex():
        found = torch.view_as_real(found)
    bits = found.reshape(-1).view(_WHOLE_NUMBERS[found.element_size()]).to(torch.int64)
    return int((bits * _weights(bits.numel(), bits.device)).sum())


def _sample(tensor: Tensor) -> Tensor:
    """Elements from all over a tensor, by their indices: however it is laid out in memory."""
    if tensor.numel() <= _ELEMENTS:
        return tensor
    columns = _columns(tuple(tensor.shape[1:]), tensor.device)
    rows = _ELEMENTS if not columns else _ELEMENTS // len(columns[0])
    step = -(-tensor.shape[0] // rows)
    places: tuple[slice | Tensor, ...] = (slice(None), *columns)
    return tensor[::step][places]


@functools.lru_cache(maxsize=64)
def _columns(shape: Sequence[int], device: torch.device) -> tuple[Tensor, ...]:
    """Places within a sample, drawn once and for all: borders and padding are often constant."""
    if not shape:
        return ()
    size = torch.Size(shape).numel()
    generator = torch.Generator().manual_seed(1)
    flat = torch.randint(size, (min(size, _COLUMNS),), generator=generator)
    return tuple(index.to(device) for index in torch.unravel_index(flat, tuple(shape)))


@functools.lru_cache(maxsize=64)
def _weights(count: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    found = torch.randint(-(1 << 62), 1 << 62, (count,), generator=generator)
    return (2 * found + 1).to(device)
