"""Stages on several ranks, action by action and captured: time, host, kernels, link, memory.

    python -m benchmarks.ranks [--mps]
    python -m benchmarks.ranks --case resnet18:64:64:10 --ranks 2 --backends eager cudagraphs
    python -m benchmarks.ranks --device cpu --case transformer-4x32:64:1:4 --backends static
    python -m benchmarks.ranks --device cpu --ranks 2 --case vit_tiny_patch16_224:96:12:2 \
        --steps 8 --backends eager model-parallel torch-1f1b torch-1f1b-checkpointed torch-gpipe

Cases are model:pixels:batch:stages. Every rank count trains the same weights on the same
micro-batches with a full pipeline; backends take turns. All ranks may be on one GPU. Each rank then
claims to be a separate machine, and messages go through the host, so the time of the link alone is
measured too. A GPU runs the kernels of several processes in turns, even while one of them only
waits for a message; with `--mps` (NVIDIA's multi-process service) it runs them side by side.

Besides PETRA's backends there are `model-parallel` (reversible, one micro-batch at a time) and, on
CPU ranks with one stage each, torch's schedules on the same stages, which drain every `--steps`.

    ms        per micro-batch, of the slowest rank; the median of the rounds
    host      processor time of each rank's main thread per micro-batch, waiting not counted
    kernels   each rank's captured sections alone, while all others are idle
    link      all messages of a micro-batch at once between all ranks, and nothing else
    of bound  ms, divided by the larger of link and all kernels together
    memory    the most device memory that each rank takes for this training; on a CPU the most that
              a round adds to parameters and optimizer state
    driver    allocations of device memory by each rank's driver, in all rounds but the first
    losses    largest relative difference to the first row of the case
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import subprocess
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import connection
from statistics import median
from typing import Any, Final

import torch
from torch import Tensor, distributed, multiprocessing, nn
from torch.distributed import pipelining
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import revcompile
from benchmarks.engine import Feed
from benchmarks.harness import Row, mib, parser_of, save, synchronize
from benchmarks.models import Case, create, sgd
from revcompile.runtime.executor.graphs import CudaGraphReplay
from revcompile.runtime.trainer.placement import RankPlacement
from tests.support.measuring import LiveStorages

CASES: Final = ("transformer-24x1024:64:1:8", "resnet18:64:64:10", "transformer-24x1024:64:8:8")
GRAPHS: Final = ("static", "cudagraphs", "inductor")
REPLAYS: Final = 20


@dataclass
class Found:
    """One rank's measurements of one variant."""

    backend: str
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    host: float = 0.0
    kernels: float = float("nan")
    link: float = 0.0
    sent: int = 0
    """Bytes per micro-batch to other ranks."""
    reserved: int = 0
    segments: list[int] = field(default_factory=list)
    """Number of memory segments that the driver has allocated so far, after each round."""
    captured: bool = False


class Variant:
    """One rank's part of a case's training with one backend."""

    def __init__(self, text: str, backend: str, options: argparse.Namespace, groups: Any) -> None:
        *parts, stages = text.split(":")
        case = Case.parse(":".join(parts))
        self.device = torch.device(options.device)
        self._control, self._links = groups
        before = self._reserved()
        with self.device:  # faster than a copy
            model = create(case.model, case.size, case.classes)
        batches = Feed(case, self.device).batches
        example, _ = replace(case, batch=2).data(self.device)
        net = revcompile.petrafy(
            model.to(memory_format=torch.channels_last),
            int(stages),
            example,
            check="off",
            microbatch_size=case.batch,
        )
        autocast = torch.bfloat16 if options.device == "cuda" else None
        alone = backend == "model-parallel"
        self.trainer = net.trainer(
            sgd,
            F.cross_entropy,
            method="reversible_backprop" if alone else "petra",
            autocast=autocast,
            backend="eager" if alone else backend,
            memory_budget=None if alone else options.memory_budget,
        )
        self._reserved()
        self._batches = batches if self.trainer.is_first else [(None, None)] * len(batches)
        self.found = Found(backend)
        warm_up = 2 * int(stages) + 12
        self.found.losses = [float(loss) for loss in self._turn(warm_up)]
        self.found.captured = self.trainer._runner.is_active
        if self.device.type == "cuda":
            self.found.reserved = torch.cuda.max_memory_reserved() - before

    def _reserved(self) -> int:
        """GPU memory reserved by this process after emptying caches; also resets the peak."""
        if self.device.type != "cuda":
            return 0
        torch.cuda.synchronize()
        gc.collect()  # frees trainers of other variants
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

    def finish(self, steps: int) -> Found:
        """Measure memory, link and kernels, and close the trainer."""
        found = self.found
        if self.device.type == "cpu":
            with LiveStorages() as live:
                self._turn(steps)
            found.reserved = live.peak
        found.sent, found.link = self._link()
        if found.captured and self.device.type == "cuda":
            found.kernels = self._kernels()
        self.trainer.close()
        return found

    def _kernels(self) -> float:
        """Seconds of a rank's captured sections, run alone; their results are meaningless."""
        pipeline = self.trainer._runner._captured
        assert pipeline is not None and isinstance(pipeline._replay, CudaGraphReplay)
        seconds = 0.0
        for turn in range(distributed.get_world_size()):
            torch.cuda.synchronize()
            distributed.barrier(self._control)
            if turn == self.trainer.rank:
                began = time.perf_counter()
                kinds = list(pipeline._replay._captures.values())
                for captures in kinds * REPLAYS:
                    for capture in captures:
                        capture.replay(lambda: defaultdict(int))
                torch.cuda.synchronize()
                seconds = (time.perf_counter() - began) / (len(kinds) * REPLAYS)
        distributed.barrier(self._control)
        return seconds

    def _link(self) -> tuple[int, float]:
        """Bytes that a rank sends per micro-batch, and seconds of all ranks' messages alone."""
        placement = self.trainer._placement
        if not isinstance(placement, RankPlacement):
            return 0, 0.0
        own, here = dict[int, int](), self.trainer.rank
        for (_, target), sender in placement.transport._senders.items():
            sizes = (describer.description.size for describer in sender._describers.values())
            own[placement.ranks.owner(target)] = sum(sizes)
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


class TorchVariant(Variant):
    """One rank's part of the training with a schedule of torch, on the same stages."""

    def __init__(self, text: str, backend: str, options: argparse.Namespace, groups: Any) -> None:
        *parts, stages = text.split(":")
        case, rank = Case.parse(":".join(parts)), distributed.get_rank()
        assert options.device == "cpu" and int(stages) == distributed.get_world_size()
        self.device, self._control, self._count = torch.device("cpu"), groups[0], options.steps
        example, _ = replace(case, batch=2).data()
        net = revcompile.petrafy(case.create(), int(stages), example, check="off")
        module: nn.Module = net.to_pipeline_stages()[rank].train()
        if "checkpointed" in backend:
            module = _Checkpointed(module)
        stage = pipelining.PipelineStage(module, rank, int(stages), self.device)
        kind = pipelining.ScheduleGPipe if "gpipe" in backend else pipelining.Schedule1F1B
        self._schedule = kind(stage, self._count, loss_fn=F.cross_entropy)
        self._optimizer = sgd([p for p in module.parameters() if p.requires_grad])
        batches = [case.data(seed=n % 4) for n in range(self._count)]
        self._x, self._y = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
        self.found = Found(backend)
        self._turn(self._count)

    def _turn(self, steps: int) -> list[Tensor]:
        assert steps == self._count
        self._optimizer.zero_grad()
        if distributed.get_rank() == 0:
            self._schedule.step(self._x)
        else:
            self._schedule.step(target=self._y)
        self._optimizer.step()
        return []

    def finish(self, steps: int) -> Found:
        """Measure memory."""
        with LiveStorages() as live:
            self._turn(steps)
        self.found.reserved = live.peak
        return self.found


class _Checkpointed(nn.Module):
    """Keeps a stage's input and computes it again in backward."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *tensors: Tensor) -> Any:
        """Run the stage."""
        return checkpoint(self.module, *tensors, use_reentrant=False)


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
        variants = [
            (TorchVariant if name.startswith("torch-") else Variant)(case, name, options, groups)
            for name in options.backends
        ]
        for _ in range(options.rounds):
            for variant in variants:
                variant.round(options.steps)
        for variant in variants:
            by_rank: list[Any] = [None] * distributed.get_world_size()
            distributed.all_gather_object(by_rank, variant.finish(options.steps), group=groups[0])
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
    """A variant's measurements over all ranks."""
    ms = 1e3 * median(map(max, zip(*(each.seconds for each in by_rank), strict=True)))
    kernels = 1e3 * sum(each.kernels for each in by_rank)
    link = 1e3 * max(each.link for each in by_rank)
    losses = by_rank[-1].losses
    pairs = zip(losses, reference.setdefault(case, losses) if losses else [], strict=True)
    return {
        "case": case,
        "ranks": len(by_rank),
        "backend": by_rank[0].backend,
        "ms": ms,
        "kernels_ms": kernels,
        "link_ms": link,
        "deviation": max((abs(a - b) / abs(b) for a, b in pairs), default=float("nan")),
        "by_rank": [asdict(each) for each in by_rank],
    }


COLUMNS: Final = {
    "": 28,
    "backend": 23,
    "ms": 7,
    "host": 24,
    "kernels": 26,
    "link": 6,
    "of bound": 8,
    "memory": 26,
    "driver": 8,
    "losses": 7,
}
"""The table's columns and their widths."""


def line_of(row: Row) -> str:
    """A line of the table."""
    by_rank = row["by_rank"]
    bound = max(row["kernels_ms"], row["link_ms"])
    is_off = row["backend"] in GRAPHS and not all(each["captured"] for each in by_rank)
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


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """What is trained, and on how many ranks."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--case", nargs="+", default=list(CASES), help="model:pixels:batch:stages")
    add("--ranks", nargs="+", type=int, default=[1, 2, 4])
    add("--backends", nargs="+", default=["cudagraphs", "eager"])
    add("--memory-budget", help="of each rank, e.g. 8GiB: PETRA's stages keep what fits")
    add("--mps", action="store_true", help="kernels of all ranks side by side")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--steps", type=int, default=20)
    add("--rounds", type=int, default=4)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """One row for each rank count, case and backend."""
    args = parse_args(argv)
    reference: Losses = {}
    rows: list[Row] = []
    for ranks in args.ranks:
        print(f"\n{ranks} ranks")
        print("  ".join(f"{name:<{width}}" for name, width in COLUMNS.items()), flush=True)
        with side_by_side() if args.mps else nullcontext():
            found = on_ranks(all_cases, args, reference, ranks=ranks, device=args.device)[0]
        for row in found:
            if row["by_rank"][-1]["losses"]:
                reference.setdefault(row["case"], row["by_rank"][-1]["losses"])
        rows += found
        save(args, rows)


# -- processes -------------------------------------------------------------------------------------


def on_ranks(work: Callable[..., Any], *arguments: Any, ranks: int, device: str) -> list[Any]:
    """Call `work(rank, *arguments)` in one process per rank; returns the results."""
    # Freed memory stays in the allocator: returned to the system, it causes random page faults.
    os.environ |= {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, context.Manager() as manager:
        results = manager.dict()
        shared = (ranks, f"{folder}/store", results, work, arguments, device)
        processes = [context.Process(target=_rank, args=(rank, *shared)) for rank in range(ranks)]
        for process in processes:
            process.start()
        _join(processes)
        by_rank = dict(results)
    if len(by_rank) < ranks:
        codes = ", ".join(f"rank {rank}: {p.exitcode}" for rank, p in enumerate(processes))
        raise RuntimeError(f"{work.__module__}: a rank gave no result (exit codes: {codes})")
    return [by_rank[rank] for rank in range(ranks)]


@contextmanager
def side_by_side() -> Iterator[None]:
    """NVIDIA's multi-process service: processes that start inside run kernels at the same time.

    Without it, a GPU runs the kernels of one process at a time, and other processes wait.
    """
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        raise RuntimeError("there is no nvidia-cuda-mps-control, which comes with NVIDIA's driver")
    with tempfile.TemporaryDirectory() as folder:
        places = dict.fromkeys(("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"), folder)
        os.environ |= places
        try:
            subprocess.run([control, "-d"], check=True)
            yield
        finally:
            subprocess.run([control], input="quit\n", text=True, timeout=30, check=False)
            for name in places:
                del os.environ[name]


def _join(processes: Sequence[Any]) -> None:
    """Wait for all processes; if one fails, terminate the others, which would wait for ever."""
    running = {process.sentinel: process for process in processes}
    while running:
        for sentinel in connection.wait(list(running)):
            process = running.pop(sentinel)
            process.join()
            if process.exitcode:
                for other in running.values():
                    other.terminate()


def _rank(
    rank: int,
    ranks: int,
    store: str,
    results: Any,
    work: Callable[..., Any],
    arguments: Any,
    device: str,
) -> None:
    """Run one rank. It exits without clean-up: threads of links may still wait for other ranks."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
    if device == "cuda":
        # NCCL wants a GPU for each rank, unless the ranks claim to be on different machines.
        os.environ |= {"NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": "lo"}
        os.environ |= {"GLOO_SOCKET_IFNAME": "lo"}
        # Use all hardware queues; ranks that run side by side have to share them.
        shared = ranks if "CUDA_MPS_PIPE_DIRECTORY" in os.environ else 1
        os.environ |= {"CUDA_DEVICE_MAX_CONNECTIONS": f"{max(1, 32 // shared)}"}
        os.environ |= {"TORCH_NCCL_ENABLE_MONITORING": "0", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2"}
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    distributed.init_process_group(backend, f"file://{store}", rank=rank, world_size=ranks)
    results[rank] = work(rank, *arguments)
    distributed.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
