"""A model cut into stages: what `petrafy` returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import fx, nn

from revcompile.compiler.cost import MemoryModel, StageMemory
from revcompile.compiler.lower import lower
from revcompile.compiler.verify import verify_programs
from revcompile.inspect import drawing
from revcompile.inspect.code import ActionList, action_list, code_text
from revcompile.inspect.explain import Explanation, explain
from revcompile.inspect.tables import StageFacts, stage_facts, stage_table
from revcompile.interop.pipelining import StageModule, pipeline_stages
from revcompile.ir.program import Part, Partition, StageProgram
from revcompile.plan.budget import MemoryPlan, Terms, budget, plan_memory
from revcompile.plan.fit import assign_contiguous, check_schedule, plan_trainer_memory
from revcompile.runtime.checkpoint import export_weights, load_into
from revcompile.runtime.distributed.process_groups import many_ranks
from revcompile.runtime.distributed.rank_weights import whole
from revcompile.runtime.distributed.trainer import DistributedTrainer
from revcompile.runtime.executor.captured import Backend, backend_of
from revcompile.runtime.reversible.module import Reversible
from revcompile.runtime.stage.activations import BuffersLike, buffers_of
from revcompile.runtime.stage.loss_head import Loss
from revcompile.runtime.stage.loss_scale import LossScale, loss_scale_of
from revcompile.runtime.stage.update import OptimizerFactory, ParamGroups, ScheduleFactory
from revcompile.runtime.trainer.settings import Settings
from revcompile.runtime.trainer.trainer import Trainer
from revcompile.schedule import Action, Keep, Method, actions, choose, delay

__all__ = ["CompiledStage", "StagedModel"]

Keeps = tuple[Keep, ...] | None
"""What each stage keeps, if not what its method says."""


@dataclass(frozen=True)
class CompiledStage:
    """One stage to look at."""

    partition: Partition
    part: Part
    generated: StageProgram
    actions: tuple[Action, ...]

    @property
    def code(self) -> str:
        """The forward, inverse and backward programs as Python, each branch a function."""
        return self.source()

    def source(self, verbose: bool = False) -> str:
        """The programs as Python.

        Args:
            verbose: Show the graphs exactly as they run: branches inlined, autograd switched on
                and off, values freed.
        """
        return code_text(self.partition, self.generated, verbose=verbose)

    @property
    def graph(self) -> fx.Graph:
        """The forward program as an FX graph."""
        return self.generated.forward

    @property
    def program(self) -> ActionList:
        """What the stage does, in order: an action list that prints as words."""
        return action_list(self.generated, self.actions)

    @property
    def reversible(self) -> bool:
        """Does the stage keep nothing between forward and backward?"""
        return self.part.reversible

    def __str__(self) -> str:
        return self.code


class StagedModel:
    """A model cut into balanced stages, each with generated code; trains with any method.

    Attributes and methods of the original that do not run it (`config`, `no_weight_decay()`) are
    here as well.

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
        self._lowered: dict[tuple[Method, Keeps], tuple[StageProgram, ...]] = {}

    def _programs(self, method: Method, keeps: Keeps = None) -> tuple[StageProgram, ...]:
        """The programs for a method and what stages keep, made when first asked for."""
        if (method, keeps) not in self._lowered:
            programs = lower(self.partition, method, keeps)
            verify_programs(self.partition, programs)
            self._lowered[method, keeps] = programs
        return self._lowered[method, keeps]

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
        parts = self.partition.parts
        return tuple(
            CompiledStage(self.partition, part, program, listed)
            for part, program, listed in zip(parts, programs, lists, strict=True)
        )

    def module(self) -> nn.Module:
        """A plain module with the current weights: a copy to evaluate, save and deploy.

        While several ranks train, each of them calls this: the weights come from all of them.
        """
        twin = whole(self.model)
        for parameter in twin.parameters():
            parameter.grad = None
        return twin

    def load(self, place: str | Path) -> None:
        """Take over the weights of a checkpoint, of the newest one in a folder, or of an export.

        Trainers of this model keep copies of shared weights and micro-batches in flight: load
        before making one, or call `trainer.load`.
        """
        load_into(self.model, place)

    def export(self, file: str | Path) -> Path:
        """Write the current weights as one file of safetensors, under their original names.

        >>> import pathlib, tempfile, torch, revcompile
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, norm_first=True)
        >>> net = revcompile.petrafy(layer, num_stages=2, example_inputs=torch.randn(2, 5, 8))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = net.export(pathlib.Path(folder, "layer.safetensors"))
        ...     net.load(file)
        """
        return export_weights(self.module(), file)

    def to_pipeline_stages(
        self, device: torch.device | str | None = None, reversible: bool = False
    ) -> tuple[StageModule, ...]:
        """The same stages as plain modules, for the schedules of `torch.distributed.pipelining`.

        Every rank picks its own: `PipelineStage(stages[rank], rank, len(stages), device)`. The
        modules hold copies of the current weights under their original names. `reversible` has
        couplings in a row keep only their output; it needs a schedule that computes all gradients
        of a stage at once (GPipe, 1F1B, interleaved 1F1B), not zero-bubble ones.

        Torch's rules: every micro-batch has the same shape, dropout draws from the global
        generator, and a parameter must not be shared between stages.

        >>> import torch, revcompile
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, 0.0, norm_first=True)
        >>> x = torch.randn(2, 5, 8)
        >>> net = revcompile.petrafy(layer, num_stages=2, example_inputs=x)
        >>> first, last = net.to_pipeline_stages()
        >>> torch.equal(last(*first(x)), net.module()(x))
        True

        The trained weights go back under their names:

        >>> state = first.state_dict() | last.state_dict()
        >>> net.model.load_state_dict(state)
        <All keys matched successfully>
        """
        return pipeline_stages(self.partition, device, reversible)

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
        loss_scale: LossScale | float | Literal["dynamic"] | None = None,
        clip_grad_norm: float | None = None,
        seed: int = 0,
        check_finite: bool = True,
        measure_every: int | None = None,
        backend: str | Backend = "auto",
        buffers: BuffersLike = None,
        memory: int | str | None = None,
        batch_size: int | None = None,
        places: Sequence[int] | None = None,
        device: torch.device | str | None = None,
        timeout: float = 600.0,
        report_loss: bool = False,
        average_statistics: bool = False,
    ) -> Trainer:
        """A trainer for this model.

        `optimizer` is a function from a list of parameters to a torch optimizer and is called
        once a stage (those of `revcompile.optim` make up for its delay); `lr_schedule` one from an
        optimizer to its schedule, stepped at every update. `method` is a row of the methods' table
        ("petra", "backprop", "1f1b", "pipedream", ...); `order` "1f1b" (the default) or "paper",
        the paper's, with twice the delay; `alpha` anything in between or beyond. `param_groups`
        turns a stage's named parameters into torch's parameter groups. `autocast` computes branches
        in torch.bfloat16 or torch.float16; with float16 the loss is scaled as torch.amp.GradScaler
        does, and micro-batches whose gradients overflow are left out (`loss_scale` "dynamic", a
        number that stays, or a `LossScale`). `clip_grad_norm` clips the norm over the whole model
        where all stages update together, and each stage's own norm where they do not.
        `measure_every` has every n-th micro-batch's reconstruction error measured. `backend` is
        how a full pipeline is run: "eager", action by action; "cudagraphs", a whole round as one
        CUDA graph, which reports bad gradients some steps late (they are never applied);
        "inductor", the same with what surrounds convolutions and products compiled; or "auto",
        eager on the CPU and CUDA graphs on a GPU. `buffers` is how stages that are not reversible
        keep their float32 inputs: in a smaller precision (torch.bfloat16 halves them,
        torch.float8_e4m3fn with a scale for each tensor quarters them; backward then computes
        with rounded values), or, with "offload", on a GPU's host; a `Buffers` says both.

        `memory` is what a device may hold, in bytes or as "2GiB", at `batch_size` samples a
        micro-batch (default: the example's). Stages for which that suffices keep the graphs of
        their micro-batches and compute nothing twice; `trainer.memory_plan` says which. Their
        backward pass goes through the activations of the forward pass, with the latest parameters
        as ever. The optimizer is built once more, for parameters of a few elements, to see how
        much it keeps. What a stage keeps cannot be saved as long as it is a graph: flush first.

        In a script started by torchrun (or with a process group of several ranks) this is the
        trainer of one rank, a `DistributedTrainer`: `places` says on which rank each stage lives
        (default: in a row, balanced by cost), `device` where to train (default: where the model
        is; of a model on the CPU only a rank's own stages ever go there), `timeout` after how many
        seconds of silence a rank gives up, and `report_loss` tells every rank the loss of each
        step. With more ranks than stages whole pipelines are copied: each copy takes its own data,
        gradients are averaged at every update, and so are batch norms' running statistics with
        `average_statistics`.
        """
        settings = Settings(
            accumulate=accumulate,
            lr_schedule=lr_schedule,
            param_groups=param_groups,
            autocast=autocast,
            loss_scale=loss_scale_of(loss_scale, autocast),
            clip_grad_norm=clip_grad_norm,
            seed=seed,
            check_finite=check_finite,
            measure_every=measure_every,
            backend=backend_of(backend),
            buffers=buffers_of(buffers),
            memory=None if memory is None else budget(memory),
        )
        chosen = choose(method, order=order, alpha=alpha)
        check_schedule(self.partition, chosen, accumulate)
        plan = plan_trainer_memory(
            self.partition,
            chosen,
            settings,
            optimizer,
            parameters=dict(self.model.named_parameters()),
            batch=self.batch if batch_size is None else batch_size,
            places=places,
        )
        programs = self._programs(chosen, plan.keeps if plan else None)
        model = self.model
        if many_ranks():
            trainer: Trainer = DistributedTrainer(
                model,
                self.partition,
                programs,
                optimizer,
                loss,
                settings,
                default_places=self._places,
                places=places,
                device=device,
                timeout=timeout,
                report_loss=report_loss,
                average_statistics=average_statistics,
            )
        else:
            if device is not None:
                model.to(device)
            trainer = Trainer(model, self.partition, programs, optimizer, loss, settings)
        trainer.memory_plan = plan
        return trainer

    def memory_plan(
        self,
        memory: int | str,
        *,
        batch: int | None = None,
        accumulate: int = 1,
        order: str | None = None,
        alpha: float | None = None,
        optimizer_copies: float = 1.0,
        buffers: BuffersLike = None,
        places: Sequence[int] | None = None,
    ) -> MemoryPlan:
        """What stages keep if a device may hold so much: bytes, or text like "2GiB".

        `places` are the devices of the stages; without it each stage has its own. The rest is as
        for the trainer, which makes its own plan; `optimizer_copies` is 1 for SGD with momentum,
        2 for Adam.

        >>> import torch, revcompile
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, norm_first=True, batch_first=True)
        >>> net = revcompile.petrafy(layer, num_stages=2, example_inputs=torch.randn(2, 5, 8))
        >>> [keep.value for keep in net.memory_plan("1MiB").keeps]
        ['graph', 'graph']
        """
        method = choose(self.method, order=order, alpha=alpha)
        terms = Terms(
            method,
            batch or self.batch,
            accumulate,
            optimizer_copies,
            buffers_of(buffers).bytes_each,
        )
        return plan_memory(self.partition, budget(memory), terms, places)

    def _places(self, ranks: int) -> list[int]:
        return assign_contiguous(self.partition, ranks)

    def delays(self, accumulate: int = 1) -> tuple[int, ...]:
        """Updates between forward and backward at each stage, for the default method."""
        count = self.num_stages
        return tuple(delay(self.method, count, j, accumulate) for j in range(count))

    def memory(
        self, batch: int | None = None, *, buffers: BuffersLike = None
    ) -> tuple[StageMemory, ...]:
        """What each stage holds at its peak, in bytes, at so many samples a micro-batch.

        `buffers` as the trainer will be given it.
        """
        model = MemoryModel.of(
            self.partition,
            self.method,
            batch=batch or self.batch,
            buffer_bytes=buffers_of(buffers).bytes_each,
        )
        return tuple(model.stage(j, *ends) for j, ends in enumerate(self.partition.ranges))

    @property
    def batch(self) -> int:
        """The batch size of the example the model was captured with."""
        return self.partition.parts[0].costs[0].batch

    def facts(
        self,
        batch: int | None = None,
        *,
        memory: int | str | None = None,
        buffers: BuffersLike = None,
    ) -> tuple[StageFacts, ...]:
        """What the summary tells, stage by stage, as numbers."""
        size = batch or self.batch
        held: Sequence[StageMemory] = self.memory(size, buffers=buffers)
        programs = self._programs(self.method)
        if memory is not None:
            plan = self.memory_plan(memory, batch=size, buffers=buffers)
            programs = self._programs(self.method, plan.keeps)
            held = [choice.memory for choice in plan.chosen]
        return stage_facts(self.partition, programs, held, size)

    def summary(
        self,
        batch: int | None = None,
        *,
        memory: int | str | None = None,
        buffers: BuffersLike = None,
    ) -> str:
        """The stages as a table: blocks, parameters, work, boundary, window, delay, memory.

        `batch` is the size of a micro-batch (the example's if not given); `memory` what a device
        may hold and `buffers` how inputs wait, as for the trainer, with one stage a device.
        """
        facts = self.facts(batch, memory=memory, buffers=buffers)
        planned = ""
        if memory is not None:
            planned = f"\n{self.memory_plan(memory, batch=batch, buffers=buffers)}"
        model = MemoryModel.of(self.partition, choose("backprop"), 1, batch=batch or self.batch)
        plain = model.stage(0, 0, len(model.pieces))
        how = "" if buffers is None else f", inputs {buffers_of(buffers)}"
        return stage_table(self.partition, facts, self.method.name + how, plain) + planned

    def explain(self, path: str) -> Explanation:
        """The story of a module: how it was found, by which rule rewired, and where it runs.

        >>> import torch, revcompile
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, norm_first=True, batch_first=True)
        >>> net = revcompile.petrafy(layer, num_stages=2, example_inputs=torch.randn(2, 5, 8))
        >>> print(net.explain("self_attn"))
        self_attn
          found    ...x + F(x)...
          rewired  ...(a, b) -> (b, a + F(b))...
          placed   stage ...
        """
        return explain(self.partition, self._programs(self.method), path)

    def draw(self, path: str | Path, *, batch: int | None = None, name: str | None = None) -> Path:
        """Draw the stages: `net.svg` to look at, `net.html` to open stage by stage.

        `batch` is the size of a micro-batch (the example's if not given), `name` the title.
        """
        size = batch or self.batch
        programs, memory = self._programs(self.method), self.memory(size)
        return drawing.draw(self.partition, programs, path, name=name, batch=size, memory=memory)

    def draw_schedule(self, path: str | Path, *, accumulate: int | None = None) -> Path:
        """Draw who computes when, for PETRA beside other methods: `timeline.svg`."""
        costs = drawing.costs_of(self.partition)
        name = self.partition.rewired.name
        return drawing.draw_schedule(costs, path, accumulate=accumulate, title=name)

    def _repr_html_(self) -> str:
        return drawing.fragment(self.partition, self._programs(self.method))

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
        model = self.__dict__.get("model")
        if model is None or not model.is_of_original(name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # What is an attribute of the original is looked up in the model when that runs.
        model = self.__dict__.get("model")
        if model is not None and name not in self.__dict__ and model.is_of_original(name):
            setattr(model, name, value)
        else:
            super().__setattr__(name, value)
