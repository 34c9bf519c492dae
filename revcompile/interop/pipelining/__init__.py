"""The stages of a partition as plain modules, for the schedules of `torch.distributed.pipelining`.

    Partition --pipeline_stages--> one `StageModule` a stage: tensors in, tensors out, autograd

Each stage is a rewired model of its own: it owns copies of the weights it reads, under their
original names, and `Reversible` runs it. Only tensors are sent. A size that a later stage reads is
computed there again, from the batch size of its inputs, and the stage that owns the size checks
that this gives the same number.
"""

from revcompile.interop.pipelining.module import StageModule
from revcompile.interop.pipelining.stages import pipeline_stages

__all__ = ["StageModule", "pipeline_stages"]
