"""Predict throughput, memory, delay and efficiency on a cluster, for PETRA and other methods.

The model is cut into one stage per device. If there are more devices than stages, the whole
pipeline is replicated, and gradients are averaged. All methods are compared at the same number of
samples per update; PETRA is also shown with an update after every micro-batch. Times are computed
from counted work and the speed of a device; with --cost measured, work is timed on this machine.
Slow links need more micro-batches in flight: the smallest --in-flight-per-stage that hides them is
chosen, and the delay it costs is shown. "zero-bubble" is an optimistic bound, not a schedule.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from revcompile.cli.models import add_model, load, rewired
from revcompile.cli.output import Answer
from revcompile.cli.units import bandwidth, count, rate, seconds, size

if TYPE_CHECKING:
    from revcompile.ir.program import Partition
    from revcompile.ir.types import Rewired
    from revcompile.plan.cluster import TimeModel
    from revcompile.plan.forecast import Forecast

_BUFFERS: Final = {"bf16": 2, "fp16": 2}
"""Bytes an element of a kept input takes on the device."""
_STATE: Final = {"sgd": 1, "adamw": 2}
"""Numbers of optimizer state for each parameter."""
_NUMBERS: Final = ("accumulation", "samples/s", "busy", "updates", "memory", "delay")
_NEARLY: Final = 1.02
"""Throughputs up to this many times another are as good as equal."""


def add(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    cluster = parser.add_argument_group("the cluster")
    cluster.add_argument("--devices", type=count, required=True, metavar="N", help="how many")
    cluster.add_argument("--link", type=bandwidth, default="100Gbps", help="between two devices")
    cluster.add_argument("--latency", type=seconds, default="10us", help="of a link")
    cluster.add_argument("--flops", type=rate, default="400T", help="FLOPs per second")
    cluster.add_argument("--memory-bandwidth", type=rate, default="3.3T", help="bytes per second")
    cluster.add_argument(
        "--memory-budget", type=size, help="what a device can hold, e.g. 80GB; cuts must fit it"
    )
    training = parser.add_argument_group("the training")
    training.add_argument(
        "--microbatch-size", type=count, default=32, help="samples per micro-batch"
    )
    training.add_argument("--stages", type=count, help="(default: one for each segment)")
    training.add_argument(
        "--accumulation-steps", type=count, help="micro-batches per update (default: 4 per stage)"
    )
    training.add_argument(
        "--in-flight-per-stage",
        type=float,
        help="micro-batches in flight for each later stage, 1 or more (default: what links need)",
    )
    training.add_argument(
        "--methods", help="names with commas between (default: petra,1f1b,gpipe,zero-bubble)"
    )
    training.add_argument(
        "--optimizer", choices=tuple(_STATE), default="sgd", help="sgd (with momentum) or adamw"
    )
    training.add_argument(
        "--kept-input-dtype",
        choices=tuple(_BUFFERS),
        help="data type of the inputs that stages keep (default: unchanged)",
    )
    parser.add_argument(
        "--cost",
        choices=("analytic", "measured"),
        default="analytic",
        help="analytic: work is counted; measured: work is timed on this machine",
    )
    parser.add_argument("--device", default="cpu", help="where to measure, e.g. cuda")


def run(args: argparse.Namespace) -> Answer:
    """The forecasts; exit code 1 if a memory budget was given and nothing fits."""
    from revcompile.arguments import check_device
    from revcompile.compiler.cost import Workload
    from revcompile.plan.cluster import Cluster, NetworkLink
    from revcompile.plan.forecast import METHODS, better_stages, plan_cluster
    from revcompile.schedule import choose

    check_device("--device", args.device)
    measured = args.cost != "analytic"
    loaded = load(
        args,
        microbatch_size=args.microbatch_size if measured else None,
        device=args.device if measured else "meta",
    )
    workload = Workload(
        choose("petra", in_flight_per_stage=args.in_flight_per_stage),
        args.microbatch_size,
        optimizer_copies=_STATE[args.optimizer],
        buffer_bytes=_BUFFERS[args.kept_input_dtype] if args.kept_input_dtype else None,
    )
    cluster = Cluster(args.devices, NetworkLink(args.link, args.latency), _time_model(args))
    options = {
        "in_flight_per_stage": args.in_flight_per_stage,
        "cost": args.cost,
        "memory_budget": args.memory_budget,
    }
    model = rewired(loaded, args).rewired
    cut, forecasts = plan_cluster(
        model,
        cluster,
        workload,
        methods=args.methods.split(",") if args.methods else METHODS,
        stages=args.stages,
        accumulation_steps=args.accumulation_steps,
        **options,
    )
    notes = _notes(
        model,
        forecasts,
        lambda petra: better_stages(model, cluster, workload, petra, **options),
    )
    return Answer(
        _table(loaded.name, args, forecasts, notes),
        _facts(loaded.name, args, cut, forecasts, notes),
        code=int(args.memory_budget is not None and not any(row.fits for row in forecasts)),
    )


def _time_model(args: argparse.Namespace) -> TimeModel:
    from revcompile.plan.cluster import Device, TimeModel, sum_speed, update_speed

    copies = _STATE[args.optimizer]
    if args.cost != "analytic":
        return TimeModel.measured(update_speed(args.device, copies), sum_speed(args.device))
    return TimeModel.on(Device(args.flops, args.memory_bandwidth), copies)


def _facts(
    name: str,
    args: argparse.Namespace,
    cut: Partition,
    forecasts: Sequence[Forecast],
    notes: Sequence[str],
) -> dict[str, Any]:
    return {
        "model": name,
        "devices": args.devices,
        "microbatch_size": args.microbatch_size,
        "link": {"bytes_per_second": args.link, "latency": args.latency},
        "cost": args.cost,
        "stages": [[piece.name for piece in part.pieces] for part in cut.parts],
        "forecasts": [dataclasses.asdict(forecast) for forecast in forecasts],
        "notes": list(notes),
    }


def _table(
    name: str, args: argparse.Namespace, forecasts: Sequence[Forecast], notes: Sequence[str]
) -> str:
    from revcompile.inspect import formatting
    from revcompile.inspect.tables import render, table_of

    first = forecasts[0]
    used = first.stages * first.replicas
    table = table_of(
        f"{name}: {first.stages} stages x {first.replicas} replicas on {args.devices} devices, "
        f"micro-batches of {args.microbatch_size}",
        {
            "method": "left",
            **dict.fromkeys(_NUMBERS, "right"),
            "limited by": "left",
        },
        "method",
    )
    for forecast in forecasts:
        fits = {None: "", True: "", False: "\n(too much)"}[forecast.fits]
        table.add_row(
            forecast.method,
            str(forecast.accumulation_steps),
            formatting.amount(forecast.throughput),
            f"{100 * forecast.efficiency:.0f} %",
            f"{100 * forecast.updating:.1f} %",
            formatting.size(forecast.memory) + fits,
            str(forecast.delay),
            forecast.bottleneck,
        )
    idle = [f"{args.devices - used} devices stay idle"] if used < args.devices else []
    return render(table, "", *idle, *notes)


def _notes(
    model: Rewired,
    forecasts: Sequence[Forecast],
    better_stages: Callable[[Forecast], Forecast | None],
) -> list[str]:
    """What PETRA's delay costs, whether another method is faster, and what would help."""
    from revcompile.plan.learning import cost_of_delay

    rows = [forecast for forecast in forecasts if forecast.method == "petra"]
    if not rows:
        return []
    notes = [
        f"petra, accumulation_steps={row.accumulation_steps}: {cost_of_delay(model, row.delay)}."
        for row in rows
    ]
    petra = rows[0]
    if petra.in_flight_per_stage and petra.in_flight_per_stage > 1:
        notes.append(
            f"petra: in_flight_per_stage={petra.in_flight_per_stage:g} in place of 1: more "
            "micro-batches are in flight, which hides slow links."
        )
    if petra.bottleneck == "averaging":
        notes.append(
            f"petra: averaging {petra.replicas} replicas at every update is the bottleneck; use a "
            f"larger --accumulation-steps than {petra.accumulation_steps}, or more stages and "
            "fewer replicas."
        )
    others = [
        forecast
        for forecast in forecasts
        if forecast.method != "petra"
        and "bound" not in forecast.method
        and forecast.fits is not False
    ]
    best = max(others, key=lambda forecast: forecast.throughput, default=petra)
    if best.throughput > _NEARLY * petra.throughput:
        notes.append(_slower(petra, best, better_stages(petra)))
    elif petra.bottleneck.startswith("link"):
        notes.append(
            f"petra: {petra.bottleneck} is too slow however much is in flight; fewer stages, a "
            "faster link or streams of lower precision would help."
        )
    return notes


def _slower(petra: Forecast, best: Forecast, better: Forecast | None) -> str:
    from revcompile.inspect.formatting import amount, size

    def figures(forecast: Forecast) -> str:
        return f"{amount(forecast.throughput)} samples/s in {size(forecast.memory)}"

    lost = (
        f"petra is slower than {best.method} here: {figures(petra)} against {figures(best)}, "
        f"limited by {petra.bottleneck}, devices {100 * petra.efficiency:.0f} % busy. "
    )
    if better is None:
        return lost + "No other number of stages that uses as many devices is faster."
    parallel = " (data parallel: reversify under DDP)" if better.stages == 1 else ""
    return (
        f"{lost}Its best number of stages is {better.stages}, with {better.replicas} replicas"
        f"{parallel}: {figures(better)}; see --stages {better.stages} "
        f"--accumulation-steps {better.accumulation_steps}."
    )
