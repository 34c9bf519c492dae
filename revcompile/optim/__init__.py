"""Optimizers that know how late their gradients are."""

from revcompile.optim.delay_aware import LeadAdamW, LeadSGD

__all__ = ["LeadAdamW", "LeadSGD"]
