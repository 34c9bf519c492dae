"""revcompile plan: forecasts for a cluster."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Final

from revcompile.arguments import check_device
from revcompile.cli import Answer
from revcompile.cli.models import load
from revcompile.compiler.capture import capture
from revcompile.compiler.capture.check import Check
from revcompile.compiler.find import find
from revcompile.compiler.partition import Pieces, one_stream
from revcompile.compiler.rewire import rewire
from revcompile.errors import InputError
from revcompile.inspect import drawing
from revcompile.inspect.formatting import amount, plural, size
from revcompile.inspect.tables import render, table_of
from revcompile.ir.policy import Policy
from revcompile.plan.forecast import Cluster, Forecast, Planner, Training, best, fewest_idle
from revcompile.plan.learning import has_attention
from revcompile.schedule import choose

_STATE: Final = {"sgd": 1, "adamw": 2}
"""Values of optimizer state per parameter."""
_FLOPS: Final = {"bf16": 400e12, "fp32": 200e12}
"""Less than half of an H200's data sheet; for float32, with TF32 matrix products."""
_NUMBERS: Final = ("samples/s", "busy", "bubbles", "links", "memory", "late")


def run(args: argparse.Namespace) -> Answer:
    """The forecasts; exit code 1 if nothing fits the devices."""
    planner = _planner(args)
    rows = planner.rows()
    advice = _advice(rows)
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
    if args.plot is not None:
        points = {row.method: (row.memory, row.throughput) for row in rows}
        curve = [(row.memory, row.throughput) for row in planner.frontier()]
        drawn = partial(drawing.frontier_svg, title, assumed, drawing.Panel(points, curve))
        drawing.write("plan", args.plot, {".svg": drawn})
    idle = args.devices - planner.stages * planner.replicas
    notes = [f"idle: {plural(idle, 'device')}", ""] if idle else []
    text = _table(title, rows, "", assumed, "", *notes, advice)
    return Answer(text, facts, code=int(not any(row.fits for row in rows)))


def _planner(args: argparse.Namespace) -> Planner:
    check_device("plan", args.device)
    choose("petra", in_flight_per_stage=args.in_flight_per_stage)
    measured = args.cost == "measured"
    if measured and args.precision == "bf16":
        raise InputError("--precision bf16: costs are measured in fp32; leave out one of the two")
    loaded = load(
        args,
        microbatch_size=args.microbatch_size if measured else None,
        device=args.device if measured else "meta",
    )
    captured = capture(loaded.model, loaded.example, loaded.kwargs, check=Check.OFF)
    found = find(captured)
    rewired = Pieces.of(rewire(captured, found, Policy(args.policy)), args.cost)
    original = Pieces.of(one_stream(captured, found), args.cost)
    args.precision = args.precision or ("fp32" if measured else "bf16")
    is_transformer = has_attention([captured.graph], captured.root)
    args.optimizer = args.optimizer or ("adamw" if is_transformer else "sgd")
    most = min(len(rewired.whole), len(original.whole))
    stages = args.stages or fewest_idle(args.devices, most)
    if stages > args.devices:
        raise InputError(f"--stages {stages} on {args.devices} devices; use 1 to {args.devices}")
    cluster = Cluster(
        args.devices,
        args.link,
        args.latency,
        args.flops or _FLOPS[args.precision],
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
    table = table_of(title, {"method": "left", **dict.fromkeys(_NUMBERS, "right")}, "method")
    for row in rows:
        shares = (row.busy, row.bubbles, row.links)
        table.add_row(
            row.method,
            amount(row.throughput),
            *(f"{round(100 * share)} %" for share in shares),
            size(row.memory) + ("" if row.fits else "\n(too much)"),
            str(row.delay),
        )
    return render(table, *below)


def _advice(rows: Sequence[Forecast]) -> str:
    """The best method that fits, how to get it, and what it costs, in a sentence."""
    fitting = [row for row in rows if row.fits]
    if not fitting:
        least = min(rows, key=lambda row: row.memory)
        return (
            f"Nothing fits: {least.method} needs the least, {size(least.memory)}; use "
            "more devices and stages, or a smaller --microbatch-size."
        )
    row = best(fitting)
    how = f"{row.method} of the original model"
    if row.keeps:
        kept = row.keeps.count("graph")
        counts = {"nothing": row.stages - kept, "graph": kept}
        keep = " + ".join(f"[{name!r}] * {count}" for name, count in counts.items() if count)
        how = (
            f"petrafy(model, {row.stages}, keep={keep}) and net.trainer(..., "
            f"options=TrainerOptions(in_flight_per_stage={row.in_flight_per_stage:g}))"
        )
    late = "no late gradient"
    if row.delay:
        late = f"gradients up to {plural(row.delay, 'update')} late"
    return (
        f"Recommended: {how}: {amount(row.throughput)} samples/s for "
        f"{size(row.memory)} per device and {late}."
    )
