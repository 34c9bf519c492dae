"""How rewiring begins, joins and ends two streams."""

from __future__ import annotations

import enum
from typing import Final

POLICY_MARK: Final = "revcompile_policy"
"""Under this name, metadata of saved weights say for which policy's function they were trained."""


class Policy(enum.Enum):
    """Which rewired model is built; see `reversify`."""

    PAPER = "paper"
    """PETRA's RevNets: streams begin in a wider layer, and end in a wider head."""
    PRETRAINED = "pretrained"
    """The original's function: couplings average, streams begin as copies, the second is read."""
    SAME_PARAMETERS = "same_parameters"
    """Streams begin as copies and end as their mean, `x + ½ΣF`: no parameter is added."""

    @property
    def widens(self) -> bool:
        return self is Policy.PAPER

    @property
    def averaged(self) -> bool:
        """Whether couplings are `(a, b) -> (b, b + gamma (a - b) + (1 + gamma) F(b))`.

        In training, gamma is ±1/16, at random for each sample and block. In eval mode it is 0.
        """
        return self is Policy.PRETRAINED
