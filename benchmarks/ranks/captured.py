"""Stages on several NCCL ranks, action by action and captured: time, host, kernels, link, memory.

    python -m benchmarks run ranks
    python -m benchmarks run ranks --case resnet18:64:64:10 --ranks 2 --backends eager cudagraphs

Cases are model:pixels:batch:stages. Every rank count trains the same weights on the same
micro-batches with a full pipeline. All ranks may be on one GPU; there each claims to be a machine
of its own, and messages go through the host, so the link's own time is measured too:

    ms        a micro-batch, of the slowest rank; the median of the rounds
    host      processor time of each rank's main thread for a micro-batch, waiting not counted
    kernels   each rank's captured stretches alone, while all others are idle
    link      all messages of a micro-batch at once between all ranks, and nothing else
    bound     the larger of link and all kernels together
    losses    largest relative difference to the first row of the case
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any, Final

import torch
from torch import Tensor, distributed
from torch.nn import functional as F

import revcompile
from benchmarks.harness import mib, show
from benchmarks.models import Case, create, sgd
from benchmarks.ranks.launch import on_ranks
from benchmarks.registry import Benchmark, Row
from benchmarks.stages.engine import Feed
from revcompile.runtime.distributed.trainer import DistributedTrainer
from revcompile.runtime.trainer.core import Trainer

CASES: Final = ("resnet18:64:64:10", "transformer-24x1024:64:1:8", "transformer-24x1024:64:8:8")
REPLAYS: Final = 20


@dataclass
class Found:
    """What one rank has measured of one variant."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    host: float = 0.0
    kernels: float = float("nan")
    link: float = 0.0
    sent: int = 0
    """Bytes a micro-batch to other ranks."""
    allocated: int = 0
    captured: bool = False


def trained(text: str, backend: str, options: argparse.Namespace, control: Any) -> Found:
    """One rank's part of one variant; `control` is the group of all ranks over gloo."""
    *parts, stages = text.split(":")
    case, device = Case.parse(":".join(parts)), torch.device("cuda", 0)
    torch.cuda.reset_peak_memory_stats()
    with device:  # made there, which is faster
        model = create(case.model, case.size, case.classes).to(memory_format=torch.channels_last)
    batches = Feed(case, device).batches
    example, _ = replace(case, batch=2).data(device)
    net = revcompile.petrafy(model, int(stages), example, check="off")
    trainer = net.trainer(sgd, F.cross_entropy, autocast=torch.bfloat16, backend=backend)
    given = [(x if trainer.is_first else None, y if trainer.is_last else None) for x, y in batches]
    found = Found()

    def turn(steps: int) -> list[Tensor]:
        metrics = [trainer.step(*given[n % len(given)]) for n in range(steps)]
        return [m.loss_tensor for m in metrics if m.loss_tensor is not None]

    found.losses = [float(loss) for loss in turn(2 * int(stages) + 12)]
    for _ in range(options.rounds):
        distributed.barrier(control)
        torch.cuda.synchronize()
        began, processor = time.perf_counter(), time.thread_time()
        turn(options.steps)
        found.host += (time.thread_time() - processor) / options.steps / options.rounds
        torch.cuda.synchronize()
        found.seconds.append((time.perf_counter() - began) / options.steps)
    found.captured = trainer.runner.is_active
    found.allocated = torch.cuda.max_memory_allocated()
    found.sent, found.link = linked(trainer, control)
    if found.captured:
        found.kernels = alone(trainer, control)
    if isinstance(trainer, DistributedTrainer):
        trainer.close()
    return found


def alone(trainer: Trainer, control: Any) -> float:
    """Seconds of a rank's captured stretches. What they compute is of no use any more."""
    replay: Any = trainer.runner._pipeline._replay  # type: ignore[union-attr]
    captures = [capture for each in replay._captures.values() for capture in each]
    seconds = 0.0
    for turn in range(distributed.get_world_size()):
        torch.cuda.synchronize()
        distributed.barrier(control)
        if turn == trainer.rank:
            began = time.perf_counter()
            for _ in range(REPLAYS):
                for capture in captures:
                    capture.graph.replay()
            torch.cuda.synchronize()
            seconds = (time.perf_counter() - began) / (REPLAYS * len(replay._captures))
    distributed.barrier(control)
    return seconds


def linked(trainer: Trainer, control: Any) -> tuple[int, float]:
    """Bytes that a rank sends for a micro-batch, and seconds of all ranks' messages alone."""
    if not isinstance(trainer, DistributedTrainer):
        return 0, 0.0
    own: dict[int, int] = {}
    for (_, target), sender in trainer.transport._senders.items():
        formats = [form for each in sender._describers.values() for form in each._formats]
        own[trainer.ranks.owner(target)] = sum(f.numel * f.dtype.itemsize for f in formats)
    every: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(every, own, group=control)
    ops = [(distributed.isend, size, peer) for peer, size in own.items()]
    ops += [
        (distributed.irecv, sends[trainer.rank], peer)
        for peer, sends in enumerate(every)
        if trainer.rank in sends
    ]
    buffers = [torch.zeros(size, dtype=torch.uint8, device="cuda") for _, size, _ in ops]
    group, seconds = distributed.new_group(backend="nccl"), []
    for _ in range(8):
        torch.cuda.synchronize()
        distributed.barrier(control)
        began = time.perf_counter()
        batch = [
            distributed.P2POp(call, buffer, peer, group)
            for (call, _, peer), buffer in zip(ops, buffers, strict=True)
        ]
        for work in distributed.batch_isend_irecv(batch):
            work.wait()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return sum(own.values()), median(seconds[2:])


def all_variants(rank: int, options: argparse.Namespace) -> list[Found]:
    """One rank's part of all of them."""
    torch.cuda.set_device(0)
    control = distributed.new_group(backend="gloo")
    found = []
    for case in options.case:
        for backend in options.backends:
            found.append(trained(case, backend, options, control))
            torch.cuda.empty_cache()
    return found


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """One for each case, rank count and backend."""
    reference: dict[str, list[float]] = {}
    for ranks in options.ranks:
        by_rank = on_ranks(all_variants, options, ranks=ranks, device="cuda")
        names = [(case, backend) for case in options.case for backend in options.backends]
        shown = []
        for number, (case, backend) in enumerate(names):
            found: list[Found] = [each[number] for each in by_rank]
            ms = 1e3 * median(map(max, zip(*(each.seconds for each in found), strict=True)))
            kernels = 1e3 * sum(each.kernels for each in found)
            link = 1e3 * max(each.link for each in found)
            losses = found[-1].losses
            pairs = zip(losses, reference.setdefault(case, losses), strict=True)
            deviation = max(abs(a - b) / abs(b) for a, b in pairs)
            host = [f"{1e3 * each.host:.2f}" for each in found]
            memory = [mib(each.allocated) for each in found]
            shown.append(
                (
                    case,
                    backend if found[0].captured or backend == "eager" else f"{backend} (off)",
                    f"{ms:.2f}",
                    " ".join(host),
                    " + ".join(f"{1e3 * each.kernels:.2f}" for each in found),
                    f"{link:.2f}",
                    f"{ms / max(kernels, link):.2f}" if kernels == kernels else "",
                    " ".join(memory),
                    f"{deviation:.1e}",
                )
            )
            yield {
                "case": case,
                "ranks": ranks,
                "backend": backend,
                "ms": ms,
                "link_ms": link,
                "deviation": deviation,
                "by_rank": [asdict(each) for each in found],
            }
        columns = ("", "backend", "ms", "host", "kernels", "link", "of bound", "MiB", "losses")
        show(f"{ranks} ranks", columns, shown)


def arguments(parser: argparse.ArgumentParser) -> None:
    """What is trained, and on how many ranks."""
    parser.add_argument("--case", nargs="+", default=list(CASES), help="model:pixels:batch:stages")
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--backends", nargs="+", default=["cudagraphs", "eager"])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=5)


BENCHMARK = Benchmark("ranks", arguments, rows, smallest=None, needs="a GPU, for NCCL")
