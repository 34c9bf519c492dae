"""Which delay hurts? A character-level GPT whose gradients are late, without a pipeline.

    python -m benchmarks run delay --data input.txt --out out/delay --table drift --jobs 12

The model of `text`, as it is, on one device: the gradients of every stage are taken at the weights
of as many updates ago as in a pipeline that stashes weights, so that it computes what that computes
but for its couplings. Parts of the model can be excepted from the delay, which no pipeline could
do. Validation losses by update.

Tables: drift (how far matrices may move during the delay, queries, keys and values as one matrix
or as three, feedback and rates), blocks (which part of the model must not be late).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import revcompile
from benchmarks.harness import show
from benchmarks.learning.drift import MAX_DRIFT
from benchmarks.learning.gpt import GPT, SIZES, next_character_loss
from benchmarks.learning.results import gather
from benchmarks.learning.text import SEQUENCES, Text, load, rate_factor, split_parameters
from benchmarks.learning.workers import OutOfTime, add_options, train
from benchmarks.registry import Benchmark, Row
from revcompile.optim import DelayAwareMuon

Batch = tuple[Tensor, Tensor]
Groups = Callable[[Any], list[dict[str, Any]]]


@dataclass(frozen=True)
class Simulated:
    """One training."""

    rate: float = 0.01
    accumulate: int = 1
    max_drift: float | None = MAX_DRIFT
    chunks: bool = True
    """Are queries, keys and values updated as three matrices?"""
    feedback: float = 1.0
    momentum: float = 0.95
    adamw_rate: float = 5e-4
    fresh: str = ""
    """Parts of names, separated by |: such parameters have no delay."""
    stages: int = 8
    updates: int = 1200
    until: int = 600
    """Stop after so many, with the learning rates of a training to the end."""
    size: str = "char"
    seed: int = 0

    @property
    def name(self) -> str:
        """What differs from the usual."""
        usual = asdict(Simulated())
        own = {name: value for name, value in asdict(self).items() if value != usual[name]}
        return ",".join(f"{name}={value}" for name, value in own.items()) or "as it is"


class LateUpdates:
    """Updates of a model by gradients at the weights of earlier updates; on a GPU one CUDA graph.

    Args:
        model: trained in place.
        loss: of output and target.
        late: how many micro-batches late a parameter's gradients are, by name.
        accumulate: micro-batches to an update.
        make: from groups to an optimizer with `delay`; one for each delay.
        groups: from named parameters to groups.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Tensor, Tensor], Tensor],
        late: Mapping[str, int],
        accumulate: int,
        make: Callable[[Any], Any],
        groups: Groups,
    ) -> None:
        self.model, self.loss, self.accumulate = model, loss, accumulate
        named = dict(model.named_parameters())
        self._used = list(named.values())
        self.weights = {name: nn.Parameter(p.detach().clone()) for name, p in named.items()}
        self._lags = [
            [number // accumulate - (number - late[name]) // accumulate for name in named]
            for number in range(accumulate)
        ]
        """By micro-batch of an update and by parameter, in updates."""
        kept = [max(lags) for lags in zip(*self._lags, strict=True)]
        self._earlier = [
            [p.detach().clone() for _ in range(count)]
            for p, count in zip(named.values(), kept, strict=True)
        ]
        self.optimizers = []
        for micro_batches in sorted(set(late.values())):
            own = [(name, p) for name, p in self.weights.items() if late[name] == micro_batches]
            optimizer = make(groups(own))
            optimizer.delay = micro_batches / accumulate
            self.optimizers.append(optimizer)
        self._device = self._used[0].device
        every = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        self._peaks = [(group, group["lr"]) for group in every]
        if self._device.type == "cuda":
            for group, peak in self._peaks:  # a captured update reads its rates from the device
                group["lr"] = torch.tensor(peak, device=self._device)
        self._captured: Callable[[], None] | None = None
        self._batches: list[Batch] = []
        self._losses: list[Tensor] = []

    def step(self, batches: Sequence[Batch], factor: float) -> Tensor:
        """One update at a share of the peak learning rates; the mean loss."""
        is_captured = self._device.type == "cuda"
        for group, peak in self._peaks:
            if is_captured:
                group["lr"].fill_(factor * peak)
            else:
                group["lr"] = factor * peak
        if not is_captured:
            self._batches = list(batches)
            self._update()
        else:
            if self._captured is None:
                self._batches = [(x.clone(), y.clone()) for x, y in batches]
                self._captured = self._capture()
            for static, batch in zip(self._batches, batches, strict=True):
                torch._foreach_copy_(list(static), list(batch))
            self._captured()
        return torch.stack(self._losses).mean()

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> float:
        """The mean loss with the latest weights."""
        torch._foreach_copy_(self._used, list(self.weights.values()))
        self.model.eval()
        losses = [self._forward(x, y) for x, y in batches]
        self.model.train()
        return torch.stack(losses).mean().item()

    def _forward(self, x: Tensor, y: Tensor) -> Tensor:
        device = self._device.type
        # Without the cache of converted weights: they change within a captured update.
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda", cache_enabled=False):
            output = self.model(x)
        return self.loss(output, y)

    def _update(self) -> None:
        weights = list(self.weights.values())
        versions = [
            [p.detach(), *earlier] for p, earlier in zip(weights, self._earlier, strict=True)
        ]
        self._losses = []
        self.model.zero_grad()
        for lags, (x, y) in zip(self._lags, self._batches, strict=True):
            with torch.no_grad():
                seen = [v[lag] for v, lag in zip(versions, lags, strict=True)]
                torch._foreach_copy_(self._used, seen)
            loss = self._forward(x, y)
            loss.backward()
            self._losses.append(loss.detach())
        for own in versions:
            for newer, older in zip(own[-2::-1], own[:0:-1], strict=True):
                older.copy_(newer)
        for weight, used in zip(weights, self._used, strict=True):
            assert used.grad is not None
            weight.grad = used.grad / self.accumulate
        for optimizer in self.optimizers:
            optimizer.step()

    def _capture(self) -> Callable[[], None]:
        """Warmed up and captured; then everything is as it was before."""
        before = {id(t): t.detach().clone() for t in self._state()}
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._update()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._update()
        with torch.no_grad():
            for t in self._state():  # what optimizers have made meanwhile begins at zero
                t.copy_(before.get(id(t), torch.zeros_like(t)))
        return graph.replay

    def _state(self) -> Iterator[Tensor]:
        yield from self.weights.values()
        yield from (t for earlier in self._earlier for t in earlier)
        for optimizer in self.optimizers:
            for values in optimizer.state.values():
                yield from (t for t in values.values() if isinstance(t, Tensor))


def run(training: Simulated, text: Text, folder: Path, deadline: float) -> str:
    """Train; writes the result and gives it in a line.

    Raises:
        OutOfTime: the deadline has come before; there is no result then.
    """
    torch.manual_seed(training.seed)
    sizes, device = SIZES[training.size], text.train.device
    model = GPT(text.vocabulary, sizes).to(device)
    updates = LateUpdates(
        model,
        next_character_loss,
        micro_batches_late(model, training, sizes.context),
        training.accumulate,
        lambda groups: DelayAwareMuon(
            groups,
            lr=training.rate,
            adamw_lr=training.adamw_rate,
            momentum=training.momentum,
            feedback=training.feedback,
            max_drift=training.max_drift,
            capturable=device.type == "cuda",
        ),
        _groups(model, training.chunks),
    )
    k, log, losses = training.accumulate, [], []
    batches = text.batches(training.until * k, SEQUENCES // k, sizes.context, 1 + training.seed)
    every = max(1, training.updates // 24)
    for number in range(1, training.until + 1):
        loss = updates.step(
            [next(batches) for _ in range(k)], rate_factor(number - 1, training.updates)
        )
        losses.append(loss)
        if number % every and number != training.until:
            continue
        validation = updates.evaluate(text.validation_batches(sizes.context))
        trained = torch.stack(losses).mean().item()
        log.append({"update": number, "train_loss": trained, "validation_loss": validation})
        losses.clear()
        if time.monotonic() > deadline and number < training.until:
            raise OutOfTime(f"after {number} updates, {validation:.3f}")
    folder.mkdir(parents=True, exist_ok=True)
    result = {"training": asdict(training), "name": training.name, "log": log}
    (folder / "result.json").write_text(json.dumps(result))
    return f"{log[-1]['validation_loss']:.3f}"


def micro_batches_late(model: nn.Module, training: Simulated, context: int) -> dict[str, int]:
    """By the name of a parameter: as in the pipeline's stage that has it."""
    device = next(model.parameters()).device
    example = torch.zeros(2, context, dtype=torch.long, device=device)
    net = revcompile.petrafy(model, training.stages, example, check="off")
    fresh = [part for part in training.fresh.split("|") if part]
    return {
        name: 0 if any(part in name for part in fresh) else net.num_stages - 1 - index
        for index, stage in enumerate(net.stages)
        for name in stage.generated.parameters
    }


def _groups(model: nn.Module, chunks: bool) -> Groups:
    split = split_parameters(model)

    def groups(named: Any) -> list[dict[str, Any]]:
        found = split(named)
        return found if chunks else [group | {"chunks": 1} for group in found]

    return groups


_EMBEDDINGS = "tokens|positions"


def _drift(usual: Simulated) -> Iterator[Simulated]:
    before = replace(usual, max_drift=None, chunks=False)
    yield from (usual, before, replace(usual, max_drift=None), replace(usual, chunks=False))
    for drift in (0.004, 0.015, 0.03, 0.06, 0.1):
        yield replace(usual, max_drift=drift)
    for other in ({"feedback": 0.0}, {"feedback": 0.6}, {"feedback": 0.8}, {"momentum": 0.9}):
        yield replace(usual, **other)
    for other in ({"rate": 0.007}, {"rate": 0.014}, {"adamw_rate": 2e-4}, {"adamw_rate": 2e-3}):
        yield replace(usual, **other)


def _blocks(usual: Simulated) -> Iterator[Simulated]:
    before = replace(usual, max_drift=None, chunks=False)
    for fresh in (
        "",
        _EMBEDDINGS,
        f"{_EMBEDDINGS}|norm|bias|head|mlp.0",
        "qkv.weight",
        "proj.weight",
        "mlp.1.weight|mlp.3.weight",
        "blocks.0.",
        "blocks.0.|blocks.1.",
        "blocks.5.|blocks.6.",
        f"{_EMBEDDINGS}|blocks.0.",
        f"{_EMBEDDINGS}|blocks.0.|blocks.1.",
    ):
        yield replace(before, fresh=fresh)


TABLES: dict[str, Callable[[Simulated], Iterator[Simulated]]] = {
    "drift": _drift,
    "blocks": _blocks,
}


def main(options: argparse.Namespace) -> Iterator[Row]:
    """Train what is missing, show what there is."""
    usual = Simulated(updates=options.updates, until=options.until, size=options.size)
    trainings = [
        replace(training, seed=seed)
        for seed in range(options.seeds)
        for table in options.table
        for training in TABLES[table](usual)
        if any(part in training.name for part in options.only)
    ]
    known = gather(options.out)
    missing = [training for training in trainings if training.name not in known]
    if missing:
        seconds = 60 * options.minutes
        text = load(options.data)
        train(run, missing, text, options.device, options.out, options.jobs, seconds)
        known = gather(options.out)
    results = [known[training.name] for training in trainings if training.name in known]
    columns = ["setting", "validation loss", "last training loss"]
    lines = [(result["name"], result["log"][-1]) for result in results]
    rows = [
        (name, f"{last['validation_loss']:.3f}", f"{last['train_loss']:.3f}")
        for name, last in lines
    ]
    show(f"simulated delay, after {options.until} of {options.updates} updates", columns, rows)
    yield from results


def arguments(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    parser.add_argument("--table", nargs="+", choices=TABLES, default=["drift"])
    parser.add_argument("--data", type=Path, help="a text file", default=Path("data/input.txt"))
    add_options(parser, seeds=1, jobs=12)
    parser.add_argument("--updates", type=int, default=1200)
    parser.add_argument("--until", type=int, default=600, help="stop after so many of them")
    parser.add_argument("--size", choices=SIZES, default="char")


BENCHMARK = Benchmark(
    "delay", arguments, main, smallest=None, needs="a text file, and some minutes on a GPU"
)
