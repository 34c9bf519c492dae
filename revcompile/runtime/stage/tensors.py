"""Helpers for tensors: non-finite elements, overlapping memory, flags, copies of nested values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from revcompile.errors import NonFiniteError
from revcompile.kernels.autocast import widest_dtype

TreeCopy = Callable[[Any], Any]
"""How a `state_dict` copies nested values: `clone_tree`, or `detach_tree` to share memory."""


SMALL: Final = 1 << 16
"""Tensors of at most this many elements are copied together, by one kernel."""
_ALIGNMENT: Final = 512


def aligned(sizes: Iterable[int]) -> tuple[list[int], int]:
    """The offsets of tensors of these sizes (in bytes) in one buffer, and the buffer's size.

    Tensors are aligned as by a GPU's allocator, because kernels are chosen by alignment.

    >>> aligned([4, 600, 8])
    ([0, 512, 1536], 2048)
    """
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    return offsets, end


def all_finite(tensors: list[Tensor]) -> list[bool]:
    """For each tensor, whether all its elements are finite; waits for the device once.

    A finite norm proves it in one fast pass. On a CPU this is the 2-norm, which may overflow: if
    it is not finite, the elements are tested.
    """
    tensors = [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in tensors]
    is_cuda = tensors[0].is_cuda
    norms = torch._foreach_norm(tensors, float("inf") if is_cuda else 2)
    if is_cuda:
        wide = widest_dtype(tensors[0].device)
        finite: list[bool] = torch.isfinite(torch.stack([norm.to(wide) for norm in norms])).tolist()
        return finite
    return [
        math.isfinite(norm) or bool(torch.isfinite(tensor).all())
        for norm, tensor in zip(norms, tensors, strict=True)
    ]


def not_finite(values: Mapping[str, Any]) -> list[str]:
    """The names of tensors with non-finite elements."""
    tensors = {n: v for n, v in values.items() if isinstance(v, Tensor) and v.numel()}
    floats = {n: t for n, t in tensors.items() if t.is_floating_point() or t.is_complex()}
    finite = all_finite(list(floats.values())) if floats else ()
    return [name for name, is_finite in zip(floats, finite, strict=True) if not is_finite]


def clone_preserving_strides(tensor: Tensor) -> Tensor:
    """A copy with the same strides, gaps included.

    >>> half = torch.zeros(2, 6)[:, :3]
    >>> half.clone().stride(), clone_preserving_strides(half).stride()
    ((3, 1), (6, 1))
    """
    plain = tensor.detach()
    if plain.layout is not torch.strided or overlaps(plain):
        return plain.clone()
    return plain.new_empty_strided(plain.shape, plain.stride()).copy_(plain)


def overlaps(tensor: Tensor) -> bool:
    """Whether elements share memory, as those of an expanded tensor do.

    >>> overlaps(torch.zeros(1, 3).expand(2, 3)), overlaps(torch.zeros(4, 6)[:, ::2])
    (True, False)
    """
    return overlap(tensor.shape, tensor.stride())


def overlap(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether elements of a tensor of this shape and stride share memory."""
    covered = 1  # elements that the dimensions of smaller strides cover
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size > 1 and step < covered:
            return True
        covered += step * (size - 1)
    return False


def add_gradients(
    sums: dict[str, Tensor],
    gradients: dict[str, Tensor | None],
    others: Iterable[Tensor],
    places: dict[str, Tensor] | None = None,
) -> None:
    """Add gradients to their sums, in place, and empty `gradients` to free each one early.

    Autograd may return one tensor twice (`p + q`), also among `others`, or one whose elements share
    memory. Sums never share memory. If `places` is given they are in it; it grows as needed.
    """
    used = {storage(gradient) for gradient in others}
    added = {n: g for n, g in gradients.items() if g is not None and n in sums}
    if added:
        torch._foreach_add_([sums[name] for name in added], list(added.values()))
    for name in tuple(gradients):
        gradient = gradients.pop(name)
        if gradient is None or name in added:
            continue
        if places is not None:
            if name not in places:
                places[name] = torch.empty_like(gradient)
            gradient = places[name].copy_(gradient)
        elif storage(gradient) in used or overlaps(gradient):
            gradient = gradient.clone(memory_format=torch.contiguous_format)
        used.add(storage(gradient))
        sums[name] = gradient


def storage(tensor: Tensor) -> int:
    """An identifier of a tensor's storage."""
    address: int = tensor.untyped_storage()._cdata
    return address


def clone_tree(tree: Any) -> Any:
    """Nested values with a clone of every tensor, strides included."""
    return pytree.tree_map_only(Tensor, clone_preserving_strides, tree)


def detach_tree(tree: Any) -> Any:
    """Nested values that share memory with the originals: read them before training continues."""
    return pytree.tree_map_only(Tensor, lambda t: t.detach(), tree)


def found_inf(gradients: Sequence[Tensor], before: Tensor) -> Tensor:
    """A flag: 1 if `before` is 1, or if an element of the gradients is not finite.

    >>> float(found_inf([torch.tensor([1.0, float("inf")])], torch.zeros(1)))
    1.0
    """
    flag = before.clone()
    gradients = [gradient for gradient in gradients if gradient.numel()]
    if not gradients:
        return flag
    if not flag.is_cuda:
        return flag if all(all_finite(gradients)) else flag.fill_(1.0)
    others = {g.dtype for g in gradients} - {torch.float64, torch.float32, torch.float16}
    if not others and not any(map(overlaps, gradients)):
        unscaled = torch.ones(1, dtype=torch.float32, device=flag.device)
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, flag, unscaled)
        return flag
    is_finite = torch.stack([torch.isfinite(gradient).all() for gradient in gradients]).all()
    return torch.maximum(flag, (~is_finite).to(flag.dtype))


def zero_if(flag: Tensor, gradients: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Zeros if the flag is set, else the gradients.

    >>> zero_if(torch.ones(1), {"weight": torch.tensor([1.0, float("nan")]), "bias": None})
    {'weight': tensor([0., 0.]), 'bias': None}
    """
    flag = flag.bool().reshape(())
    zeros = {g.dtype: g.new_zeros(()) for g in gradients.values() if g is not None}
    return {
        name: None if g is None else torch.where(flag, zeros[g.dtype], g)
        for name, g in gradients.items()
    }


def restore_if(flag: Tensor, tensors: Sequence[Tensor], snapshot: Sequence[Tensor]) -> None:
    """Copy a snapshot back into its tensors, bit for bit, if the flag is set.

    >>> weight = torch.tensor([1.0, 2.0])
    >>> snapshot = [weight.clone()]
    >>> restore_if(torch.ones(1), [weight.fill_(torch.nan)], snapshot)
    >>> weight
    tensor([1., 2.])
    """
    flag = flag.bool().reshape(())
    small: dict[Any, list[tuple[Tensor, Tensor]]] = {}
    for tensor, old in zip(tensors, snapshot, strict=True):
        target = tensor.detach()
        if target.numel() <= SMALL:
            small.setdefault((target.device, target.dtype), []).append((target, old))
        else:
            torch.where(flag, old, target, out=target)
    for pairs in small.values():  # concatenated by type: there may be hundreds
        now, before = (torch.cat([t.flatten() for t in part]) for part in zip(*pairs, strict=True))
        copy_parts([target for target, _ in pairs], torch.where(flag, before, now))


def copy_parts(targets: Sequence[Tensor], flat: Tensor) -> None:
    """Copy a flat tensor's parts, one after the other, to tensors."""
    parts = flat.split([target.numel() for target in targets])
    shaped = [part.view(target.shape) for part, target in zip(parts, targets, strict=True)]
    torch._foreach_copy_(list(targets), shaped)


def non_finite_error(
    stage: int, microbatch: int, gradients: Mapping[str, Tensor | None]
) -> NonFiniteError:
    """The error that names a stage's non-finite gradients."""
    bad = not_finite(gradients)
    more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
    return NonFiniteError(
        f"stage {stage}, micro-batch {microbatch}: the gradient of parameter {bad[0]}{more} "
        f"is not finite. The micro-batch was left out of the update; lower the learning rate, "
        "clip gradients, or look at this batch",
        stage=stage,
        microbatch=microbatch,
    )
