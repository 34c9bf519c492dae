"""Checkpoints: safetensors and JSON under the original names, written atomically, no pickle.

    trainer's state --save_training--> folder/step_00000120 --load_training--> trainer's state
                                                            --load_weights---> model's state dict

Only plain trees of values and tensors are stored here: each object makes its own `state_dict`.
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
