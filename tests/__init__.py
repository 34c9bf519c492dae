"""The tests, and what benchmarks share with them."""
