"""Kernels for branches in low precision, and exactly invertible arithmetic.

`exact_sum` has sums that can be undone. `layer_norm`, `batch_norm` and `gradient_sum` do in one
pass over memory what autocast does in several; `triton_kernels` and `triton_batch_norm` are those
passes, imported when they are first needed.
"""
