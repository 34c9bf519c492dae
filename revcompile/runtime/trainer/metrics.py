"""What training and evaluation report, and what an evaluation needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from revcompile.errors import InputError
from revcompile.ir.module_tree import device_of_model


class Metric(Protocol):
    """A mean over a batch, from the model's output and the target."""

    def __call__(self, output: Any, target: Any, /) -> float | Tensor: ...


@dataclass(frozen=True)
class Metrics:
    """What a step reports. Reading `loss`, `loss_scale` or `skipped` waits for the device."""

    microbatch: int
    samples: int
    delays: tuple[int, ...]
    updates: tuple[int, ...]
    lr: float | None
    throughput: float
    """Samples per second of training so far; `evaluate`, `save`, `load`, capturing do not count."""
    loss_tensor: Tensor | None = field(default=None, repr=False)
    output: Any = field(default=None, repr=False)
    reconstruction: Mapping[int, float] = field(default_factory=dict)
    """Relative error of each stage's rebuilt input, when measured in this step."""
    scale: float | Tensor | None = field(default=None, repr=False)
    overflowed: int | Tensor = field(default=0, repr=False)

    @property
    def loss(self) -> float:
        """The micro-batch's loss; nan on ranks that do not know it."""
        return float("nan") if self.loss_tensor is None else float(self.loss_tensor)

    @property
    def loss_scale(self) -> float | None:
        """The factor of the loss before it was differentiated, where it is known."""
        return None if self.scale is None else float(self.scale)

    @property
    def skipped(self) -> int:
        """Micro-batches that overflowed at a stage of this process and were left out, so far."""
        return int(self.overflowed)

    def scalars(self) -> dict[str, float]:
        """The figures that are known here, by name, for a logger. Waits for the device."""
        found = {"loss": self.loss_tensor, "lr": self.lr, "loss_scale": self.loss_scale}
        numbers = {name: float(value) for name, value in found.items() if value is not None}
        stages = {f"reconstruction/{i}": error for i, error in self.reconstruction.items()}
        return numbers | {"throughput": self.throughput} | stages

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


class Throughput:
    """Samples per second of steps that follow each other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._samples, self._seconds = 0, 0.0
        self._counted_until: float | None = None

    def resume(self) -> None:
        """A step begins."""
        if self._counted_until is None:
            self._counted_until = perf_counter()

    def add(self, samples: int, *, counts: bool = True) -> float:
        """A step has ended; returns the mean of all steps that count."""
        assert self._counted_until is not None
        now = perf_counter()
        if counts:
            self._samples += samples
            self._seconds += now - self._counted_until
        self._counted_until = now
        return self._samples / max(self._seconds, 1e-9)

    def pause(self) -> None:
        """Something other than training begins. The device may still be busy with steps."""
        if self._counted_until is not None:
            if self._device.type != "cpu":
                torch.accelerator.synchronize(self._device)
            self._seconds += perf_counter() - self._counted_until
            self._counted_until = None


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


class RunningMeans:
    """Loss and metrics summed over batches, each weighted by its samples."""

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
        self.sums["loss"] += float(loss) * samples
        for name, metric in self._metrics.items():
            self.sums[name] += _mean(name, metric, output, target) * samples
        self.samples += samples

    def evaluation(self, gather: Callable[[Any], Sequence[Any]]) -> Evaluation:
        """The means over the batches of all ranks."""
        of_ranks = gather([self.sums, self.samples])
        samples = sum(samples for _, samples in of_ranks)
        if not samples:
            raise InputError("trainer.evaluate: the loader is empty")
        means = {n: sum(sums.get(n, 0.0) for sums, _ in of_ranks) / samples for n in self.sums}
        return Evaluation(means.pop("loss"), samples, means)


def loader_problem(loader: Any, is_needed: bool) -> str | None:
    """Why it cannot be iterated over; ranks that need no data may have none."""
    if isinstance(loader, Iterable) or (loader is None and not is_needed):
        return None
    return f"expected a loader of batches (inputs, target), got {loader!r}"


@contextmanager
def eval_mode(model: nn.Module, autocast: torch.dtype | None) -> Iterator[None]:
    """Eval mode without gradients; modules' modes and random generators are restored afterwards."""
    modes = {module: module.training for module in model.modules()}
    device = device_of_model(model)
    model.eval()
    try:
        with (
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            torch.no_grad(),
            torch.autocast(device.type, autocast, enabled=autocast is not None),
        ):
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
