"""What training and evaluation report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from revcompile.errors import InputError

__all__ = ["Evaluation", "Means", "Metric", "Metrics"]


class Metric(Protocol):
    """A mean over a batch, from the model's output and the target."""

    def __call__(self, output: Any, target: Any, /) -> float | Tensor:
        """The mean."""
        ...


@dataclass(frozen=True)
class Metrics:
    """What has reached the last stage by now.

    `loss` waits for the device the first time it is read.
    """

    microbatch: int
    samples: int
    delays: tuple[int, ...]
    updates: tuple[int, ...]
    lr: float | None
    throughput: float
    """Samples a second, since the trainer was made or last asked to count anew."""
    loss_tensor: Tensor | None = field(default=None, repr=False)
    output: Any = field(default=None, repr=False)
    reconstruction: Mapping[int, float] = field(default_factory=dict)
    """Relative error of each stage's rebuilt input, when measured in this step."""
    loss_scale: float | None = None
    """What the loss was multiplied with before it was differentiated, where that is known."""
    skipped: int = 0
    """Micro-batches of this process that overflowed at a stage, and were left out, so far."""

    @property
    def loss(self) -> float:
        """The micro-batch's loss."""
        return float("nan") if self.loss_tensor is None else float(self.loss_tensor)

    def __repr__(self) -> str:
        loss = "None" if self.loss_tensor is None else f"{self.loss:.6g}"
        return (
            f"Metrics(microbatch={self.microbatch}, loss={loss}, lr={self.lr}, "
            f"delays={self.delays}, updates={self.updates}, samples={self.samples}, "
            f"throughput={self.throughput:.4g})"
        )

    def __str__(self) -> str:
        rate = "" if self.lr is None else f", lr {self.lr:g}"
        return (
            f"micro-batch {self.microbatch}: loss {self.loss:.4g}{rate}, gradients late by "
            f"{self.delays}, {self.throughput:,.0f} samples/s"
        )


@dataclass(frozen=True)
class Evaluation:
    """Means over all samples of a loader."""

    loss: float
    samples: int
    metrics: Mapping[str, float]


def _mean(name: str, metric: Metric, output: Any, target: Any) -> float:
    try:
        return float(metric(output, target))
    except Exception as error:
        raise InputError(
            f"trainer.evaluate: metric {name!r} raised {type(error).__name__}: {error}; it is a "
            "function of (output, target) and returns one number, the mean over the batch"
        ) from error


class Means:
    """Loss and metrics of batches of different sizes, on their way to an `Evaluation`."""

    def __init__(self, metrics: Mapping[str, Metric] | None) -> None:
        if metrics is not None and not isinstance(metrics, Mapping):
            raise InputError(
                "trainer.evaluate: metrics= is a dict of names and functions of (output, target), "
                f"got {type(metrics).__name__}"
            )
        self._metrics = dict(metrics or {})
        if "loss" in self._metrics:
            raise InputError(
                'trainer.evaluate: the name "loss" is taken; call the metric otherwise'
            )
        self.sums: dict[str, float] = {"loss": 0.0, **dict.fromkeys(self._metrics, 0.0)}
        self.samples = 0

    def add(self, loss: Tensor, output: Any, target: Any, samples: int) -> None:
        """One batch."""
        self.sums["loss"] += float(loss) * samples
        for name, metric in self._metrics.items():
            self.sums[name] += _mean(name, metric, output, target) * samples
        self.samples += samples

    def join(self, sums: Mapping[str, float], samples: int) -> None:
        """Another process's batches."""
        for name in self.sums:
            self.sums[name] += sums.get(name, 0.0)
        self.samples += samples

    def evaluation(self) -> Evaluation:
        """The means over all samples."""
        if not self.samples:
            raise InputError("trainer.evaluate: the loader is empty")
        means = {name: total / self.samples for name, total in self.sums.items()}
        return Evaluation(means.pop("loss"), self.samples, means)
