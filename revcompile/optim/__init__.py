"""Optimizers that know how late their gradients are."""

from revcompile.optim.error_feedback import ErrorFeedback
from revcompile.optim.groups import muon_groups
from revcompile.optim.muon import DelayAwareMuon
from revcompile.optim.sgd import DelayAwareSGD

__all__ = [
    "DelayAwareMuon",
    "DelayAwareSGD",
    "ErrorFeedback",
    "muon_groups",
]
