"""How the rounds of a full pipeline are run: action by action, or recorded once and repeated."""

from revcompile.runtime.executor.captured.backends import Backend, backend_of
from revcompile.runtime.executor.captured.runner import GraphRunner

__all__ = ["Backend", "GraphRunner", "backend_of"]
