"""One stage's numerics: programs, stored activations, weights, updates."""
