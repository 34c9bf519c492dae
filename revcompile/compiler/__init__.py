"""The passes, in the order in which they run. Each takes a value of `ir` and returns the next.

capture     nn.Module -> Captured        a checked graph of the model
find        Captured -> Found            its residual blocks
rewire      Captured, Found -> Rewired   two streams: couplings and opaque segments
partition   Rewired -> Partition         stages, balanced by `cost`
lower       Partition -> StagePrograms   generated code for each stage
verify      between the passes: checks that every value is computed once, before it is read
"""
