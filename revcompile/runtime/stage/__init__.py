"""One stage's numerics: programs, kept activations, weight versions, updates."""
