"""Sizes in bytes as text: "80GiB" to a number, a number to "6.1 MiB"."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
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


def bytes_of(size: int | str, name: str = "memory_budget") -> int:
    """A number of bytes above 0 from a whole number or text; `name` is the argument's, for errors.

    >>> bytes_of("80GiB"), bytes_of("8 GB"), bytes_of(1000)
    (85899345920, 8000000000, 1000)
    >>> bytes_of("80")
    Traceback (most recent call last):
    revcompile.errors.InputError: memory_budget='80': expected bytes, such as "8GiB", ...
    """
    count: object = size
    if isinstance(size, str):
        units = {f"{prefix}B": scale for prefix, scale in (DECIMAL | BINARY).items()}
        units |= {prefix: scale for prefix, scale in (DECIMAL | BINARY).items() if prefix}
        with suppress(InputError, OverflowError):
            count = int(parse_quantity(size, units, "8GiB"))
    if not isinstance(count, Integral) or isinstance(count, bool) or count < 1:
        raise InputError(f'{name}={size!r}: expected bytes, such as "8GiB", "500MiB" or 8589934592')
    return int(count)


def format_size(count: int) -> str:
    """A number of bytes as text, in the largest unit that is not above it.

    >>> format_size(6_422_528), format_size(200)
    ('6.1 MiB', '200 B')
    """
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} B"
