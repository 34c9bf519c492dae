"""The immutable values that passes exchange, and the functions that generated code calls.

    type           made by     what it is
    -------------  ----------  -----------------------------------------------------------------
    Captured       capture     the model as a `torch.fx` graph over a private copy of its modules
    Residual       find        an additive shortcut `x + F(x)` in that graph: a block
    Refusal        find        a sum that is not used as a block, and why
    Found          find        all residuals and refusals of one graph
    Rewired        rewire      the two-stream model: segments in order, over named live values
    Segment        rewire      a block as `Coupling` `(a, b) -> (b, a + F(b))`, or an `Opaque` graph
    Part           partition   the pieces of one stage: segments, or parts of opaque ones; a
                               `Partition` has all parts
    Unit           lower       pieces of one stage that are differentiated together
    StageCode      lower       the code of one stage, with a function for each branch
    StageProgram   lower       the same as graphs that run: forward, backward

Passes never change their input; each builds new graphs.
"""
