"""rewire: `Captured` and its shortcuts -> two streams, as a list of segments."""

from revcompile.compiler.rewire.rewire import rewire
from revcompile.compiler.rewire.rules import RULES, Rule

__all__ = ["RULES", "Rule", "rewire"]
