"""The strides of streams: a branch reads a rebuilt stream with the strides that it had in forward.

Random numbers are drawn in memory order, and layers choose kernels by strides. With other strides,
dropout would drop other elements in the rebuild. Therefore both streams of a chain enter it with
equal strides (`alike`), and a sum and its inverse keep those of their stream (`like`). A
rearrangement stores the strides before it, and its inverse restores them (`with_strides`).
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def is_traced() -> bool:
    """Whether `torch.export` or `torch.jit.trace` records this call: nothing is rebuilt then.

    Strides stay as they come, because they may depend on the batch size, which may be symbolic.
    """
    return torch.compiler.is_exporting() or torch._C._is_tracing()


def alike(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Two streams, both with the usual strides of the second."""
    of_b = usual(b)
    return of_b if a is b else with_strides(a, of_b.stride()), of_b


def like(stream: Tensor, x: Tensor) -> Tensor:
    """`x` with the strides of a stream, if it has the shape of the stream."""
    return with_strides(x, stream.stride()) if x.shape == stream.shape else x


def usual(x: Tensor) -> Tensor:
    """The tensor with its usual strides."""
    return with_strides(x, usual_strides(x))


def with_strides(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """The tensor with these strides: itself, a view, or a copy.

    >>> with_strides(torch.ones(2, 3), (1, 2)).stride()
    (1, 2)
    """
    # Under transforms of `torch.func`, strides mean less, and nothing is rebuilt.
    if is_traced() or x.stride() == strides or torch._C._are_functorch_transforms_active():
        return x
    sizes = zip(x.shape, x.stride(), strides, strict=True)
    if all(size == 1 or old == new for size, old, new in sizes):
        return x.as_strided(x.shape, strides)
    return x.new_empty_strided(x.shape, strides).copy_(x)


def usual_strides(x: Tensor) -> tuple[int, ...]:
    """The strides of a sum with `x`: the same order of dimensions, without gaps.

    Dimensions of size 1 can have any stride; they get the one that their memory format usually has.

    >>> usual_strides(torch.ones(2, 6)[:, ::2]), usual_strides(torch.ones(3, 2).T)
    ((3, 1), (1, 2))
    """
    if is_traced() or (x.is_contiguous() and 1 not in x.shape):
        return x.stride()
    return _usual_strides(x.shape, x.stride())


@functools.lru_cache(maxsize=256)
def _usual_strides(shape: torch.Size, strides: tuple[int, ...]) -> tuple[int, ...]:
    x = torch.empty_like(torch.empty_strided(shape, strides, device="meta"))  # has no gaps
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    for memory_format in (torch.contiguous_format, formats.get(x.ndim)):
        if memory_format is not None and x.is_contiguous(memory_format=memory_format):
            return torch.empty_like(x, memory_format=memory_format).stride()
    return x.stride()
