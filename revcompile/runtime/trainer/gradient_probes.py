"""How good is a method's gradient? PETRA's Appendix B, and Features Replay's sufficient direction.

A probe watches one micro-batch and compares, stage by stage, three gradients of its loss:

    method       what the stage's backward pass adds to its gathered gradient
    delayed      backprop with the parameters each stage had when it forwarded the micro-batch
    end-to-end   backprop with the parameters w^t that all stages have when the stage differentiates

w^t is that of the papers, where all stages update at the end of a tick t. Here a tick is a step of
the schedule, within which the stages of one process run one after another: so stage i counts as it
is just before it differentiates the micro-batch that is its own in the tick. Of tied parameters
each stage's own contribution is compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, fx

from revcompile.errors import InputError
from revcompile.ir import coupling_ops
from revcompile.ir.coupling_ops import mix
from revcompile.ir.program import StageProgram
from revcompile.ir.python_code import compile_graph
from revcompile.kernels.autocast import widest_dtype
from revcompile.runtime.reversible.replay import BufferSnapshot
from revcompile.runtime.stage.loss_head import LossHead
from revcompile.runtime.stage.stage import Stage
from revcompile.runtime.stage.tensors import clone_tree
from revcompile.runtime.stage.weights import detached_copies
from revcompile.schedule import Order, delay, window

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
    """A probe's result. Numbers of a stage without trainable parameters are nan.

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
        for row in self.stages:
            columns = (row.method_vs_delayed, row.method_vs_end_to_end, row.delayed_vs_end_to_end)
            cells = "".join(f" {c.cosine:11.4f} {c.norm_ratio:8.4f}" for c in columns)
            lines.append(f"{row.stage:5} {row.delay:5}{cells} {row.sigma:7.4f}")
        return "\n".join([*lines, f"sigma over all stages: {self.sigma:.4f}"])


# -- record -------------------------------------------------------------------------------------


class Probe:
    """Observes one micro-batch; training goes on, unchanged to the bit.

    `trainer.watch()` makes one. Until the micro-batch is back at the first stage, parameters are
    copied: at most one copy of the model a stage during a flush, one copy during a step. The model
    runs once more for every stage, and once for the delayed gradients. The loss is called as
    often: one that keeps state would notice, and one that draws random numbers draws others.
    """

    def __init__(
        self,
        microbatch: int,
        stages: Sequence[Stage],
        loss_head: LossHead,
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
        self._loss_head = loss_head
        self._programs = [_differentiable(stage.program) for stage in stages]
        self._delayed: list[Gradients] | None = None
        self._compared: dict[int, _Compared] = {}
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
        return len(self._compared) == len(self._stages)

    @property
    def over(self) -> bool:
        return self.complete or self.lost

    @property
    def report(self) -> GradientReport:
        """The comparison, once the probe is complete."""
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
        stages, of_sigma = zip(*(each for _, each in sorted(self._compared.items())), strict=True)
        return GradientReport(
            method=self._method,
            microbatch=self.microbatch,
            stages=stages,
            sigma=_ratio(*map(sum, zip(*of_sigma, strict=True))),
        )

    # -- called by the trainer and its stages -------------------------------------------------

    def fed(self, microbatch: int, inputs: Mapping[str, Any], target: Any) -> None:
        """A micro-batch is about to enter. Its tensors are copied: the caller may reuse them."""
        if microbatch == self.microbatch:
            self._data = clone_tree((dict(inputs), target))

    def rolled_back(self, microbatch: int) -> None:
        """A micro-batch's step has failed; the next one gets its number."""
        if microbatch == self.microbatch:
            self._begin()

    def forwarded(self, stage: Stage, microbatch: int) -> None:
        if microbatch == self.microbatch:
            index = stage.program.index
            self._forwarded[index] = detached_copies(stage.weights.forward() or stage.parameters)
            self._buffers[index] = stage.in_flight[microbatch].buffers

    def differentiated(self, stage: Stage, microbatch: int, gradients: Gradients) -> None:
        index = stage.program.index
        if index not in self._buffers:
            return
        if microbatch == self.microbatch:
            self._of_method[index] = clone_tree(dict(gradients))
        elif microbatch > self.microbatch and index not in self._of_method:
            self.lost = True
        self._save_weights(index, microbatch)

    def _save_weights(self, index: int, microbatch: int) -> None:
        """Copy the weights of stage `index` for every stage whose tick it has just reached."""
        version: Weights | None = None
        for stage, current in self._current.items():
            tick = self.microbatch + self._behind[stage]
            # >=: before the pipeline is full, and after skipped micro-batches, some never come.
            if index not in current and microbatch >= tick - self._behind[index]:
                if version is None:
                    version = detached_copies(self._stages[index].parameters)
                current[index] = version

    def compare(self, drained: bool) -> None:
        """A step or a flush is over: compare what is complete by now."""
        if self._data is None or len(self._buffers) < len(self._stages):
            return
        if self._delayed is None:
            weights = [self._forwarded[j] for j in range(len(self._stages))]
            self._delayed = self._run(weights, range(len(self._stages)))
            self._forwarded.clear()
        if drained:
            for index in range(len(self._stages)):
                self._save_weights(index, self.microbatch + max(self._behind))
            self.lost |= len(self._of_method) < len(self._stages)
        for stage in [j for j in self._of_method if j not in self._compared]:
            if len(self._current[stage]) < len(self._stages):
                continue
            current = self._current.pop(stage)
            (end_to_end,) = self._run([current[i] for i in range(len(self._stages))], [stage])
            gradients = self._of_method[stage], self._delayed[stage], end_to_end
            self._compared[stage] = _compared(stage, self._delays[stage], *gradients)

    def _run(self, weights: Sequence[Weights], chosen: Sequence[int]) -> list[Gradients]:
        """Plain backprop: the parameter gradients of the chosen stages, with any `weights` of each.

        The stages' own forward programs under one autograd graph are what training runs: same order
        of operations, same masks. Parameters, buffers and random state are as before afterwards.
        """
        assert self._data is not None
        leaves = [
            (position, name, tensor)
            for position, index in enumerate(chosen)
            for name, tensor in weights[index].items()
            if tensor.requires_grad
        ]
        gradients: list[dict[str, Tensor | None]] = [{} for _ in chosen]
        if not leaves:
            return list(gradients)
        devices = dict.fromkeys(tensor.device for _, _, tensor in leaves if tensor.is_cuda)
        values, target = dict(self._data[0]), self._data[1]
        with torch.random.fork_rng(list(devices)):
            for index, (stage, run) in enumerate(zip(self._stages, self._programs, strict=True)):
                inputs = [values[port.name] for port in stage.program.inputs]
                with (
                    stage._program_context(weights[index]),  # freezes statistics
                    stage._stateful.replay(self._buffers[index]),
                    torch.set_grad_enabled(index >= min(chosen)),
                ):
                    outputs = run(stage.root, mix(stage.seed, self.microbatch), *inputs)
                values |= zip((port.name for port in stage.program.outputs), outputs, strict=True)
            with torch.enable_grad():
                output, where = self._loss_head.assembled(values), f"micro-batch {self.microbatch}"
                loss = self._loss_head.evaluate(output, target, f"probe of {where}")
            grads = torch.autograd.grad(loss, [t for _, _, t in leaves], allow_unused=True)
        for (position, name, _), grad in zip(leaves, grads, strict=True):
            gradients[position][name] = grad
        return list(gradients)


def _ratio(x: float, y: float) -> float:
    return x / y if y else math.nan


# -- comparing ------------------------------------------------------------------------------------


_Compared = tuple[StageGradients, tuple[float, float]]
"""Of one stage, and what `sigma` is the ratio of: `<end-to-end, method>` and `|end-to-end|^2`."""


def _compared(stage: int, delay: int, *gradients: Gradients) -> _Compared:
    """One stage's gradients: the method's, delayed, end-to-end."""
    dots = [[_dot(x, y) for y in gradients[: i + 1]] for i, x in enumerate(gradients)]
    norms, of_sigma = [math.sqrt(each[-1]) for each in dots], (dots[2][0], dots[2][2])
    first, second, third = (
        Similarity(_ratio(dots[y][x], norms[x] * norms[y]), _ratio(norms[x], norms[y]))
        for x, y in ((0, 1), (0, 2), (1, 2))
    )
    return StageGradients(stage, delay, first, second, third, _ratio(*of_sigma)), of_sigma


def _dot(x: Gradients, y: Gradients) -> float:
    pairs = [(g, y.get(name)) for name, g in x.items()]
    products = [
        (a.to(widest_dtype(a.device)) * b).sum()
        for a, b in pairs
        if a is not None and b is not None
    ]
    return float(torch.stack(products).sum()) if products else 0.0


_CUTS: Final = (coupling_ops.leaf, coupling_ops.detached)


def _differentiable(program: StageProgram) -> Callable[..., Any]:
    """The forward program as one autograd graph, without the cuts between its units."""
    graph = fx.Graph()
    outputs, _ = graph.graph_copy(program.forward, {})  # type: ignore[misc]
    graph.output(outputs)
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in _CUTS:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.op == "call_function" and node.target is coupling_ops.recording:
            graph.erase_node(node)
    return compile_graph(graph, f"stage {program.index} probe")
