"""Two ranks over gloo, one thread each: how busy does each method keep them?

    python -m benchmarks.pipeline --model resnet18 --size 64 --batch 16
    python -m benchmarks.pipeline --model vit_tiny_patch16_224 --size 224 --batch 8

Every variant trains the same two stages with the same micro-batches; they take turns, round by
round, and a figure is the median of the rounds. "ideal" is `1 / max stage time`: each rank runs its
own stage's programs on made-up messages, both at once, nothing sent. torch's own pipelining runs
`net.to_pipeline_stages()`, with and without activation checkpointing. Peak memory of each rank is
counted in a run of its own (live tensors, less parameters and optimizer state).
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import timm
import torch
from torch import Tensor, distributed, multiprocessing, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import revcompile
from benchmarks.harness import LiveStorages, mib, save, show
from revcompile.runtime.distributed.trainer import DistributedTrainer
from revcompile.staged import StagedModel

RANKS = 2
Turn = Callable[[], None]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """The same optimizer for all."""
    return torch.optim.SGD(parameters, lr=1e-4, momentum=0.9)


class Bench:
    """One rank's side of every variant."""

    def __init__(self, options: argparse.Namespace, rank: int) -> None:
        self.options, self.rank = options, rank
        generator = torch.Generator().manual_seed(0)
        shape = (options.batch, 3, options.size, options.size)
        self.x = torch.randn(shape, generator=generator)
        self.y = torch.randint(0, 10, (options.batch,), generator=generator)
        self.trainers: list[DistributedTrainer] = []

    def net(self) -> StagedModel:
        """The same two stages each time; every variant trains its own copy."""
        torch.manual_seed(0)
        extra = {"img_size": self.options.size} if "vit" in self.options.model else {}
        model = timm.create_model(self.options.model, num_classes=10, **extra)
        return revcompile.petrafy(model, RANKS, self.x[:2], check="off")

    def variants(self) -> dict[str, Turn]:
        """Each a function that trains on `options.microbatches` micro-batches."""
        count = self.options.microbatches
        found = {
            "petra": self._ours("petra"),
            f"petra, updates every {count}": self._ours("petra", count),
            "reversible model parallel": self._ours("reversible_backprop"),
            "gpipe": self._ours("gpipe", count),
            "1f1b": self._ours("1f1b", count),
        }
        for kind in (ScheduleGPipe, Schedule1F1B):
            for saving in (False, True):
                name = f"torch {kind.__name__.removeprefix('Schedule')}"
                name += ", checkpointed" if saving else ""
                found[name] = self._torch(kind, saving)
        found["ideal"] = self._alone()
        return found

    def _ours(self, method: str, accumulate: int = 1) -> Turn:
        trainer = self.net().trainer(sgd, F.cross_entropy, method=method, accumulate=accumulate)
        assert isinstance(trainer, DistributedTrainer)
        self.trainers.append(trainer)

        def turn() -> None:
            for _ in range(self.options.microbatches):
                trainer.step(self.x, self.y)

        return turn

    def _alone(self) -> Turn:
        """A rank's own stage on messages made up once: no waiting, nothing sent."""
        trainer = self.trainers[0]
        (actor,) = trainer.actors
        stage, program, state = actor.stage, actor.program, {"m": 1_000_000}
        inputs: dict[str, Any] = {}
        for port in program.inputs:
            kind = port.type
            inputs[port.name] = None if kind is None else torch.randn(kind.at(self.options.batch))
        if self.rank == 0:
            inputs = {program.inputs[0].name: self.x}

        def one() -> None:
            m = state["m"] = state["m"] + 1
            outputs = stage.forward(m, inputs)
            if actor.objective is not None:
                trainer.objective.targets[m] = self.y
                gradients = actor.objective(m, outputs)
                trainer.objective.losses.pop(m)
                trainer.objective.outputs.pop(m)
            else:
                gradients = {n: outputs[n] for n in program.graded_outputs}
            stage.backward(m, outputs, gradients)
            actor.updater.apply({n: g * 1e-9 for n, g in stage.take_gradients().items()})
            stage.updated()

        def turn() -> None:
            for _ in range(self.options.microbatches):
                one()

        return turn

    def _torch(self, kind: Any, saving: bool) -> Turn:
        module = self.net().to_pipeline_stages()[self.rank].train()
        if saving:
            module = _Checkpointed(module)
        stage = PipelineStage(module, self.rank, RANKS, torch.device("cpu"))
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


def work(rank: int, options: argparse.Namespace, store: str, results: Any) -> None:
    """One rank: time all variants in turn, then count memory."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank)}
    distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=RANKS)
    variants = Bench(options, rank).variants()
    times: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(options.rounds + 1):
        for name, turn in variants.items():
            distributed.barrier()
            start = time.perf_counter()
            turn()
            distributed.barrier()
            if number:  # the first round fills pipelines and warms caches
                times[name].append((time.perf_counter() - start) / options.microbatches)
    memory = {name: _peak(turn) for name, turn in variants.items() if name != "ideal"}
    results[rank] = {"times": times, "memory": memory}
    distributed.barrier()
    os._exit(0)


def _peak(turn: Turn) -> int:
    """The most bytes of tensors made in one turn that are alive at once."""
    distributed.barrier()
    with LiveStorages() as live:
        turn()
    return live.peak


def main() -> None:
    """Start the ranks, print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, context.Manager() as manager:
        results = manager.dict()
        arguments = (options, f"{folder}/store", results)
        ranks = [context.Process(target=work, args=(rank, *arguments)) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        report(options, dict(results))


def report(options: argparse.Namespace, results: dict[int, Any]) -> None:
    """Milliseconds a micro-batch, throughput against ideal and against PETRA, memory by rank."""
    times = {
        name: [
            max(pair) for pair in zip(*(r["times"][name] for r in results.values()), strict=True)
        ]
        for name in results[0]["times"]
    }
    ideal, petra = times["ideal"], times["petra"]
    rows = []
    for name, found in times.items():
        against = median(i / t for i, t in zip(ideal, found, strict=True))
        slower = median(t / p for t, p in zip(found, petra, strict=True))
        peaks = [mib(r["memory"][name]) if name in r["memory"] else "" for r in results.values()]
        rows.append((name, f"{1e3 * median(found):.1f}", f"{against:.2f}", f"{slower:.2f}", *peaks))
    title = f"{options.model}, {options.size} px, {options.microbatches} x batch {options.batch}"
    columns = ("variant", "ms a micro-batch", "of ideal", "time / petra's", "rank 0", "rank 1")
    show(title, columns, rows)
    save(options.json, "pipeline", torch.device("cpu"), {"times": times, "rows": rows})


if __name__ == "__main__":
    main()
