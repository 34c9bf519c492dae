"""Two ranks over gloo, one thread each: how busy does each method keep them?

    python -m benchmarks run pipeline resnet18:64:16                    model:pixels:batch
    taskset -c 0,2 python -m benchmarks run pipeline --short vit_tiny_patch16_224:96:12
    python -m benchmarks run pipeline --memory-budget 8GiB --microbatches 4 resnet18:64:16

Every variant trains the same two stages with the same micro-batches; they take turns, round by
round, and a figure is the median of the rounds. "ideal" is `1 / max stage time`: each rank runs its
own stage's programs on made-up messages, both at once, nothing sent. torch's own pipelining runs
`net.to_pipeline_stages()`, with and without activation checkpointing. Peak memory of each rank is
counted in a run of its own (live tensors, less parameters and optimizer state).

With `--memory-budget` only PETRA under a budget for each rank is timed: its stages keep what the
budget allows, against its own ideal and against torch's 1F1B without checkpointing.

The last table sums up. Model parallel runs one rank at a time, and a lone rank may be faster than
two at once, which share caches and memory (and, as hyper-threads, a core): stage times are measured
both ways, and "at most" is what PETRA could gain if messages took no time at all.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from statistics import median
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import revcompile
from benchmarks.harness import LiveStorages, mib, show
from benchmarks.models import Case, sgd
from benchmarks.ranks import budgeted
from benchmarks.ranks.launch import RANKS, on_ranks
from benchmarks.registry import Benchmark, Row
from revcompile.compiler.cost import piece_costs
from revcompile.runtime.trainer.trainer import Trainer
from revcompile.schedule import Keep
from revcompile.staged import StagedModel

IDEAL = "ideal"
ALONE = tuple(f"stage {rank} alone" for rank in range(RANKS))
UNTRAINED = (IDEAL, budgeted.IDEAL, *ALONE)
"""Variants that only run stage programs: no messages, and nothing is learned."""
Turn = Callable[[], None]


def measured(model: nn.Module, x: Tensor, keep: Keep) -> dict[str, float]:
    """Seconds of every segment of a model on this machine, undisturbed as far as can be.

    What stages `keep` says whether a segment is computed again in backward.
    """
    found = [_measured(model, x, keep) for _ in range(3)]
    return {name: min(times[name] for times in found) for name in found[0]}


def _measured(model: nn.Module, x: Tensor, keep: Keep) -> dict[str, float]:
    rewired = revcompile.reversify(model, x, check="off").rewired
    segments = rewired.body.segments
    found = piece_costs(rewired, segments, rewired.body.types, "measured")
    return {s.name: s.work(c, keep, False) for s, c in zip(segments, found, strict=True)}


class Bench:
    """One rank's side of every variant."""

    def __init__(self, options: argparse.Namespace, case: Case, rank: int) -> None:
        self.options, self.case, self.rank = options, case, rank
        self.keep = Keep.NOTHING if options.memory_budget is None else Keep.GRAPH
        generator = torch.Generator().manual_seed(0)
        shape = (case.batch, 3, case.size, case.size)
        self.x = torch.randn(shape, generator=generator)
        self.y = torch.randint(0, 10, (case.batch,), generator=generator)
        self.trainers: list[Trainer] = []
        self.spent: dict[str, budgeted.Spent] = {}

    def net(self) -> StagedModel:
        """The same two stages each time; every variant trains its own copy."""
        # Costs that were given for stages that keep graphs are those of all that is left to do:
        # spared is the same share of each.
        return revcompile.petrafy(
            self.case.create(),
            RANKS,
            self.x[:2],
            check="off",
            cost=self.costs,
            keep=self.keep.value,
        )

    @functools.cached_property
    def costs(self) -> Any:
        """What the stages are balanced by: the same for every copy, on every rank."""
        if self.options.cost == "analytic":
            return self.options.cost
        found = [measured(self.case.create(), self.x, self.keep) if self.rank == 0 else None]
        distributed.broadcast_object_list(found)
        return found[0]

    def budgeted(self) -> dict[str, Turn]:
        """Stages that keep what a budget allows, and what they are measured by."""
        count, memory = self.options.microbatches, self.options.memory_budget
        found = {budgeted.PLANNED: self._ours("petra", memory=memory)}
        found[budgeted.IDEAL] = self._alone(self.trainers[-1])
        found[f"{budgeted.PLANNED}, every {count}"] = self._ours("petra", count, memory)
        found["petra"] = self._ours("petra")
        ours = (name for name in found if name != budgeted.IDEAL)
        for name, trainer in zip(ours, self.trainers, strict=True):
            stage = trainer.executors[0].stage
            self.spent[name] = budgeted.Spent(stage, "forward", "backward")
        found[budgeted.TORCH] = self._torch(Schedule1F1B, False)
        passes = ("forward_one_chunk", "backward_one_chunk")
        self.spent[budgeted.TORCH] = budgeted.Spent(self.stage, *passes)
        return found

    def variants(self) -> dict[str, Turn]:
        """Each a function that trains on `options.microbatches` micro-batches."""
        if self.options.memory_budget is not None:
            return self.budgeted()
        count = self.options.microbatches
        found = {
            "petra": self._ours("petra"),
            "reversible model parallel": self._ours("reversible_backprop"),
        }
        alone = self._alone(self.trainers[0])
        for rank, name in enumerate(ALONE):
            found[name] = alone if rank == self.rank else _nothing
        found[IDEAL] = alone
        if self.options.short:
            return found
        found |= {
            f"petra, updates every {count}": self._ours("petra", count),
            "gpipe": self._ours("gpipe", count),
            "1f1b": self._ours("1f1b", count),
        }
        for kind in (ScheduleGPipe, Schedule1F1B):
            for saving in (False, True):
                name = f"torch {kind.__name__.removeprefix('Schedule')}"
                name += ", checkpointed" if saving else ""
                found[name] = self._torch(kind, saving)
        return found

    def _ours(self, method: str, accumulate: int = 1, memory: str | None = None) -> Turn:
        trainer = self.net().trainer(
            sgd,
            F.cross_entropy,
            method=method,
            accumulate=accumulate,
            memory_budget=memory,
            batch_size=self.case.batch,
        )
        self.trainers.append(trainer)

        def turn() -> None:
            for _ in range(self.options.microbatches):
                trainer.step(self.x, self.y)

        return turn

    def _alone(self, trainer: Trainer) -> Turn:
        """A rank's own stage on messages made up once: no waiting, nothing sent."""
        (executor,) = trainer.executors
        stage, program, state = executor.stage, executor.program, {"m": 1_000_000}
        inputs: dict[str, Any] = {}
        for port in program.inputs:
            kind = port.type
            inputs[port.name] = None if kind is None else torch.randn(kind.at(self.case.batch))
        if self.rank == 0:
            inputs = {program.inputs[0].name: self.x}

        def one() -> None:
            m = state["m"] = state["m"] + 1
            outputs = stage.forward(m, inputs)
            if executor.loss_head is not None:
                trainer.loss_head.targets[m] = self.y
                gradients = executor.loss_head(m, outputs)
                trainer.loss_head.losses.pop(m)
                trainer.loss_head.outputs.pop(m)
            else:
                gradients = {n: outputs[n] for n in program.outputs_with_grad}
            stage.backward(m, outputs, gradients)
            with stage.updating(executor.updater.parameters):
                executor.updater.apply({n: g * 1e-9 for n, g in stage.take_gradients().items()})

        def turn() -> None:
            for _ in range(self.options.microbatches):
                one()

        return turn

    def _torch(self, kind: Any, saving: bool) -> Turn:
        module: nn.Module = self.net().to_pipeline_stages()[self.rank].train()
        if saving:
            module = _Checkpointed(module)
        self.stage = stage = PipelineStage(module, self.rank, RANKS, torch.device("cpu"))
        schedule = kind(stage, self.options.microbatches, loss_fn=F.cross_entropy)
        optimizer = sgd([p for p in module.parameters() if p.requires_grad])
        x = self.x.repeat(self.options.microbatches, 1, 1, 1)
        y = self.y.repeat(self.options.microbatches)

        def turn() -> None:
            optimizer.zero_grad()
            if self.rank == 0:
                schedule.step(x)
            else:
                schedule.step(target=y)
            optimizer.step()

        return turn


class _Checkpointed(nn.Module):
    """Keeps a stage's input and computes it again in backward."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *tensors: Tensor) -> Any:
        """Run the stage."""
        return checkpoint(self.module, *tensors, use_reentrant=False)


def _nothing() -> None:
    """The other rank's turn."""


def work(rank: int, options: argparse.Namespace, case: Case) -> dict[str, Any]:
    """One rank: time all variants in turn, then count memory."""
    bench = Bench(options, case, rank)
    variants = bench.variants()
    times: dict[str, list[float]] = {name: [] for name in variants}
    own: dict[str, list[float]] = {name: [] for name in variants}
    busy: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(options.rounds + 1):
        for name, turn in variants.items():
            distributed.barrier()
            start, began = time.perf_counter(), time.process_time()
            with bench.spent[name] if number and name in bench.spent else nullcontext():
                turn()
            ended, took = time.perf_counter(), time.process_time() - began
            distributed.barrier()
            if number:  # the first round fills pipelines and warms caches
                own[name].append((ended - start) / options.microbatches)
                busy[name].append(took / options.microbatches)
                times[name].append((time.perf_counter() - start) / options.microbatches)
    trained = {} if options.short else {n: t for n, t in variants.items() if n not in UNTRAINED}
    memory = {name: _peak(turn) for name, turn in trained.items()}
    plans = [str(trainer.memory_plan) for trainer in bench.trainers if trainer.memory_plan]
    spent = {name: one.least(options.microbatches) for name, one in bench.spent.items()}
    extra = {"memory": memory, "plans": plans, "spent": spent}
    return {"times": times, "own": own, "busy": busy, **extra}


def _peak(turn: Turn) -> int:
    """The most bytes of tensors made in one turn that are alive at once."""
    distributed.barrier()
    with LiveStorages() as live:
        turn()
    return int(live.peak)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    parser.add_argument("cases", nargs="*", type=Case.parse, default=[Case("resnet18", 64, 16)])
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cost", choices=("analytic", "measured"), default="measured")
    parser.add_argument("--short", action="store_true", help="only what the last table needs")
    parser.add_argument(
        "--memory-budget", help="of each rank, e.g. 8GiB: only the variants under a budget"
    )


def main(options: argparse.Namespace) -> Iterator[Row]:
    """Start the ranks for one case after the other, print the tables."""
    summary = []
    for case in options.cases:
        found = run(options, case)
        if options.memory_budget is None:
            summary.append(found["summary"])
        yield found
    if not summary:
        return
    columns = ("", "of ideal", "/ model parallel", "at most", "stages at once, ms", "alone, ms")
    show("PETRA, two ranks", columns, [_line(**one) for one in summary])


def run(options: argparse.Namespace, case: Case) -> dict[str, Any]:
    """Measure a case in processes of its own."""
    return report(options, case, dict(enumerate(on_ranks(work, options, case))))


def report(options: argparse.Namespace, case: Case, results: dict[int, Any]) -> dict[str, Any]:
    """Milliseconds a micro-batch, throughput against ideal and against PETRA, memory by rank."""
    if options.memory_budget is not None:
        title = f"{case.model}, {case.size} px, {options.microbatches} x batch {case.batch}"
        return {**asdict(case), **budgeted.report(title, options.microbatches, results)}
    times = budgeted.slowest(results)
    rows = []
    for name, found in times.items():
        if name in ALONE:
            continue
        peaks = [mib(r["memory"][name]) if name in r["memory"] else "" for r in results.values()]
        against = f"{_ratio(times[IDEAL], found):.2f}"
        slower = f"{_ratio(found, times['petra']):.2f}"
        rows.append((name, f"{1e3 * median(found):.1f}", against, slower, *peaks))
    title = f"{case.model}, {case.size} px, {options.microbatches} x batch {case.batch}"
    columns = ("variant", "ms a micro-batch", "of ideal", "time / petra's", "rank 0", "rank 1")
    show(title, columns, rows)
    together = [results[rank]["own"][IDEAL] for rank in range(RANKS)]
    alone = [results[rank]["own"][name] for rank, name in enumerate(ALONE)]
    both, one_by_one = zip(*together, strict=True), zip(*alone, strict=True)
    summary = {
        "title": title,
        "of_ideal": _ratio(times[IDEAL], times["petra"]),
        "gain": _ratio(times["reversible model parallel"], times["petra"]),
        "limit": _ratio([sum(pair) for pair in one_by_one], [max(pair) for pair in both]),
        "together": [1e3 * median(stage) for stage in together],
        "alone": [1e3 * median(stage) for stage in alone],
    }
    return {**asdict(case), "summary": summary, "times": times, "rows": rows}


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return median(a / b for a, b in zip(ours, theirs, strict=True))


def _line(
    title: str,
    of_ideal: float,
    gain: float,
    limit: float,
    together: Sequence[float],
    alone: Sequence[float],
) -> tuple[str, ...]:
    figures = (f"{one:.2f}" for one in (of_ideal, gain, limit))
    stages = (" + ".join(f"{one:.1f}" for one in each) for each in (together, alone))
    return title, *figures, *stages


SMALLEST = ("conv-2x4:8:2", "--rounds", "1", "--microbatches", "2", "--cost", "analytic")
BENCHMARK = Benchmark("pipeline", arguments, main, smallest=SMALLEST)
