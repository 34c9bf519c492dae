"""lower: parts -> stage programs, the code each device runs."""

from revcompile.compiler.lower.lower import lower

__all__ = ["lower"]
