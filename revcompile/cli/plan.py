"""Predict throughput, memory, delay and efficiency on a cluster, for PETRA and other methods.

The model is cut into one stage a device; where there are more devices than stages, whole pipelines
are replicated and gradients averaged. Times come from counted work on devices of the given figures,
or with --cost measured from this machine. Slow links need more micro-batches in flight: the least
alpha that hides them is chosen, and the delay it costs is shown. "zero-bubble" is an optimistic
bound, not a schedule that we run.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from revcompile.cli.models import add_model, load, rewired
from revcompile.cli.output import say, say_json
from revcompile.cli.units import bandwidth, count, rate, seconds, size

if TYPE_CHECKING:
    from revcompile.ir.program import Partition
    from revcompile.plan.cluster import TimeModel
    from revcompile.plan.forecast import Forecast

__all__ = ["add", "run"]

_BUFFERS: Final = {"bf16": 2, "fp16": 2, "fp8": 1, "offload": 0}
"""Bytes an element of a kept input takes on the device."""


def add(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    cluster = parser.add_argument_group("the cluster")
    cluster.add_argument("--devices", type=count, required=True, metavar="N")
    cluster.add_argument("--link", type=bandwidth, default="100Gbps", help="between two devices")
    cluster.add_argument("--latency", type=seconds, default="10us", help="of a link")
    cluster.add_argument("--flops", type=rate, default="400T", help="that a device reaches")
    cluster.add_argument("--memory-bandwidth", type=rate, default="3.3T", help="bytes a second")
    cluster.add_argument(
        "--memory-budget", type=size, help="of a device, e.g. 80GB: the cut must fit"
    )
    training = parser.add_argument_group("the training")
    training.add_argument("--batch-size", type=count, default=32, help="samples a micro-batch")
    training.add_argument("--stages", type=count, help="default: as many as there are segments")
    training.add_argument(
        "--microbatches", type=count, help="an update, where pipelines drain (default: 4 a stage)"
    )
    training.add_argument(
        "--accumulate", type=count, default=1, help="micro-batches an update, where they do not"
    )
    training.add_argument("--alpha", type=float, help="micro-batches in flight (default: chosen)")
    training.add_argument("--methods", help="comma between (petra,1f1b,gpipe,zero-bubble)")
    training.add_argument("--adam", action="store_true", help="two numbers of optimizer state")
    training.add_argument(
        "--buffers", choices=tuple(_BUFFERS), help="how inputs are kept that cannot be rebuilt"
    )
    parser.add_argument(
        "--cost",
        choices=("analytic", "measured", "replayed"),
        default="analytic",
        help="counted work on devices of these figures, times of this machine, or (CUDA) times "
        "of kernels alone, as captured steps take them",
    )
    parser.add_argument("--device", default="cpu", help="where to measure, e.g. cuda")


def run(args: argparse.Namespace) -> int:
    """Print the forecasts; exit code 1 if a memory budget was given and nothing fits."""
    from revcompile.compiler.cost import Workload
    from revcompile.plan.cluster import Cluster, NetworkLink
    from revcompile.plan.forecast import METHODS, plan_cluster
    from revcompile.schedule import choose

    measured = args.cost != "analytic"
    loaded = load(
        args,
        batch_size=args.batch_size if measured else None,
        device=args.device if measured else "meta",
    )
    workload = Workload(
        choose("petra"),
        args.batch_size,
        args.accumulate,
        optimizer_copies=2 if args.adam else 1,
        buffer_bytes=_BUFFERS[args.buffers] if args.buffers else None,
    )
    cut, forecasts = plan_cluster(
        rewired(loaded, args).rewired,
        Cluster(args.devices, NetworkLink(args.link, args.latency), _time_model(args)),
        workload,
        methods=args.methods.split(",") if args.methods else METHODS,
        stages=args.stages,
        microbatches=args.microbatches,
        alpha=args.alpha,
        cost=args.cost,
        memory_budget=args.memory_budget,
    )
    say_json(_facts(loaded.name, args, cut, forecasts)) if args.json else say(
        _table(loaded.name, args, forecasts)
    )
    return 1 if args.memory_budget and not any(forecast.fits for forecast in forecasts) else 0


def _time_model(args: argparse.Namespace) -> TimeModel:
    from revcompile.plan.cluster import Device, TimeModel, update_speed

    if args.cost != "analytic":
        return TimeModel.measured(update_speed(args.device))
    return TimeModel.on(Device(args.flops, args.memory_bandwidth))


def _facts(
    name: str, args: argparse.Namespace, cut: Partition, forecasts: Sequence[Forecast]
) -> dict[str, Any]:
    return {
        "model": name,
        "devices": args.devices,
        "batch_size": args.batch_size,
        "link": {"bytes_per_second": args.link, "latency": args.latency},
        "cost": args.cost,
        "stages": [[piece.name for piece in part.pieces] for part in cut.parts],
        "forecasts": [dataclasses.asdict(forecast) for forecast in forecasts],
    }


def _table(name: str, args: argparse.Namespace, forecasts: Sequence[Forecast]) -> str:
    from rich import box
    from rich.table import Table

    from revcompile.inspect import formatting
    from revcompile.inspect.tables import render

    first = forecasts[0]
    used = first.stages * first.replicas
    table = Table(
        title=f"{name}: {first.stages} stages x {first.replicas} replicas on {args.devices} "
        f"devices, micro-batches of {args.batch_size}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )
    columns = ("samples/s", "busy", "memory", "delay", "alpha", "accumulate", "bottleneck")
    table.add_column("method", min_width=len("zero-bubble"))
    for column in columns:
        is_text = column == "bottleneck"
        table.add_column(column, justify="left" if is_text else "right", no_wrap=True)
    for forecast in forecasts:
        fits = {None: "", True: "", False: "\n(too much)"}[forecast.fits]
        table.add_row(
            forecast.method,
            formatting.amount(forecast.throughput),
            f"{100 * forecast.efficiency:.1f} %",
            formatting.size(forecast.memory) + fits,
            str(forecast.delay),
            "" if forecast.alpha is None else f"{forecast.alpha:g}",
            str(forecast.accumulate),
            forecast.bottleneck,
        )
    idle = [f"{args.devices - used} devices stay idle"] if used < args.devices else []
    return render(table, "", *idle, *_advice(forecasts))


def _advice(forecasts: Sequence[Forecast]) -> list[str]:
    petra = next((forecast for forecast in forecasts if forecast.method == "petra"), None)
    if petra is None:
        return []
    if petra.bottleneck.startswith("link"):
        return [
            f"petra: {petra.bottleneck} is too narrow whatever is in flight; fewer stages, a "
            "faster link or streams of lower precision would help"
        ]
    if petra.bottleneck == "averaging":
        return [
            f"petra: averaging {petra.replicas} replicas at every update is the bottleneck; use a "
            f"larger --accumulate than {petra.accumulate}, or more stages and fewer replicas"
        ]
    if petra.alpha is None or petra.alpha == 1:
        return []
    least = -(-(petra.stages - 1) // petra.accumulate)
    return [
        f"petra: alpha {petra.alpha:g} hides the links; gradients of the first stage are "
        f"{petra.delay} updates late instead of {least}"
    ]
