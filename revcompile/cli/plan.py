"""Forecast throughput, memory and delay of PETRA and other methods on a cluster.

The other methods (data parallel, GPipe, 1F1B, interleaved 1F1B and zero-bubble) train the original
model, PETRA the rewired one. Precision, optimizer, samples per update and the rule for cuts are the
same. A device has one stage (interleaved: two). Further devices hold replicas, whose gradients are
averaged. PETRA has three rows: all stages rebuild their activations; the last stages keep their
graphs, within the memory of 1F1B; and within the memory of the device.

  busy     share of the time in which devices compute
  bubbles  share in which they wait for other stages
  links    share in which they wait for messages or averaging besides
  memory   peak of the device that needs the most
  late     the largest delay of gradients, in updates
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from revcompile.cli.models import add_model, load
from revcompile.cli.output import Answer
from revcompile.cli.units import bandwidth, count, rate, seconds, size

if TYPE_CHECKING:
    from revcompile.plan.forecast import Cluster, Forecast, Planner, Training

_STATE: Final = {"sgd": 1, "adamw": 2}
"""Numbers of optimizer state for each parameter."""
_FLOPS: Final = {"bf16": "400T", "fp32": "200T"}
"""What half an H200's data sheet gives, or a little less; in float32 with TF32 products."""
_NUMBERS: Final = ("samples/s", "busy", "bubbles", "links", "memory", "late")


def add(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    cluster = parser.add_argument_group("the cluster (defaults: what an H200 reaches)")
    cluster.add_argument("--devices", type=count, required=True, metavar="N", help="how many")
    cluster.add_argument("--link", type=bandwidth, default="100Gbps", help="between two devices")
    cluster.add_argument("--latency", type=seconds, default="10us", help="of a link")
    cluster.add_argument(
        "--flops", type=rate, help="FLOPs per second (default: 400T in bf16, 200T in fp32)"
    )
    cluster.add_argument("--memory-bandwidth", type=rate, default="3.3T", help="bytes per second")
    cluster.add_argument("--memory-budget", type=size, default="141GB", help="memory of a device")
    training = parser.add_argument_group("the training")
    training.add_argument(
        "--microbatch-size", type=count, default=32, help="samples per micro-batch"
    )
    training.add_argument(
        "--stages", type=count, help="stages of a pipeline (default: as many as use all devices)"
    )
    training.add_argument(
        "--accumulation-steps", type=count, help="micro-batches per update (default: 4 per stage)"
    )
    training.add_argument(
        "--in-flight-per-stage",
        type=float,
        help="PETRA's micro-batches in flight for each later stage, 1 or more (default: as many as "
        "links need)",
    )
    training.add_argument(
        "--optimizer",
        choices=tuple(_STATE),
        help="sgd (with momentum) or adamw (default: adamw for models with attention, else sgd)",
    )
    training.add_argument(
        "--precision",
        choices=tuple(_FLOPS),
        help="bf16: activations and messages in bfloat16, weights and PETRA's streams in float32 "
        "(default: bf16; measured costs are fp32)",
    )
    parser.add_argument(
        "--cost",
        choices=("analytic", "measured"),
        default="analytic",
        help="analytic: from FLOPs and bytes; measured: timed on this machine, in fp32",
    )
    parser.add_argument("--device", default="cpu", help="where to measure, e.g. cuda")
    parser.add_argument("--plot", metavar="FILE.svg", help="draw throughput over memory")


def run(args: argparse.Namespace) -> Answer:
    """The forecasts; exit code 1 if nothing fits the devices."""
    from revcompile.arguments import new_file
    from revcompile.inspect.formatting import plural

    path = new_file("--plot", args.plot, "frontier.svg") if args.plot else None
    planner = _planner(args)
    rows = planner.rows()
    advice = _advice(planner, rows)
    assumed = _assumed(args, planner.cluster, planner.training)
    facts = {
        "model": planner.original.rewired.name,
        "cluster": dataclasses.asdict(planner.cluster),
        "training": dataclasses.asdict(planner.training),
        "forecasts": [dataclasses.asdict(row) for row in rows],
        "frontier": [dataclasses.asdict(row) for row in planner.frontier()],
        "recommended": advice,
    }
    stages, devices = plural(planner.stages, "stage"), plural(args.devices, "device")
    title = f"{args.model}: {stages} x {planner.replicas} on {devices}"
    if path is not None:
        from revcompile.inspect.drawing import draw_frontier

        points = {row.method: (row.memory, row.throughput) for row in rows}
        curve = [(row.memory, row.throughput) for row in planner.frontier()]
        draw_frontier(path, title, assumed, points, curve)
    idle = args.devices - planner.stages * planner.replicas
    notes = [f"idle: {plural(idle, 'device')}", ""] if idle else []
    text = _table(title, rows, "", assumed, "", *notes, advice)
    return Answer(text, facts, code=int(not any(row.fits for row in rows)))


def _planner(args: argparse.Namespace) -> Planner:
    from revcompile.arguments import check_device
    from revcompile.compiler.capture import capture
    from revcompile.compiler.capture.check import Check
    from revcompile.compiler.find import find
    from revcompile.compiler.partition import Pieces, one_stream
    from revcompile.compiler.rewire import rewire
    from revcompile.errors import InputError
    from revcompile.ir.policy import Policy
    from revcompile.plan.forecast import Cluster, Planner, Training, fewest_idle
    from revcompile.plan.learning import has_attention
    from revcompile.schedule import choose

    check_device("--device", args.device)
    choose("petra", in_flight_per_stage=args.in_flight_per_stage)
    measured = args.cost == "measured"
    if measured and args.precision == "bf16":
        raise InputError("--precision bf16: costs are measured in fp32; leave out one of the two")
    loaded = load(
        args,
        microbatch_size=args.microbatch_size if measured else None,
        device=args.device if measured else "meta",
    )
    captured = capture(loaded.model, loaded.example, None, check=Check.OFF)
    found = find(captured)
    rewired = Pieces.of(rewire(captured, found, Policy(args.policy)), args.cost)
    original = Pieces.of(one_stream(captured, found), args.cost)
    args.precision = args.precision or ("fp32" if measured else "bf16")
    is_transformer = has_attention([captured.graph], captured.root)
    args.optimizer = args.optimizer or ("adamw" if is_transformer else "sgd")
    most = min(len(rewired.whole), len(original.whole))
    stages = args.stages or fewest_idle(args.devices, most)
    if stages > args.devices:
        raise InputError(
            f"plan: stages={stages} on {args.devices} devices; use 1 to {args.devices}"
        )
    cluster = Cluster(
        args.devices,
        args.link,
        args.latency,
        args.flops or rate(_FLOPS[args.precision]),
        args.memory_bandwidth,
        args.memory_budget,
    )
    training = Training(
        args.microbatch_size,
        args.accumulation_steps or 4 * stages,
        _STATE[args.optimizer],
        args.precision == "bf16",
        measured,
    )
    return Planner(original, rewired, cluster, training, stages, args.in_flight_per_stage)


def _assumed(args: argparse.Namespace, cluster: Cluster, training: Training) -> str:
    from revcompile.inspect.formatting import amount, size

    speed = (
        f"times measured on {args.device}"
        if training.measured
        else f"{amount(cluster.flops)}FLOPS and {amount(cluster.memory_bandwidth)}B/s of memory"
    )
    return (
        f"assumed: {args.precision}, {speed}; links of {amount(cluster.link)}B/s and "
        f"{cluster.latency * 1e6:g} us; {size(cluster.memory)} per device; {args.optimizer}; "
        f"{training.accumulation_steps} micro-batches of {training.microbatch_size} per update"
    )


def _table(title: str, rows: Sequence[Forecast], *below: str) -> str:
    from revcompile.inspect import formatting
    from revcompile.inspect.tables import render, table_of

    table = table_of(title, {"method": "left", **dict.fromkeys(_NUMBERS, "right")}, "method")
    for row in rows:
        shares = (row.busy, row.bubbles, row.links)
        table.add_row(
            row.method,
            formatting.amount(row.throughput),
            *(f"{round(100 * share)} %" for share in shares),
            formatting.size(row.memory) + ("" if row.fits else "\n(too much)"),
            str(row.delay),
        )
    return render(table, *below)


def _advice(planner: Planner, rows: Sequence[Forecast]) -> str:
    """The best method that fits, how to get it, and what it costs, in a sentence."""
    from revcompile.inspect import formatting
    from revcompile.plan.forecast import best

    fitting = [row for row in rows if row.fits]
    if not fitting:
        least = min(rows, key=lambda row: row.memory)
        return (
            f"Nothing fits: {least.method} needs the least, {formatting.size(least.memory)}; use "
            "more devices and stages, or a smaller --microbatch-size."
        )
    row = best(fitting)
    how = f"{row.method} of the original model"
    if row.keeps:
        kept = row.keeps.count("graph")
        counts = {"nothing": row.stages - kept, "graph": kept}
        keep = " + ".join(f"[{name!r}] * {count}" for name, count in counts.items() if count)
        budget = ""
        if kept:
            budget = f", memory_budget='{math.ceil(planner.trainer_budget(row) / 2**20)}MiB'"
        how = (
            f"petrafy(model, {row.stages}, keep={keep}) and net.trainer(..., "
            f"options=TrainerOptions(in_flight_per_stage={row.in_flight_per_stage:g}){budget})"
        )
    late = "no late gradient"
    if row.delay:
        late = f"gradients up to {formatting.plural(row.delay, 'update')} late"
    return (
        f"Recommended: {how}: {formatting.amount(row.throughput)} samples/s for "
        f"{formatting.size(row.memory)} per device and {late}."
    )
