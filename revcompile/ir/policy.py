"""The free choices of rewiring: how streams begin, meet and end."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal

from revcompile.arguments import member_of
from revcompile.errors import PolicyError


class Enter(enum.Enum):
    """How one value becomes two streams.

    >>> Policy(enter="duplicate").enter.value
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
    SECOND = "second"
    """The second stream alone, which in an averaged coupling is the original's value."""


@dataclass(frozen=True)
class Policy:
    """The free choices of rewiring. Where one is impossible, the other is taken, with a note.

    - `"paper"` builds PETRA's RevNets.
    - `"pretrained"` starts as the function that the model is: in eval mode the result computes what
      the original computes, and training adds noise that averages out.
    - `"same_parameters"` adds no parameter and leaves the head's weights alone, but is another
      function, `x + ½ΣF`, in which attention and MLP read different streams. A trained model loses
      what it has learnt; this is for training from scratch.

    Args:
        enter: how one value becomes two streams: "widen" or "duplicate".
        fuse: how two streams become one value inside the model: "mean", "concat", "second".
        leave: how the last two streams reach the head: likewise.
        averaged: whether couplings are `(a, b) -> (b, b + gamma (a - b) + (1 + gamma) F(b))`, with
            gamma = ±1/16 at random for each sample and block in training and 0 in eval mode,
            instead of `(b, a + F(b))`. Such streams enter as copies and leave by the second.

    Raises:
        PolicyError: averaged streams are to enter or leave in another way.

    >>> Policy.named("paper").leave.value
    'concat'
    """

    enter: Enter | Literal["widen", "duplicate"] = Enter.WIDEN
    fuse: Fuse | Literal["mean", "concat", "second"] = Fuse.MEAN
    leave: Fuse | Literal["mean", "concat", "second"] = Fuse.CONCAT
    averaged: bool = False

    def __post_init__(self) -> None:
        for name, kind in (("enter", Enter), ("fuse", Fuse), ("leave", Fuse)):
            object.__setattr__(self, name, member_of("Policy", name, getattr(self, name), kind))
        ends = self.enter, self.fuse, self.leave
        if self.averaged and ends != (Enter.DUPLICATE, Fuse.SECOND, Fuse.SECOND):
            raise PolicyError(
                "policy: averaged couplings keep the original's function only if streams enter as "
                "copies and leave by the second; that is "
                'policy="pretrained"'
            )
        if not self.averaged and Fuse.SECOND in ends:
            raise PolicyError(
                "policy: 'second' drops the first stream, and with it half of what blocks have "
                "computed; use 'mean', or averaged=True"
            )

    @staticmethod
    def named(name: str | Policy) -> Policy:
        """Look up a preset, or pass a `Policy` through."""
        if isinstance(name, Policy):
            return name
        second = Fuse.SECOND
        presets = {
            "paper": Policy(),
            "pretrained": Policy(Enter.DUPLICATE, second, second, averaged=True),
            "same_parameters": Policy(Enter.DUPLICATE, Fuse.MEAN, Fuse.MEAN),
        }
        if not isinstance(name, str) or name not in presets:
            known = ", ".join(repr(p) for p in presets)
            raise PolicyError(
                f"policy: expected {known} or a revcompile.Policy, got {name!r}; for single "
                "choices write e.g. revcompile.Policy(enter='duplicate')"
            )
        return presets[name]
