"""precision: what branches in low precision ask for, and the kernels that make it cheap.

`grid` has sums that can be undone to the bit. `norms`, `batchnorms` and `gradients` do in one pass
over memory what autocast does in several; `kernels` and `batch_kernels` are those passes in Triton,
imported when they are first needed.
"""
