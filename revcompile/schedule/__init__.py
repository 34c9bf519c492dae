"""schedule: every method as three choices, the action list of every stage, and its dry run.

A method is an order, what a stage keeps for its backward pass, and which parameters that pass
uses. The order fixes each stage's list of actions, however long the messages take:

    >>> for stage in actions(choose("petra"), stages=2, microbatches=3):
    ...     print(*stage)
    F0 SY0 F1 SY1 RDY0 B0 U0 F2 SY2 RDY1 B1 U1 RDY2 B2 U2
    RX0 F0 B0 SDX0 U0 RX1 F1 B1 SDX1 U1 RX2 F2 B2 SDX2 U2

The dry run plays the lists against each other without a tensor: it proves that no stage waits for
ever, and says how busy each one is.
"""

from revcompile.schedule.action import Action, Op, Tie
from revcompile.schedule.dryrun import Costs, ScheduleError, Span, Timeline, dry_run, throughput
from revcompile.schedule.methods import (
    METHODS,
    Keep,
    Method,
    Order,
    Weights,
    choose,
    delay,
    mean_delay,
    window,
)
from revcompile.schedule.periods import (
    Wire,
    busy_share,
    hiding_alpha,
    in_one_process,
    period,
    zero_bubble_period,
)
from revcompile.schedule.rounds import Schedule, actions

__all__ = [
    "METHODS",
    "Action",
    "Costs",
    "Keep",
    "Method",
    "Op",
    "Order",
    "Schedule",
    "ScheduleError",
    "Span",
    "Tie",
    "Timeline",
    "Weights",
    "Wire",
    "actions",
    "busy_share",
    "choose",
    "delay",
    "dry_run",
    "hiding_alpha",
    "in_one_process",
    "mean_delay",
    "period",
    "throughput",
    "window",
    "zero_bubble_period",
]
