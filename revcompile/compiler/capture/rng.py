"""Random generators: left as they were found, and watched where a graph cannot follow."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["foreign_state", "rng_kept", "seed_all"]


def foreign_state() -> tuple[Any, ...]:
    """The state of the generators outside torch; it changes when somebody draws from them."""
    numpy = sys.modules.get("numpy")
    kind, keys, *rest = numpy.random.get_state() if numpy else (None, b"")
    return random.getstate(), kind, bytes(keys), *rest


def seed_all(seed: int) -> None:
    """Seed torch's generators and those outside torch."""
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


@contextmanager
def rng_kept() -> Iterator[None]:
    """Leave every random generator as it was found."""
    numpy = sys.modules.get("numpy")
    python_state, numpy_state = random.getstate(), numpy and numpy.random.get_state()
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python_state)
        if numpy:
            numpy.random.set_state(numpy_state)
