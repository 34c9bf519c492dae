"""capture: a model and example inputs -> `Captured`, a graph that was checked against it."""

from revcompile.compiler.capture.capture import capture
from revcompile.compiler.capture.check import Check
from revcompile.compiler.capture.example import Example, make_example

__all__ = ["Check", "Example", "capture", "make_example"]
