"""Optimizers that know how late their gradients are."""

from revcompile.optim.delay_aware import DelayAwareAdamW, DelayAwareSGD

__all__ = ["DelayAwareAdamW", "DelayAwareSGD"]
