"""The stages of a partition as plain modules, for the schedules of `torch.distributed.pipelining`.

    Partition --pipeline_stages--> one `StageModule` a stage: tensors in, tensors out, autograd

Each stage is a rewired model of its own: it owns copies of the weights it reads, under their
original names, and `Reversible` runs it. Only tensors cross a boundary. Plain numbers (sizes) are
worked out from the batch size of what arrives, and the stage that computes a size compares it with
what the later ones will believe.
"""

from revcompile.interop.pipelining.module import StageModule
from revcompile.interop.pipelining.stages import pipeline_stages

__all__ = ["StageModule", "pipeline_stages"]
