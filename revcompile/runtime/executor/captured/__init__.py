"""Captured steps: the steps of a full pipeline over static buffers, called or replayed."""

from revcompile.runtime.executor.captured.pipeline import StepResult
from revcompile.runtime.executor.captured.runner import Backend, GraphRunner, backend_of

__all__ = ["Backend", "GraphRunner", "StepResult", "backend_of"]
