"""Numbers, tensor types and paths in short form, for tables and drawings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from revcompile.ir.types import TensorType
from revcompile.units import format_size

size = format_size


def amount(count: float) -> str:
    """A count with a metric prefix.

    >>> amount(30_391_144), amount(640)
    ('30.4 M', '640')
    """
    for unit, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= 0.9995 * scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f}"


def plural(count: int, noun: str) -> str:
    """`1 stage`, `2 stages`."""
    return f"{count} {noun}" + "s" * (count != 1)


def share(part: float, whole: float) -> str:
    """A part of a whole, in per cent."""
    return f"{100 * part / whole:.1f} %" if whole else "0 %"


def dtype(kind: TensorType) -> str:
    """`torch.float32` as `f32`."""
    name = str(kind.dtype).removeprefix("torch.")
    return (
        name.replace("bfloat", "bf").replace("float", "f").replace("uint", "u").replace("int", "i")
    )


def shape(kind: TensorType) -> str:
    """`[B,256,56,56]`."""
    return str(kind)[str(kind).index("[") :].replace(", ", ",")


def bytes_of(kind: TensorType | None, batch: int | None) -> int:
    """Bytes of a value at a batch size, or at the example's; 0 for plain values."""
    return 0 if kind is None else kind.nbytes(batch)


def counted(kinds: Sequence[TensorType]) -> tuple[str, ...]:
    """Several tensors, equal ones once: `2×f32[B,64,56,56]`."""
    counts = Counter(f"{dtype(kind)}{shape(kind)}" for kind in kinds)
    return tuple(f"{n}×{name}" if n > 1 else name for name, n in counts.items())


def listed(kinds: Sequence[TensorType]) -> str:
    """`counted` in a line."""
    return ", ".join(counted(kinds))


def first_few(names: Sequence[str]) -> str:
    """The first three, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def span(names: Sequence[str]) -> str:
    """The first and the last of several paths, without their common start in the second.

    >>> span(["blocks.1.mlp", "blocks.2.attn", "blocks.2.mlp"])
    'blocks.1.mlp – 2.mlp'
    """
    if len(names) == 1:
        return names[0]
    first, last = names[0].split("."), names[-1].split(".")
    same = 0
    while same < min(len(first), len(last)) - 1 and first[same] == last[same]:
        same += 1
    return f"{names[0]} – {'.'.join(last[same:])}"
