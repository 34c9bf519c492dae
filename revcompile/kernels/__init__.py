"""Kernels for branches in low precision, and exactly invertible arithmetic.

`exact_sum` has sums that can be undone, `layout` the strides of their results. `layer_norm`,
`batch_norm` and `gradient_sum` do in one pass over memory what autocast does in several. The Triton
kernels are in modules of their own, which are imported when they are first needed.
"""
