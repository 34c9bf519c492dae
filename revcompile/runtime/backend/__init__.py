"""How the rounds of a full pipeline are run: action by action, or recorded once and repeated."""

from revcompile.runtime.backend.fast import Fast
from revcompile.runtime.backend.kinds import Backend, backend_of

__all__ = ["Backend", "Fast", "backend_of"]
