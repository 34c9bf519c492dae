"""Predict throughput, memory, delay and efficiency on a cluster, for PETRA and other methods.

The model is cut into one stage a device; where there are more devices than stages, whole pipelines
are copied and gradients averaged. Times come from counted work on devices of the given figures, or
with --cost measured from this machine. Slow links need more micro-batches in flight: the least
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
    from revcompile.plan.forecast import Forecast, Seconds

__all__ = ["add", "run"]

_BUFFERS: Final = {"bf16": 2, "fp16": 2, "fp8": 1, "offload": 0}
"""Bytes an element of an input takes on the device while it waits."""


def add(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    add_model(parser)
    cluster = parser.add_argument_group("the cluster")
    cluster.add_argument("--devices", type=count, required=True, metavar="N")
    cluster.add_argument("--link", type=bandwidth, default="100Gbps", help="between two devices")
    cluster.add_argument("--latency", type=seconds, default="10us", help="of a link")
    cluster.add_argument("--flops", type=rate, default="400T", help="that a device reaches")
    cluster.add_argument("--memory-bandwidth", type=rate, default="3.3T", help="bytes a second")
    cluster.add_argument("--memory", type=size, help="of a device, e.g. 80GB: the cut must fit")
    training = parser.add_argument_group("the training")
    training.add_argument("--batch", type=count, default=32, help="samples a micro-batch")
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
        "--buffers", choices=tuple(_BUFFERS), help="how inputs wait that cannot be rebuilt"
    )
    parser.add_argument(
        "--cost",
        choices=("analytic", "measured", "replayed"),
        default="analytic",
        help="counted work on devices of these figures, times of this machine, or (CUDA) times "
        "of kernels alone, as recorded rounds take",
    )
    parser.add_argument("--device", default="cpu", help="where to measure, e.g. cuda")


def run(args: argparse.Namespace) -> int:
    """Print the forecasts; exit code 1 if a memory limit was given and nothing fits."""
    from revcompile.plan.forecast import METHODS, plan
    from revcompile.schedule import Wire

    measured = args.cost != "analytic"
    loaded = load(
        args,
        batch=args.batch if measured else None,
        device=args.device if measured else "meta",
    )
    cut, found = plan(
        rewired(loaded, args).rewired,
        args.devices,
        batch=args.batch,
        wire=Wire(args.link, args.latency),
        seconds=_seconds(args),
        cost=args.cost,
        stages=args.stages,
        microbatches=args.microbatches,
        accumulate=args.accumulate,
        alpha=args.alpha,
        methods=args.methods.split(",") if args.methods else METHODS,
        memory=args.memory,
        optimizer_copies=2 if args.adam else 1,
        buffer_bytes=_BUFFERS[args.buffers] if args.buffers else None,
    )
    say_json(_facts(loaded.name, args, cut, found)) if args.json else say(
        _table(loaded.name, args, found)
    )
    return 1 if args.memory and not any(one.fits for one in found) else 0


def _seconds(args: argparse.Namespace) -> Seconds:
    from revcompile.plan.forecast import Device, Seconds, update_speed

    if args.cost != "analytic":
        return Seconds.measured(update_speed(args.device))
    return Seconds.on(Device(args.flops, args.memory_bandwidth))


def _facts(
    name: str, args: argparse.Namespace, cut: Partition, found: Sequence[Forecast]
) -> dict[str, Any]:
    return {
        "model": name,
        "devices": args.devices,
        "batch": args.batch,
        "link": {"bytes_per_second": args.link, "latency": args.latency},
        "cost": args.cost,
        "stages": [[piece.name for piece in part.pieces] for part in cut.parts],
        "forecasts": [dataclasses.asdict(one) for one in found],
    }


def _table(name: str, args: argparse.Namespace, found: Sequence[Forecast]) -> str:
    from rich import box
    from rich.table import Table

    from revcompile.inspect import formatting
    from revcompile.inspect.tables import render

    first = found[0]
    used = first.stages * first.replicas
    table = Table(
        title=f"{name}: {first.stages} stages x {first.replicas} replicas on {args.devices} "
        f"devices, micro-batches of {args.batch}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    columns = ("samples/s", "busy", "memory", "delay", "alpha", "updates every", "pace set by")
    table.add_column("method")
    for column in columns:
        is_text = column == "pace set by"
        table.add_column(column, justify="left" if is_text else "right", no_wrap=column == "memory")
    for one in found:
        fits = {None: "", True: "", False: " (too much)"}[one.fits]
        table.add_row(
            one.method,
            formatting.amount(one.throughput),
            f"{100 * one.efficiency:.1f} %",
            formatting.size(one.memory) + fits,
            str(one.delay),
            "" if one.alpha is None else f"{one.alpha:g}",
            str(one.group),
            one.limit,
        )
    idle = [f"{args.devices - used} devices stay idle"] if used < args.devices else []
    return render(table, *idle, *_advice(found))


def _advice(found: Sequence[Forecast]) -> list[str]:
    petra = next((one for one in found if one.method == "petra"), None)
    if petra is None:
        return []
    if petra.limit.startswith("link"):
        return [
            f"petra: {petra.limit} is too narrow whatever is in flight; fewer stages, a faster "
            "link or streams of lower precision would help"
        ]
    if petra.limit == "averaging":
        return [
            f"petra: averaging {petra.replicas} copies at every update holds it back; use a "
            f"larger --accumulate than {petra.group}, or more stages and fewer copies"
        ]
    if petra.alpha is None or petra.alpha == 1:
        return []
    least = -(-(petra.stages - 1) // petra.group)
    return [
        f"petra: alpha {petra.alpha:g} hides the links; gradients of the first stage are "
        f"{petra.delay} updates late instead of {least}"
    ]
