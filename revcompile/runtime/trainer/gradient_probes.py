"""How good is a method's gradient? PETRA's Appendix B, and Features Replay's sufficient direction.

A probe watches one micro-batch and compares, stage by stage, three gradients of its loss:

    method       what the stage's backward pass adds to its gathered gradient
    delayed      backprop with the parameters each stage had when it forwarded the micro-batch
    end-to-end   backprop with the parameters w^t that all stages have when the stage differentiates

w^t is that of the papers, where all stages update at the end of a tick t. Here a tick is a round
of the schedule, and stages of one process take turns in it: so stage i is taken as it is just
before it differentiates the micro-batch that is its own in the tick. Tied parameters: each stage's
share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from revcompile.errors import InputError
from revcompile.ir import stage_ops
from revcompile.ir.program import StageProgram
from revcompile.ir.types import Live, Rewired
from revcompile.runtime.reversible.graph_code import compile_graph
from revcompile.runtime.reversible.replay import BufferSnapshot
from revcompile.runtime.stage.loss_head import Objective
from revcompile.runtime.stage.stage import Stage
from revcompile.runtime.stage.weights import WeightCopy
from revcompile.schedule import Order, delay, window

__all__ = ["GradientReport", "Probe", "Similarity", "StageGradients"]

Gradients = Mapping[str, Tensor | None]
Weights = Mapping[str, Tensor]


# -- what is reported -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Similarity:
    """Two gradients x and y: `<x, y> / |x| |y|` and `|x| / |y|` (PETRA, Appendix B)."""

    cosine: float
    norm_ratio: float


@dataclass(frozen=True)
class StageGradients:
    """One stage's three gradients compared, over all its parameters together."""

    stage: int
    delay: int
    method_vs_delayed: Similarity
    method_vs_end_to_end: Similarity
    delayed_vs_end_to_end: Similarity
    sigma: float
    """`<end-to-end, method> / |end-to-end|^2`."""


@dataclass(frozen=True)
class GradientReport:
    """What a probe has seen. Numbers of a stage without trainable parameters are nan.

    `sigma` is the constant of Features Replay's Assumption 1, "there exists a constant sigma > 0
    such that <grad f(w^t), E[sum_k g_k^t]> >= sigma |grad f(w^t)|^2" (Eq. 8), as this micro-batch
    alone gives it: the largest one that satisfies it.
    """

    method: str
    microbatch: int
    stages: tuple[StageGradients, ...]
    sigma: float

    def __str__(self) -> str:
        pairs = ("method : delayed", "method : end-to-end", "delayed : end-to-end")
        lines = [
            f"{self.method}, micro-batch {self.microbatch}: cosine and norm ratio of gradients",
            f"{'stage':>5} {'delay':>5}" + "".join(f" {pair:>20}" for pair in pairs) + "   sigma",
        ]
        for one in self.stages:
            columns = (one.method_vs_delayed, one.method_vs_end_to_end, one.delayed_vs_end_to_end)
            cells = "".join(f" {c.cosine:11.4f} {c.norm_ratio:8.4f}" for c in columns)
            lines.append(f"{one.stage:5} {one.delay:5}{cells} {one.sigma:7.4f}")
        return "\n".join([*lines, f"sigma over all stages: {self.sigma:.4f}"])


# -- record -------------------------------------------------------------------------------------


class Probe:
    """Watches one micro-batch while training goes on, unchanged to the bit.

    `trainer.watch()` makes one. Until the micro-batch is back at the first stage, parameters are
    copied: at most as many copies of the model as there are stages, during a flush; one during a
    step. The model runs once more for every stage, and once for the delayed gradients. The loss is
    called as often: one that has a memory of its own would notice, and one that draws random
    numbers draws others.
    """

    def __init__(
        self,
        microbatch: int,
        stages: Sequence[Stage],
        rewired: Rewired,
        objective: Objective,
        accumulate: int,
    ) -> None:
        self.microbatch = microbatch
        self.lost = False
        """Was the micro-batch left out of an update (not finite)? Then there is no report."""
        self._stages = tuple(stages)
        method, count = stages[0].program.method, len(stages)
        self._method = method.name
        delayed = method.order is Order.CONTINUOUS
        self._behind = [
            window(method, count, j, accumulate) - 1 if delayed else 0 for j in range(count)
        ]
        self._delays = [delay(method, count, j, accumulate) for j in range(count)]
        self._backprop = _Backprop(self._stages, rewired, objective)
        self._delayed: list[Gradients] | None = None
        self._compared: dict[int, _Products] = {}
        self._begin()

    def _begin(self) -> None:
        self._data: tuple[Mapping[str, Any], Any] | None = None
        self._forwarded: dict[int, Weights] = {}
        self._buffers: dict[int, list[BufferSnapshot]] = {}
        self._of_method: dict[int, Gradients] = {}
        self._current: dict[int, dict[int, Weights]] = {j: {} for j in range(len(self._stages))}
        """For each stage, the parameters w^t that its end-to-end gradient is taken at."""

    @property
    def complete(self) -> bool:
        """Have all stages been seen?"""
        return len(self._compared) == len(self._stages)

    @property
    def over(self) -> bool:
        """Is there nothing left to wait for?"""
        return self.complete or self.lost

    @property
    def report(self) -> GradientReport:
        """What was seen, once the probe is complete."""
        if self.lost:
            raise InputError(
                f"probe: micro-batch {self.microbatch} was left out of an update because a "
                "gradient was not finite; watch another one"
            )
        if not self.complete:
            missing = [j for j in range(len(self._stages)) if j not in self._compared]
            raise InputError(
                f"probe: micro-batch {self.microbatch} has not been seen at stages {missing} yet; "
                "call trainer.step with more micro-batches, or trainer.flush, until probe.complete"
            )
        found = [self._compared[j] for j in range(len(self._stages))]
        return GradientReport(
            method=self._method,
            microbatch=self.microbatch,
            stages=tuple(one.compared(j, self._delays[j]) for j, one in enumerate(found)),
            sigma=_ratio(sum(p.method_e2e for p in found), sum(p.e2e_e2e for p in found)),
        )

    # -- what stages and trainer tell ---------------------------------------------------------

    def fed(self, microbatch: int, inputs: Mapping[str, Any], target: Any) -> None:
        """A micro-batch is about to enter. Its tensors are copied: who gave them may reuse them."""
        if microbatch == self.microbatch:
            self._data = pytree.tree_map_only(
                Tensor, lambda t: t.detach().clone(), (dict(inputs), target)
            )

    def taken_back(self, microbatch: int) -> None:
        """A micro-batch's step has failed; the next one will have its number."""
        if microbatch == self.microbatch:
            self._begin()

    def forwarded(self, stage: Stage, microbatch: int) -> None:
        """A stage has run a micro-batch."""
        if microbatch == self.microbatch:
            index = stage.program.index
            self._forwarded[index] = _copied(stage)
            self._buffers[index] = stage.in_flight[microbatch].buffers

    def differentiated(self, stage: Stage, microbatch: int, gradients: Gradients) -> None:
        """A stage has a micro-batch's gradient, and has not been updated with it."""
        index = stage.program.index
        if index not in self._buffers:
            return
        if microbatch == self.microbatch:
            self._of_method[index] = {
                name: None if g is None else g.detach().clone() for name, g in gradients.items()
            }
        elif microbatch > self.microbatch and index not in self._of_method:
            self.lost = True
        self._see(index, microbatch)

    def _see(self, index: int, microbatch: int) -> None:
        """Stage `index` is where it is in the ticks of all stages that wait for this."""
        version: Weights | None = None
        for stage, current in self._current.items():
            tick = self.microbatch + self._behind[stage]
            # The first that comes: before the pipeline is full, and after losses, some do not.
            if index not in current and microbatch >= tick - self._behind[index]:
                version = _copied(self._stages[index]) if version is None else version
                current[index] = version

    def settle(self, drained: bool) -> None:
        """A step or a flush is over: compute what can be computed by now."""
        if self._data is None or len(self._buffers) < len(self._stages):
            return
        if self._delayed is None:
            weights = [self._forwarded[j] for j in range(len(self._stages))]
            self._delayed = self._run(weights, range(len(self._stages)))
            self._forwarded.clear()
        if drained:
            for index in range(len(self._stages)):
                self._see(index, self.microbatch + max(self._behind))
            self.lost |= len(self._of_method) < len(self._stages)
        for stage in [j for j in self._of_method if self._seen(j)]:
            current = self._current.pop(stage)
            (end_to_end,) = self._run([current[i] for i in range(len(self._stages))], [stage])
            self._compared[stage] = _Products.of(
                self._of_method[stage], self._delayed[stage], end_to_end
            )

    def _seen(self, stage: int) -> bool:
        return stage not in self._compared and len(self._current[stage]) == len(self._stages)

    def _run(self, weights: Sequence[Weights], wanted: Sequence[int]) -> list[Gradients]:
        assert self._data is not None
        return self._backprop(self.microbatch, *self._data, weights, self._buffers, wanted)


def _copied(stage: Stage) -> Weights:
    return WeightCopy().current(stage.parameters)


def _ratio(x: float, y: float) -> float:
    return x / y if y else math.nan


# -- comparing ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Products:
    """Inner products of one stage's gradients: all that is needed of them."""

    method: float
    delayed: float
    e2e_e2e: float
    method_delayed: float
    method_e2e: float
    delayed_e2e: float

    @classmethod
    def of(cls, method: Gradients, delayed: Gradients, end_to_end: Gradients) -> _Products:
        return cls(
            _dot(method, method),
            _dot(delayed, delayed),
            _dot(end_to_end, end_to_end),
            _dot(method, delayed),
            _dot(method, end_to_end),
            _dot(delayed, end_to_end),
        )

    def compared(self, stage: int, delay: int) -> StageGradients:
        return StageGradients(
            stage,
            delay,
            _similarity(self.method_delayed, self.method, self.delayed),
            _similarity(self.method_e2e, self.method, self.e2e_e2e),
            _similarity(self.delayed_e2e, self.delayed, self.e2e_e2e),
            _ratio(self.method_e2e, self.e2e_e2e),
        )


def _dot(x: Gradients, y: Gradients) -> float:
    pairs = [(g, y.get(name)) for name, g in x.items()]
    found = [(a.double() * b.double()).sum() for a, b in pairs if a is not None and b is not None]
    return float(torch.stack(found).sum()) if found else 0.0


def _similarity(dot: float, x: float, y: float) -> Similarity:
    """From an inner product and two squared norms."""
    return Similarity(_ratio(dot, math.sqrt(x) * math.sqrt(y)), _ratio(math.sqrt(x), math.sqrt(y)))


# -- plain backprop -------------------------------------------------------------------------------


class _Backprop:
    """The stages' own forward programs under one autograd graph, with any parameters.

    The programs are what training runs: same order of operations, same masks. Parameters, buffers
    and random state are as before afterwards.
    """

    def __init__(self, stages: Sequence[Stage], rewired: Rewired, objective: Objective) -> None:
        self.stages, self.objective = stages, objective
        self.result, self.spec = rewired.body.result, rewired.signature.out_spec
        self.runs = [_differentiable(stage.program) for stage in stages]

    def __call__(
        self,
        microbatch: int,
        inputs: Mapping[str, Any],
        target: Any,
        weights: Sequence[Weights],
        buffers: Mapping[int, list[BufferSnapshot]],
        wanted: Sequence[int],
    ) -> list[Gradients]:
        """The gradients of the wanted stages' parameters, each stage with its `weights`."""
        leaves = [
            (position, name, tensor)
            for position, index in enumerate(wanted)
            for name, tensor in weights[index].items()
            if tensor.requires_grad
        ]
        found: list[dict[str, Tensor | None]] = [{} for _ in wanted]
        if not leaves:
            return list(found)
        devices = {tensor.device for _, _, tensor in leaves if tensor.is_cuda}
        values = dict(inputs)
        with torch.random.fork_rng(list(devices)):
            for stage, run, chosen in zip(self.stages, self.runs, weights, strict=True):
                recorded = stage.program.index >= min(wanted)
                values |= _forward(stage, run, microbatch, values, chosen, buffers, recorded)
            with torch.enable_grad():
                flat = [values[r.name] if isinstance(r, Live) else r for r in self.result]
                output = pytree.tree_unflatten(flat, self.spec)
                loss = self.objective.evaluate(output, target, f"probe of micro-batch {microbatch}")
            grads = torch.autograd.grad(loss, [t for _, _, t in leaves], allow_unused=True)
        for (position, name, _), grad in zip(leaves, grads, strict=True):
            found[position][name] = grad
        return list(found)


def _forward(
    stage: Stage,
    run: Callable[..., Any],
    microbatch: int,
    values: Mapping[str, Any],
    weights: Weights,
    buffers: Mapping[int, list[BufferSnapshot]],
    recorded: bool,
) -> dict[str, Any]:
    program = stage.program
    given = [values[port.name] for port in program.inputs]
    with (
        stage._program_context(weights, microbatch),  # statistics stand still in here
        stage._stateful.replay(buffers[program.index]),
        torch.set_grad_enabled(recorded),
    ):
        outputs = run(stage.root, stage_ops.mix(stage.seed, microbatch), *given)
    return dict(zip((port.name for port in program.outputs), outputs, strict=True))


_CUTS: Final = (stage_ops.leaf, stage_ops.detached)


def _differentiable(program: StageProgram) -> Callable[..., Any]:
    """The forward program without what cuts its units off from each other: `(key, *inputs)`."""
    graph = fx.Graph()
    outputs, _ = graph.graph_copy(program.forward, {})  # type: ignore[misc]
    graph.output(outputs)
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in _CUTS:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.op == "call_function" and node.target is stage_ops.recording:
            graph.erase_node(node)
    return compile_graph(graph, f"stage {program.index} probe")
