"""Imported once by the server that ranks are forked from: what every rank would do first."""

import torch
from distributed_worker import compiled

from revcompile.runtime.distributed import failures

torch.set_num_threads(1)
compiled("resnet", 4, "cpu")
failures.POLL_PERIOD = 0.1  # type: ignore[misc]  # ranks on one machine hear of each other soon
