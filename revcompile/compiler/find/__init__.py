"""find: `Captured` -> every additive shortcut, accepted or refused with a reason."""

from revcompile.compiler.find.residual import Found, find

__all__ = ["Found", "find"]
