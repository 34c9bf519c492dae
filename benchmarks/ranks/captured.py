"""Stages on several NCCL ranks, action by action and captured: time, host, kernels, link, memory.

    python -m benchmarks run ranks
    python -m benchmarks run ranks --case resnet18:64:64:10 --ranks 2 --backends eager cudagraphs
    python -m benchmarks run ranks --device cpu --case transformer-4x32:64:1:4 --backends static

Cases are model:pixels:batch:stages. Every rank count trains the same weights on the same
micro-batches with a full pipeline; backends take turns. All ranks may be on one GPU; there each
claims to be a machine of its own, and messages go through the host, so the link's own time is
measured too. A GPU runs the kernels of several processes in turns, also while one only waits for
a message: with `--mps` (NVIDIA's multi-process service) it runs them side by side.

    ms        a micro-batch, of the slowest rank; the median of the rounds
    host      processor time of each rank's main thread for a micro-batch, waiting not counted
    kernels   each rank's captured sections alone, while all others are idle
    link      all messages of a micro-batch at once between all ranks, and nothing else
    of bound  ms, divided by the larger of link and all kernels together
    memory    the most that each rank has taken of the device for this training
    driver    allocations of device memory by each rank's driver, in all rounds but the first
    losses    largest relative difference to the first row of the case
"""

from __future__ import annotations

import argparse
import gc
import time
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any, Final

import torch
from torch import Tensor, distributed
from torch.nn import functional as F

import revcompile
from benchmarks.harness import mib, synchronize
from benchmarks.models import Case, create, sgd
from benchmarks.ranks.launch import on_ranks, side_by_side
from benchmarks.registry import Benchmark, Row
from benchmarks.stages.engine import Feed
from revcompile.runtime.executor.graphs import CudaGraphReplay
from revcompile.runtime.trainer.placement import RankPlacement

CASES: Final = ("transformer-24x1024:64:1:8", "resnet18:64:64:10", "transformer-24x1024:64:8:8")
REPLAYS: Final = 20


@dataclass
class Found:
    """What one rank has measured of one variant."""

    backend: str
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    host: float = 0.0
    kernels: float = float("nan")
    link: float = 0.0
    sent: int = 0
    """Bytes a micro-batch to other ranks."""
    reserved: int = 0
    segments: list[int] = field(default_factory=list)
    """Blocks of memory that the driver has given so far, after each round."""
    captured: bool = False


class Variant:
    """One rank's part of a case's training with one backend."""

    def __init__(self, text: str, backend: str, options: argparse.Namespace, groups: Any) -> None:
        *parts, stages = text.split(":")
        case = Case.parse(":".join(parts))
        self.device = torch.device(options.device)
        self._control, self._links = groups
        before = self._reserved()
        with self.device:  # made there, which is faster
            model = create(case.model, case.size, case.classes)
        batches = Feed(case, self.device).batches
        example, _ = replace(case, batch=2).data(self.device)
        net = revcompile.petrafy(
            model.to(memory_format=torch.channels_last), int(stages), example, check="off"
        )
        autocast = torch.bfloat16 if options.device == "cuda" else None
        self.trainer = net.trainer(sgd, F.cross_entropy, autocast=autocast, backend=backend)
        self._reserved()
        is_first, is_last = self.trainer.is_first, self.trainer.is_last
        self._batches = [(x if is_first else None, y if is_last else None) for x, y in batches]
        self.found = Found(backend)
        warm_up = 2 * int(stages) + 12
        self.found.losses = [float(loss) for loss in self._turn(warm_up)]
        self.found.captured = self.trainer.runner.is_active
        if self.device.type == "cuda":
            self.found.reserved = torch.cuda.max_memory_reserved() - before

    def _reserved(self) -> int:
        """What this process takes of the GPU, caches emptied; the peak is counted from here."""
        if self.device.type != "cuda":
            return 0
        torch.cuda.synchronize()
        gc.collect()  # trainers of other variants
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_reserved()

    def _turn(self, steps: int) -> list[Tensor]:
        batches, step = self._batches, self.trainer.step
        metrics = [step(*batches[n % len(batches)]) for n in range(steps)]
        return [m.loss_tensor for m in metrics if m.loss_tensor is not None]

    def round(self, steps: int) -> None:
        """Time some steps."""
        distributed.barrier(self._control)
        synchronize(self.device)
        began, processor = time.perf_counter(), time.thread_time()
        self._turn(steps)
        host = time.thread_time() - processor
        synchronize(self.device)
        self.found.seconds.append((time.perf_counter() - began) / steps)
        self.found.host = min(self.found.host or 1.0, host / steps)
        if self.device.type == "cuda":
            self.found.segments.append(torch.cuda.memory_stats()["segment.all.allocated"])

    def finish(self) -> Found:
        """Measure what the steps are compared with, and close the trainer."""
        found = self.found
        found.sent, found.link = self._link()
        if found.captured and self.device.type == "cuda":
            found.kernels = self._kernels()
        self.trainer.close()
        return found

    def _kernels(self) -> float:
        """Seconds of a rank's captured sections. What they compute is of no use any more."""
        pipeline = self.trainer.runner._captured
        assert pipeline is not None and isinstance(pipeline._replay, CudaGraphReplay)
        seconds = 0.0
        for turn in range(distributed.get_world_size()):
            torch.cuda.synchronize()
            distributed.barrier(self._control)
            if turn == self.trainer.rank:
                began = time.perf_counter()
                steps = sum(pipeline._replay.replay_all() for _ in range(REPLAYS))
                torch.cuda.synchronize()
                seconds = (time.perf_counter() - began) / steps
        distributed.barrier(self._control)
        return seconds

    def _link(self) -> tuple[int, float]:
        """Bytes that a rank sends for a micro-batch, and seconds of all ranks' messages alone."""
        placement = self.trainer.placement
        if not isinstance(placement, RankPlacement):
            return 0, 0.0
        own, here = dict[int, int](), self.trainer.rank
        for (_, target), sender in placement.transport._senders.items():
            own[placement.ranks.owner(target)] = sender.payload_bytes()
        every: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(every, own, group=self._control)
        ops = [(distributed.isend, size, peer) for peer, size in own.items()]
        ops += [
            (distributed.irecv, sends[here], peer)
            for peer, sends in enumerate(every)
            if here in sends
        ]
        buffers = [torch.zeros(size, dtype=torch.uint8, device=self.device) for _, size, _ in ops]
        seconds = []
        for _ in range(10):
            synchronize(self.device)
            distributed.barrier(self._control)
            began = time.perf_counter()
            batch = [
                distributed.P2POp(call, buffer, peer, self._links)
                for (call, _, peer), buffer in zip(ops, buffers, strict=True)
            ]
            for work in distributed.batch_isend_irecv(batch):
                work.wait()
            synchronize(self.device)
            seconds.append(time.perf_counter() - began)
        return sum(own.values()), median(seconds[2:])


Losses = dict[str, list[float]]


def all_cases(rank: int, options: argparse.Namespace, reference: Losses) -> list[Row]:
    """One rank's part of all cases; prints a line for each variant."""
    warnings.simplefilter("ignore")
    if options.device == "cuda":
        torch.cuda.set_device(0)
    groups = [distributed.new_group(backend=b) for b in ("gloo", _backend(options))]
    rows = []
    for case in options.case:
        began = time.perf_counter()
        variants = [Variant(case, backend, options, groups) for backend in options.backends]
        for _ in range(options.rounds):
            for variant in variants:
                variant.round(options.steps)
        for variant in variants:
            by_rank: list[Any] = [None] * distributed.get_world_size()
            distributed.all_gather_object(by_rank, variant.finish(), group=groups[0])
            rows.append(row_of(case, by_rank, reference))
            if rank == 0:
                print(line_of(rows[-1]), flush=True)
        del variant, variants
        if rank == 0:
            print(f"    ({time.perf_counter() - began:.0f} s)", flush=True)
        if options.device == "cuda":
            torch.cuda.empty_cache()
    return rows


def _backend(options: argparse.Namespace) -> str:
    return "nccl" if options.device == "cuda" else "gloo"


def row_of(case: str, by_rank: list[Found], reference: Losses) -> Row:
    """A variant's figures over all ranks."""
    ms = 1e3 * median(map(max, zip(*(each.seconds for each in by_rank), strict=True)))
    kernels = 1e3 * sum(each.kernels for each in by_rank)
    link = 1e3 * max(each.link for each in by_rank)
    losses = by_rank[-1].losses
    pairs = zip(losses, reference.setdefault(case, losses), strict=True)
    return {
        "case": case,
        "ranks": len(by_rank),
        "backend": by_rank[0].backend,
        "ms": ms,
        "kernels_ms": kernels,
        "link_ms": link,
        "deviation": max(abs(a - b) / abs(b) for a, b in pairs),
        "by_rank": [asdict(each) for each in by_rank],
    }


COLUMNS: Final = {
    "": 28,
    "backend": 11,
    "ms": 7,
    "host": 24,
    "kernels": 26,
    "link": 6,
    "of bound": 8,
    "memory": 26,
    "driver": 8,
    "losses": 7,
}
"""Their widths."""


def line_of(row: Row) -> str:
    """A line of the table."""
    by_rank = row["by_rank"]
    bound = max(row["kernels_ms"], row["link_ms"])
    is_off = row["backend"] != "eager" and not all(each["captured"] for each in by_rank)
    cells = (
        row["case"],
        f"{row['backend']} (off)" if is_off else row["backend"],
        f"{row['ms']:.2f}",
        " ".join(f"{1e3 * each['host']:.2f}" for each in by_rank),
        " + ".join(f"{1e3 * each['kernels']:.2f}" for each in by_rank),
        f"{row['link_ms']:.2f}",
        f"{row['ms'] / bound:.2f}" if bound == bound and bound else "",
        " ".join(mib(each["reserved"]) for each in by_rank),
        " ".join(str(each["segments"][-1] - each["segments"][0]) for each in by_rank)
        if by_rank[0]["segments"]
        else "",
        f"{row['deviation']:.0e}",
    )
    pairs = zip(cells, COLUMNS.values(), strict=True)
    return "  ".join(f"{cell:<{width}}" for cell, width in pairs)


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """One for each rank count, case and backend."""
    reference: Losses = {}
    for ranks in options.ranks:
        print(f"\n{ranks} ranks")
        print("  ".join(f"{name:<{width}}" for name, width in COLUMNS.items()), flush=True)
        with side_by_side() if options.mps else nullcontext():
            found = on_ranks(all_cases, options, reference, ranks=ranks, device=options.device)[0]
        for row in found:
            reference.setdefault(row["case"], row["by_rank"][-1]["losses"])
        yield from found


def arguments(parser: argparse.ArgumentParser) -> None:
    """What is trained, and on how many ranks."""
    parser.add_argument("--case", nargs="+", default=list(CASES), help="model:pixels:batch:stages")
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--backends", nargs="+", default=["cudagraphs", "eager"])
    parser.add_argument("--mps", action="store_true", help="kernels of all ranks side by side")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=4)


BENCHMARK = Benchmark("ranks", arguments, rows, smallest=None, needs="a GPU, for NCCL")
