"""Optimizers that know how late their gradients are."""

from revcompile.optim.combined import CombinedOptimizer
from revcompile.optim.delay_aware import DelayAwareAdamW, DelayAwareSGD
from revcompile.optim.error_feedback import ErrorFeedback
from revcompile.optim.muon import DelayAwareMuon, muon_groups

__all__ = [
    "CombinedOptimizer",
    "DelayAwareAdamW",
    "DelayAwareMuon",
    "DelayAwareSGD",
    "ErrorFeedback",
    "muon_groups",
]
