"""Quantities on the command line (100Gbps, 12GB/s, 80GiB, 50ms, 400T), and names of drawings."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from revcompile.errors import InputError
from revcompile.units import BINARY, DECIMAL, bytes_of, parse_quantity

Number = TypeVar("Number", int, float)

_TIMES: Final = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}


def bandwidth(text: str) -> float:
    """Bytes per second, from bits (bps) or bytes (B/s).

    >>> bandwidth("100Gbps"), bandwidth("12.5GB/s")
    (12500000000.0, 12500000000.0)
    """
    units = {f"{prefix}bps": scale / 8 for prefix, scale in DECIMAL.items()}
    units |= {f"{prefix}bit/s": scale / 8 for prefix, scale in DECIMAL.items()}
    units |= {f"{prefix}B/s": scale for prefix, scale in (DECIMAL | BINARY).items()}
    return _parsed(text, units, "100Gbps, 1Gbps, 12GB/s")


def rate(text: str) -> float:
    """FLOPs or bytes per second.

    >>> rate("400T"), rate("3.3TB/s")
    (400000000000000.0, 3300000000000.0)
    """
    units = dict(DECIMAL)
    for ending in ("B/s", "FLOPS", "FLOP/s", "FLOPs"):
        units |= {f"{prefix}{ending}": scale for prefix, scale in DECIMAL.items()}
    return _parsed(text, units, "400T, 3.3TB/s")


def size(text: str) -> int:
    """A size in bytes.

    >>> size("80GiB"), size("141GB")
    (85899345920, 141000000000)
    """
    return _as_argument_error(lambda: bytes_of(text, "size"))


def seconds(text: str) -> float:
    """A time; only 0 needs no unit.

    >>> seconds("50ms"), seconds("0")
    (0.05, 0.0)
    """
    return 0.0 if text.strip() == "0" else _parsed(text, _TIMES, "10us, 50ms, 1s")


def count(text: str) -> int:
    """A positive whole number.

    >>> count("4096")
    4096
    """
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def shape(text: str) -> tuple[int, ...]:
    """Sizes separated by commas.

    >>> shape("3,224,224")
    (3, 224, 224)
    """
    return tuple(count(part.strip()) for part in text.split(","))


def drawing(*examples: str) -> Callable[[str], Path]:
    """A reader of names of files that end as the examples, in a folder that exists.

    >>> drawing("net.svg", "net.html")("a.html").name
    'a.html'
    """

    def read(text: str) -> Path:
        path, endings = Path(text), [Path(example).suffix for example in examples]
        if path.suffix not in endings:
            ending, wanted = path.suffix or "nothing", " or ".join(endings)
            raise argparse.ArgumentTypeError(
                f"{text!r} ends in {ending}; give the file a name that ends in {wanted}"
            )
        if not path.absolute().parent.is_dir():
            raise argparse.ArgumentTypeError(f"there is no folder {path.absolute().parent}")
        return path

    return read


def _parsed(text: str, units: dict[str, float], examples: str) -> float:
    value = _as_argument_error(lambda: parse_quantity(text, units, examples))
    if not value and units is not _TIMES:
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0")
    return value


def _as_argument_error(read: Callable[[], Number]) -> Number:
    """Turn an InputError into the error that argparse reports."""
    try:
        return read()
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
