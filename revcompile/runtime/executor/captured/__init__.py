"""Captured steps: the steps of a full pipeline over static buffers, called or replayed."""

from revcompile.runtime.executor.captured.runner import Backend, GraphRunner

__all__ = ["Backend", "GraphRunner"]
