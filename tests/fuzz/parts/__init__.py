"""The catalogue: importing this package enters every kind of part."""

from tests.fuzz.parts import blocks, control, gradients, inplace, sides, skips, state

__all__ = ["blocks", "control", "gradients", "inplace", "sides", "skips", "state"]
