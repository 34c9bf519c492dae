"""A model cut into stages, before it is trained: programs, delays, memory, tables, pictures."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from revcompile.arguments import (
    MethodName,
    WeightsName,
    check_optimizer_copies,
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
from revcompile.ir.program import Partition, StageProgram
from revcompile.plan.budget import MemoryPlan, choices, decides, plan_memory
from revcompile.runtime.stage.activations import buffer_bytes
from revcompile.schedule import Keep, Method, actions, choose, delay
from revcompile.units import bytes_of

Keeps = tuple[Keep, ...] | None
"""What each stage keeps of a micro-batch; None: what the method says."""


class StageReport:
    """Reports on a model's stages; the subclass `StagedModel` also trains them."""

    def __init__(
        self,
        partition: Partition,
        method: Method,
        keeps: Keeps = None,
        memory_budget: int | str | None = None,
    ) -> None:
        self._partition, self._keeps, self._memory_budget = partition, keeps, memory_budget
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

    def _kept(self, method: Method) -> Keeps:
        """What the stages keep by `keep=`; None: what the method says."""
        return None if decides(method) else self._keeps

    @property
    def num_stages(self) -> int:
        return len(self._partition.parts)

    @property
    def stages(self) -> tuple[CompiledStage, ...]:
        """The stages with their programs for `net.method` and `keep=`."""
        count = self.num_stages
        lists = actions(self.method, count, 2 * count, ties=self._partition.ties)
        programs = self._programs(self.method, self._kept(self.method))
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

    def workload(
        self,
        *,
        accumulation_steps: int = 1,
        optimizer_copies: float = 1.0,
        weights: WeightsName | None = None,
        in_flight_per_stage: float | None = None,
        kept_input_dtype: torch.dtype | None = None,
    ) -> Workload:
        """How `net.method` trains micro-batches of `net.microbatch_size`, for reports.

        Args:
            optimizer_copies: Values of optimizer state per parameter: 1 for SGD with momentum, 2
                for Adam.
            accumulation_steps, weights, in_flight_per_stage, kept_input_dtype: As for the trainer.
        """
        who = "net.workload"
        check_optimizer_copies(who, optimizer_copies)
        return Workload(
            choose(self.method, weights=weights, in_flight_per_stage=in_flight_per_stage),
            self.microbatch_size,
            whole_number(who, "accumulation_steps", accumulation_steps, 1),
            optimizer_copies,
            buffer_bytes(kept_input_dtype),
        )

    def facts(
        self, workload: Workload | None = None, *, memory_budget: int | str | None = None
    ) -> tuple[StageView, ...]:
        """What the summary shows, stage by stage: work, messages, `memory` in bytes, `keep`.

        Frozen parameters have no gradients, stashed copies or optimizer state. Without batch norms,
        pieces before the first trainable parameter keep nothing.

        Args:
            workload: What `net.workload(...)` returns. Default: without arguments.
            memory_budget: As for the trainer, with one stage per device. Default: that of
                `petrafy`.

        >>> import torch, revcompile
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, norm_first=True, batch_first=True)
        >>> net = revcompile.petrafy(layer, num_stages=2, example_inputs=torch.randn(2, 5, 8))
        >>> [stage.keep.value for stage in net.facts(memory_budget="1MiB")]
        ['graph', 'graph']
        """
        return self._view("net.facts", workload, memory_budget)[0].stages

    def _view(
        self,
        caller: str,
        workload: Workload | None = None,
        memory_budget: int | str | None = None,
        name: str | None = None,
    ) -> tuple[ModelView, MemoryPlan | None]:
        """The data that reports show, and the plan for a memory budget."""
        workload = self.workload() if workload is None else workload
        if not isinstance(workload, Workload):
            raise InputError(
                f"{caller}: workload={workload!r}; give what net.workload(...) returns"
            )
        method, plan = workload.method, None
        keeps = self._kept(method)
        given = self._memory_budget if memory_budget is None else memory_budget
        if given is not None:
            plan = plan_memory(self._partition, bytes_of(given), workload, keeps=keeps)
            keeps = None if decides(method) else plan.keeps
        kept = keeps or (method.keep,) * self.num_stages
        chosen = choices(self._partition, workload, kept)
        programs = self._programs(method, keeps)
        held = [choice.memory for (choice,) in chosen]
        size = workload.microbatch_size
        return model_view(self._partition, programs, kept, held, size, name), plan

    def summary(
        self,
        workload: Workload | None = None,
        *,
        memory_budget: int | str | None = None,
        verbose: bool = False,
    ) -> str:
        """The stages as a table: blocks, parameters, work, messages, in flight, delay, memory.

        Args:
            workload: What `net.workload(...)` returns. Default: without arguments.
            memory_budget: As for the trainer, with one stage per device. Default: that of
                `petrafy`.
            verbose: Whether to give every reason why sums were not rewired.
        """
        view, plan = self._view("net.summary", workload, memory_budget)
        model = MemoryModel(self._partition, Workload(choose("backprop"), view.batch), stages=1)
        plain = model.stage(0, 0, len(model.pieces))
        low = None if workload is None else workload.buffer_bytes
        how = "" if low is None else f", inputs in {8 * low} bits"
        table = stage_table(view, view.method + how, plain, verbose)
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
        return explain(self._view("net.explain")[0], path)

    def draw(self, path: str | Path, *, name: str | None = None) -> Path:
        """Draw the stages: `net.svg` is a picture, `net.html` a page with details of each stage.

        Args:
            path: The file to write, a .svg or .html.
            name: The title. Default: the model's class.
        """
        path = new_file("net.draw", path, "net.svg")
        return drawing.draw(self._view("net.draw", name=name)[0], path)

    def draw_schedule(self, path: str | Path, *, accumulation_steps: int | None = None) -> Path:
        """Draw a timeline of the stages, with `net.method` beside other methods, as an .svg."""
        path = new_file("net.draw_schedule", path, "timeline.svg")
        costs, name = drawing.costs_of(self._partition), self._partition.rewired.name
        methods = drawing.beside_others(self.method)
        svg = partial(drawing.timeline_svg, costs, methods, accumulation_steps, name)
        return drawing.write("net.draw_schedule", path, {".svg": svg})

    def _repr_html_(self) -> str:
        return drawing.fragment(self._view("net")[0])

    def __str__(self) -> str:
        return self.summary()
