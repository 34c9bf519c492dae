"""One training, from wherever its last checkpoint left off."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import revcompile
from benchmarks.learning.cifar import Cifar
from benchmarks.learning.experiments import MUON, PARAMETERS_BUFFERED, PLAIN, Experiment
from benchmarks.learning.helps import HELPS, MOMENTA, MOMENTUM
from benchmarks.learning.mixed import rebuild_with_latest
from benchmarks.learning.workers import OutOfTime
from examples.recipe import Recipe, paper_recipe, small_stem
from revcompile.optim import DelayAwareMuon, muon_groups
from revcompile.schedule import delay

Log = list[dict[str, Any]]
Groups = Callable[[Sequence[tuple[str, nn.Parameter]]], list[dict[str, Any]]]


def run_to_line(experiment: Experiment, data: Cifar, folder: Path, deadline: float) -> str:
    """`run`, and its result in a line."""
    log = run(experiment, data, folder, deadline)
    seconds = sum(line["seconds"] for line in log)
    return f"{log[-1]['test_accuracy']:.2%} in {seconds:.0f} s"


def run(experiment: Experiment, data: Cifar, folder: Path, deadline: float) -> Log:
    """Train to the end or to the deadline; the log of its epochs, always in `epochs.json` too."""
    torch.manual_seed(experiment.seed)
    kind = Plain if experiment.method == PLAIN else Staged
    training = kind(experiment, data)
    log = training.resume(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for epoch in range(len(log), experiment.epochs):
        start = time.monotonic()
        line = {"epoch": epoch + 1, **training.epoch(epoch)}
        log.append(line | {"seconds": round(time.monotonic() - start, 2)})
        (folder / "epochs.json").write_text(json.dumps(log))
        is_last = epoch + 1 == experiment.epochs
        if time.monotonic() > deadline and not is_last:
            training.save(folder, log)
            raise OutOfTime(f"after {len(log)} epochs, {log[-1]['test_accuracy']:.2%}")
    (folder / "result.json").write_text(
        json.dumps({"experiment": asdict(experiment), "name": experiment.name, "log": log})
    )
    return log


def create(experiment: Experiment) -> nn.Module:
    """The model, for images of 32 pixels, channels last."""
    if experiment.model == "vit_tiny":
        model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=4, num_classes=10)
    else:
        model = timm.create_model(experiment.model, num_classes=10)
        small_stem(model)
    return model.to(memory_format=torch.channels_last)


def recipe_of(experiment: Experiment, samples: int) -> Recipe:
    """The paper's recipe for this many training images."""
    return paper_recipe(
        samples // experiment.batch,
        experiment.batch,
        experiment.accumulate,
        experiment.epochs,
        rate=experiment.rate,
        weight_decay=experiment.weight_decay,
        kind=experiment.optimizer,
        schedule=experiment.schedule,
    )


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    """Share of right answers."""
    return (output.argmax(1) == target).float().mean()


class Staged:
    """A petrafied model and its trainer."""

    def __init__(self, experiment: Experiment, data: Cifar) -> None:
        self.experiment, self.data = experiment, data
        device = data.train.device
        example = torch.randn(8, 3, 32, 32, device=device)
        model = create(experiment).to(device)
        policy = revcompile.Policy.named(experiment.policy)
        self.net = revcompile.petrafy(model, experiment.stages, example, policy=policy, check="off")
        recipe = recipe_of(experiment, len(data.train))
        is_muon = experiment.optimizer == MUON
        self.trainer = self.net.trainer(
            partial(_muon, recipe, experiment.max_drift) if is_muon else recipe.optimizer,
            F.cross_entropy,
            method=experiment.chosen,
            accumulate=experiment.accumulate,
            lr_schedule=self._schedule(recipe),
            param_groups=self._groups(recipe, muon_groups(model) if is_muon else None),
            autocast=torch.bfloat16 if device.type == "cuda" else None,
            backend=experiment.backend,
            seed=experiment.seed,
            synchronous=round(experiment.synchronous * recipe.updates / experiment.epochs),
        )
        if experiment.method == PARAMETERS_BUFFERED:
            for executor in self.trainer.executors[:-1]:  # the last stage has no delay
                rebuild_with_latest(executor.stage)

    def epoch(self, epoch: int) -> dict[str, float]:
        """Train, then test."""
        experiment, trainer = self.experiment, self.trainer
        losses = []
        batches = self.data.epoch(experiment.batch, experiment.seed, epoch)
        for x, y in batches:
            losses.append(trainer.step(x, y).loss_tensor)
        if epoch + 1 == experiment.epochs:
            trainer.flush()
        evaluation = trainer.evaluate(self.data.tests(), {"accuracy": accuracy})
        loss = torch.stack([loss for loss in losses if loss is not None]).mean().item()
        line: dict[str, Any] = {
            "train_loss": loss,
            "test_loss": evaluation.loss,
            "test_accuracy": evaluation.metrics["accuracy"],
            "norms": self._norms(),
        }
        return line

    def _norms(self) -> list[float]:
        """How large the weights of each stage are, all in all (not those of norms, nor biases)."""
        parameters = dict(self.net.model.named_parameters())
        norms = []
        for stage in self.net.stages:
            own = [parameters[name] for name in stage.generated.parameters]
            squared = [p.detach().square().sum() for p in own if p.dim() > 1]
            norms.append(round(math.sqrt(sum(map(float, squared))), 3))
        return norms

    def resume(self, folder: Path) -> Log:
        """Load the last checkpoint, if there is one."""
        if not (folder / "log.json").exists():
            return []
        self.trainer.load(folder / "checkpoints")
        log: Log = json.loads((folder / "log.json").read_text())
        return log

    def save(self, folder: Path, log: Log) -> None:
        """Leave what is needed to go on."""
        self.trainer.save(folder / "checkpoints", keep=1, drain=True)
        (folder / "log.json").write_text(json.dumps(log))

    def _groups(self, recipe: Recipe, split: Groups | None) -> Groups:
        """The recipe's groups or those of `split`, each with its stage's delay in updates."""
        delays = _delays(self.net, self.experiment)

        def groups(named: Sequence[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
            late = delays[named[0][0]]
            with_delay = (split or recipe.param_groups)(named)
            for group in with_delay:
                group["delay"] = late
                if self.experiment.recipe in MOMENTA:
                    group["momentum"] = MOMENTA[self.experiment.recipe](late)
                    group["lr"] = recipe.rate * (1 - group["momentum"]) / (1 - MOMENTUM)
            return with_delay

        return groups

    def _schedule(self, recipe: Recipe) -> Callable[[Any], Any]:
        helps = HELPS.get(self.experiment.recipe)
        if helps is None:
            return recipe.lr_schedule

        def schedule(optimizer: Any) -> Any:
            late = optimizer.param_groups[0]["delay"]
            return torch.optim.lr_scheduler.LambdaLR(
                optimizer,
                lambda update: helps(late, update / recipe.updates, recipe.factor(update)),
            )

        return schedule


def _muon(recipe: Recipe, max_drift: float | None, params: Any) -> DelayAwareMuon:
    """Matrices at the recipe's rate and decay; the rest as AdamW has it by default."""
    decay = recipe.weight_decay
    return DelayAwareMuon(params, lr=recipe.rate, weight_decay=decay, max_drift=max_drift)


def _delays(net: revcompile.StagedModel, experiment: Experiment) -> dict[str, int]:
    """From every parameter to its stage's delay in updates."""
    method, count = experiment.chosen, net.num_stages
    return {
        name: delay(method, count, stage.generated.index, experiment.accumulate)
        for stage in net.stages
        for name in stage.generated.parameters
    }


class Plain:
    """The model as it is, trained by autograd."""

    def __init__(self, experiment: Experiment, data: Cifar) -> None:
        self.experiment, self.data = experiment, data
        self.device = data.train.device
        self.model = create(experiment).to(self.device)
        if experiment.backend == "inductor":
            self.model.compile(dynamic=False)
        recipe = recipe_of(experiment, len(data.train))
        groups = recipe.param_groups(self.model.named_parameters())
        self.optimizer = recipe.optimizer(groups)
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
        right, total = [], []
        self.model.eval()
        with torch.no_grad():
            for x, y in self.data.tests():
                output = self._run(x)
                right.append(accuracy(output, y))
                total.append(F.cross_entropy(output, y))
        return {
            "train_loss": torch.stack(losses).mean().item(),
            "test_loss": torch.stack(total).mean().item(),
            "test_accuracy": torch.stack(right).mean().item(),
        }

    def _run(self, x: Tensor) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            output: Tensor = self.model(x)
        return output.float()

    def resume(self, folder: Path) -> Log:
        """Load the last checkpoint, if there is one."""
        if not (folder / "log.json").exists():
            return []
        state = torch.load(folder / "plain.pt", weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        log: Log = json.loads((folder / "log.json").read_text())
        return log

    def save(self, folder: Path, log: Log) -> None:
        """Leave what is needed to go on."""
        folder.mkdir(parents=True, exist_ok=True)
        parts: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
        }
        state = {name: part.state_dict() for name, part in parts.items()}
        torch.save(state, folder / "plain.pt")
        (folder / "log.json").write_text(json.dumps(log))
