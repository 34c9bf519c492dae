"""Fingerprints of batches: inputs on one rank and targets on another have to belong together.

The rank of the first stage uses the inputs, and the rank of the last stage uses the targets. Each
is usually given both. The first rank sends a fingerprint of its target with the micro-batch, and
the last rank compares it with its own target. If the first rank has no target, inputs are compared.

A fingerprint covers types, shapes and at most 2048 elements of each tensor, from all over the
batch. It depends on the order of the samples, and is the same on every device and in every process.
Reading tensors on a GPU makes the host wait, so these are compared only in the first few
micro-batches and then in every 64th.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

_ELEMENTS: Final = 2048
_FIRST: Final = 8
_EVERY: Final = 64
_MASK: Final = (1 << 63) - 1


@dataclass(frozen=True)
class Fingerprint:
    """Fingerprints of a micro-batch's data, as given to the first stage; 0: not compared."""

    inputs: int = 0
    target: int = 0
    samples: int = 0
    """How many samples there are; outputs do not always show it."""

    @classmethod
    def of(
        cls, inputs: Any, target: Any, microbatch: int, samples: int = 0, is_last: bool = False
    ) -> Fingerprint:
        """Fingerprint the target, or the inputs without a target; neither if one rank has both."""
        if is_last:
            return cls(samples=samples)
        of_target = fingerprint(target, microbatch)
        return cls(0 if of_target else fingerprint(inputs, microbatch), of_target, samples)


NOT_COMPARED: Final = Fingerprint()


def compared(sent: Fingerprint, inputs: Any, target: Any, microbatch: int) -> str | None:
    """Compare what the last stage was given with the fingerprint from the first stage.

    Inputs are compared only if the first rank had no target: each rank may augment its inputs at
    random, and only those of the first rank are used.

    Returns:
        "targets" or "inputs" if they differ, else None. Without a target here, nothing can differ.
    """
    if target is None:
        return None
    for name, known, given in (("targets", sent.target, target), ("inputs", sent.inputs, inputs)):
        here = fingerprint(given, microbatch) if known else 0
        if known and here and known != here:
            return name
    return None


def fingerprint(tree: Any, microbatch: int) -> int:
    """A positive number; 0 for an empty tree, or for GPU tensors that are not read this time."""
    is_due = microbatch < _FIRST or microbatch % _EVERY == 0
    leaves = [leaf for leaf in pytree.tree_leaves(tree) if leaf is not None]
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
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
    elements = leaf.detach()
    if leaf.numel() > _ELEMENTS:
        elements = elements[_places(tuple(leaf.shape), leaf.device)]
    elements = elements.resolve_conj().resolve_neg().contiguous()
    return about + zlib.crc32(elements.reshape(-1).view(torch.uint8).cpu().numpy().data)


@functools.lru_cache(maxsize=64)
def _places(shape: Sequence[int], device: torch.device) -> tuple[Tensor, ...]:
    """Fixed random indices: elements at regular distances are often equal, as those of padding."""
    generator = torch.Generator().manual_seed(1)
    flat = torch.randint(math.prod(shape), (_ELEMENTS,), generator=generator)
    return tuple(index.to(device) for index in torch.unravel_index(flat, tuple(shape)))
