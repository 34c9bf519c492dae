"""What to do about delay, stage by stage: rates and momentum that are tried, not recommended."""

from __future__ import annotations

from collections.abc import Callable

MOMENTUM = 0.9


def less_momentum(delay: int, momentum: float = MOMENTUM) -> float:
    """Momentum with which a delayed gradient lags as much as a fresh one with all of it.

    Momentum lets a gradient act `momentum / (1 - momentum)` updates late on average; a delay adds
    to that.

    >>> [round(less_momentum(delay), 3) for delay in (0, 4, 9, 12)]
    [0.9, 0.833, 0.0, 0.0]
    """
    lag = max(0.0, momentum / (1 - momentum) - delay)
    return lag / (1 + lag)


def _t1(delay: int, done: float, factor: float) -> float:
    """PipeMare's T1: the rate divided by the delay at first, by nothing from a quarter on."""
    return float(factor * max(1, delay) ** -max(0.0, 1 - 4 * done))


def _shrink(delay: int, done: float, factor: float) -> float:
    """A little less for a longer delay, all the time."""
    return float(factor * (1 + delay) ** -0.5)


def _cap(delay: int, done: float, factor: float) -> float:
    """A rate that is too high for the delay is cut; one that is low enough is left alone."""
    return float(min(factor, (1 + delay) ** -0.5))


def _short(delay: int) -> float:
    """A short memory: momentum lets a late gradient act later still."""
    return 0.7


MOMENTA: dict[str, Callable[[int], float]] = {"steady": less_momentum, "short": _short}
"""The same by momentum: from a stage's delay to its own, with a rate to match."""

HELPS: dict[str, Callable[[int, float, float], float]] = {
    "t1": _t1,
    "shrink": _shrink,
    "cap": _cap,
}
"""What to do about delay: from a stage's delay in updates, the share of the training that is over
and the schedule's factor to the factor that is used."""
