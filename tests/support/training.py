"""What the trainer's tests share: small models, data, optimizers, the loop everybody writes."""

import copy
import dataclasses
import functools
import io
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from helpers import refilling
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.utils import _pytree as pytree

import revcompile
from revcompile import TrainerOptions
from revcompile.errors import NonFiniteError
from revcompile.optim import ErrorFeedback
from revcompile.runtime.reversible.reconstruction import relative_error
from revcompile.runtime.stage.stage import Stage
from revcompile.runtime.trainer.trainer import Trainer

METHODS: Final = ("petra", "pipedream", "ddg", "backprop", "reversible_backprop", "gpipe", "1f1b")

Batch = tuple[Any, Any]


# -- models ---------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(torch.tanh(self.up(self.norm(x)))))


class Net(nn.Module):
    """Dropout, batch norms, couplings, opaque ends, and a layer that two distant blocks share."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first = nn.Linear(5, 6), nn.BatchNorm1d(6)
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.blocks[3].up = self.blocks[0].up
        self.last, self.head = nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.last(self.blocks(self.first(self.stem(x)))))


class Plain(nn.Module):
    """Couplings only in the middle; nothing random, no buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


class Steep(nn.Linear):
    """Where the first number of a sample is 0 the gradient is not finite, the value is."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + ((0 * y).abs() + (x[:, :1] != 0)).sqrt()


def settings_of(**given: Any) -> dict[str, Any]:
    """Settings as `net.trainer` takes them: those of `TrainerOptions` go into `options=`."""
    names = [field.name for field in dataclasses.fields(TrainerOptions) if field.name in given]
    return given | {"options": TrainerOptions(**{name: given.pop(name) for name in names})}


def seeded(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make().to(dtype).train()


@functools.cache
def compiled(
    make: Callable[[], nn.Module], stages: int, dtype: torch.dtype, *leaf_modules: type[nn.Module]
) -> revcompile.StagedModel:
    model, example = seeded(make, dtype), torch.zeros(4, 5, dtype=dtype)
    return revcompile.petrafy(model, stages, example, leaf_modules=leaf_modules, check="off")


def fresh(
    make: Callable[[], nn.Module] = Net,
    stages: int = 4,
    dtype: torch.dtype = torch.float64,
    *leaf_modules: type[nn.Module],
    model: Any = None,
) -> revcompile.StagedModel:
    """A staged model of its own, or of that model: compiled once, copied for every test."""
    made = compiled(make, stages, dtype, *leaf_modules)
    model = copy.deepcopy(made.model) if model is None else model
    net = type(made)(model, made._partition, made.method)
    net._lowered = made._lowered  # programs hold no weights
    return net


def rebuilt_errors(trainer: Trainer) -> dict[int, list[float]]:
    """By stage, the largest relative error of what each backward pass rebuilds from now on."""
    return {executor.index: _watched(executor.stage) for executor in trainer._executors}


def _watched(stage: Stage) -> list[float]:
    forward, differentiate = stage.forward, stage.differentiate
    inputs: dict[int, Any] = {}
    errors: list[float] = []

    def watched_forward(microbatch: int, values: Any) -> Any:
        inputs[microbatch] = values
        return forward(microbatch, values)

    def watched_backward(microbatch: int, *given: Any) -> Any:
        passed, expected = differentiate(microbatch, *given), inputs.pop(microbatch)
        rebuilt = {n: v for n, v in passed.values.items() if isinstance(v, Tensor)}
        floats = [n for n, v in rebuilt.items() if v.is_floating_point()]
        found = [relative_error(expected[name], rebuilt[name]) for name in floats]
        errors.append(max(found, default=0.0))
        return passed

    stage.forward, stage.differentiate = watched_forward, watched_backward  # type: ignore[method-assign]
    return errors


def batches(count: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> list[Batch]:
    """Micro-batches of four; every fifth has three samples."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [3 if index % 5 == 4 else 4 for index in range(count)]
    return [
        (
            torch.randn(size, 5, generator=generator, dtype=torch.float64).to(dtype),
            torch.randint(0, 3, (size,), generator=generator),
        )
        for size in sizes
    ]


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-2)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def plain_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def several(parameters: Any) -> list[torch.optim.Optimizer]:
    """SGD with error feedback for matrices, AdamW for everything else."""
    given = list(parameters)
    matrices, rest = ([p for p in given if (p.ndim == 2) is kind] for kind in (True, False))
    return [ErrorFeedback(momentum(matrices)), adam(rest)]


SCHEDULES: Final[dict[str, Callable[[Any], lr_scheduler.LRScheduler]]] = {
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=40),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 20),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda update: 1 / (1 + update)),
    "milestones": lambda o: lr_scheduler.MultiStepLR(o, [3, 5], 0.5),
    "warm-up": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 3), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    "warm-up, milestones": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 2), lr_scheduler.MultiStepLR(o, [2], 0.5)], [2]
    ),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 4, cycle_momentum=False),
}


def trainer_of(
    net: revcompile.StagedModel,
    optimizer: Any = momentum,
    loss: Any = F.cross_entropy,
    **settings: Any,
) -> Trainer:
    return net.trainer(optimizer, loss, **settings_of(**settings))


def feed(trainer: Trainer, data: list[Batch]) -> list[float]:
    return [refilling(trainer.step, *batch).loss for batch in data]


def drained(trainer: Trainer, data: list[Batch]) -> list[float]:
    """The losses of all of the data, of which nothing is in flight any more."""
    losses = feed(trainer, data)
    trainer.flush()
    return losses


def trained(
    net: revcompile.StagedModel, data: Iterable[Batch], optimizer: Any = plain_sgd, **settings: Any
) -> Trainer:
    """A trainer after all of the data, drained; squares are its loss unless it is given one."""
    trainer = trainer_of(net, optimizer, **{"loss": F.mse_loss, **settings})
    for batch in data:
        trainer.step(*batch)
    trainer.flush()
    return trainer


def reported(trainer: Trainer, data: list[Batch]) -> list[tuple[int | None, int | None]]:
    """Stages and micro-batches that steps say are not finite."""
    found = []
    for batch in data:
        try:
            trainer.step(*batch)
        except NonFiniteError as error:
            found.append((error.stage, error.microbatch))
    return found


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    loaded: dict[str, Any] = torch.load(buffer, weights_only=True)
    return loaded


def same(a: Any, b: Any) -> bool:
    """Equal to the bit, structure and all."""
    leaves, spec = pytree.tree_flatten(a)
    others, other_spec = pytree.tree_flatten(b)
    return spec == other_spec and all(map(_same_leaf, leaves, others))


def _same_leaf(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
    return bool(a == b)


def weights(net: revcompile.StagedModel) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in net.model.state_dict().items()}


def plain_loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: list[Batch],
    *,
    loss: Any = F.cross_entropy,
    accumulation_steps: int = 1,
    clip: float | None = None,
    schedule: lr_scheduler.LRScheduler | None = None,
) -> dict[str, Tensor]:
    """What everybody writes, and what methods without a delay must equal."""
    for index, (inputs, target) in enumerate(data, 1):
        args = inputs if isinstance(inputs, tuple) else (inputs,)
        (loss(model(*args), target) / accumulation_steps).backward()
        if index % accumulation_steps == 0:
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            if schedule is not None:
                schedule.step()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}
