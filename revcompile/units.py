"""Sizes as people write and read them: 80GiB, 6.1 MiB."""

from __future__ import annotations

import re
from collections.abc import Mapping
from numbers import Integral
from typing import Final

from revcompile.errors import InputError

__all__ = ["BINARY", "DECIMAL", "is_whole", "parsed", "readable", "size_of"]

_QUANTITY: Final = re.compile(r"\s*([0-9.]+(?:e[+-]?\d+)?)\s*([A-Za-zµ/]*)\s*", re.IGNORECASE)
DECIMAL: Final = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
BINARY: Final = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}


def is_whole(value: object) -> bool:
    """Is it a whole number, numpy's included? True and False are not.

    >>> is_whole(3), is_whole(3.0), is_whole(True)
    (True, False, False)
    """
    return isinstance(value, Integral) and not isinstance(value, bool)


def parsed(text: str, units: Mapping[str, float], examples: str) -> float:
    """A number with one of the units."""
    found = _QUANTITY.fullmatch(text)
    if found is None or found[2] not in units:
        raise InputError(f"{text!r} is not understood; write e.g. {examples}")
    try:
        return round(float(found[1]) * units[found[2]], 12)
    except ValueError:
        raise InputError(f"{found[1]!r} is not a number") from None


def size_of(text: str) -> int:
    """Bytes.

    >>> size_of("80GiB"), size_of("141GB")
    (85899345920, 141000000000)
    """
    units = {f"{prefix}B": scale for prefix, scale in (DECIMAL | BINARY).items()}
    units |= DECIMAL | BINARY
    return int(parsed(text, units, "80GiB, 141GB"))


def readable(count: int) -> str:
    """Bytes in the unit that suits them.

    >>> readable(6_422_528), readable(200)
    ('6.1 MiB', '200 B')
    """
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} B"
