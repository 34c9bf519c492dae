"""Stages on disk: written and read without pickle, so that a file runs nothing by being read.

    StageProgram + modules --save_stage--> program.json, tensors.safetensors --load_stage-->

A worker needs the packages that the stage's layers come from, not the code that put the model
together.
"""

from revcompile.runtime.shipping.names import ALLOWED
from revcompile.runtime.shipping.stages import load_stage, save_stage

__all__ = ["ALLOWED", "load_stage", "save_stage"]
