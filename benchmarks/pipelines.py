"""PETRA and torch's pipeline schedules on several CPU ranks: time, memory, and time to a loss.

    torchrun --nproc-per-node 8 -m benchmarks.pipelines
    torchrun --nproc-per-node 8 -m benchmarks.pipelines --model vit --methods 1f1b petra-kept
    torchrun --nproc-per-node 8 -m benchmarks.pipelines --train input.txt --updates 300

The model is a GPT, or timm's ViT with patches of 4 x 4, with 16 blocks. torch's schedules train the
original model, cut into stages with equal numbers of blocks. PETRA trains the rewired model, cut by
revcompile. All methods have the same number of samples per update. If there are two cores for each
rank, each rank is bound to two of its own. It computes with `--threads` threads.

    ms        per micro-batch, of the slowest rank; methods take turns, the median of the rounds
    forecast  from mean times of passes and messages, which are measured in every round (`alone`)
    uneven    the same, but with the measured time of each micro-batch instead of the mean
    compute   the share of `ms` in which the main thread of the busiest rank runs
    memory    the most memory that a rank takes from the operating system for this training

Methods: gpipe, 1f1b, interleaved, zbv (torch's; over gloo, torch 2.11 cannot run the last one);
petra (everything is rebuilt), petra-kept (all graphs are kept). petra:2 has two micro-batches in
flight per stage, petra-kept:1.5 has one and a half.

With `--model device` a block computes next to nothing, but sleeps: `--milliseconds` in forward, and
twice as long in backward. That models ranks with one device each, whose passes do not take longer
when other ranks compute; messages and all work of the host are real.

With `--train` the methods train a character-level GPT one after the other, each with every
optimizer of `--optimizers`. The table shows how long each method takes to reach the loss of the
first method with the same optimizer (the mean of the last 20 updates). All methods but the first
train a quarter longer.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final, Protocol

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, distributed, nn
from torch.distributed import pipelining
from torch.nn import functional as F

import revcompile
from benchmarks.alone import (
    Passes,
    costs_of,
    message_time,
    played,
    time_petra,
    time_torch,
    torch_passes,
)
from benchmarks.harness import parser_of, save, show
from benchmarks.text import GPT, Sizes, next_character_loss
from revcompile import TrainerOptions
from revcompile.optim import DelayAwareMuon, muon_groups
from revcompile.schedule import drained_passes, period
from revcompile.schedule.drained import update_time

TORCH: Final = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zbv": pipelining.ScheduleZBVZeroBubble,
}
VOCABULARY: Final = 256
CLASSES: Final = 10
PATCH: Final = 4
MEAN_OF: Final = 20
"""Number of updates over which the compared loss is averaged."""
LONGER: Final = 1.25
"""How much longer the other methods train than the first one."""
Batches = Iterator[tuple[Tensor, Tensor]]


class Job(Protocol):
    """A running training."""

    def update(self, batches: Batches) -> list[float]:
        """Train on the micro-batches of an update; returns their losses on the last rank."""

    def fill(self, batches: Batches) -> None:
        """Fill the pipeline, if it is one that stays full; ranks may return at different times."""

    def passes(self, batches: Batches) -> Passes:
        """Seconds of this rank's passes without waiting; nothing is in flight afterwards."""

    def forecast(self, ranks: Sequence[Passes]) -> tuple[float, float]:
        """Seconds per micro-batch: from mean times, and from the single times of passes."""

    def close(self) -> None:
        """End the training."""


class Embedding(nn.Module):
    """The layers of a GPT before its blocks."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.tokens, self.positions = model.tokens, model.positions

    def forward(self, tokens: Tensor) -> Tensor:
        """`(batch, tokens)` to `(batch, tokens, width)`."""
        out: Tensor = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        return out


class Patches(nn.Module):
    """The layers of a ViT before its blocks."""

    def __init__(self, model: VisionTransformer) -> None:
        super().__init__()
        self.patch_embed, self.positions = model.patch_embed, model.pos_embed

    def forward(self, images: Tensor) -> Tensor:
        """`(batch, 3, side, side)` to `(batch, tokens, width)`."""
        out: Tensor = (self.patch_embed(images) + self.positions).contiguous()  # as gloo needs it
        return out


class Classifier(nn.Module):
    """The layers of a ViT after its blocks."""

    def __init__(self, model: VisionTransformer) -> None:
        super().__init__()
        self.fc_norm, self.head = model.fc_norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        """`(batch, tokens, width)` to `(batch, classes)`."""
        out: Tensor = self.head(self.fc_norm(x.mean(1)))
        return out


@torch.library.custom_op("benchmarks::device", mutates_args=())
def on_device(x: Tensor, seconds: float, backward_seconds: float) -> Tensor:
    """A copy, after the time that a device would take."""
    time.sleep(seconds)
    return x.clone()


@on_device.register_fake
def _(x: Tensor, seconds: float, backward_seconds: float) -> Tensor:
    return torch.empty_like(x)


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    time.sleep(ctx.backward_seconds)
    return gradient.clone(), None, None


def _remember(ctx: Any, inputs: tuple[Tensor, float, float], output: Tensor) -> None:
    ctx.backward_seconds = inputs[2]


on_device.register_autograd(_differentiate, setup_context=_remember)


class Branch(nn.Module):
    """Half a block, which takes the time of a device."""

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(width, 8), nn.Linear(8, width)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        """Compute an output of the input's shape."""
        out: Tensor = self.up(self.down(on_device(x, self.seconds, 2 * self.seconds)))
        return out


class DeviceBlock(nn.Module):
    """Two branches, as in a transformer's block."""

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.attention, self.mlp = (Branch(width, seconds / 2) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Compute an output of the input's shape."""
        x = x + self.attention(x)
        return x + self.mlp(x)


def layers_of(model: Any) -> list[nn.Module]:
    """The model as a sequence: the layers before its blocks, the blocks, the layers after them."""
    if isinstance(model, GPT):
        return [Embedding(model), *model.blocks, nn.Sequential(model.norm, model.head)]
    return [Patches(model), *model.blocks, Classifier(model)]


class TorchJob:
    """One of torch's schedules, on the original model."""

    def __init__(self, args: argparse.Namespace, schedule: Any, optimizer: str) -> None:
        rank, world = distributed.get_rank(), distributed.get_world_size()
        is_multi = issubclass(schedule, pipelining.schedules.PipelineScheduleMulti)
        stages = world * (1 + is_multi)
        is_v = issubclass(schedule, pipelining.ScheduleZBVZeroBubble)
        mine = [rank]
        if is_multi:
            mine.append(stages - 1 - rank if is_v else rank + world)
        model = make_model(args)
        first, *blocks, last = layers_of(model)
        size = len(blocks) // stages
        parts = [blocks[index * size : (index + 1) * size] for index in range(stages)]
        parts[0].insert(0, first)
        parts[-1].append(last)
        self._modules = modules = {index: nn.Sequential(*parts[index]) for index in mine}
        made = [
            pipelining.PipelineStage(module, index, stages, torch.device("cpu"))
            for index, module in modules.items()
        ]
        self._loss = loss_of(args)
        self._schedule = schedule(
            made if is_multi else made[0], args.accumulation_steps, loss_fn=self._loss
        )
        if is_multi:
            order = self._schedule.pipeline_order
            self._lists = tuple(torch_passes(order[each]) for each in range(world))
        else:
            name = "gpipe" if schedule is pipelining.ScheduleGPipe else "1f1b"
            self._lists = drained_passes(name, stages, stages, args.accumulation_steps)
        self._embed = first
        names = {parameter: name for name, parameter in model.named_parameters()}
        mine_named = [(names[p], p) for module in modules.values() for p in module.parameters()]
        make, groups = optimizer_of(args, optimizer, model)
        self._optimizer = make([p for _, p in mine_named] if groups is None else groups(mine_named))
        self._microbatches = args.accumulation_steps
        self._is_first, self._is_last = 0 in mine, stages - 1 in mine

    def update(self, batches: Batches) -> list[float]:
        taken = islice(batches, self._microbatches)
        inputs, targets = (torch.cat(each) for each in zip(*taken, strict=True))
        losses: list[Tensor] = []
        self._optimizer.zero_grad()
        kwargs = {"target": targets, "losses": losses} if self._is_last else {}
        self._schedule.step(*((inputs,) if self._is_first else ()), **kwargs)
        self._optimizer.step()
        return [float(loss.detach()) for loss in losses]

    def fill(self, batches: Batches) -> None:
        pass

    def passes(self, batches: Batches) -> Passes:
        inputs, targets = next(batches)
        with torch.no_grad():
            stream = self._embed(inputs)

        def update() -> None:
            self._optimizer.step()
            self._optimizer.zero_grad()

        distributed.barrier()
        found = time_torch(
            self._lists[distributed.get_rank()],
            self._modules,
            {stage: stream if stage else inputs for stage in self._modules},
            (lambda output: self._loss(output, targets)) if self._is_last else None,
            update,
        )

        def send(peer: int) -> None:
            distributed.send(stream, peer)

        def receive(peer: int) -> None:
            distributed.recv(stream, peer)

        return found._replace(message=message_time(send, receive))

    def forecast(self, ranks: Sequence[Passes]) -> tuple[float, float]:
        mean, uneven = (
            update_time(self._lists, costs_of(ranks, is_uneven)) for is_uneven in (False, True)
        )
        return mean / self._microbatches, uneven / self._microbatches

    def close(self) -> None:
        pass


class PetraJob:
    """PETRA, on the rewired model."""

    def __init__(
        self, args: argparse.Namespace, keeps: bool, in_flight: float, optimizer: str
    ) -> None:
        model, example = make_model(args), next(data_of(args))[0]
        make, groups = optimizer_of(args, optimizer, model)
        stages, size = distributed.get_world_size(), args.batch
        net = revcompile.petrafy(model, stages, example, check="off", microbatch_size=size)
        self._microbatches = args.accumulation_steps
        self._trainer = net.trainer(
            make,
            loss_of(args),
            param_groups=groups,
            accumulation_steps=args.accumulation_steps,
            memory_budget="1000GiB" if keeps else None,
            options=TrainerOptions(in_flight_per_stage=in_flight),
        )

    def update(self, batches: Batches) -> list[float]:
        return self._steps(batches, self._microbatches)

    def fill(self, batches: Batches) -> None:
        self._steps(batches, self._trainer._schedule.windows[0])

    def _steps(self, batches: Batches, count: int) -> list[float]:
        trainer, losses = self._trainer, []
        for inputs, targets in islice(batches, count):
            metrics = trainer.step(inputs, targets)
            losses += [metrics.loss] if trainer.is_last else []
        return losses

    def passes(self, batches: Batches) -> Passes:
        return time_petra(self._trainer, next(batches), self._microbatches)

    def forecast(self, ranks: Sequence[Passes]) -> tuple[float, float]:
        method, microbatches = self._trainer.method, self._microbatches
        return (
            period(method, costs_of(ranks), microbatches),
            played(method, costs_of(ranks, is_uneven=True), microbatches),
        )

    def close(self) -> None:
        self._trainer.close()


def make_model(args: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    if args.model == "vit":
        return VisionTransformer(
            img_size=side_of(args),
            patch_size=PATCH,
            num_classes=CLASSES,
            global_pool="avg",
            embed_dim=args.width,
            depth=args.blocks,
            num_heads=args.width // 64,
            class_token=False,
        )
    model = GPT(VOCABULARY, Sizes(args.blocks, args.width, args.width // 64, args.tokens))
    if args.model == "device":
        seconds = args.milliseconds / 1e3
        model.blocks = nn.Sequential(*(DeviceBlock(args.width, seconds) for _ in model.blocks))
    return model


def side_of(args: argparse.Namespace) -> int:
    """The side of an image in pixels."""
    return PATCH * math.isqrt(args.tokens)


def loss_of(args: argparse.Namespace) -> Callable[[Tensor, Tensor], Tensor]:
    return F.cross_entropy if args.model == "vit" else next_character_loss


def data_of(args: argparse.Namespace) -> Batches:
    """Micro-batches, the same on all ranks."""
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(VOCABULARY, (10_000,), generator=generator)
    if args.train:
        text = torch.frombuffer(bytearray(args.train.read_bytes()), dtype=torch.uint8).long()
    while True:
        if args.model == "vit":
            side = side_of(args)
            inputs = torch.randn(args.batch, 3, side, side, generator=generator)
            yield inputs, torch.randint(CLASSES, (args.batch,), generator=generator)
        else:
            begin = torch.randint(len(text) - args.tokens, (args.batch, 1), generator=generator)
            taken = text[begin + torch.arange(args.tokens + 1)]
            yield taken[:, :-1], taken[:, 1:]


def optimizer_of(
    args: argparse.Namespace, name: str, model: nn.Module
) -> tuple[Any, Callable[[Any], list[dict[str, Any]]] | None]:
    """A function that makes the optimizer, and one that makes its parameter groups."""
    if name == "adamw":
        return partial(torch.optim.AdamW, lr=args.lr), None
    return DelayAwareMuon, muon_groups(model, adamw=("head",))


def make_job(args: argparse.Namespace, method: str, optimizer: str) -> Job:
    name, _, in_flight = method.partition(":")
    if name in TORCH:
        return TorchJob(args, TORCH[name], optimizer)
    return PetraJob(args, name == "petra-kept", float(in_flight or 1), optimizer)


# -- time and memory -------------------------------------------------------------------------------


def gathered(value: Any) -> list[Any]:
    """The values of all ranks."""
    values = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values


def resident(key: str) -> float:
    """MiB of this process: `VmRSS` now, `VmHWM` the most since it was reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(key))


def measure_memory(args: argparse.Namespace, method: str) -> float:
    """The most MiB that a rank takes for a training."""
    malloc = ctypes.CDLL(None)
    malloc.mallopt(-3, 2**16)  # M_MMAP_THRESHOLD: freed tensors go back to the system at once
    # Memory that the libraries take at their first use does not count.
    warm, (inputs, targets) = make_model(args), next(data_of(args))
    loss_of(args)(warm(inputs), targets).backward()
    torch.optim.AdamW(warm.parameters()).step()
    del warm
    gc.collect()
    malloc.malloc_trim(0)
    before = resident("VmRSS")
    batches, job = data_of(args), make_job(args, method, "adamw")
    job.update(batches)
    distributed.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    job.update(batches)
    most = resident("VmHWM") - before
    job.close()
    malloc.mallopt(-3, 2**25)
    return max(gathered(most))


def measure_times(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    jobs = {method: make_job(args, method, "adamw") for method in args.methods}
    batches = data_of(args)
    times: dict[str, list[float]] = {method: [] for method in jobs}
    shares: dict[str, list[float]] = {method: [] for method in jobs}
    forecasts: dict[str, list[tuple[float, float]]] = {method: [] for method in jobs}
    parts: dict[str, list[Any]] = {method: [] for method in jobs}
    for number in range(args.rounds + 1):  # the first one only warms up
        for method, job in jobs.items():
            if number:
                ranks = gathered(job.passes(batches))
                forecasts[method].append(job.forecast(ranks))
                parts[method].append([each._asdict() for each in ranks])
            distributed.barrier()
            job.fill(batches)
            wall, main = time.perf_counter(), time.thread_time()
            for _ in range(args.updates_per_round if number else 1):
                job.update(batches)
            wall, main = time.perf_counter() - wall, time.thread_time() - main
            slowest, busiest = (max(each) for each in zip(*gathered((wall, main)), strict=True))
            if number:
                times[method].append(1e3 * slowest)
                shares[method].append(busiest / slowest)
    for job in jobs.values():
        job.close()
    count = args.updates_per_round * args.accumulation_steps
    for method in jobs:
        each = [value / count for value in times[method]]
        yield {
            "method": method,
            "ms": median(each),
            "from": min(each),
            "to": max(each),
            "forecast": 1e3 * median(mean for mean, _ in forecasts[method]),
            "uneven": 1e3 * median(uneven for _, uneven in forecasts[method]),
            "passes": parts[method],
            "compute": median(shares[method]),
        }


def compare(args: argparse.Namespace) -> list[dict[str, Any]]:
    # Measure memory first: later, a training would reuse what others have freed.
    memory = {m: measure_memory(args, m) if args.memory else math.nan for m in args.methods}
    no_times = dict.fromkeys(("ms", "from", "to", "forecast", "uneven", "compute"), math.nan)
    rows = list(measure_times(args)) if args.rounds else [{"method": m} | no_times for m in memory]
    for row in rows:
        row |= {"speed": rows[0]["ms"] / row["ms"], "memory": memory[row["method"]]}
    first = f"{args.methods[0]} / this"
    columns = ("method", "ms", "from", "to", "forecast", "uneven", first, "compute", "memory")
    cells = [
        (
            row["method"],
            *(f"{row[key]:.1f}" for key in ("ms", "from", "to")),
            *(
                f"{row[key]:.1f} ({row[key] / row['ms'] - 1:+.0%})"
                for key in ("forecast", "uneven")
            ),
            f"{row['speed']:.2f}",
            f"{row['compute']:.0%}",
            f"{row['memory']:.0f} MiB",
        )
        for row in rows
    ]
    if distributed.get_rank() == 0:
        show(title(args), columns, cells)
    return rows


def title(args: argparse.Namespace) -> str:
    return (
        f"{args.model} of {args.blocks} blocks x {args.width}, {args.tokens} tokens, "
        f"{distributed.get_world_size()} ranks, micro-batches of {args.batch}, "
        f"{args.accumulation_steps} an update"
    )


# -- time to a loss --------------------------------------------------------------------------------


def train(
    args: argparse.Namespace, method: str, optimizer: str, updates: int
) -> list[tuple[float, float]]:
    """After every update, seconds since the beginning and the mean of the latest losses."""
    batches, job = data_of(args), make_job(args, method, optimizer)
    distributed.barrier()
    begin, seen = time.perf_counter(), []
    for _ in range(updates):
        losses = job.update(batches)
        seen.append((time.perf_counter() - begin, fmean(losses) if losses else None))
    job.close()
    times, losses = zip(
        *next(each for each in gathered(seen) if each[0][1] is not None), strict=True
    )
    means = [fmean(losses[max(0, end - MEAN_OF) : end]) for end in range(1, len(losses) + 1)]
    return list(zip(times, means, strict=True))


def race(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    columns = ("method", "to loss", "takes", "ms per update", "last loss")
    cells: list[tuple[str, ...]] = []
    for optimizer in args.optimizers:
        aim = math.nan
        for method in args.methods:
            is_first = method == args.methods[0]
            updates = args.updates if is_first else round(LONGER * args.updates)
            curve = train(args, method, optimizer, updates)
            whole, last = curve[-1]
            aim = last if is_first else aim
            seconds = next((at for at, loss in curve[MEAN_OF - 1 :] if loss <= aim), None)
            rows.append({"method": method, "optimizer": optimizer, "curve": curve, "aim": aim})
            rows[-1]["seconds"] = seconds
            takes = "-" if seconds is None else f"{seconds:.1f} s"
            each = 1e3 * whole / len(curve)
            cells.append(
                (f"{method}, {optimizer}", f"{aim:.4f}", takes, f"{each:.0f}", f"{last:.4f}")
            )
            if distributed.get_rank() == 0:
                print(*cells[-1], sep="  ", flush=True)
    if distributed.get_rank() == 0:
        show(title(args), columns, cells)
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--model", choices=("gpt", "vit", "device"), default="gpt")
    add("--milliseconds", type=float, default=5.0, help="of a block's forward pass on a device")
    add("--methods", nargs="+", default=["1f1b", "gpipe", "interleaved", "petra-kept", "petra"])
    add("--blocks", type=int, default=16)
    add("--width", type=int, default=256)
    add("--tokens", type=int, default=64)
    add("--batch", type=int, default=8, help="samples in a micro-batch")
    add("--accumulation-steps", type=int, default=32, help="micro-batches in an update")
    add("--threads", type=int, default=2, help="of each rank")
    add("--rounds", type=int, default=5)
    add("--updates-per-round", type=int, default=2)
    add("--memory", action=argparse.BooleanOptionalAction, default=True)
    add("--train", type=Path, metavar="TEXT", help="time to a loss, with this file")
    add("--updates", type=int, default=300, help="with --train")
    add("--optimizers", nargs="+", choices=("adamw", "muon"), default=["muon", "adamw"])
    add("--lr", type=float, default=1e-3, help="of AdamW")
    args = parser.parse_args(argv)
    if "RANK" in os.environ:
        distributed.init_process_group("gloo")
    else:  # without torchrun
        store = distributed.HashStore()  # type: ignore[attr-defined]
        distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    rank, world = distributed.get_rank(), distributed.get_world_size()
    if hasattr(os, "sched_setaffinity") and len(os.sched_getaffinity(0)) >= 2 * world:
        os.sched_setaffinity(0, {2 * rank, 2 * rank + 1})
    torch.set_num_threads(args.threads)
    rows = race(args) if args.train else compare(args)
    if rank == 0:
        save(args, rows)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
