"""What runs: knows segments' code and tensors, never a pass."""
