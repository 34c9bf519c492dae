"""The PETRA paper's recipe: Nesterov SGD, warm-up, two drops, rate by batch size."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import timm
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from revcompile.optim import DelayAwareSGD, ErrorFeedback


@dataclass(frozen=True)
class Recipe:
    """What `net.trainer` needs: `optimizer`, `lr_schedule` and `param_groups`.

    `rate` is the peak learning rate; the first `warmup` of `updates` updates rise to it.
    """

    rate: float
    updates: int
    warmup: int
    weight_decay: float = 5e-4
    kind: str = "sgd"
    schedule: str = "steps"

    def optimizer(self, parameters: Any) -> Optimizer:
        """The optimizer of a stage; called once per stage."""
        return OPTIMIZERS[self.kind](parameters, lr=self.rate, weight_decay=self.weight_decay)

    def lr_schedule(self, optimizer: Optimizer) -> LambdaLR:
        """The schedule of the learning rate; stepped at every update."""
        return LambdaLR(optimizer, self.factor)

    def param_groups(self, named: Iterable[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
        """No weight decay on norms and biases (Goyal et al., 2017), which have one dimension."""
        parameters = [parameter for _, parameter in named]
        matrices = {"params": [p for p in parameters if p.dim() > 1]}
        vectors = {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0}
        return [group for group in (matrices, vectors) if group["params"]]

    def factor(self, update: int) -> float:
        """The share of the peak rate at an update."""
        if update < self.warmup:
            return (update + 1) / self.warmup
        return SCHEDULES[self.schedule](update / max(1, self.updates))


def paper_recipe(
    steps: int,
    batch: int,
    accumulation_steps: int,
    epochs: int,
    *,
    rate: float | None = None,
    **options: Any,
) -> Recipe:
    """The paper's recipe for epochs of `steps` micro-batches of `batch` samples.

    The default `rate` is 0.1 per 256 samples in an update for SGD, and 5e-4 for other optimizers.
    A sixth of all epochs, 5 at most, is warm-up. `options` are further fields of the recipe.

    >>> paper_recipe(100, 128, 2, 12)
    Recipe(rate=0.1, updates=600, warmup=100, weight_decay=0.0005, kind='sgd', schedule='steps')
    """
    is_sgd = options.get("kind", "sgd") in ("sgd", "delay-aware-sgd")
    return Recipe(
        rate=rate or (0.1 * batch * accumulation_steps / 256 if is_sgd else 5e-4),
        updates=epochs * steps // accumulation_steps,
        warmup=max(1, round(min(5, epochs / 6) * steps / accumulation_steps)),
        **options,
    )


def small_resnet18(classes: int) -> nn.Module:
    """A ResNet-18 with a quarter of the channels, and a stem of three 3x3 convolutions."""
    options: dict[str, Any] = {"channels": (16, 32, 64, 128), "stem_type": "deep", "stem_width": 8}
    return timm.create_model("resnet18", num_classes=classes, **options)


def small_stem(model: nn.Module) -> None:
    """A ResNet's first layer for small images: 3x3, no stride, no pooling."""
    first = getattr(model, "conv1", None)
    if isinstance(first, nn.Conv2d) and hasattr(model, "maxpool"):
        model.conv1 = nn.Conv2d(3, first.out_channels, 3, padding=1, bias=False)
        model.maxpool = nn.Identity()


def _steps(done: float) -> float:
    """The factor: 0.1 after half of the training, 0.01 after three quarters."""
    return 0.1 ** ((done >= 0.5) + (done >= 0.75))


def _cosine(done: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


SCHEDULES: dict[str, Callable[[float], float]] = {"steps": _steps, "cosine": _cosine}

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": partial(SGD, momentum=0.9, nesterov=True),
    "adamw": AdamW,
    "delay-aware-sgd": DelayAwareSGD,
    "delay-aware-adamw": lambda parameters, **settings: ErrorFeedback(
        AdamW(parameters, **settings)
    ),
}
"""The last two compensate for the delay of a stage's gradients."""
