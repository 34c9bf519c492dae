"""Trainings on CIFAR-10 with late gradients, several side by side on one GPU.

    python -m benchmarks.learning cosine --data data --out out/cosine --jobs 8
    python -m benchmarks.learning cosine --out out/cosine --show

The first command trains every row of the table that has no result yet. Run again, it continues
trainings that ran out of `--minutes` from their checkpoints. `results.json` in the folder holds all
results so far; with a copy of it, another machine trains only the missing rows. The second command
prints the results and draws the curves.

Tables: orders (two orders of PETRA, and delay-aware momentum, against backprop, by accumulation
steps, with the paper's learning rates), cosine (the same with a cosine schedule), ablation (PETRA's
Table 4), transformer (vit_tiny in 8 stages, by the weights that backward uses), deeper (resnet34
and resnet50 in 18 stages).
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, Final

import timm
import torch
from matplotlib import colormaps
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F

import revcompile
from benchmarks.cifar import Cifar, load
from benchmarks.figures import save_figure
from benchmarks.harness import parser_of, save, show
from benchmarks.trainings import OutOfTime, Result, add_options, gather, train
from examples.recipe import Recipe, paper_recipe, small_stem
from revcompile import TrainerOptions
from revcompile.optim import DelayAwareMuon, muon_groups

PLAIN: Final = "plain"
"""Backprop on the model as it is, not rewired."""
MUON: Final = "delay-aware-muon"
USUAL: Final = {
    "resnet18": ("sgd", 10, (64, 256)),
    "resnet34": ("sgd", 18, (64, 256)),
    "resnet50": ("sgd", 18, (64, 256)),
    "vit_tiny": ("adamw", 8, (64, 256)),
}
"""By model, the optimizer, stages and micro-batch sizes that names of trainings leave out."""

Log = list[dict[str, Any]]


@dataclass(frozen=True)
class Experiment:
    """One training. `rate` is the peak learning rate; None follows the paper's rule."""

    method: str
    in_flight_per_stage: float | None = None
    accumulation_steps: int = 1
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
    weights: str | None = None
    """Which weights backward uses; None: the method's."""
    policy: str = "paper"
    """The policy of `petrafy`."""

    @property
    def setting(self) -> str:
        """The name without epochs and seed; results are averaged over seeds.

        >>> Experiment("petra", None, 4, model="vit_tiny", stages=4, optimizer="nadam").setting
        'vit_tiny-petra-k4-4stages-nadam'
        """
        in_flight_per_stage = f"-{self.in_flight_per_stage}" if self.in_flight_per_stage else ""
        usual, stages, sizes = USUAL[self.model]
        cut = f"-{self.stages}stages" if self.stages != stages else ""
        cut += f"-of{self.batch}" if self.batch not in sizes else ""
        how = f"-{self.optimizer}" if self.optimizer != usual else ""
        how += f"-lr{self.rate:g}" if self.rate is not None else ""
        how += f"-{self.schedule}" if self.schedule != "steps" else ""
        weights = f"-{self.weights}" if self.weights else ""
        policy = f"-{self.policy}" if self.policy != "paper" else ""
        method = f"{self.method}{weights}{in_flight_per_stage}"
        return f"{self.model}{policy}-{method}-k{self.accumulation_steps}{cut}{how}"

    @property
    def name(self) -> str:
        """The unique name, which is also that of its folder."""
        return f"{self.setting}-{self.epochs}e-s{self.seed}"


# -- tables ----------------------------------------------------------------------------------------

_Row = tuple[str, float | None, str]
"""Method, in_flight_per_stage and optimizer."""
_ONE_F_ONE_B: Final[_Row] = ("petra", 1, "sgd")
_PAPER: Final[_Row] = ("petra", 2, "sgd")
_DELAY_AWARE: Final[_Row] = ("petra", 1, "delay-aware-sgd")
_BACKPROP: Final[_Row] = ("backprop", None, "sgd")


def _orders(seeds: int, epochs: int, schedule: str = "steps") -> Iterator[Experiment]:
    """The most important rows come first."""
    others = range(1, seeds)
    for seeded, rows in (
        (range(1), (_DELAY_AWARE, _BACKPROP, _ONE_F_ONE_B, _PAPER)),
        (others, (_DELAY_AWARE, _BACKPROP)),
        (others, (_ONE_F_ONE_B,)),
        (others, (_PAPER,)),
    ):
        for seed, k, (method, in_flight_per_stage, optimizer) in itertools.product(
            seeded, (2, 1, 4, 8), rows
        ):
            yield Experiment(
                method,
                in_flight_per_stage,
                k,
                seed,
                epochs=epochs,
                optimizer=optimizer,
                schedule=schedule,
            )
        if _PAPER in rows:
            for seed in seeded:
                yield Experiment(PLAIN, None, 1, seed, epochs=epochs, schedule=schedule)


def _ablation(seeds: int, epochs: int) -> Iterator[Experiment]:
    """Which buffer matters, with k = 1 and in the paper's order."""
    for seed in range(seeds):
        for method in ("reversible_backprop", "delayed", "dsp"):
            yield Experiment(method, None, 1, seed, epochs=epochs)
        yield Experiment("petra", 2, 1, seed, epochs=epochs)


def _transformer(seeds: int, epochs: int) -> Iterator[Experiment]:
    """A vision transformer with 256 images per update; Muon trains the matrices."""
    same = Experiment(
        "petra",
        accumulation_steps=4,
        model="vit_tiny",
        stages=8,
        epochs=epochs,
        optimizer=MUON,
        schedule="cosine",
        weight_decay=0.05,
    )
    backprop = replace(same, method="backprop", accumulation_steps=1, batch=256)
    stashed = replace(same, weights="stashed")
    for seed, rate in itertools.product(range(seeds), (0.01, 0.005)):
        for row in (
            backprop,
            replace(same, weights="latest"),
            stashed,
            replace(same, weights="predicted"),
            replace(stashed, policy="pretrained"),
            replace(backprop, policy="pretrained"),
        ):
            yield replace(row, seed=seed, rate=rate)


def _deeper(seeds: int, epochs: int) -> Iterator[Experiment]:
    """The paper's RevNet-34 and RevNet-50, in 18 stages."""
    same = Experiment("petra", stages=18, epochs=epochs, schedule="cosine")
    for seed, k, model in itertools.product(range(seeds), (4, 1), ("resnet34", "resnet50")):
        row = replace(same, model=model, accumulation_steps=k, seed=seed)
        yield replace(row, optimizer="delay-aware-sgd")
        yield replace(row, method="backprop")


TABLES: Final[dict[str, Callable[[int, int], Iterable[Experiment]]]] = {
    "orders": _orders,
    "cosine": partial(_orders, schedule="cosine"),
    "ablation": _ablation,
    "transformer": _transformer,
    "deeper": _deeper,
}


# -- one training ----------------------------------------------------------------------------------


def run(experiment: Experiment, data: Cifar, folder: Path, deadline: float) -> str:
    """Train to the end or to the deadline, from wherever the last checkpoint left off."""
    torch.manual_seed(experiment.seed)
    kind = Plain if experiment.method == PLAIN else Staged
    training = kind(experiment, data)
    folder.mkdir(parents=True, exist_ok=True)
    log: Log = []
    if (folder / "log.json").exists():
        training.load(folder)
        log = json.loads((folder / "log.json").read_text())
    for epoch in range(len(log), experiment.epochs):
        start = time.monotonic()
        line = {"epoch": epoch + 1, **training.epoch(epoch)}
        log.append(line | {"seconds": round(time.monotonic() - start, 2)})
        (folder / "progress.json").write_text(json.dumps(log))  # the only record if it is killed
        if time.monotonic() > deadline and epoch + 1 < experiment.epochs:
            training.save(folder)
            (folder / "log.json").write_text(json.dumps(log))
            raise OutOfTime(f"after {len(log)} epochs, {log[-1]['test_accuracy']:.2%}")
    result = {"experiment": asdict(experiment), "name": experiment.name, "log": log}
    (folder / "result.json").write_text(json.dumps(result))
    seconds = sum(line["seconds"] for line in log)
    return f"{log[-1]['test_accuracy']:.2%} in {seconds:.0f} s"


def create(name: str) -> nn.Module:
    """The model, for images of 32 pixels, channels last."""
    if name == "vit_tiny":
        model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=4, num_classes=10)
    else:
        model = timm.create_model(name, num_classes=10)
        small_stem(model)
    return model.to(memory_format=torch.channels_last)


def recipe_of(experiment: Experiment, samples: int) -> Recipe:
    """The paper's recipe for this many training images."""
    return paper_recipe(
        samples // experiment.batch,
        experiment.batch,
        experiment.accumulation_steps,
        experiment.epochs,
        rate=experiment.rate,
        weight_decay=experiment.weight_decay,
        kind=experiment.optimizer,
        schedule=experiment.schedule,
    )


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    """Share of correct predictions."""
    return (output.argmax(1) == target).float().mean()


class Staged:
    """A petrafied model and its trainer."""

    def __init__(self, experiment: Experiment, data: Cifar) -> None:
        self.experiment, self.data = experiment, data
        device = data.train.device
        example = torch.randn(8, 3, 32, 32, device=device)
        model = create(experiment.model).to(device)
        policy: Any = experiment.policy
        net = revcompile.petrafy(model, experiment.stages, example, policy=policy, check="off")
        recipe = recipe_of(experiment, len(data.train))
        is_muon = experiment.optimizer == MUON
        backend: Any = experiment.backend
        weights: Any = {"weights": experiment.weights} if experiment.weights else {}
        self.trainer = net.trainer(
            partial(_muon, recipe) if is_muon else recipe.optimizer,
            F.cross_entropy,
            method=experiment.method,
            accumulation_steps=experiment.accumulation_steps,
            lr_schedule=recipe.lr_schedule,
            param_groups=muon_groups(model) if is_muon else recipe.param_groups,
            autocast=torch.bfloat16 if device.type == "cuda" else None,
            backend=backend,
            seed=experiment.seed,
            **weights,
            options=TrainerOptions(in_flight_per_stage=experiment.in_flight_per_stage),
        )

    def epoch(self, epoch: int) -> dict[str, float]:
        """Train, then test."""
        experiment, trainer = self.experiment, self.trainer
        batches = self.data.epoch(experiment.batch, experiment.seed, epoch)
        losses = [trainer.step(x, y).loss_tensor for x, y in batches]
        if epoch + 1 == experiment.epochs:
            trainer.flush()
        evaluation = trainer.evaluate(self.data.tests(), {"accuracy": accuracy})
        known = [loss for loss in losses if loss is not None]
        return {
            "train_loss": torch.stack(known).mean().item(),
            "test_loss": evaluation.loss,
            "test_accuracy": evaluation.metrics["accuracy"],
        }

    def load(self, folder: Path) -> None:
        """Load the last checkpoint."""
        self.trainer.load(folder / "checkpoints")

    def save(self, folder: Path) -> None:
        """Save a checkpoint."""
        self.trainer.save(folder / "checkpoints", keep_last=1, drain=True)


def _muon(recipe: Recipe, params: Any) -> DelayAwareMuon:
    """Matrices use the recipe's rate and weight decay; the rest uses AdamW's defaults."""
    return DelayAwareMuon(params, lr=recipe.rate, weight_decay=recipe.weight_decay)


class Plain:
    """The model as it is, trained by autograd."""

    def __init__(self, experiment: Experiment, data: Cifar) -> None:
        self.experiment, self.data = experiment, data
        self.device = data.train.device
        self.model = create(experiment.model).to(self.device)
        if experiment.backend == "inductor":
            self.model.compile(dynamic=False)
        recipe = recipe_of(experiment, len(data.train))
        self.optimizer = recipe.optimizer(recipe.param_groups(self.model.named_parameters()))
        self.schedule = recipe.lr_schedule(self.optimizer)

    def epoch(self, epoch: int) -> dict[str, float]:
        """Train, then test."""
        losses, experiment = [], self.experiment
        self.model.train()
        for x, y in self.data.epoch(experiment.batch, experiment.seed, epoch):
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self._run(x), y)
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            losses.append(loss.detach())
        self.model.eval()
        with torch.no_grad():
            tested = [(self._run(x), y) for x, y in self.data.tests()]
        return {
            "train_loss": torch.stack(losses).mean().item(),
            "test_loss": fmean(F.cross_entropy(*pair).item() for pair in tested),
            "test_accuracy": fmean(accuracy(*pair).item() for pair in tested),
        }

    def _run(self, x: Tensor) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            output: Tensor = self.model(x)
        return output.float()

    @property
    def _parts(self) -> tuple[Any, ...]:
        return self.model, self.optimizer, self.schedule

    def load(self, folder: Path) -> None:
        """Load the last checkpoint."""
        states = torch.load(folder / "plain.pt", weights_only=True)
        for part, state in zip(self._parts, states, strict=True):
            part.load_state_dict(state)

    def save(self, folder: Path) -> None:
        """Save a checkpoint."""
        torch.save([part.state_dict() for part in self._parts], folder / "plain.pt")


# -- the command -----------------------------------------------------------------------------------


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command-line options."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("table", choices=TABLES)
    add("--data", type=Path, help="folder with CIFAR-10", default=Path("data"))
    add_options(parser, seeds=3, jobs=8)
    add("--epochs", type=int, default=30)
    add("--samples", type=int, help="train on the first N images only, to try it out")
    add("--backend", default="auto", help="all train alike; inductor is fastest")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Train what is missing, or show what is there."""
    args = parse_args(argv)
    rows = [
        replace(row, backend=args.backend) for row in TABLES[args.table](args.seeds, args.epochs)
    ]
    experiments = [row for row in rows if any(part in row.name for part in args.only)]
    known = gather(args.out)
    if not args.show:
        missing = [experiment for experiment in experiments if experiment.name not in known]
        data = load(args.data).cut(args.samples or 10**9)
        train(run, missing, data, args.device, args.out, args.jobs, 60 * args.minutes)
        known = gather(args.out)
    by_setting: dict[str, list[Result]] = {}
    for experiment in sorted(experiments, key=lambda experiment: experiment.accumulation_steps):
        if experiment.name in known:
            by_setting.setdefault(experiment.setting, []).append(known[experiment.name])
    if not by_setting:
        epochs = sorted({result["experiment"]["epochs"] for result in known.values()})
        there = f"; there are some with --epochs {' or '.join(map(str, epochs))}" if epochs else ""
        raise SystemExit(
            f"{args.out} has no results of {args.table!r} with {args.epochs} epochs{there}"
        )
    lines = []
    for setting, results in by_setting.items():
        last = [100 * result["log"][-1]["test_accuracy"] for result in results]
        best = [100 * max(line["test_accuracy"] for line in r["log"]) for r in results]
        seconds = fmean(sum(line["seconds"] for line in r["log"]) for r in results)
        spread = f" ± {pstdev(last):.2f}" if len(last) > 1 else ""
        figures = f"{fmean(last):.2f}{spread}", f"{fmean(best):.2f}", f"{seconds:.0f}"
        lines.append((setting, len(last), *figures))
    columns = ("setting", "seeds", "test accuracy, %", "best epoch, %", "seconds")
    show(f"{args.table}: CIFAR-10, {args.epochs} epochs", columns, lines)
    draw_curves(by_setting, args.out / "curves.svg")
    save(args, [result for results in by_setting.values() for result in results])


def draw_curves(settings: Mapping[str, Sequence[Result]], file: Path) -> None:
    """Training loss and test error by epoch: a column per accumulation factor.

    Lines are means over seeds, with all seeds within the band around them.
    """
    factors = sorted(
        {results[0]["experiment"]["accumulation_steps"] for results in settings.values()}
    )
    figure = Figure(figsize=(1.5 + 2.6 * max(2, len(factors)), 6.5), layout="constrained")
    grid = figure.subplots(2, len(factors), sharex=True, sharey="row", squeeze=False)
    measures: dict[str, Callable[[Any], float]] = {
        "training loss": lambda line: line["train_loss"],
        "test error, %": lambda line: 100 - 100 * line["test_accuracy"],
    }
    kinds: dict[str, Any] = {}
    for setting, results in settings.items():
        k = results[0]["experiment"]["accumulation_steps"]
        kind = setting.replace(f"-k{k}", "")
        colour = kinds.setdefault(kind, colormaps["tab10"](len(kinds) % 10))
        for axes, (name, measure) in zip(grid[:, factors.index(k)], measures.items(), strict=True):
            values = list(
                zip(*([measure(line) for line in r["log"]] for r in results), strict=False)
            )
            at = range(1, len(values) + 1)
            axes.plot(at, [fmean(v) for v in values], color=colour, label=kind, lw=1.5)
            axes.fill_between(
                at,
                *zip(*((min(v), max(v)) for v in values), strict=True),
                color=colour,
                alpha=0.2,
                lw=0,
            )
            axes.set(yscale="log", ylabel=name if k == factors[0] else "")
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(alpha=0.3)
        grid[0, factors.index(k)].set_title(f"k = {k}", fontsize="medium")
        grid[1, factors.index(k)].set_xlabel("epoch")
    lines = {line.get_label(): line for axes in grid[0] for line in axes.lines}
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", frameon=False)
    save_figure(figure, file)


if __name__ == "__main__":
    main()
