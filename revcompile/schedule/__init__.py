"""schedule: every method as three choices, the action list of every stage, and its dry run.

    methods        the table: order, what a stage keeps for backward, which weights backward uses
    delay          micro-batches in flight at a stage, and how many updates late its gradients are
    generate       the action list of every stage
    dryrun         executes the lists without tensors: no deadlock, and how busy each stage is
    drained        passes of pipelines that drain, here and in other systems: time and memory
    steady_state   time per micro-batch in a full pipeline
    chrome         recorded runs as Chrome traces

Pure arithmetic: nothing here imports torch.
"""

from revcompile.schedule.action import Action, Op, Tie
from revcompile.schedule.delay import delay, mean_delay, window
from revcompile.schedule.drained import drained_passes, peak_in_flight
from revcompile.schedule.dryrun import Costs, ScheduleError, Span, check_schedule, dry_run
from revcompile.schedule.generate import Schedule, actions
from revcompile.schedule.methods import METHODS, Keep, Method, Order, Weights, choose
from revcompile.schedule.steady_state import hiding_in_flight, period, stage_work

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
    "Weights",
    "actions",
    "check_schedule",
    "choose",
    "delay",
    "drained_passes",
    "dry_run",
    "hiding_in_flight",
    "mean_delay",
    "peak_in_flight",
    "period",
    "stage_work",
    "window",
]
