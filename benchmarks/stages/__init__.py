"""Stages of one process: how fast the engine runs them, and what they hold."""
