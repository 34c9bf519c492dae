"""Do transformers learn under delay? A character-level GPT, trained by method, weights, optimizer.

    python -m benchmarks run text --data input.txt --out out/text --table weights --jobs 6
    python -m benchmarks run text --out out/text --table weights --show

Twelve pre-norm blocks of width 384, 256 characters of context, 64 sequences an update, 1,200
updates; the last tenth of the text is for validation, every 50 updates. What has a result in the
folder is not trained again. Every row is the best validation loss of its run; where several
learning rates of a setting were trained, `--show` gives the best one and says which.

Tables: weights (8 stages, an update every micro-batch), averaged (the same with averaged
couplings), start (with a tenth of the updates without delay first), accumulated (micro-batches of 8
and an update every 8), orders (12 stages, and the paper's order), wide (GPT-2 small's sizes).
`--max-drift` trains rows of `DelayAwareMuon` with another limit to how far matrices move during the
delay.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import revcompile
from benchmarks.harness import show
from benchmarks.learning.drift import MAX_DRIFT, add_drift_option, drift_name
from benchmarks.learning.gpt import GPT, SIZES, next_character_loss
from benchmarks.learning.planned import seconds_an_update, updates_to
from benchmarks.learning.results import gather
from benchmarks.learning.workers import OutOfTime, add_options, train
from benchmarks.registry import Benchmark, Row
from revcompile.optim import DelayAwareAdamW, DelayAwareMuon, muon_groups

_CHARACTERS = 65
"""Of Tiny Shakespeare."""
SEQUENCES = 64
"""In an update, at any `accumulate`."""
WARM_UP = 0.05
LAST_RATE = 0.1
"""Share of the peak learning rate at the end of the cosine."""
FEEDBACK = "muon-feedback"
"""`DelayAwareMuon` as it is; without error feedback it is called muon."""


POLICIES: dict[str, revcompile.Policy] = {
    "paper": revcompile.Policy(),
    "pretrained": revcompile.Policy.named("pretrained"),
}


@dataclass(frozen=True)
class Training:
    """One row: everything that distinguishes a run."""

    method: str
    optimizer: str
    rate: float
    stages: int = 8
    accumulate: int = 1
    order: str | None = None
    weights: str | None = None
    synchronous: int = 0
    """Updates without delay at the start."""
    updates: int = 1200
    seed: int = 0
    size: str = "char"
    until: int | None = None
    """Stop after so many updates, with the learning rates of a training to the end."""
    policy: str = "paper"
    max_drift: float | None = MAX_DRIFT
    """Of `DelayAwareMuon`."""

    @property
    def setting(self) -> str:
        """Its name without learning rate and seed."""
        order = f"-{self.order}" if self.order else ""
        weights = f"-{self.weights}" if self.weights else ""
        start = f"-sync{self.synchronous}" if self.synchronous else ""
        where = f"{self.size}-{self.stages}stages-k{self.accumulate}"
        policy = f"-{self.policy}" if self.policy != "paper" else ""
        optimizer = f"{self.optimizer}{drift_name(self.max_drift)}"
        return f"{where}{policy}-{self.method}{weights}{order}{start}-{optimizer}"

    @property
    def name(self) -> str:
        """Its name: of its folder, and in tables."""
        until = f"-until{self.until}" if self.until else ""
        return f"{self.setting}-lr{self.rate:g}-{self.updates}u{until}-s{self.seed}"


@dataclass(frozen=True)
class Text:
    """Characters as numbers."""

    train: Tensor
    validation: Tensor
    vocabulary: int

    def to(self, device: torch.device) -> Text:
        """The same on another device."""
        return Text(self.train.to(device), self.validation.to(device), self.vocabulary)

    def batches(
        self, count: int, sequences: int, context: int, seed: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Random places of the text, the same for every row with a seed."""
        device = self.train.device
        generator = torch.Generator().manual_seed(seed)
        along = torch.arange(context + 1, device=device)
        for _ in range(count):
            starts = torch.randint(len(self.train) - context, (sequences, 1), generator=generator)
            window = self.train[starts.to(device) + along]
            yield window[:, :-1].contiguous(), window[:, 1:].contiguous()

    def validation_batches(self, context: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The held-out text from its beginning, the same part of it for every row.

        Its last 12,000 characters are harder than the rest: with batches of another size, which
        leave fewer of them out, a loss would be larger by some hundredths.
        """
        count = (len(self.validation) - 1) // (context * SEQUENCES)
        used = count * SEQUENCES * context
        x = self.validation[:used].view(count, SEQUENCES, context)
        y = self.validation[1 : used + 1].view(count, SEQUENCES, context)
        yield from zip(x, y, strict=True)


def load(file: Path) -> Text:
    """From a text file."""
    text = file.read_text()
    numbers = {character: number for number, character in enumerate(sorted(set(text)))}
    encoded = torch.tensor([numbers[character] for character in text])
    cut = len(encoded) * 9 // 10
    return Text(encoded[:cut], encoded[cut:], len(numbers))


def run(training: Training, text: Text, folder: Path, deadline: float) -> str:
    """Train to the end; writes the result and gives it in a line.

    What was measured so far is in the folder's `log.json` at any time.

    Raises:
        OutOfTime: the deadline has come before; there is no result then.
    """
    torch.manual_seed(training.seed)
    sizes, device = SIZES[training.size], text.train.device
    sequences = SEQUENCES // training.accumulate
    model = GPT(text.vocabulary, sizes).to(device)
    example = torch.zeros(2, sizes.context, dtype=torch.long, device=device)
    policy = POLICIES[training.policy]
    net = revcompile.petrafy(model, training.stages, example, policy=policy, check="off")
    trainer = _trainer(net, model, training, device)
    folder.mkdir(parents=True, exist_ok=True)
    log: list[dict[str, float]] = []
    losses: list[Tensor] = []
    start = time.monotonic()
    count = (training.until or training.updates) * training.accumulate
    every = max(1, training.updates * training.accumulate // 24)
    batches = text.batches(count, sequences, sizes.context, 1 + training.seed)
    for number, (x, y) in enumerate(batches, 1):
        loss = trainer.step(x, y).loss_tensor
        if loss is not None:
            losses.append(loss.detach().clone())
        if number % every:
            continue
        if number == count:
            trainer.flush()
        validation = trainer.evaluate(text.validation_batches(sizes.context)).loss
        trained = torch.stack(losses).mean().item()
        losses.clear()
        log.append(
            {
                "update": number // training.accumulate,
                "train_loss": trained,
                "validation_loss": validation,
                "seconds": round(time.monotonic() - start, 1),
            }
        )
        (folder / "log.json").write_text(json.dumps(log))
        best = min(line["validation_loss"] for line in log)
        if time.monotonic() > deadline and number < count:
            raise OutOfTime(f"after {log[-1]['update']} updates, best so far {best:.3f}")
    result = {"training": asdict(training), "name": training.name, "log": log}
    (folder / "result.json").write_text(json.dumps(result))
    last = log[-1]
    return f"{best:.3f} (train {last['train_loss']:.3f}) in {last['seconds']:.0f} s"


def rate_factor(update: int, updates: int) -> float:
    """The share of the peak learning rate at an update: warm-up, then a cosine."""
    done = update / updates
    if done < WARM_UP:
        return (update + 1) / (WARM_UP * updates)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return LAST_RATE + (1 - LAST_RATE) * cosine


def split_parameters(model: nn.Module) -> Callable[[Any], list[dict[str, Any]]]:
    """`param_groups=` of a GPT for Muon: its output layer and positions are AdamW's."""
    return muon_groups(model, adamw=["head", "positions"])


def _trainer(
    net: revcompile.StagedModel, model: nn.Module, training: Training, device: torch.device
) -> Any:
    is_muon = "muon" in training.optimizer
    on_gpu = device.type == "cuda"
    chosen = {"weights": training.weights} if training.weights else {}
    factor = functools.partial(rate_factor, updates=training.updates)
    return net.trainer(
        lambda params: OPTIMIZERS[training.optimizer](params, training, on_gpu),
        next_character_loss,
        method=training.method,
        order=training.order,
        accumulate=training.accumulate,
        lr_schedule=lambda optimizer: LambdaLR(optimizer, factor),
        param_groups=split_parameters(model) if is_muon else None,
        autocast=torch.bfloat16 if on_gpu else None,
        seed=training.seed,
        synchronous=training.synchronous,
        **chosen,
    )


OPTIMIZERS: dict[str, Callable[[Any, Training, bool], torch.optim.Optimizer]] = {
    "adamw": lambda params, training, on_gpu: torch.optim.AdamW(
        params, lr=training.rate, betas=(0.9, 0.99), capturable=on_gpu
    ),
    "delay-aware-adamw": lambda params, training, on_gpu: DelayAwareAdamW(
        params, lr=training.rate, betas=(0.9, 0.99)
    ),
    "muon": lambda params, training, on_gpu: DelayAwareMuon(
        params,
        lr=training.rate,
        feedback=0.0,
        max_drift=training.max_drift,
        capturable=on_gpu,
    ),
    FEEDBACK: lambda params, training, on_gpu: DelayAwareMuon(
        params, lr=training.rate, max_drift=training.max_drift, capturable=on_gpu
    ),
}
"""From parameters, the row and "on a GPU?" to an optimizer."""


# -- tables ----------------------------------------------------------------------------------------

_RATES = {"adamw": (1e-3, 3e-4), "delay-aware-adamw": (3e-4,)}
_MUON_RATES = (0.02, 0.015, 0.012, 0.01, 0.007, 0.005)


def _rows(*rows: tuple[str, str | None, str], **same: Any) -> Iterator[Training]:
    """Each `(method, weights, optimizer)` at the learning rates of its optimizer."""
    for method, weights, optimizer in rows:
        # Without delay, an update of several micro-batches is one of all of them together.
        own = same | {"accumulate": 1} if method == "backprop" else same
        for rate in _RATES.get(optimizer, _MUON_RATES):
            yield Training(method, optimizer, rate, weights=weights, **own)


def _weights(updates: int, size: str) -> Iterator[Training]:
    yield from _rows(
        ("petra_stashed", None, FEEDBACK),
        ("petra", None, FEEDBACK),
        ("petra", "predicted", FEEDBACK),
        ("backprop", None, "adamw"),
        ("backprop", None, "muon"),
        ("petra_stashed", None, "muon"),
        ("petra_stashed", None, "adamw"),
        ("petra", None, "adamw"),
        updates=updates,
        size=size,
    )


def _start(updates: int, size: str) -> Iterator[Training]:
    yield from _rows(
        ("petra_stashed", None, FEEDBACK),
        ("petra", "predicted", FEEDBACK),
        updates=updates,
        size=size,
        synchronous=updates // 10,
    )


def _averaged(updates: int, size: str) -> Iterator[Training]:
    yield from _rows(
        ("petra_stashed", None, FEEDBACK),
        ("backprop", None, "muon"),
        updates=updates,
        size=size,
        policy="pretrained",
    )


def _accumulated(updates: int, size: str) -> Iterator[Training]:
    yield from _rows(
        ("petra_stashed", None, FEEDBACK),
        ("petra", None, FEEDBACK),
        ("petra", "predicted", FEEDBACK),
        ("backprop", None, "muon"),
        ("petra", None, "adamw"),
        updates=updates,
        size=size,
        accumulate=8,
    )


def _orders(updates: int, size: str) -> Iterator[Training]:
    for stages, order in ((12, None), (8, "paper")):
        same = {"updates": updates, "size": size, "stages": stages, "order": order}
        stashed, latest = ("petra_stashed", None, FEEDBACK), ("petra", None, FEEDBACK)
        for accumulate in (1, 8):
            yield from _rows(stashed, latest, accumulate=accumulate, **same)
        yield from _rows(stashed, policy="pretrained", **same)


def _wide(updates: int, size: str) -> Iterator[Training]:
    yield from _rows(
        ("petra", None, FEEDBACK),
        ("petra_stashed", None, FEEDBACK),
        ("backprop", None, "muon"),
        updates=updates,
        size=size if size == "tiny" else "wide",
        accumulate=8,
    )


TABLES: dict[str, Callable[[int, str], Iterator[Training]]] = {
    "weights": _weights,
    "averaged": _averaged,
    "start": _start,
    "accumulated": _accumulated,
    "orders": _orders,
    "wide": _wide,
}


def main(options: argparse.Namespace) -> Iterator[Row]:
    """Train what is missing, show the best of every setting."""
    rows = [
        replace(row, seed=seed, until=options.until, max_drift=limit)
        for seed, table in itertools.product(range(options.seeds), options.table)
        for row in TABLES[table](options.updates, options.size)
        for limit in (options.max_drift if row.optimizer == FEEDBACK else [MAX_DRIFT])
    ]
    trainings = [row for row in rows if any(part in row.name for part in options.only)]
    known = gather(options.out)
    if not options.show:
        missing = [training for training in trainings if training.name not in known]
        text = load(options.data)
        train(run, missing, text, options.device, options.out, options.jobs, 60 * options.minutes)
        known = gather(options.out)
    results = [known[training.name] for training in trainings if training.name in known]
    if not results:
        raise SystemExit(
            f"{options.out} has no results of these rows; there are: "
            + (", ".join(sorted(known)) or "none")
        )
    best: dict[str, tuple[float, Any]] = {}
    for result in results:
        loss = min(line["validation_loss"] for line in result["log"])
        setting = Training(**result["training"]).setting
        if setting not in best or loss < best[setting][0]:
            best[setting] = loss, result
    lines = [
        (
            setting,
            f"{result['training']['rate']:g}",
            f"{loss:.3f}",
            f"{result['log'][-1]['train_loss']:.3f}",
            f"{result['log'][-1]['seconds']:.0f}",
            *(_reached(result, options.reach) if options.reach else ()),
        )
        for setting, (loss, result) in best.items()
    ]
    columns = ["setting", "learning rate", "validation loss", "last training loss", "seconds"]
    if options.reach:
        columns += [f"updates to {options.reach:g}", "ms by the planner"]
    show(f"character-level GPT, {options.updates} updates", columns, lines)
    yield from results


def _reached(result: Any, loss: float) -> tuple[str, str]:
    """Updates until a validation loss, and how long they take by the planner."""
    training, updates = Training(**result["training"]), updates_to(loss, result["log"])
    if updates is None:
        return "never", ""
    where = training.method, training.stages, training.accumulate, training.order
    each = seconds_an_update(_rewired(training.size, training.policy), SEQUENCES, *where)
    return f"{updates:.0f}", f"{1000 * updates * each:.0f}"


@functools.cache
def _rewired(size: str, policy: str) -> Any:
    with torch.device("meta"):
        model = GPT(_CHARACTERS, SIZES[size])
        example = torch.zeros(2, SIZES[size].context, dtype=torch.long)
    net = revcompile.petrafy(model, 2, example, policy=POLICIES[policy], check="off")
    return net.partition.rewired


def arguments(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    parser.add_argument("--table", nargs="+", choices=TABLES, default=["weights"])
    parser.add_argument("--data", type=Path, help="a text file", default=Path("data/input.txt"))
    add_options(parser, seeds=1, jobs=6)
    add_drift_option(parser)
    parser.add_argument("--reach", type=float, help="say when a validation loss was reached")
    parser.add_argument("--updates", type=int, default=1200)
    parser.add_argument("--until", type=int, help="stop after so many of them")
    parser.add_argument("--size", choices=SIZES, default="char")
    parser.add_argument("--show", action="store_true", help="train nothing")


BENCHMARK = Benchmark(
    "text", arguments, main, smallest=None, needs="a text file, and some minutes on a GPU"
)
