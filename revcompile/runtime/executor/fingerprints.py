"""Fingerprints of batches: inputs on one rank and targets on another have to belong together.

The rank of the first stage uses the inputs, that of the last stage the targets. Each is usually
given both: the first sends a fingerprint of its target with the micro-batch, and the last compares
it with the target it is about to use. Without a target on the first rank, inputs are compared.

A fingerprint covers types, shapes and at most a few thousand elements, some of each of the first
128 samples. It depends on the order of the samples, and is the same on every device and in every
process. Reading tensors on a GPU makes the host wait: of these only the first few micro-batches and
then every 64th are compared.
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

_ROWS: Final = 128
_COLUMNS: Final = 16
_ELEMENTS: Final = _ROWS * _COLUMNS
_FIRST: Final = 8
_EVERY: Final = 64
_MASK: Final = (1 << 63) - 1


@dataclass(frozen=True)
class Fingerprint:
    """Of the data of a micro-batch, as its first stage was given it; 0: not compared."""

    inputs: int = 0
    target: int = 0
    samples: int = 0
    """How many there are: outputs do not always tell."""

    @classmethod
    def of(
        cls, inputs: Any, target: Any, microbatch: int, samples: int = 0, is_last: bool = False
    ) -> Fingerprint:
        """Of the target; of the inputs where there is none; not compared if one stage has both."""
        if is_last:
            return cls(samples=samples)
        of_target = fingerprint(target, microbatch)
        return cls(0 if of_target else fingerprint(inputs, microbatch), of_target, samples)


NOT_COMPARED: Final = Fingerprint()


def compared(sent: Fingerprint, inputs: Any, target: Any, microbatch: int) -> str | None:
    """Compare what the last stage was given with the fingerprint from the first stage.

    Inputs are compared only without a target: random augmentation may change them on every rank in
    its own way, and only those of the first rank are used.

    Returns:
        "targets" or "inputs" if they differ, else None. A loss without target is always right.
    """
    if target is None:
        return None
    for name, known, given in (("targets", sent.target, target), ("inputs", sent.inputs, inputs)):
        here = fingerprint(given, microbatch) if known else 0
        if known and here and known != here:
            return name
    return None


def fingerprint(tree: Any, microbatch: int) -> int:
    """A positive number; 0 for an empty tree, or where reading a GPU's memory is not due."""
    is_due = microbatch < _FIRST or microbatch % _EVERY == 0
    if not is_due and isinstance(tree, Tensor) and tree.is_cuda:  # what most steps are given
        return 0
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
    elements = _sample(leaf.detach()).resolve_conj().resolve_neg().contiguous()
    return about + zlib.crc32(elements.reshape(-1).view(torch.uint8).cpu().numpy().data)


def _sample(tensor: Tensor) -> Tensor:
    """Elements from all over a tensor; which ones does not depend on its strides."""
    if tensor.numel() <= _ELEMENTS:
        return tensor
    columns = _columns(tuple(tensor.shape[1:]), tensor.device)
    rows = _ELEMENTS if not columns else _ELEMENTS // len(columns[0])
    step = -(-tensor.shape[0] // rows)
    indices: tuple[slice | Tensor, ...] = (slice(None), *columns)
    return tensor[::step][indices]


@functools.lru_cache(maxsize=64)
def _columns(shape: Sequence[int], device: torch.device) -> tuple[Tensor, ...]:
    """Random indices into a sample, always the same: its first elements are often constant."""
    if not shape:
        return ()
    size = torch.Size(shape).numel()
    generator = torch.Generator().manual_seed(1)
    flat = torch.randint(size, (min(size, _COLUMNS),), generator=generator)
    return tuple(index.to(device) for index in torch.unravel_index(flat, tuple(shape)))
