"""Whole trainings: what delay does to accuracy."""
