"""Checkpoints: safetensors and JSON under the original names; never half of one, never a pickle.

Trainer.state_dict() --save_training--> folder/step_00000120 --load_training--> a state dict
                                               |
                                               load_weights --> a state dict of the model
"""

from revcompile.runtime.checkpoint.signals import until_signal
from revcompile.runtime.checkpoint.storage import Checkpoint, find_checkpoint, save_checkpoint
from revcompile.runtime.checkpoint.training import load_training, save_training, set_generators
from revcompile.runtime.checkpoint.weights import export_weights, load_into, load_weights

__all__ = [
    "Checkpoint",
    "export_weights",
    "find_checkpoint",
    "load_into",
    "load_training",
    "load_weights",
    "save_checkpoint",
    "save_training",
    "set_generators",
    "until_signal",
]
