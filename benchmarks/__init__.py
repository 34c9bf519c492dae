"""What is measured here: `python -m benchmarks` lists it, by folder."""
