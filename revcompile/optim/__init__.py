"""Optimizers that know how late their gradients are."""

from revcompile.optim.adamw import DelayAwareAdamW
from revcompile.optim.combined import CombinedOptimizer
from revcompile.optim.error_feedback import ErrorFeedback
from revcompile.optim.groups import muon_groups
from revcompile.optim.muon import DelayAwareMuon
from revcompile.optim.sgd import DelayAwareSGD

__all__ = [
    "CombinedOptimizer",
    "DelayAwareAdamW",
    "DelayAwareMuon",
    "DelayAwareSGD",
    "ErrorFeedback",
    "muon_groups",
]
