"""A model cut into stages, before it is trained: programs, delays, memory, tables, pictures."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from revcompile.arguments import (
    MethodName,
    WeightsName,
    check_optimizer_copies,
    check_stage_to_rank,
    new_file,
    whole_number,
)
from revcompile.compiler.cost import MemoryModel, Workload
from revcompile.compiler.lower import lower
from revcompile.errors import InputError
from revcompile.inspect import drawing
from revcompile.inspect.code import CompiledStage
from revcompile.inspect.explain import Explanation, explain
from revcompile.inspect.tables import stage_table
from revcompile.inspect.views import ModelView, StageView, model_view
from revcompile.ir.program import Partition, StageMemory, StageProgram
from revcompile.plan.budget import MemoryPlan, plan_memory
from revcompile.runtime.stage.activations import buffer_bytes
from revcompile.schedule import Keep, Method, actions, choose, delay
from revcompile.units import bytes_of

Keeps = tuple[Keep, ...] | None
"""What each stage keeps of a micro-batch; None: what the method says."""


class StageReport:
    """Reports on a model's stages; the subclass `StagedModel` also trains them."""

    def __init__(self, partition: Partition, method: Method) -> None:
        self._partition = partition
        self.method = method
        self.microbatch_size = partition.parts[0].costs[0].batch
        self._lowered: dict[Any, tuple[StageProgram, ...]] = {}

    def _programs(self, method: Method, keeps: Keeps = None) -> tuple[StageProgram, ...]:
        """The stages' programs, cached by method, what stages keep and which weights are frozen."""
        parameters = self._partition.rewired.root.parameters()
        key = method, keeps, tuple(p.requires_grad for p in parameters)
        if key not in self._lowered:
            self._lowered[key] = lower(self._partition, method, keeps)
        return self._lowered[key]

    @property
    def method(self) -> Method:
        """The method of the programs, delays and memory shown here; the default of trainers."""
        return self._method

    @method.setter
    def method(self, method: MethodName | Method) -> None:
        self._method = self._choose(method)

    def _choose(self, method: str | Method, *, weights: str | None = None, **order: Any) -> Method:
        """A method by name; with averaged couplings, "petra" stashes weights by default."""
        if method == "petra" and weights is None and self._partition.rewired.policy.averaged:
            weights = "stashed"
        return choose(method, weights=weights, **order)

    @property
    def microbatch_size(self) -> int:
        """Samples per micro-batch that reports and memory budgets assume; it can be set.

        At first what `petrafy(microbatch_size=)` says, or the batch size of the example.
        """
        return self._microbatch_size

    @microbatch_size.setter
    def microbatch_size(self, size: int) -> None:
        self._microbatch_size = whole_number("net", "microbatch_size", size, 1)

    @property
    def num_stages(self) -> int:
        return len(self._partition.parts)

    @property
    def stages(self) -> tuple[CompiledStage, ...]:
        """The stages with their programs for `net.method`."""
        count = self.num_stages
        lists = actions(self.method, count, 2 * count, ties=self._partition.ties)
        programs = self._programs(self.method)
        parts = self._partition.parts
        return tuple(
            CompiledStage(self._partition, part, program, listed)
            for part, program, listed in zip(parts, programs, lists, strict=True)
        )

    def delays(self, accumulation_steps: int = 1) -> tuple[int, ...]:
        """Updates between forward and backward of a micro-batch at each stage."""
        count = self.num_stages
        whole_number("net.delays", "accumulation_steps", accumulation_steps, 1)
        return tuple(delay(self.method, count, j, accumulation_steps) for j in range(count))

    def memory(
        self,
        *,
        kept_input_dtype: torch.dtype | None = None,
        weights: WeightsName | None = None,
        accumulation_steps: int = 1,
    ) -> tuple[StageMemory, ...]:
        """Peak memory of each stage, in bytes, for micro-batches of `net.microbatch_size` samples.

        Frozen parameters have no gradients, stashed copies or optimizer state. Without batch norms,
        pieces before the first trainable parameter keep nothing.

        Args:
            kept_input_dtype, weights, accumulation_steps: As for the trainer.
        """
        method = choose(self.method, weights=weights)
        whole_number("net.memory", "accumulation_steps", accumulation_steps, 1)
        bytes_each = buffer_bytes(kept_input_dtype)
        size = self.microbatch_size
        model = MemoryModel(
            self._partition, Workload(method, size, accumulation_steps, buffer_bytes=bytes_each)
        )
        return tuple(model.stage(j, *ends) for j, ends in enumerate(self._partition.ranges))

    def facts(
        self,
        *,
        memory_budget: int | str | None = None,
        kept_input_dtype: torch.dtype | None = None,
    ) -> tuple[StageView, ...]:
        """The numbers of the summary, stage by stage."""
        return self._view(memory_budget, kept_input_dtype)[0].stages

    def _view(
        self,
        memory_budget: int | str | None = None,
        kept_input_dtype: torch.dtype | None = None,
        name: str | None = None,
    ) -> tuple[ModelView, MemoryPlan | None]:
        """The data that reports show, and the plan for a memory budget."""
        held: Sequence[StageMemory] = self.memory(kept_input_dtype=kept_input_dtype)
        plan = None
        if memory_budget is not None:
            plan = self.memory_plan(memory_budget, kept_input_dtype=kept_input_dtype)
            held = [choice.memory for choice in plan.chosen]
        programs = self._programs(self.method, None if plan is None else plan.keeps)
        return model_view(self._partition, programs, held, self.microbatch_size, name), plan

    def summary(
        self,
        *,
        memory_budget: int | str | None = None,
        kept_input_dtype: torch.dtype | None = None,
        verbose: bool = False,
    ) -> str:
        """The stages as a table: blocks, parameters, work, messages, in flight, delay, memory.

        Args:
            memory_budget, kept_input_dtype: As for the trainer, with one stage per device.
            verbose: Whether to give every reason why sums were not rewired.
        """
        view, plan = self._view(memory_budget, kept_input_dtype)
        model = MemoryModel(self._partition, Workload(choose("backprop"), view.batch), stages=1)
        plain = model.stage(0, 0, len(model.pieces))
        dtype = str(kept_input_dtype).removeprefix("torch.")
        how = "" if kept_input_dtype is None else f", inputs in {dtype}"
        table = stage_table(view, self.method.name + how, plain, verbose)
        return table if plan is None else f"{table}\n{plan}"

    def explain(self, path: str) -> Explanation:
        """How a module was found, by which rule it was rewired, and where it runs.

        >>> import torch, revcompile
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, norm_first=True, batch_first=True)
        >>> net = revcompile.petrafy(layer, num_stages=2, example_inputs=torch.randn(2, 5, 8))
        >>> print(net.explain("self_attn"))
        self_attn
          found    ...x + F(x)...
          rewired  ...(a, b) -> (b, a + F(b))...
          placed   stage ...
        """
        if not isinstance(path, str):
            raise InputError(
                f"net.explain: expected the path of a module, got {path!r}; see print(net)"
            )
        return explain(self._view()[0], path)

    def draw(self, path: str | Path, *, name: str | None = None) -> Path:
        """Draw the stages: `net.svg` is a picture, `net.html` a page with details of each stage.

        Args:
            path: The file to write, a .svg or .html.
            name: The title. Default: the model's class.
        """
        path = new_file("net.draw", path, "net.svg")
        return drawing.draw(self._view(name=name)[0], path)

    def draw_schedule(self, path: str | Path, *, accumulation_steps: int | None = None) -> Path:
        """Draw a timeline of the stages, with `net.method` beside other methods, as an .svg."""
        path = new_file("net.draw_schedule", path, "timeline.svg")
        costs, name = drawing.costs_of(self._partition), self._partition.rewired.name
        methods = drawing.beside_others(self.method)
        svg = partial(drawing.timeline_svg, costs, methods, accumulation_steps, name)
        return drawing.write("net.draw_schedule", path, {".svg": svg})

    def _repr_html_(self) -> str:
        return drawing.fragment(self._view()[0])

    def __str__(self) -> str:
        return self.summary()

    def memory_plan(
        self,
        memory_budget: int | str,
        *,
        accumulation_steps: int = 1,
        in_flight_per_stage: float | None = None,
        optimizer_copies: float = 1.0,
        kept_input_dtype: torch.dtype | None = None,
        stage_to_rank: Sequence[int] | None = None,
    ) -> MemoryPlan:
        """What each stage keeps within a memory budget per device, as a trainer plans it.

        Args:
            memory_budget: Bytes, or text like "2GiB".
            accumulation_steps, in_flight_per_stage, kept_input_dtype: As for the trainer.
            optimizer_copies: Values of optimizer state per parameter: 1 for SGD with momentum, 2
                for Adam.
            stage_to_rank: The device of each stage. Default: one stage per device.

        >>> import torch, revcompile
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, norm_first=True, batch_first=True)
        >>> net = revcompile.petrafy(layer, num_stages=2, example_inputs=torch.randn(2, 5, 8))
        >>> [keep.value for keep in net.memory_plan("1MiB").keeps]
        ['graph', 'graph']
        """
        check_optimizer_copies("net.memory_plan", optimizer_copies)
        if stage_to_rank is not None:
            check_stage_to_rank("net.memory_plan", stage_to_rank, self.num_stages)
        method = choose(self.method, in_flight_per_stage=in_flight_per_stage)
        workload = Workload(
            method,
            self.microbatch_size,
            accumulation_steps,
            optimizer_copies,
            buffer_bytes(kept_input_dtype),
        )
        return plan_memory(self._partition, bytes_of(memory_budget), workload, stage_to_rank)
