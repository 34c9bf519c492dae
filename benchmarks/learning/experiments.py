"""What is trained: tables of experiments by name."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from benchmarks.learning.drift import MAX_DRIFT, drift_name
from revcompile.schedule import Keep, Method, Order, Weights, choose

PLAIN = "plain"
"""Backprop on the model as it is, not rewired."""
MUON = "delay-aware-muon"

_USUAL = {
    "resnet18": ("sgd", 10, (64, 256)),
    "resnet50": ("sgd", 18, (64, 256)),
    "vit_tiny": ("adamw", 8, (64, 256)),
}
"""With what a model is trained, in how many stages and by micro-batches of which sizes, unless the
name says otherwise."""


@dataclass(frozen=True)
class Experiment:
    """One training. `rate` is the peak learning rate; None follows the paper's rule."""

    method: str
    order: str | None = None
    accumulate: int = 1
    seed: int = 0
    model: str = "resnet18"
    stages: int = 10
    epochs: int = 30
    batch: int = 64
    rate: float | None = None
    optimizer: str = "sgd"
    schedule: str = "steps"
    weight_decay: float = 5e-4
    backend: str = "auto"
    recipe: str = ""
    """What is done about delay, by stage: see `helps.py`."""
    weights: str | None = None
    """Which weights backward uses; None: as the method has it."""
    policy: str = "paper"
    """How the compiler makes two streams of one."""
    synchronous: float = 0
    """Epochs without delay at the start."""
    max_drift: float | None = MAX_DRIFT
    """Of `DelayAwareMuon`."""

    @property
    def setting(self) -> str:
        """Its name, without the seed: what is averaged over seeds."""
        order = f"-{self.order}" if self.order else ""
        usual, stages, sizes = _USUAL[self.model]
        cut = f"-{self.stages}stages" if self.stages != stages else ""
        cut += f"-of{self.batch}" if self.batch not in sizes else ""
        optimizer = f"-{self.optimizer}" if self.optimizer != usual else ""
        helps = f"-{self.recipe}" if self.recipe else ""
        rate = f"-lr{self.rate:g}" if self.rate is not None else ""
        schedule = f"-{self.schedule}" if self.schedule != "steps" else ""
        how = f"{optimizer}{drift_name(self.max_drift)}{rate}{schedule}{helps}"
        weights = f"-{self.weights}" if self.weights else ""
        policy = f"-{self.policy}" if self.policy != "paper" else ""
        start = f"-sync{self.synchronous:g}" if self.synchronous else ""
        method = f"{self.method}{weights}{order}{start}"
        return f"{self.model}{policy}-{method}-k{self.accumulate}{cut}{how}"

    @property
    def name(self) -> str:
        """Its name: of its folder, and in tables."""
        return f"{self.setting}-{self.epochs}e-s{self.seed}"

    @property
    def chosen(self) -> Method:
        """The method as the trainer takes it."""
        if self.method in _ABLATED:
            return _ABLATED[self.method]
        return choose(self.method, order=self.order, weights=self.weights)


_Row = tuple[str, str | None, str]
"""Method, order and optimizer."""
_ONE_F_ONE_B: Final[_Row] = ("petra", "1f1b", "sgd")
_PAPER: Final[_Row] = ("petra", "paper", "sgd")
_DELAY_AWARE: Final[_Row] = ("petra", "1f1b", "delay-aware-sgd")
_BACKPROP: Final[_Row] = ("backprop", None, "sgd")

PARAMETERS_BUFFERED = "params-buffer"
"""Gradients with the parameters of the forward pass, inputs rebuilt with the latest ones."""

_ABLATED = {
    PARAMETERS_BUFFERED: Method(
        PARAMETERS_BUFFERED, Order.CONTINUOUS, 2.0, Keep.NOTHING, Weights.STASHED
    ),
}


def _orders(seeds: int, epochs: int) -> Iterator[Experiment]:
    """PETRA's two orders, and delay-aware momentum, against backprop, by accumulation.

    What matters most comes first.
    """
    others = range(1, seeds)
    for seeded, rows in (
        (range(1), (_DELAY_AWARE, _BACKPROP, _ONE_F_ONE_B, _PAPER)),
        (others, (_DELAY_AWARE, _BACKPROP)),
        (others, (_ONE_F_ONE_B,)),
        (others, (_PAPER,)),
    ):
        yield from _by_accumulation(seeded, rows, epochs)
        if _PAPER in rows:
            yield from (Experiment(PLAIN, None, 1, seed, epochs=epochs) for seed in seeded)


def _by_accumulation(
    seeds: Iterable[int], rows: Sequence[_Row], epochs: int
) -> Iterator[Experiment]:
    for seed, k, (method, order, optimizer) in itertools.product(seeds, (2, 1, 4, 8), rows):
        yield Experiment(method, order, k, seed, epochs=epochs, optimizer=optimizer)


def _cosine(seeds: int, epochs: int) -> Iterator[Experiment]:
    """The same with a learning rate that falls all the time."""
    for experiment in _orders(seeds, epochs):
        yield replace(experiment, schedule="cosine")


def _momentum(seeds: int, epochs: int) -> Iterator[Experiment]:
    """The same again, with a shorter momentum."""
    for row in (_ONE_F_ONE_B, _BACKPROP):
        for experiment in _by_accumulation(range(seeds), (row,), epochs):
            yield replace(experiment, schedule="cosine", recipe="short")


def _ablation(seeds: int, epochs: int) -> Iterator[Experiment]:
    """Which buffer matters: the five rows of PETRA's Table 4, k = 1, the paper's order."""
    for seed in range(seeds):
        yield Experiment("reversible_backprop", None, 1, seed, epochs=epochs)
        for method in ("delayed", "dsp", "params-buffer"):
            yield Experiment(method, None, 1, seed, epochs=epochs)
        yield Experiment("petra", "paper", 1, seed, epochs=epochs)


def _helps(seeds: int, epochs: int) -> Iterator[Experiment]:
    """What to do about delay, at k = 1 and the rate at which delay hurts."""
    for seed in range(seeds):
        yield Experiment("backprop", None, 1, seed, epochs=epochs, batch=256, rate=0.1)
        for order, recipe in (
            ("paper", ""),
            *(("1f1b", recipe) for recipe in ("", "t1", "shrink", "cap", "steady", "short")),
        ):
            yield Experiment(
                "petra", order, 1, seed, epochs=epochs, batch=256, rate=0.1, recipe=recipe
            )


def _transformer(seeds: int, epochs: int) -> Iterator[Experiment]:
    """A vision transformer: what makes up for delay? All have updates with 256 images."""
    same = Experiment(
        "petra",
        accumulate=4,
        model="vit_tiny",
        stages=8,
        epochs=epochs,
        rate=5e-4,
        optimizer="delay-aware-adamw",
        schedule="cosine",
        weight_decay=0.05,
    )
    few = replace(same, stages=4)
    for seed in range(seeds):
        for experiment in (
            replace(same, method="petra_stashed"),
            replace(few, accumulate=8, batch=32),
            few,
            same,
            *(
                replace(same, method="backprop", optimizer=o)
                for o in ("adamw", "delay-aware-adamw")
            ),
            *(replace(same, optimizer=o) for o in ("adamw", "nadam")),
        ):
            yield replace(experiment, seed=seed)


def _transformer_muon(seeds: int, epochs: int) -> Iterator[Experiment]:
    """The same with matrices by Muon: backprop, and the weights that backward may use."""
    for seed, rate in itertools.product(range(seeds), (0.01, 0.005)):
        for method, weights, policy, start in (
            ("backprop", None, "paper", 0),
            ("petra", "latest", "paper", 0),
            ("petra", "stashed", "paper", 0),
            ("petra", "stashed", "paper", 1),
            ("petra", "predicted", "paper", 0),
            ("petra", "stashed", "pretrained", 0),
            ("backprop", None, "pretrained", 0),
        ):
            is_backprop = method == "backprop"  # an update of four micro-batches is one of 256
            yield Experiment(
                method,
                accumulate=1 if is_backprop else 4,
                batch=256 if is_backprop else 64,
                seed=seed,
                model="vit_tiny",
                stages=8,
                epochs=epochs,
                rate=rate,
                optimizer=MUON,
                schedule="cosine",
                weight_decay=0.05,
                weights=weights,
                policy=policy,
                synchronous=start,
            )


def _weights(seeds: int, epochs: int) -> Iterator[Experiment]:
    """RevNet-18 at k = 1 by the weights that backward uses, and by Muon."""
    same = Experiment("petra", epochs=epochs, schedule="cosine", optimizer="delay-aware-sgd")
    muon = replace(same, optimizer=MUON, rate=0.01, weight_decay=0.05)
    for seed in range(seeds):
        yield replace(same, weights="stashed", seed=seed)
        for method, kept in (("backprop", None), ("petra", "latest"), ("petra", "stashed")):
            yield replace(muon, method=method, weights=kept, seed=seed)


def _resnet50(seeds: int, epochs: int) -> Iterator[Experiment]:
    """The paper's hardest row: RevNet-50 in 18 stages."""
    same = Experiment("petra", model="resnet50", stages=18, epochs=epochs, schedule="cosine")
    for seed in range(seeds):
        for k in (1, 4):
            for method, optimizer in (("petra", "delay-aware-sgd"), ("backprop", "sgd")):
                yield replace(same, method=method, optimizer=optimizer, accumulate=k, seed=seed)


TABLES: dict[str, Callable[[int, int], Iterator[Experiment]]] = {
    "orders": _orders,
    "cosine": _cosine,
    "momentum": _momentum,
    "ablation": _ablation,
    "helps": _helps,
    "transformer": _transformer,
    "muon": _transformer_muon,
    "weights": _weights,
    "resnet50": _resnet50,
}
