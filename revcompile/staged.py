"""A model cut into stages: what `petrafy` returns."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from revcompile.compiler.lower import lower
from revcompile.compiler.verify import verify_programs
from revcompile.inspect.stages import code_text, stage_table
from revcompile.program import Part, Partition, StageProgram
from revcompile.runtime.objective import Loss
from revcompile.runtime.reversible import Reversible
from revcompile.runtime.trainer import Settings, Trainer
from revcompile.runtime.update import OptimizerFactory, ParamGroups, ScheduleFactory
from revcompile.schedule import Action, Costs, Method, actions, choose, delay, dry_run, window

__all__ = ["CompiledStage", "StagedModel"]


@dataclass(frozen=True)
class CompiledStage:
    """One stage to look at."""

    part: Part
    program: StageProgram
    all_actions: tuple[Action, ...]

    @property
    def code(self) -> str:
        """The forward and the backward program as Python."""
        return code_text(self.program)

    @property
    def graph(self) -> fx.Graph:
        """The forward program as an FX graph."""
        return self.program.forward

    @property
    def reversible(self) -> bool:
        """Does the stage keep nothing between forward and backward?"""
        return self.part.reversible

    def __str__(self) -> str:
        return self.code


class StagedModel:
    """A model cut into balanced stages, each with generated code; trains with any method.

    >>> import torch, revcompile
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, norm_first=True, batch_first=True)
    >>> net = revcompile.petrafy(layer, num_stages=2, example_inputs=torch.randn(2, 5, 8))
    >>> [stage.reversible for stage in net.stages]
    [False, False]
    >>> trainer = net.trainer(lambda p: torch.optim.SGD(p, lr=0.1), torch.nn.functional.mse_loss)
    >>> metrics = trainer.step(torch.randn(4, 5, 8), torch.zeros(4, 5, 8))
    >>> trainer.flush()
    >>> metrics.delays
    (1, 0)
    """

    def __init__(self, model: Reversible, partition: Partition, method: Method) -> None:
        self.model = model
        """The parameters live here, under their original names."""
        self.partition = partition
        self.method = method
        self._programs = functools.cache(self._lowered)

    def _lowered(self, method: Method) -> tuple[StageProgram, ...]:
        programs = lower(self.partition, method)
        verify_programs(self.partition, programs)
        return programs

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return len(self.partition.parts)

    @property
    def stages(self) -> tuple[CompiledStage, ...]:
        """The stages with their programs for the default method."""
        count = self.num_stages
        lists = actions(self.method, count, 2 * count, ties=self.partition.ties)
        programs = self._programs(self.method)
        return tuple(map(CompiledStage, self.partition.parts, programs, lists))

    def module(self) -> nn.Module:
        """A plain module with the current weights: a copy to evaluate, save and deploy."""
        twin = copy.deepcopy(self.model)
        for parameter in twin.parameters():
            parameter.grad = None
        return twin

    def trainer(
        self,
        optimizer: OptimizerFactory,
        loss: Loss,
        *,
        accumulate: int = 1,
        method: str | Method = "petra",
        order: str | None = None,
        alpha: float | None = None,
        lr_schedule: ScheduleFactory | None = None,
        param_groups: ParamGroups | None = None,
        autocast: torch.dtype | None = None,
        clip_grad_norm: float | None = None,
        seed: int = 0,
        check_finite: bool = True,
        measure_every: int | None = None,
    ) -> Trainer:
        """A trainer for this model.

        `optimizer` is a function from a list of parameters to a torch optimizer and is called
        once a stage; `lr_schedule` one from an optimizer to its schedule, stepped at every
        update. `method` is a row of the methods' table ("petra", "backprop", "1f1b",
        "pipedream", ...); `order` "half" (the default) or "paper", the paper's, with twice the
        delay; `alpha` anything in between or beyond. `param_groups` turns a stage's named
        parameters into torch's parameter groups. `clip_grad_norm` clips the norm over the whole
        model where all stages update together, and each stage's own norm where they do not.
        `measure_every` has every n-th micro-batch's reconstruction error measured.
        """
        settings = Settings(
            accumulate=accumulate,
            lr_schedule=lr_schedule,
            param_groups=param_groups,
            autocast=autocast,
            clip_grad_norm=clip_grad_norm,
            seed=seed,
            check_finite=check_finite,
            measure_every=measure_every,
        )
        chosen = choose(method, order=order, alpha=alpha)
        self._proved(chosen, accumulate)
        programs = self._programs(chosen)
        return Trainer(self.model, self.partition, programs, optimizer, loss, settings)

    def _proved(self, method: Method, accumulate: int) -> None:
        """Play the schedule without tensors: it must not lock up."""
        count, ties = self.num_stages, self.partition.ties
        longest = max(window(method, count, j, accumulate) for j in range(count))
        lists = actions(method, count, longest + 2, accumulate, ties)
        dry_run(lists, Costs.uniform(count))

    def delays(self, accumulate: int = 1) -> tuple[int, ...]:
        """Updates between forward and backward at each stage, for the default method."""
        count = self.num_stages
        return tuple(delay(self.method, count, j, accumulate) for j in range(count))

    def summary(self, batch: int | None = None) -> str:
        """The stages as a table: blocks, parameters, work, boundary, window, delay, memory."""
        return stage_table(self.partition, self._programs(self.method), batch)

    def __str__(self) -> str:
        return self.summary()

    def __repr__(self) -> str:
        reversible = sum(part.reversible for part in self.partition.parts)
        return (
            f"StagedModel({self.partition.rewired.name}: {self.num_stages} stages, "
            f"{reversible} reversible)"
        )

    def __getattr__(self, name: str) -> Any:
        if name in ("parameters", "state_dict", "forward", "eval", "train", "to"):
            raise AttributeError(
                f"a StagedModel has no {name!r}: net.module() is the plain module with the current "
                "weights, net.trainer(...) trains it"
            )
        raise AttributeError(name)
