"""rewire: `Captured` and its residual blocks -> two streams, as a list of segments."""

from revcompile.compiler.rewire.rewire import rewire

__all__ = ["rewire"]
