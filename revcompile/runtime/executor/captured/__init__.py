"""Captured steps: the steps of a full pipeline over static buffers, called or replayed."""
