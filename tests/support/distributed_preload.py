"""Imported once by the server that ranks are forked from: what every rank would do first."""

import torch
from distributed_worker import compiled

torch.set_num_threads(1)
compiled("resnet", 4, "cpu")
