"""The free choices of rewiring: how streams begin, meet and end."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from revcompile.errors import PolicyError

__all__ = ["Enter", "Fuse", "Policy"]


class Enter(enum.Enum):
    """How one value becomes two streams.

    >>> Policy(enter=Enter.DUPLICATE).enter.value
    'duplicate'
    """

    WIDEN = "widen"
    DUPLICATE = "duplicate"


class Fuse(enum.Enum):
    """How two streams become one value.

    >>> Policy().fuse is Fuse.MEAN
    True
    """

    MEAN = "mean"
    CONCAT = "concat"


@dataclass(frozen=True)
class Policy:
    """The free choices of rewiring. Where one is impossible, the other is taken, with a note.

    `Policy.named("paper")` builds PETRA's RevNets; `Policy.named("pretrained")` adds no parameter
    and does not change the head's weights.

    Args:
        enter: how one value becomes two streams.
        fuse: how two streams become one value inside the model.
        leave: how the last two streams reach the head.

    >>> Policy.named("paper").leave.value
    'concat'
    """

    enter: Enter = Enter.WIDEN
    fuse: Fuse = Fuse.MEAN
    leave: Fuse = Fuse.CONCAT

    @staticmethod
    def named(name: str | Policy) -> Policy:
        """Look up a preset, or pass a `Policy` through."""
        if isinstance(name, Policy):
            return name
        presets = {
            "paper": Policy(),
            "pretrained": Policy(enter=Enter.DUPLICATE, fuse=Fuse.MEAN, leave=Fuse.MEAN),
        }
        if not isinstance(name, str) or name not in presets:
            known = ", ".join(repr(p) for p in presets)
            raise PolicyError(
                f"policy: expected {known} or a revcompile.Policy, got {name!r}; for single "
                "choices write e.g. revcompile.Policy(enter=Enter.DUPLICATE)"
            )
        return presets[name]
