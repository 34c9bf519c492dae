"""Sizes in bytes as text: "80GiB" to a number, a number to "6.1 MiB"."""

from __future__ import annotations

import re
from collections.abc import Mapping
from numbers import Integral
from typing import Final

from revcompile.errors import InputError

_QUANTITY: Final = re.compile(r"\s*([0-9.]+(?:e[+-]?\d+)?)\s*([A-Za-zµ/]*)\s*", re.IGNORECASE)
DECIMAL: Final = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
BINARY: Final = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}


def is_int(value: object) -> bool:
    """Whether it is an integer, numpy's included; True and False are not.

    >>> is_int(3), is_int(3.0), is_int(True)
    (True, False, False)
    """
    return isinstance(value, Integral) and not isinstance(value, bool)


def parse_quantity(text: str, units: Mapping[str, float], examples: str) -> float:
    """Parse a number followed by a unit; the result is in the unit whose factor is 1."""
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2] not in units:
        raise InputError(f"{text!r} is not understood; write e.g. {examples}")
    try:
        return round(float(match[1]) * units[match[2]], 12)
    except ValueError:
        raise InputError(f"{match[1]!r} is not a number") from None


def parse_size(text: str) -> int:
    """Parse a size in bytes.

    >>> parse_size("80GiB"), parse_size("141GB")
    (85899345920, 141000000000)
    >>> parse_size("80")
    Traceback (most recent call last):
    revcompile.errors.InputError: '80' is not understood; write e.g. 80GiB, 141GB
    """
    units = {f"{prefix}B": scale for prefix, scale in (DECIMAL | BINARY).items()}
    units |= {prefix: scale for prefix, scale in (DECIMAL | BINARY).items() if prefix}
    return int(parse_quantity(text, units, "80GiB, 141GB"))


def parse_memory_budget(memory_budget: int | str) -> int:
    """Bytes a device may hold, from a number or from text.

    >>> parse_memory_budget("2GiB"), parse_memory_budget(1000)
    (2147483648, 1000)
    """
    try:
        size = parse_size(memory_budget) if isinstance(memory_budget, str) else memory_budget
    except InputError as error:
        raise InputError(f"memory_budget={error}") from None
    if not is_int(size) or size < 1:
        raise InputError(
            f'memory_budget={memory_budget!r}; give bytes above 0, or a size like "2GiB"'
        )
    return int(size)


def format_size(count: int) -> str:
    """A number of bytes as text, in the largest unit that is not above it.

    >>> format_size(6_422_528), format_size(200)
    ('6.1 MiB', '200 B')
    """
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} B"
