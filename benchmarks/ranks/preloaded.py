"""Imported by the server that ranks are forked from: compiles the net once, as each rank will.

What a first compilation imports and caches takes longer than the compilation; this way it happens
once for all ranks.

Not for ranks on GPUs: the first backward pass of a process counts its GPUs, of which the server
shows none, and the count stays.
"""

from __future__ import annotations

import torch

from benchmarks.ranks import kills, victim

__all__ = ["kills"]

torch.set_num_threads(1)  # a forked process has no other threads
if not victim.gpus_are_hidden():
    victim.compiled()
