"""A model cut into stages: what `petrafy` returns."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, Never

import torch
from torch import nn

from revcompile.arguments import (
    AutocastName,
    BackendName,
    MethodName,
    WeightsName,
    autocast_dtype,
    check_device,
    check_stage_to_rank,
    file_path,
    flag,
    known_keywords,
    member_of,
)
from revcompile.compiler.cost import Workload
from revcompile.compiler.gradient_paths import trained_parameters
from revcompile.compiler.lower.fusion import Fusion
from revcompile.compiler.lower.samples import with_samples
from revcompile.compiler.partition import assign_contiguous
from revcompile.compiler.recapture import Recompiler
from revcompile.errors import InputError
from revcompile.inspect.formatting import plural
from revcompile.interop.pipelining import StageModule, pipeline_stages
from revcompile.ir.program import Partition
from revcompile.plan.budget import decides, free_memory, plan_memory, state_copies
from revcompile.plan.learning import warn_of_delay
from revcompile.plan.report import Keeps, StageReport
from revcompile.runtime.checkpoint.training import export_weights, load_into
from revcompile.runtime.distributed.layout import make_layout, world_size
from revcompile.runtime.distributed.rank_weights import whole_model
from revcompile.runtime.reversible.module import Reversible
from revcompile.runtime.reversible.module_guards import TreeGuard
from revcompile.runtime.stage.activations import buffer_bytes
from revcompile.runtime.stage.loss import Loss
from revcompile.runtime.stage.optimizers import OptimizerFactory, ParamGroups, ScheduleFactory
from revcompile.runtime.stage.settings import NO_FLOAT16, Backend, Settings, Task, TrainerOptions
from revcompile.runtime.trainer.placement import Placement, RankPlacement
from revcompile.runtime.trainer.trainer import Trainer
from revcompile.schedule import Method, check_schedule, delay
from revcompile.units import bytes_of


def original_model(model: Reversible, weights: nn.Module) -> nn.Module:
    """A model of the original's own class; `weights` is a module like `model` to copy weights from.

    Raises:
        InputError: The rewired model computes another function, or the original's class is unknown.
    """
    rewired, recompiler = model.rewired, model._cases.recapture
    if rewired.is_another_function:
        raise InputError(
            f"original: {rewired.name} was rewired to another function than the original's, in "
            'which these weights mean something else; policy="pretrained" keeps the function'
        )
    if not isinstance(recompiler, Recompiler):
        raise InputError(
            "original: a copy or an unpickled module does not know the original's class, which "
            "cannot be imported by its name; create the original model, and load_state_dict"
        )
    return recompiler.original(weights)


class StagedModel(StageReport):
    """A model cut into balanced stages, each with generated code; trains with any method.

    Attributes of the original, and methods by which optimizers are made (`no_weight_decay()`), are
    available here as well.

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

    def __init__(
        self,
        model: Reversible,
        partition: Partition,
        method: Method,
        keeps: Keeps = None,
        memory_budget: int | None = None,
    ) -> None:
        super().__init__(partition, method, keeps, memory_budget)
        self.model = model
        """The rewired module, which owns the parameters under their original names."""
        self._tree = TreeGuard(partition.rewired, model)

    def _check_tree(self, caller: str) -> None:
        """Raise if modules have changed since the model was cut."""
        problem = self._tree.problem()
        if problem is not None:
            raise InputError(f"{caller}: {problem}")

    def _check_trainable(self, caller: str) -> None:
        """Raise if training would change no parameter, or one in float16."""
        rewired = self._partition.rewired
        if trained := trained_parameters(rewired):
            for name in trained:
                if rewired.root.get_parameter(name).dtype is torch.float16:
                    raise InputError(f"{caller}: {name} is in float16: {NO_FLOAT16}")
            return
        if any(p.requires_grad for p in self.model.parameters()):
            why = "no parameter that requires a gradient has a path to the result (detach, no_grad)"
        else:
            why = "no parameter requires a gradient"
        raise InputError(
            f"{caller}: {rewired.name} has nothing to train: {why}; call requires_grad_() on what "
            "is to be trained (net.model has it under the original's names)"
        )

    def to_module(self) -> nn.Module:
        """A copy of `net.model` with the current weights, to evaluate, save and deploy.

        While several ranks train, each of them calls this: the weights come from all of them.
        """
        module = whole_model(self.model)
        for parameter in module.parameters():
            parameter.grad = None
        return module

    def to_original(self) -> nn.Module:
        """A model of the original's own class with copies of these weights, to save and serve.

        Only for `policy="pretrained"`, under which both compute the same function.

        Raises:
            InputError: The rewired model computes another function than the original.
        """
        return original_model(self.model, whole_model(self.model))

    def load_weights(self, path: str | Path) -> None:
        """Load weights from a file of `save_weights`, a checkpoint, or a folder's newest one.

        Flush a trainer of this model first: a trainer with micro-batches in flight stops, because
        they belong to the old weights. Optimizers keep their state; `trainer.load` loads it too.
        """
        load_into(self.model, file_path("net.load_weights", path, "runs/a"))

    def save_weights(self, file: str | Path) -> Path:
        """Write the current weights as one file of safetensors, under their original names.

        >>> import pathlib, tempfile, torch, revcompile
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, norm_first=True)
        >>> net = revcompile.petrafy(layer, num_stages=2, example_inputs=torch.randn(2, 5, 8))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = net.save_weights(pathlib.Path(folder, "layer.safetensors"))
        ...     net.load_weights(file)
        """
        target = file_path("net.save_weights", file, "model.safetensors")
        return export_weights(self.to_module(), target)

    def to_pipeline_stages(
        self, device: torch.device | str | None = None, reversible: bool = False
    ) -> tuple[StageModule, ...]:
        """The same stages as plain modules, for the schedules of `torch.distributed.pipelining`.

        Every rank picks its own: `PipelineStage(stages[rank], rank, len(stages), device)`. The
        modules hold copies of the current weights under their original names.

        Args:
            device: Where to put the modules. Default: where the model is.
            reversible: Store only the output of each chain of couplings. This needs a schedule that
                computes all gradients of a stage at once (GPipe, 1F1B, interleaved 1F1B), not a
                zero-bubble one.

        Torch's rules: every micro-batch has the same shape, dropout draws from the global
        generator, and a parameter must not be shared between stages.

        >>> import torch, revcompile
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, 0.0, norm_first=True)
        >>> x = torch.randn(2, 5, 8)
        >>> net = revcompile.petrafy(layer, num_stages=2, example_inputs=x)
        >>> first, last = net.to_pipeline_stages()
        >>> torch.equal(last(*first(x)), net.to_module()(x))
        True

        The trained weights go back under their names:

        >>> state = first.state_dict() | last.state_dict()
        >>> net.model.load_state_dict(state)
        <All keys matched successfully>
        """
        self._check_tree("net.to_pipeline_stages")
        target = check_device("net.to_pipeline_stages", device, allow_meta=True)
        flag("net.to_pipeline_stages", "reversible", reversible)
        return pipeline_stages(self._partition, target, reversible)

    @known_keywords(
        "net.trainer",
        {each.name: f"options=TrainerOptions({each.name}=...)" for each in fields(TrainerOptions)},
    )
    def trainer(
        self,
        optimizer: OptimizerFactory,
        loss: Loss | None = None,
        *,
        method: MethodName | Method | None = None,
        weights: WeightsName | None = None,
        accumulation_steps: int = 1,
        lr_schedule: ScheduleFactory | None = None,
        param_groups: ParamGroups | None = None,
        clip_grad_norm: float | None = None,
        autocast: torch.dtype | AutocastName | None = None,
        memory_budget: int | str | None = None,
        backend: BackendName | Backend = "auto",
        device: torch.device | str | None = None,
        seed: int = 0,
        options: TrainerOptions | None = None,
    ) -> Trainer:
        """A trainer for this model; in a script started by torchrun, the trainer of this rank.

        Earlier trainers of this model cannot be used any more. Steps run in train mode, even if the
        model was compiled in eval mode (as `from_pretrained` returns it). Layers that were in eval
        mode while the model was in train mode, such as frozen batch norms, stay in eval mode.

        Args:
            optimizer: Function from a list of parameters to a torch optimizer, or to a list of
                several (Muon for matrices, AdamW for the rest), called once per stage. Optimizers
                of `revcompile.optim` compensate for the stage's delay. `lr_schedule` gets a list of
                optimizers as one optimizer with all parameter groups.
            loss: Function of the model's output and the target to a scalar; None for a model that
                returns its own loss, as a scalar or as `output.loss` (`trainer.step(inputs)`).
            method: A row of the methods' table: "petra", "backprop", "1f1b", "pipedream", ...
                Default: `net.method`, which is PETRA unless it was set.
            weights: Which parameters the passes of a stage with delay t use. "latest": both use the
                latest; no copies. "stashed": backward uses those of its forward pass; t copies, so
                only one (as PipeDream-2BW) if accumulation_steps >= num_stages - 1. "predicted":
                forward uses `y - t u`, for the latest parameters y and their last update u;
                backward uses y; one copy. Optimizers of `revcompile.optim` then do not compensate.
                Default: the method's; "petra" with policy="pretrained" has "stashed".
            accumulation_steps: Micro-batches per update (the paper's k).
            lr_schedule: Function from an optimizer to its `torch.optim.lr_scheduler`, which is
                stepped at every update.
            param_groups: Function from a stage's `[(name, parameter), ...]` to torch's parameter
                groups.
            clip_grad_norm: The largest gradient norm: of each stage, or, with methods that drain,
                of the whole model.
            autocast: torch.bfloat16 ("bf16"), for the branches; the streams stay float32. float16
                is refused: its gradients need a scaled loss. Use `reversify` and GradScaler.
            memory_budget: Memory of a device, as "8GiB" or in bytes; "auto": four fifths of what a
                CUDA device has free (on ranks, the one with the least). Its stages do not need
                more. Where `keep=` and the method leave it open, stages with enough memory keep the
                autograd graphs of their micro-batches and compute nothing twice; backward uses the
                latest parameters as before. `trainer.memory_plan` shows these stages. The optimizer
                is built once more, on small parameters, to count its state. A trainer that keeps
                graphs must be flushed before it is saved. Default: that of `petrafy`.
            backend: How the steps of a full pipeline run. "eager": action by action; "cudagraphs":
                each step as a CUDA graph (on ranks: one for forward, one for backward passes). It
                reports bad gradients some steps late and never applies them; "inductor": the same
                with compiled code around convolutions and matrix products; "static": as
                "cudagraphs", but without graphs, on any device, for debugging; "auto":
                "cudagraphs" on a GPU, else "eager".
            device: Where to train. Default: where the model is. On ranks only a rank's own stages
                are moved there.
            seed: Seed of all random numbers of the stages.
            options: All other settings, see `TrainerOptions`.

        Raises:
            InputError: An argument is not usable as given. Nothing has been trained then.
        """
        who = "net.trainer"
        self._check_tree(who)
        self._check_trainable(who)
        low_precision: torch.dtype | None = autocast_dtype(autocast)
        target = check_device(who, device)
        options = TrainerOptions() if options is None else options
        if not isinstance(options, TrainerOptions):
            raise InputError(
                f"{who}: options={type(options).__name__}; write options=TrainerOptions(...)"
            )
        if options.stage_to_rank is not None:
            check_stage_to_rank(who, options.stage_to_rank, self.num_stages)
        settings = Settings(
            accumulation_steps=accumulation_steps,
            lr_schedule=lr_schedule,
            param_groups=param_groups,
            autocast=low_precision,
            clip_grad_norm=clip_grad_norm,
            seed=seed,
            backend=member_of(who, "backend", backend, Backend),
            options=options,
        )
        chosen = self._choose(
            self.method if method is None else method,
            in_flight_per_stage=options.in_flight_per_stage,
            weights=weights,
        )
        count, ties = self.num_stages, self._partition.ties
        check_schedule(chosen, count, accumulation_steps, ties)
        plan, assign = None, partial(assign_contiguous, self._partition)
        keeps = self._kept(chosen)
        if self._keeps and decides(chosen) and {*self._keeps[:-1]} - {chosen.keep}:
            names = [keep.value for keep in self._keeps]
            raise InputError(
                f"{who}: petrafy was given keep={names}, but stages trained by {chosen.name!r} "
                f"keep {chosen.keep.value!r}; use method='petra' with weights='latest', or leave "
                "out keep="
            )
        memory_budget = self._memory_budget if memory_budget is None else memory_budget
        if memory_budget is not None:
            parameters = dict(self.model.named_parameters())
            late = delay(chosen, count, 0, accumulation_steps)
            workload = Workload(
                chosen,
                self.microbatch_size,
                accumulation_steps,
                state_copies(parameters, optimizer, param_groups, late),
                buffer_bytes(options.kept_input_dtype),
                low_precision,
            )
            devices = [0] * count  # in one process all stages share one
            if world_size() > 1:
                layout = make_layout(count, world_size(), options.stage_to_rank, assign)
                devices = list(layout.stage_to_rank)
            if memory_budget == "auto":
                budget = free_memory(self.model, target, options.timeout)
            else:
                budget = bytes_of(memory_budget)
            plan = plan_memory(self._partition, budget, workload, devices, keeps)
            keeps = None if decides(chosen) else plan.keeps
        programs = self._programs(chosen, keeps)
        fuse = Fusion().fuse if settings.backend is Backend.INDUCTOR else None
        given = optimizer, loss, settings, with_samples, fuse
        task = Task(self.model, self._partition, programs, *given)
        with ExitStack() as undo:  # a trainer that is refused changes nothing
            if world_size() > 1:
                placement: Placement = RankPlacement(task, undo, target, assign=assign)
            else:
                placement = Placement(task, undo, target)
            trainer = Trainer(task, placement)
            trainer.memory_plan = plan
            warn_of_delay(trainer)
            undo.pop_all()
        trainer._take_over()
        return trainer

    def __repr__(self) -> str:
        rewired = self._partition.rewired
        blocks = plural(len(rewired.couplings), "reversible block")
        return f"StagedModel({rewired.name}: {plural(self.num_stages, 'stage')}, {blocks})"

    def __call__(self, *args: Any, **kwargs: Any) -> Never:
        raise InputError(
            "a StagedModel is trained, not called: net.trainer(...) trains it, and net.to_module() "
            "is the module with the current weights: net.to_module()(x)"
        )

    def __getattr__(self, name: str) -> Any:
        if name in ("parameters", "state_dict", "forward", "eval", "train", "to"):
            raise AttributeError(
                f"a StagedModel has no {name!r}: net.to_module() is the module with the "
                "current weights, net.trainer(...) trains it"
            )
        model = self.__dict__.get("model")
        if model is None or not model._is_of_original(name):
            is_layer = model is not None and name in model._modules
            hint = f"; layers are those of net.model: net.model.{name}" if is_layer else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")
        return getattr(model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # Attributes of the original are read from the model while it runs, so they are set there.
        model = self.__dict__.get("model")
        own = name in self.__dict__ or hasattr(type(self), name)
        if model is not None and not own and model._is_of_original(name):
            setattr(model, name, value)
        else:
            super().__setattr__(name, value)
