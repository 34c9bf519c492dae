"""Numbers, tensor types and paths in short form, for tables and drawings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import takewhile

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
    """`1 stage`, `2 stages`, `2 batches`."""
    return f"{count} {noun}" + ("es" if noun.endswith("ch") else "s") * (count != 1)


def share(part: float, whole: float) -> str:
    """A part of a whole, in per cent."""
    return f"{100 * part / whole:.1f} %" if whole else "0 %"


def counted(kinds: Sequence[TensorType]) -> tuple[str, ...]:
    """Types of tensors, equal ones counted: `2×f32[B,64,56,56]`."""
    counts = Counter(map(_short, kinds))
    return tuple(f"{n}×{name}" if n > 1 else name for name, n in counts.items())


def _short(kind: TensorType) -> str:
    name = str(kind).replace(", ", ",")
    return (
        name.replace("bfloat", "bf").replace("float", "f").replace("uint", "u").replace("int", "i")
    )


def listed(kinds: Sequence[TensorType]) -> str:
    """`counted` as one line of text."""
    return ", ".join(counted(kinds))


def first_few(names: Sequence[str]) -> str:
    """The first three names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def common_start(paths: Iterable[Sequence[str]]) -> list[str]:
    """The names with which all paths begin."""
    together = takewhile(lambda names: len(set(names)) == 1, zip(*paths, strict=False))
    return [names[0] for names in together]


def span(names: Sequence[str]) -> str:
    """The first and the last of several paths; the last without their common start.

    >>> span(["blocks.1.mlp", "blocks.2.attn", "blocks.2.mlp"]), span(["layer1.0", "layer1.1"])
    ('blocks.1.mlp – 2.mlp', 'layer1.0 – layer1.1')
    """
    first, last = (name.rpartition(": ")[2] for name in (names[0], names[-1]))
    if len(names) == 1:
        return first
    shared = common_start([first.split("."), last.split(".")[:-1]])
    numbered = last.rpartition(".")[2].isdigit()  # "layer1.0 – 1" would be unclear
    return f"{first} – {last if numbered else '.'.join(last.split('.')[len(shared) :])}"
