"""Every method as three choices, and what follows from them: windows and delays."""

from __future__ import annotations

import dataclasses
import difflib
import enum
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Final

from revcompile.errors import InputError

__all__ = [
    "METHODS",
    "Keep",
    "Method",
    "Order",
    "Weights",
    "check_sizes",
    "choose",
    "delay",
    "mean_delay",
    "window",
]


class Keep(enum.Enum):
    """What a stage keeps of a micro-batch for its backward pass."""

    GRAPH = "graph"
    INPUT = "input"
    NOTHING = "nothing"


class Weights(enum.Enum):
    """Which parameters the backward pass uses; STASHED are those of the forward pass."""

    LATEST = "latest"
    STASHED = "stashed"


class Order(enum.Enum):
    """In which order forward and backward passes meet at a stage."""

    LOCKED = "locked"
    """One micro-batch at a time."""
    GPIPE = "gpipe"
    """All forward passes of a group, then all backward passes, first in first out."""
    ONE_F_ONE_B = "1f1b"
    """One forward, one backward in turn; the pipeline is drained after every group."""
    CONTINUOUS = "continuous"
    """One forward, one backward in turn, never drained."""
    SYNTHETIC = "synthetic"
    """Backward at once, with a predicted gradient (DNI)."""


@dataclass(frozen=True)
class Method:
    """One row of the methods' table. `alpha` counts for the continuous order only."""

    name: str
    order: Order
    alpha: float
    keep: Keep
    weights: Weights

    def __post_init__(self) -> None:
        if self.order is Order.CONTINUOUS and not 1 <= self.alpha < math.inf:
            raise InputError(
                f"method {self.name!r}: alpha={self.alpha}, but a stage would stall before its "
                "gradients are back with alpha below 1; use alpha >= 1 (1: least delay, "
                "2: the order of the PETRA paper)"
            )


def _table() -> Iterator[Method]:
    latest, stashed = Weights.LATEST, Weights.STASHED
    yield Method("backprop", Order.LOCKED, 0.0, Keep.GRAPH, latest)
    yield Method("reversible_backprop", Order.LOCKED, 0.0, Keep.NOTHING, latest)
    yield Method("gpipe", Order.GPIPE, 0.0, Keep.GRAPH, latest)
    yield Method("1f1b", Order.ONE_F_ONE_B, 0.0, Keep.GRAPH, latest)
    yield Method("pipedream", Order.CONTINUOUS, 1.0, Keep.INPUT, stashed)
    yield Method("ddg", Order.CONTINUOUS, 1.0, Keep.GRAPH, stashed)
    yield Method("features_replay", Order.CONTINUOUS, 1.0, Keep.INPUT, latest)
    yield Method("delayed", Order.CONTINUOUS, 2.0, Keep.INPUT, stashed)
    yield Method("dsp", Order.CONTINUOUS, 2.0, Keep.INPUT, latest)
    yield Method("petra", Order.CONTINUOUS, 1.0, Keep.NOTHING, latest)
    yield Method("petra_stashed", Order.CONTINUOUS, 1.0, Keep.NOTHING, stashed)
    yield Method("dni", Order.SYNTHETIC, 0.0, Keep.GRAPH, latest)


METHODS: Final[Mapping[str, Method]] = MappingProxyType({m.name: m for m in _table()})
"""Every method by name."""

_ALPHAS: Final = {"1f1b": 1.0, "paper": 2.0}


def choose(name: str | Method, *, order: str | None = None, alpha: float | None = None) -> Method:
    """Look a method up, in the given order: "1f1b" (delay J-1-j) or "paper" (delay 2(J-1-j)).

    >>> choose("petra").alpha, choose("petra", order="paper").alpha
    (1.0, 2.0)
    """
    if not isinstance(name, str | Method):
        raise InputError(f"method={name!r}; use the name of a method, e.g. method='petra'")
    if isinstance(name, str) and name not in METHODS:
        near = difflib.get_close_matches(name, METHODS, 1)
        hint = f"did you mean {near[0]!r}?" if near else "use one of: " + ", ".join(METHODS)
        raise InputError(f"method {name!r} does not exist; {hint}")
    method = METHODS[name] if isinstance(name, str) else name
    if order is None and alpha is None:
        return method
    if order is not None and alpha is not None:
        raise InputError(f"order={order!r} and alpha={alpha} say the same thing; give one of them")
    if method.order is not Order.CONTINUOUS:
        free = ", ".join(m.name for m in METHODS.values() if m.order is Order.CONTINUOUS)
        raise InputError(
            f"method {method.name!r} has a fixed order; leave out order= and alpha=, "
            f"or use one of: {free}"
        )
    if order is not None:
        if not isinstance(order, str) or order not in _ALPHAS:
            raise InputError(f'order={order!r} does not exist; use "1f1b" or "paper"')
        alpha = _ALPHAS[order]
    if isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise InputError(
            f"alpha={alpha!r}; use a number, at least 1 (1: order='1f1b', 2: order='paper')"
        )
    return dataclasses.replace(method, alpha=float(alpha))


def window(method: Method, stages: int, stage: int, group: int = 1) -> int:
    """Most micro-batches in flight at a stage: forward done, backward not.

    `group` is the number of micro-batches between two drains of `gpipe` and `1f1b`. DNI has one
    in flight, but keeps its output for one more round, until the true gradient has come and the
    gradient_predictor can learn from it.

    >>> [window(choose("petra"), 4, stage) for stage in range(4)]
    [4, 3, 2, 1]
    """
    check_sizes(stages, group)
    if not 0 <= stage < stages:
        raise InputError(f"stage={stage}, but with {stages} stages it is 0 to {stages - 1}")
    behind = stages - 1 - stage
    match method.order:
        case Order.LOCKED | Order.SYNTHETIC:
            return 1
        case Order.GPIPE:
            return group
        case Order.ONE_F_ONE_B:
            return min(group, 1 + behind)
        case Order.CONTINUOUS:
            # As a fraction of its decimal digits: 1.1 * 50 is 55, not a little more.
            return 1 + math.ceil(Fraction(repr(float(method.alpha))) * behind)


def delay(method: Method, stages: int, stage: int, accumulate: int = 1) -> int:
    """Most updates of a stage between forward and backward pass of one micro-batch.

    >>> [delay(choose("petra", order="paper"), 4, stage) for stage in range(4)]
    [6, 4, 2, 0]
    """
    return -(-_between(method, stages, stage, accumulate) // accumulate)


def mean_delay(method: Method, stages: int, stage: int, accumulate: int = 1) -> float:
    """The same on average over micro-batches.

    >>> [mean_delay(choose("petra"), 4, stage, accumulate=2) for stage in range(4)]
    [1.5, 1.0, 0.5, 0.0]
    """
    return _between(method, stages, stage, accumulate) / accumulate


def _between(method: Method, stages: int, stage: int, accumulate: int) -> int:
    """Micro-batches whose gradients a stage may apply between the two passes of one."""
    others = window(method, stages, stage, accumulate) - 1
    # All other orders have an update only when nothing is in flight.
    return others if method.order is Order.CONTINUOUS else 0


def check_sizes(stages: int, accumulate: int) -> None:
    """Refuse a pipeline without stages, or an update without micro-batches."""
    if stages < 1:
        raise InputError(f"stages={stages}; a pipeline has at least 1")
    if accumulate < 1:
        raise InputError(f"accumulate={accumulate}; an update needs at least 1 micro-batch")
