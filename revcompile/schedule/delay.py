"""How late a stage's gradients are: micro-batches in flight at a stage, and the delay in updates.

For stage j of J: a micro-batch is in flight at a stage from its forward to its backward pass.

    order                    in flight ("window")    delay in updates, accumulation_steps = 1
    never drained            1 + ceil(n (J-1-j))     ceil(n (J-1-j)), n = `in_flight_per_stage`
    drained at every update  see `window`            0

With more `accumulation_steps` (the paper's k) the delay is that many times smaller.
"""

from __future__ import annotations

import math
from fractions import Fraction

from revcompile.errors import InputError
from revcompile.schedule.methods import Method, Order


def window(method: Method, stages: int, stage: int, accumulation_steps: int = 1) -> int:
    """The largest number of micro-batches in flight at a stage: forward done, backward not.

    `gpipe` and `1f1b` drain the pipeline after `accumulation_steps` micro-batches. DNI has one in
    flight, but keeps its output for one more step, until the true gradient has come and the
    gradient predictor can learn from it.

    >>> from revcompile.schedule import choose
    >>> [window(choose("petra"), 4, stage) for stage in range(4)]
    [4, 3, 2, 1]
    """
    check_sizes(stages, accumulation_steps)
    later_stages = stages - 1 - stage
    match method.order:
        case Order.LOCKED | Order.SYNTHETIC:
            return 1
        case Order.GPIPE:
            return accumulation_steps
        case Order.ONE_F_ONE_B:
            return min(accumulation_steps, 1 + later_stages)
        case Order.CONTINUOUS:
            # Exact in decimal: 1.1 * 50 is 55, not a little more.
            return 1 + math.ceil(Fraction(repr(float(method.in_flight_per_stage))) * later_stages)


def delay(method: Method, stages: int, stage: int, accumulation_steps: int = 1) -> int:
    """The largest number of updates of a stage between the two passes of one micro-batch.

    >>> from revcompile.schedule import choose
    >>> [delay(choose("petra", in_flight_per_stage=1), 4, stage) for stage in range(4)]
    [3, 2, 1, 0]
    >>> [delay(choose("petra", in_flight_per_stage=2), 4, stage) for stage in range(4)]
    [6, 4, 2, 0]
    """
    return -(
        -_delay_in_microbatches(method, stages, stage, accumulation_steps) // accumulation_steps
    )


def mean_delay(method: Method, stages: int, stage: int, accumulation_steps: int = 1) -> float:
    """The delay in updates, averaged over micro-batches.

    >>> from revcompile.schedule import choose
    >>> [mean_delay(choose("petra"), 4, stage, accumulation_steps=2) for stage in range(4)]
    [1.5, 1.0, 0.5, 0.0]
    """
    return _delay_in_microbatches(method, stages, stage, accumulation_steps) / accumulation_steps


def _delay_in_microbatches(method: Method, stages: int, stage: int, accumulation_steps: int) -> int:
    """How many micro-batches' gradients a stage may apply between the two passes of one."""
    # Drained orders update only when nothing is in flight, locked ones have one in flight.
    if method.order is not Order.CONTINUOUS:
        return 0
    return window(method, stages, stage, accumulation_steps) - 1


def check_sizes(stages: int, accumulation_steps: int) -> None:
    """Refuse a pipeline without stages, or an update without micro-batches."""
    if stages < 1:
        raise InputError(f"stages={stages}; a pipeline has at least 1")
    if accumulation_steps < 1:
        raise InputError(
            f"accumulation_steps={accumulation_steps}; an update needs at least 1 micro-batch"
        )
