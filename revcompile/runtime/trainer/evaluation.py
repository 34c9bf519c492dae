"""Evaluation: batches go from stage to stage, nothing comes back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn

from revcompile.errors import InputError, RevcompileError
from revcompile.runtime.executor.messages import TARGET, Message, MessageKind, next_message
from revcompile.runtime.stage.loss import described
from revcompile.runtime.trainer.inputs import split_batch, split_call
from revcompile.runtime.trainer.steps import Steps, Values

Found = TypeVar("Found")


class Metric(Protocol):
    """A mean over a batch, from the model's output and the target."""

    def __call__(self, output: Any, target: Any, /) -> float | Tensor: ...


@dataclass(frozen=True)
class Evaluation:
    """Means over all samples of a loader."""

    loss: float
    samples: int
    metrics: Mapping[str, float]


class RunningMeans:
    """Loss and metrics summed over batches, each weighted by its samples."""

    def __init__(self, steps: Steps, metrics: Mapping[str, Metric] | None) -> None:
        self._head, self._gather = steps.loss_head, steps.placement.gather
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

    def add(self, where: str, output: Any, target: Any, samples: int) -> None:
        self.sums["loss"] += float(self._head.evaluate(output, target, where)) * samples
        for name, metric in self._metrics.items():
            try:
                self.sums[name] += float(metric(output, target)) * samples
            except Exception as error:
                raise InputError(
                    f"trainer.evaluate: metric {name!r} raised {type(error).__name__}: {error}; it "
                    "is a function of (output, target) and returns one number, the mean over the "
                    "batch"
                ) from error
        self.samples += samples

    def evaluation(self) -> Evaluation:
        """The means over the batches of all ranks."""
        of_ranks = self._gather([self.sums, self.samples])
        samples = sum(samples for _, samples in of_ranks)
        if not samples:
            raise InputError("trainer.evaluate: the loader is empty")
        means = {n: sum(sums.get(n, 0.0) for sums, _ in of_ranks) / samples for n in self.sums}
        return Evaluation(means.pop("loss"), samples, means)


def loader_problem(loader: Any, is_needed: bool) -> str | None:
    """Why the loader cannot be used, or None; ranks that need no data may have no loader."""
    if isinstance(loader, Iterable) or (loader is None and not is_needed):
        return None
    return f"expected a loader of batches (inputs, target), got {loader!r}"


@contextmanager
def _explaining(where: str, inputs: Any) -> Iterator[None]:
    """Around the model: an error names the batch and its inputs."""
    try:
        yield
    except RevcompileError:
        raise
    except Exception as error:
        raise InputError(
            f"{where}: the model failed on it: {type(error).__name__}: {error}\n"
            f"  inputs: {described(inputs)}"
        ) from error


def evaluate_model(steps: Steps, model: nn.Module, loader: Any, means: RunningMeans) -> None:
    """Evaluate in one process, with the model: in eval mode it may differ from the stages."""
    binder = steps.binder
    for number, batch in enumerate(loader):
        inputs, target = split_batch(batch, steps.loss_head.has_target, "trainer.evaluate")
        where = f"evaluation, batch {number}"
        for part in (inputs, target):
            binder.check_tensors(part, where)
        samples = binder.count_samples(binder.bind(inputs, where))
        inputs, target = binder.take((inputs, target), copy=False)
        args, kwargs = split_call(inputs)
        with _explaining(where, inputs):
            output = model(*args, **kwargs)
        means.add(where, output, target, samples)
        del output  # before the next batch's output: logits may be the largest tensor there is
        binder.wait_copied()


class EvaluationPass:
    """A rank's part of an evaluation.

    A void message ends it. A stage that fails sends one at once and discards the batches that
    still arrive: no rank waits for it. The error is kept until the end.

    Args:
        steps: Has the stages of this rank.
        loader: Batches for the first stage, if it is here.
        means: Sums over the batches that reach the last stage, if it is here.
    """

    def __init__(self, steps: Steps, loader: Iterable[Any] | None, means: RunningMeans) -> None:
        self._steps, self._means = steps, means
        self._placement = placement = steps.placement
        self._binder, self._head = steps.binder, steps.loss_head
        has_target = self._head.has_target
        # `for .. in (loader,)` delays `iter(loader)`, which may fail, to the first `next`.
        self._batches = (
            split_batch(batch, has_target, "trainer.evaluate")
            for each in (loader,)
            for batch in each or ()
        )
        self.error: Exception | None = None
        self._stages = {executor.index: executor.stage for executor in steps.executors}
        self._last = placement.transport.stages - 1
        self._running = set(self._stages)
        """Stages that have not seen the last batch."""
        self._ended: set[int] = set()
        """Stages that have sent their void message."""

    def run(self) -> None:
        """Run all stages of this rank until each has seen the last batch."""
        number = 0
        while self._running:
            for stage in sorted(self._running):
                self._run_batch(stage, number)
            self._binder.wait_copied()
            number += 1

    def _tried(self, function: Callable[..., Found], *given: Any) -> Found | None:
        """What a function returns, or None if it fails."""
        try:
            return function(*given)
        except Exception as error:
            self.error = self.error or error
            return None

    def _run_batch(self, stage: int, number: int) -> None:
        values, outputs, has_ended = self._next(stage, number), None, stage in self._ended
        if values is not None and not has_ended:
            outputs = self._tried(self._outputs, stage, number, values)
        if values is None or (outputs is None and stage == 0):
            self._running.discard(stage)
        if outputs is None:
            self._ended.add(stage)
        if stage != self._last and not has_ended:
            message = Message(number, outputs or {}, void=outputs is None)
            self._placement.transport.send((stage, stage + 1, MessageKind.EVALUATE), message)

    def _next(self, stage: int, number: int) -> Mapping[str, Any] | None:
        if stage == 0:
            return self._tried(self._first, number)
        where = f"stage {stage} for batch {number} of an evaluation"
        route = stage - 1, stage, MessageKind.EVALUATE
        message = next_message(self._placement.transport, route, where)
        return None if message.void else message.values

    def _first(self, number: int) -> Values | None:
        """The inputs of the model, and the target; None after the last batch."""
        batch = next(self._batches, None)
        if batch is None:
            return None
        values = self._binder.prepare(*batch, f"evaluation, batch {number}")
        return self._binder.take(values)  # type: ignore[no-any-return]

    def _outputs(self, stage: int, number: int, values: Mapping[str, Any]) -> Mapping[str, Any]:
        where, inputs = f"evaluation, batch {number}", dict(values)
        target, samples = inputs.pop(TARGET)
        with _explaining(where, inputs):
            outputs = self._stages[stage].evaluate(inputs)
        if stage == self._last:
            self._means.add(where, self._head.assembled(outputs), target, samples)
        return {**outputs, TARGET: (target, samples)}
