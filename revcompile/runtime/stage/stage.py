"""One stage's numerics: run its programs, store what is in flight, accumulate its gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from revcompile.errors import InputError
from revcompile.ir import ops
from revcompile.ir.coupling_ops import is_seeded_elsewhere, mix, refusing_other_leaves
from revcompile.ir.module_tree import TreeReads, repeated_layers
from revcompile.ir.precision_rewrites import for_stages, taking_stored
from revcompile.ir.python_code import compile_graph
from revcompile.ir.snapshot import has_hooks, read_by
from revcompile.ir.types import Coupling
from revcompile.kernels.repeatable import Repeated, repeatable
from revcompile.runtime.reversible.bindings import LayerHooks, filled
from revcompile.runtime.reversible.module_guards import hooked
from revcompile.runtime.reversible.replay import BufferSnapshot, StatefulBuffers, is_capturing
from revcompile.runtime.stage.activations import (
    ActivationStore,
    InFlight,
    StageDraws,
    StreamSamples,
)
from revcompile.runtime.stage.saved_tensors import Graph, Recorded, SavedTensors
from revcompile.runtime.stage.settings import Fuse, Task
from revcompile.runtime.stage.slots import Ring, free_cached
from revcompile.runtime.stage.tensors import TreeCopy, add_gradients, clone_tree
from revcompile.runtime.stage.weights import (
    CastWeights,
    PassWeights,
    Used,
    at_versions,
    castable_parameters,
    parameter_entries,
)
from revcompile.schedule import Order


class Backward(NamedTuple):
    """The results of a backward pass."""

    values: dict[str, Any]
    """The stage's inputs, rebuilt."""
    input_gradients: dict[str, Tensor | None]
    gradients: dict[str, Tensor | None]
    """Gradients of the parameters."""
    held: InFlight
    sampled: dict[str, Tensor]


def _is_of_graph(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


class Stage:
    """Runs a `StageProgram` on the modules of `root`.

    Results depend on the order of calls, on `seed` and on the micro-batches' numbers, never on
    time or on the global random state, which is left unchanged. Hooks of layers run in forward,
    and in backward if that runs the layers again.
    """

    runs_fused = False
    """Whether it runs the programs that `fuse` has made instead of the generated ones."""
    _ring_size = 0
    """How many micro-batches have a slot for their activations; 0: there are no slots."""
    ring: Ring | None = None
    """The slots, from the first forward pass on."""
    sums: dict[str, Tensor] | None = None
    """Static buffers for sums of gradients over several micro-batches; None: not static."""

    def __init__(self, task: Task, index: int, device: torch.device, seed: int) -> None:
        self.program, self.root = program, root = task.programs[index], task.model
        self.seed, self.device = mix(seed, index), device
        self.autocast, options = task.settings.autocast, task.settings.options
        copied, tolerance = task.copied(index), task.model.tolerance
        self.activations = ActivationStore(program, options.kept_input_dtype)
        self._gradient_message_dtype = options.gradient_message_dtype
        self.watched = read_by([program.forward], root)
        """The parts of the model that it reads."""
        self.parameters: dict[str, Tensor] = {n: ops.attribute(root, n) for n in program.parameters}
        self._entries = parameter_entries(root, self.parameters)
        """The module entries that hold its parameters."""
        for name, parameter in list(self.parameters.items()):
            if has_hooks(parameter):
                raise InputError(f"trainer, stage {index}: {hooked(name)}")
            if name in copied:
                copy = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
                self.parameters[name] = copy
        self._own_weights = dict(self.parameters) if copied else None
        """The parameters, if some are its own copies of tied ones; None: those of its modules."""
        self.weights = PassWeights(program, self.parameters, task.delay(index))
        reads, names = TreeReads(program.forward, root), list[str]()
        if self.autocast is not None:
            own = {n: p for n, p in self.parameters.items() if n not in copied}
            names = castable_parameters(program, reads, self._entries, own)
        self.cast_weights = CastWeights(self.parameters, names, self.autocast)
        self.hooks = LayerHooks(reads.modules)
        self.leaves_checked = False
        """Whether a backward pass has shown that it depends on inputs and parameters alone."""
        others = [(m, name) for m, name in reads.buffers if not isinstance(m, _BatchNorm)]
        self.stateful = StatefulBuffers(others)
        """The buffers, other than batch norms' statistics, that its layers change."""
        # A functional batch norm updates all statistics of its layer, read by the program or not.
        norms = [module for module in reads.owners if isinstance(module, _BatchNorm)]
        self._statistics = [(norm, name) for norm in norms for name in norm._buffers]
        self._draws = StageDraws(program)
        pieces = [piece for unit in program.units for piece in unit.pieces]
        averaged = [p for p in pieces if isinstance(p, Coupling) and p.averaged]
        repeated = [repeated_layers(coupling.branch, root) for coupling in averaged]
        self._repeated = Repeated(*map(any, zip(*repeated, strict=True)))
        """Which layers of averaged couplings must give bit-identical results when run again."""
        self._samples = StreamSamples(index, tolerance)
        graphs = [program.forward, taking_stored(program, self.activations.sent)]
        if self.autocast is not None:
            outlive = program.graphs_outlive_updates
            graphs = [for_stages(graph, root, self.autocast, outlive) for graph in graphs]
        if task.sample is not None and tolerance is not None:
            graphs = [task.sample(program, graph, self._samples.take) for graph in graphs]
        self._generated = self._fused = self._compiled(graphs)
        self._saved = SavedTensors() if program.graphs_outlive_updates else None
        """Stores the saved tensors of graphs in flight in slots."""
        self._latest: InFlight | None = None
        """The last forward pass, if there are slots. In captured steps its graph serves all."""
        self._has_recorded = False
        self.saves_elsewhere = False
        """Whether a graph has saved something that no slot can hold."""
        self.in_flight: dict[int, InFlight] = {}
        self.gradients: dict[str, Tensor] = {}
        """Sums over micro-batches, for the parameters that have a gradient."""

    def fuse(self, fuse: Fuse) -> None:
        """Let a pass make the programs that run while `runs_fused` is set.

        A stage that keeps graphs in flight is not fused: one graph serves all its micro-batches.
        """
        if self.program.keeps_graphs_in_flight:
            return
        program, stored = self.program, self.activations
        graphs = program.forward, taking_stored(program, stored.low)
        is_stored_as_read = self.autocast is not None and stored.dtype == self.autocast
        self._fused = self._compiled(fuse(*graphs, self.root, is_stored_as_read), ", fused")

    def _compiled(self, graphs: Sequence[fx.Graph], kind: str = "") -> list[Callable[..., Any]]:
        names = (f"stage {self.program.index} {p}{kind}" for p in ("forward", "backward"))
        return [compile_graph(graph, name) for graph, name in zip(graphs, names, strict=True)]

    @property
    def _functions(self) -> Sequence[Callable[..., Any]]:
        """The forward and the backward program."""
        return self._fused if self.runs_fused else self._generated

    def use_slots(self, slots: int, updates: int | None, accumulates: bool) -> None:
        """Store values that outlive a pass in static buffers, as captured steps need.

        Args:
            slots: Slots for micro-batches in flight; 0: none.
            updates: Versions of stashed weights in static buffers; None: not static.
            accumulates: Whether gradients are summed in static buffers.
        """
        self._ring_size, self.ring = slots, None
        self.sums = {} if accumulates else None
        if self.weights.stash is not None:
            self.weights.stash.count = updates

    # -- forward ------------------------------------------------------------------------------

    def forward(self, microbatch: int, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Run a micro-batch, and store what its backward pass needs."""
        program = self.program
        weights = self.weights.forward()
        values = [inputs[port.name] for port in program.inputs]
        latest = self._saved_by_reference()
        recorded: AbstractContextManager[Recorded | None] = nullcontext()
        # The first graph keeps its saved tensors: autograd then detects writes to them.
        if self._saved is not None and self._ring_size and self._has_recorded:
            recorded = self._saved.recorded(values, latest, is_capturing(self.device))
        self._has_recorded = True
        hooks = self.hooks.now()
        with (
            self.stateful.recorded() as changed,
            recorded as saved,
            self._program_context(weights if saved is None else saved.leaves),
            self._draws.forward(microbatch, self.device),
            self.hooks.running(hooks),
            self._samples.collecting() as sampled,
        ):
            outputs, kept = self._functions[0](self.root, mix(self.seed, microbatch), *values)
            held = self._hold(microbatch, self.activations.store(kept), saved)
        held.used = self.weights.used(weights)
        held.buffers = changed
        held.parameter_versions = tuple(p._version for p in latest.values())
        if sampled and not is_capturing(self.device):
            held.samples = self._samples.start(sampled)
        held.hooks = hooks
        return dict(zip((port.name for port in program.outputs), outputs, strict=True))

    def _hold(
        self, microbatch: int, kept: tuple[Any, ...], saved: Recorded | None = None
    ) -> InFlight:
        """Store values of a micro-batch: in its slot, if there are slots and they fit."""
        graph, fits = None, not self.program.keeps_graphs_in_flight
        if saved is not None:
            graph, fits = Graph(kept, saved.leaves), saved.is_repeatable(kept)
            self.saves_elsewhere |= not fits
            others = (None if _is_of_graph(value) else value for value in kept)
            kept = (*others, *saved.stored())
        if self._ring_size and self.ring is None and fits:
            self.ring = Ring(kept, self._ring_size)
        held = InFlight(kept, graph)
        if self.ring is not None and fits and self.ring.put(microbatch, kept):
            held = InFlight(self.ring.value(microbatch), graph, ring=self.ring)
        elif self.ring is not None and is_capturing(self.device):
            raise InputError(f"what stage {self.program.index} keeps depends on the data")
        self.in_flight[microbatch] = held
        if self.ring is not None:
            self._latest = held
        return held

    def stepped(self, entered: int, left: int, tied: int, has_updated: bool) -> None:
        """Note what a captured step has done.

        Args:
            entered: The micro-batch of its forward pass.
            left: The micro-batch of its backward pass.
            tied: How many updates of tied weights were received.
            has_updated: Whether its gradients were applied.
        """
        for _ in range(tied):
            self.weights.count_update(self.used())
        if self.ring is not None:
            held = self._latest
            assert held is not None
            if held.ring is not None:  # else the step was not replayed, but run in Python
                held = InFlight(self.ring.value(entered), held.graph, ring=self.ring)
            held.used = self.weights.used(self.weights.forward())
            self.in_flight[entered] = held
            del self.in_flight[left]
        self.gradients = {} if has_updated or self.sums is None else dict(self.sums)
        if has_updated:
            self.weights.count_update(self.used())

    @property
    def is_in_slots(self) -> bool:
        """Whether all micro-batches in flight are in slots, where a captured step finds them."""
        return all(
            held.ring is not None and held.ring is self.ring and not held.buffers
            for held in self.in_flight.values()
        )

    def evaluate(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Run in the modules' current mode; nothing is stored or changed."""
        values = [inputs[port.name] for port in self.program.inputs]
        with self._program_context(None):
            outputs, _ = self._functions[0](self.root, self.seed, *values)
        return dict(zip((port.name for port in self.program.outputs), outputs, strict=True))

    def statistics(self) -> list[Tensor]:
        """The running statistics of its batch norms."""
        buffers = (module._buffers[name] for module, name in self._statistics)
        return [buffer for buffer in buffers if buffer is not None]

    @property
    def moves_statistics_early(self) -> bool:
        """Whether running statistics change in forward, or in a backward pass right after it."""
        program = self.program
        return program.is_last or program.keeps_graphs or program.method.order is Order.LOCKED

    # -- backward -----------------------------------------------------------------------------

    def finish(self, passed: Backward, is_exact: bool) -> None:
        """After a backward pass with finite gradients: check the rebuilt values.

        Args:
            is_exact: Whether they should equal those of the forward pass, up to rounding.

        Raises:
            InversionError: They should, but do not.
        """
        if is_exact and passed.held.samples is not None:
            self._samples.finish(passed.held.samples, passed.sampled)

    def age(self, microbatch: int) -> int:
        """How many updates old the stashed weights of its backward pass are; 0: the latest."""
        held = self.in_flight.get(microbatch)
        if held is None or self.weights.stash is None:
            return 0
        return self.weights.age(held.used)

    def rebuilds_exactly(self, microbatch: int) -> bool:
        """Whether backward computes with the weights and inputs of the forward pass."""
        used = self.in_flight[microbatch].used
        return self.weights.are_unchanged(used) and not self.activations.low

    def differentiate(
        self,
        microbatch: int,
        values: Mapping[str, Any],
        gradients: Mapping[str, Tensor | None],
        is_exact: bool = False,
    ) -> Backward:
        """Rebuild or recompute, and differentiate. Nothing is accumulated.

        Args:
            values: The outputs, as far as the program needs them.
            gradients: Gradients of the outputs.
            is_exact: See `finish`.
        """
        program, held = self.program, self.in_flight.pop(microbatch)
        stored = held.kept
        if held.ring is not None:
            stored = held.ring.take(microbatch)  # a copy: backward's results outlive the slot
        else:
            held.kept = ()  # `stored` is the only reference now
        is_fused = self._functions is not self._generated
        latest = self._saved_by_reference()
        parameters, weights = tuple(latest.values()), self.weights.backward(held.used)
        graphs: AbstractContextManager[None] = at_versions(parameters, held.parameter_versions)
        if self._saved is not None and (graph := held.graph) is not None:
            if is_capturing(self.device):
                assert self._latest is not None and self._latest.graph is not None
                graph = self._latest.graph
            weights = graph.leaves
            graphs = self._saved.read(stored[len(graph.kept) :], latest)
            pairs = zip(graph.kept, stored, strict=False)
            stored = tuple(g if _is_of_graph(g) else v for g, v in pairs)
        kept = self.activations.load(stored, is_fused)
        del stored
        arguments = (
            *kept,
            *(values[name] for name in program.needs_back),
            *(gradients.get(name) for name in program.outputs_with_grad),
        )
        key = mix(self.seed, microbatch)
        check: AbstractContextManager[None] = nullcontext()
        if not self.leaves_checked or held.hooks:
            check = refusing_other_leaves(f"stage {program.index}")
        with (
            self._program_context(weights),
            self._draws.backward(microbatch, key, self.device),
            self.stateful.replay(held.buffers),
            self.hooks.running(held.hooks),
            self._naming_microbatch(microbatch),
            check,
            graphs,
            self._samples.collecting(is_exact) as sampled,
        ):
            returned, of_inputs, of_parameters = self._functions[1](self.root, key, *arguments)
        self.leaves_checked = True
        dense = (g.to_dense() if g is not None and g.is_sparse else g for g in of_parameters)
        own_grads = self.cast_weights.like_weights(
            dict(zip(program.parameters, dense, strict=True))
        )
        if self._gradient_message_dtype is not None:
            of_inputs = [
                g if g is None or g.dtype != torch.float32 else g.to(self._gradient_message_dtype)
                for g in of_inputs
            ]
        input_grads = dict(zip(program.inputs_with_grad, of_inputs, strict=True))
        rebuilt = dict(zip(program.sends_back, returned, strict=True))
        return Backward(rebuilt, input_grads, own_grads, held, sampled)

    @contextmanager
    def updating(self, names: Iterable[str]) -> Iterator[None]:
        """Around a change of some of its parameters."""
        with self.weights.updating(names, self.used()):
            yield
        self.cast_weights.refresh()

    def used(self) -> list[Used]:
        """Which weights the micro-batches in flight have used in their forward passes."""
        return [held.used for held in self.in_flight.values()]

    def accumulate(
        self, gradients: dict[str, Tensor | None], input_grads: Mapping[str, Tensor | None]
    ) -> None:
        """Add gradients to the accumulated ones.

        Each is freed as soon as it is added: `gradients` is empty afterwards.
        """
        if self.sums == {} and any(gradient is not None for gradient in gradients.values()):
            free_cached(self.device)
        others = [gradient for gradient in input_grads.values() if gradient is not None]
        add_gradients(self.gradients, gradients, others, self.sums)

    @contextmanager
    def _naming_microbatch(self, microbatch: int) -> Iterator[None]:
        """Name the micro-batch if autograd raises its error about in-place writes."""
        try:
            yield
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            raise InputError(
                f"stage {self.program.index}: what its graph of micro-batch {microbatch} has saved "
                "was written to while it was in flight; call trainer.flush() before you write to "
                "weights, and write to copies of a step's outputs and of the model's buffers"
            ) from error

    def _saved_by_reference(self) -> Mapping[str, Tensor]:
        """Parameters that graphs in flight have saved by reference, and that updates change.

        Backward uses their latest values (PETRA, Eq. 5), but the activations of the forward pass.
        Values that the forward pass computed from parameters count as activations.
        """
        if not self.program.graphs_outlive_updates:
            return {}
        return self.cast_weights.current() or self._own_weights or self.parameters

    # -- checkpoints --------------------------------------------------------------------------

    def clear(self) -> None:
        """Drop all micro-batches and accumulated gradients."""
        self.in_flight.clear()
        self.gradients = {}

    def reset(self, seed: int) -> None:
        """Start again: other parameters were loaded, and random numbers come from another seed."""
        self.clear()
        self._draws.clear()
        self.seed = mix(seed, self.program.index)
        self.weights.loaded()

    def state_dict(self, copy: TreeCopy) -> dict[str, Any]:
        """Accumulated gradients, and the micro-batches in flight with their stashed weights."""
        weights, of_flights = self.weights.state(self.used(), copy)
        names = {id(module): name for name, module in self.root.named_modules()}
        for state, held in zip(of_flights, self.in_flight.values(), strict=True):
            state["kept"] = copy(self.activations.state(held.kept))
            state["buffers"] = [
                [f"{names[id(saved.module)]}:{saved.name}", copy(saved.copy)]
                for saved in held.buffers
            ]
        in_flight = [list(each) for each in zip(self.in_flight, of_flights, strict=True)]
        return {**weights, "gradients": copy(self.gradients), "in_flight": in_flight}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.gradients = {}
        self.accumulate(clone_tree(dict(state["gradients"])), {})
        self.weights.load(state)
        for microbatch, saved in state["in_flight"]:
            kept = self.activations.store(clone_tree(tuple(saved["kept"])))
            held = self._hold(microbatch, kept)
            held.used = self.weights.load_used(saved, state)
            held.hooks = self.hooks.now()
            for place, contents in saved["buffers"]:
                path, _, name = place.rpartition(":")
                module = self.root.get_submodule(path)
                snapshot = BufferSnapshot(module, name, module.get_buffer(name), contents.clone())
                held.buffers.append(snapshot)

    # -- context ------------------------------------------------------------------------------

    @contextmanager
    def _program_context(self, weights: Mapping[str, Tensor] | None) -> Iterator[None]:
        """Around a program: weights, autocast and random state; global state is restored."""
        with ExitStack() as stack:
            device = self.device
            if self._draws.is_random and not is_seeded_elsewhere():
                devices = [device] if device.type == "cuda" else []
                stack.enter_context(torch.random.fork_rng(devices))
            stack.enter_context(torch.no_grad())
            if self.autocast is not None:
                stack.enter_context(torch.autocast(device.type, self.autocast))
            if any(self._repeated):
                stack.enter_context(repeatable(self._repeated))
            if weights is None:
                weights = self.cast_weights.current() or self._own_weights
            if weights is not None:
                contents = [(entry, weights[name]) for entry, name in self._entries]
                stack.enter_context(filled(contents))
            token = ops.statistics_frozen.set(True)
            try:
                yield
            finally:
                ops.statistics_frozen.reset(token)
