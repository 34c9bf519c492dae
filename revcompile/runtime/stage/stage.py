"""One stage's numerics: run its programs, keep what is in flight, gather its gradient."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from revcompile.errors import InputError, NonFiniteError
from revcompile.ir import ops
from revcompile.ir.module_tree import device_of_model
from revcompile.ir.program import StageProgram
from revcompile.ir.stage_ops import is_seeded_elsewhere, mix, recording
from revcompile.runtime.reversible.cast_down import narrowed
from revcompile.runtime.reversible.graph_code import compile_graph
from revcompile.runtime.reversible.match_dtypes import matched
from revcompile.runtime.reversible.probes import relative_error
from revcompile.runtime.reversible.replay import Snapshot, StatefulBuffers
from revcompile.runtime.stage.activations import ActivationStore, Buffers
from revcompile.runtime.stage.cast_weights import Casts, castable
from revcompile.runtime.stage.finite import all_finite
from revcompile.runtime.stage.loss_scale import unscaled
from revcompile.runtime.stage.strides import overlaps
from revcompile.runtime.stage.traits import candidates, moves_early, outlives_updates, statistics_of
from revcompile.runtime.stage.unchanged import Unchanged, parameters_of
from revcompile.runtime.stage.weight_stash import Slots, Stash, as_of
from revcompile.schedule import Weights

__all__ = ["InFlight", "Observer", "Programs", "Stage"]


Programs = tuple[Callable[..., Any], Callable[..., Any]]
"""A stage's forward and backward programs."""


@dataclass
class InFlight:
    """What a stage holds of one micro-batch between its forward and its backward pass."""

    kept: tuple[Any, ...]
    weights: Mapping[str, Tensor] | None = None
    buffers: list[Snapshot] = field(default_factory=list)
    versions: tuple[int, ...] = ()
    original: Mapping[str, Tensor] = field(default_factory=dict)
    read_at: tuple[int, ...] = ()
    """Versions of the parameters that its graph has saved by reference."""


class Observer(Protocol):
    """Somebody who looks on; nothing is changed by it."""

    def forwarded(self, stage: Stage, microbatch: int) -> None:
        """A stage has run a micro-batch."""
        ...

    def differentiated(
        self, stage: Stage, microbatch: int, gradients: Mapping[str, Tensor | None]
    ) -> None:
        """A stage has a micro-batch's gradient, which is about to be gathered."""
        ...


class Stage:
    """Runs a `StageProgram` on the modules of `root`.

    Results depend on the order of calls, on `seed` and on the micro-batches' numbers: never on
    time or on the global random state, which is left as it was.
    """

    def __init__(
        self,
        program: StageProgram,
        root: nn.Module,
        *,
        seed: int = 0,
        autocast: torch.dtype | None = None,
        replicas: Sequence[str] = (),
        check_finite: bool = True,
        buffers: Buffers | None = None,
    ) -> None:
        self.program = program
        self.root = root
        self.seed = mix(seed, program.index)
        self.autocast = autocast
        self.check_finite = check_finite
        self.keeper = ActivationStore(program, buffers or Buffers())
        self.parameters = parameters_of(program, root)
        self.unchanged = Unchanged(program, root, self.parameters, replicas)
        self._slots = Slots(root, self.parameters)
        for name in replicas:
            original = self.parameters[name]
            self.parameters[name] = nn.Parameter(original.detach().clone(), original.requires_grad)
        self.reads: Mapping[str, Tensor] | None = dict(self.parameters) if replicas else None
        """What its modules compute with, if not with the parameters they hold."""
        self._stash = Stash() if program.method.weights is Weights.STASHED else None
        self.is_stashing = self._stash is not None
        """Does a forward pass keep its weights? Not where somebody else does."""
        names = castable(program, root, self.parameters) if autocast is not None else []
        self.casts = Casts(self.parameters, names, autocast)
        self._random = any(unit.random for unit in program.units)
        self._stateful = StatefulBuffers(candidates(program, root))
        self._statistics = statistics_of(program, root) if moves_early(program) else []
        graphs = [program.forward, program.backward]
        if autocast is not None:
            graphs = [narrowed(matched(graph), root) for graph in graphs]
        self._plain = (
            compile_graph(graphs[0], f"stage {program.index} forward"),
            compile_graph(graphs[1], f"stage {program.index} backward"),
        )
        self._forward, self._backward = self._plain
        self.device: torch.device | None = None
        """Where it computes; None: where its parameters are."""
        self.observers: Sequence[Observer] = ()
        self.in_flight: dict[int, InFlight] = {}
        self.gradients: dict[str, Tensor] = {}
        self.sums_in_place = False
        """Will nobody want back what was gathered before?"""
        self.reconstruction: dict[int, float] = {}
        """Relative error of the rebuilt input, for the micro-batches that were to be measured."""

    def run_with(self, programs: Programs | None) -> None:
        """Run these programs, which compute the same, instead of the generated ones."""
        self._forward, self._backward = programs or self._plain

    # -- forward ------------------------------------------------------------------------------

    def forward(
        self, microbatch: int, inputs: Mapping[str, Any], *, measure: bool = False
    ) -> dict[str, Any]:
        """Run a micro-batch; what backward needs stays here until then."""
        program = self.program
        self.unchanged.check()
        weights = self.version()
        values = [inputs[port.name] for port in program.inputs]
        before, marks = self._stateful.before(), self._stateful.marks()
        with self._running(weights, microbatch):
            outputs, kept = self._forward(self.root, mix(self.seed, microbatch), *values)
            kept = self.keeper.stored(kept)
        self.in_flight[microbatch] = InFlight(
            kept=kept,
            weights=weights,
            buffers=self._stateful.after(before, marks),
            versions=tuple(t._version if isinstance(t, Tensor) else 0 for t in kept),
            original={name: inputs[name] for name in program.sends_back} if measure else {},
            read_at=tuple(p._version for p in self._referenced()),
        )
        for observer in self.observers:
            observer.forwarded(self, microbatch)
        return dict(zip((port.name for port in program.outputs), outputs, strict=True))

    def evaluate(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Run in the modules' present mode; nothing is kept or changed."""
        values = [inputs[port.name] for port in self.program.inputs]
        with self._running(None, 0):
            outputs, _ = self._forward(self.root, self.seed, *values)
        return dict(zip((port.name for port in self.program.outputs), outputs, strict=True))

    def drop(self, microbatch: int) -> None:
        """Forget a micro-batch that will not come back."""
        self.in_flight.pop(microbatch, None)

    def statistics(self) -> list[Tensor]:
        """The running statistics of the stage's batch norms."""
        found = (module._buffers[name] for module, name in statistics_of(self.program, self.root))
        return [buffer for buffer in found if buffer is not None]

    def snapshot(self) -> list[Snapshot]:
        """Copies of the buffers that a micro-batch can change before its first update."""
        statistics = [
            (module, name, buffer, buffer._version, buffer.detach().clone())
            for module, name in self._statistics
            if (buffer := module._buffers[name]) is not None
        ]
        return [*statistics, *self._stateful.before()]

    # -- backward -----------------------------------------------------------------------------

    def backward(
        self,
        microbatch: int,
        values: Mapping[str, Any],
        gradients: Mapping[str, Tensor | None],
        scale: float | None = None,
    ) -> tuple[dict[str, Any], dict[str, Tensor | None]]:
        """Rebuild or recompute, and differentiate; returns values and gradients of the inputs.

        The gradient of the parameters is added to what the stage has gathered, divided by the
        `scale` that the given ones have. If it is not finite nothing is added, and
        `NonFiniteError` is raised.
        """
        original = self.in_flight[microbatch].original
        rebuilt, back, found = self.differentiate(microbatch, values, gradients)
        if self.check_finite:
            self._finite(microbatch, found, back, scale)
        if scale is not None:
            found = unscaled(found, scale)
        for observer in self.observers:
            observer.differentiated(self, microbatch, found)
        self.gather(found, back)
        if original:
            errors = [
                relative_error(original[name], rebuilt[name])
                for name in original
                if isinstance(rebuilt[name], Tensor)
                and (rebuilt[name].is_floating_point() or rebuilt[name].is_complex())
            ]
            self.reconstruction[microbatch] = max(errors, default=0.0)
        return rebuilt, back

    def differentiate(
        self, microbatch: int, values: Mapping[str, Any], gradients: Mapping[str, Tensor | None]
    ) -> tuple[dict[str, Any], dict[str, Tensor | None], dict[str, Tensor | None]]:
        """Values and gradients of the inputs, and gradients of the parameters, not gathered."""
        program, held = self.program, self.in_flight.pop(microbatch)
        self._unwritten(microbatch, held)
        kept, held.kept = self.keeper.taken(held.kept), ()  # not held any longer than they wait
        arguments = (
            *kept,
            *(values[name] for name in program.needs_back),
            *(gradients.get(name) for name in program.outputs_with_grad),
        )
        for following in itertools.islice(self.in_flight.values(), 1):
            self.keeper.announce(following.kept)
        with (
            self._running(held.weights, microbatch),
            self._stateful.replayed(held.buffers),
            self._noticing(microbatch),
            as_of(self._referenced(), held.read_at),
        ):
            returned, of_inputs, of_parameters = self._backward(
                self.root, mix(self.seed, microbatch), *arguments
            )
        dense = (g.to_dense() if g is not None and g.is_sparse else g for g in of_parameters)
        found = self.casts.widened(dict(zip(program.parameters, dense, strict=True)))
        back = dict(zip(program.inputs_with_grad, of_inputs, strict=True))
        return dict(zip(program.sends_back, returned, strict=True)), back, found

    def take_gradients(self) -> dict[str, Tensor]:
        """The gathered gradient (a sum over micro-batches); gathering starts anew."""
        found, self.gradients = self.gradients, {}
        return found

    def updated(self) -> None:
        """The parameters have changed."""
        if self._stash is not None:
            self._stash.forget()

    def ages(self) -> dict[int, int]:
        """Of every micro-batch in flight: versions of stashed weights between its own and now."""
        if self._stash is None:
            return dict.fromkeys(self.in_flight, 0)
        versions = {id(held.weights): None for held in reversed(self.in_flight.values())}
        first = 0 if self._stash.is_current(next(iter(versions), 0)) else 1
        order = {version: first + place for place, version in enumerate(versions)}
        return {microbatch: order[id(held.weights)] for microbatch, held in self.in_flight.items()}

    def version(self) -> Mapping[str, Tensor] | None:
        """The weights of a forward pass now, if they are stashed."""
        stash = self._stash if self.is_stashing else None
        return stash.version(self.parameters) if stash is not None else None

    def stashed(self) -> int:
        """How many copies of its parameters the stage keeps."""
        versions = {id(held.weights) for held in self.in_flight.values() if held.weights}
        return len(versions)

    def gather(self, found: dict[str, Tensor | None], sent: Mapping[str, Tensor | None]) -> None:
        """Add gradients up; out of place where what was gathered before may be taken back.

        Each is let go as soon as it is added: `found` is empty afterwards. Autograd may hand out
        one tensor twice (`p + q`), also as the gradient of an input, or one whose elements share
        memory. What is gathered is the stage's own.
        """
        taken = {g.untyped_storage()._cdata for g in sent.values() if g is not None}
        for name in tuple(found):
            gradient = found.pop(name)
            if gradient is None:
                continue
            if name in self.gradients and self.sums_in_place:
                gradient = self.gradients[name].add_(gradient)
            elif name in self.gradients:
                gradient = self.gradients[name] + gradient
            elif gradient.untyped_storage()._cdata in taken or overlaps(gradient):
                gradient = gradient.clone(memory_format=torch.contiguous_format)
            taken.add(gradient.untyped_storage()._cdata)
            self.gradients[name] = gradient

    def _finite(
        self,
        microbatch: int,
        found: Mapping[str, Tensor | None],
        back: Mapping[str, Any],
        scale: float | None,
    ) -> None:
        there = {n: g for n, g in {**back, **found}.items() if g is not None and g.numel()}
        if not there:
            return
        fine = all_finite(list(there.values()))
        bad = [name for name, ok in zip(there, fine, strict=True) if not ok]
        if not bad:
            return
        of_parameters = [name for name in bad if name in found]
        where = f"parameter {of_parameters[0]}" if of_parameters else f"value {bad[0]}"
        more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
        lower = "the learning rate" if scale is None else f"the loss scale ({scale:g})"
        raise NonFiniteError(
            f"stage {self.program.index}, micro-batch {microbatch}: the gradient of {where}{more} "
            f"is not finite. The micro-batch was left out of the update; lower {lower}, clip "
            "gradients, or look at this batch",
            stage=self.program.index,
            microbatch=microbatch,
        )

    def _unwritten(self, microbatch: int, held: InFlight) -> None:
        for name, value, version in zip(self.program.kept, held.kept, held.versions, strict=True):
            if isinstance(value, Tensor) and value._version != version:
                raise InputError(
                    f"stage {self.program.index}: {name} of micro-batch {microbatch} was written "
                    "to while it was in flight; hand the trainer a fresh tensor for each step"
                )

    @contextmanager
    def _noticing(self, microbatch: int) -> Iterator[None]:
        """Graphs have saved what the trainer was given, and notice themselves if it changes."""
        try:
            yield
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            raise InputError(
                f"stage {self.program.index}: what its graph of micro-batch {microbatch} has saved "
                "was written to while it was in flight; hand the trainer a fresh tensor for each "
                "step"
            ) from error

    def _referenced(self) -> tuple[Tensor, ...]:
        """Parameters that graphs in flight have saved by reference, and that updates change.

        Backward is to use the latest ones: activations are the forward pass's, parameters are
        not. What the forward pass computed from parameters counts as an activation.
        """
        if not self.outlives_updates:
            return ()
        return tuple((self.casts.read() or self.reads or self.parameters).values())

    # -- replay_context ------------------------------------------------------------------------

    @contextmanager
    def _running(self, weights: Mapping[str, Tensor] | None, microbatch: int) -> Iterator[None]:
        """Programs start with nothing recorded; everything global is put back afterwards."""
        frozen = ops.statistics_frozen
        with ExitStack() as stack:
            device = self._device()
            if self._random and not is_seeded_elsewhere():
                devices = [device] if device.type == "cuda" else []
                stack.enter_context(torch.random.fork_rng(devices))
            stack.enter_context(torch.no_grad())
            if self.autocast is not None:
                stack.enter_context(torch.autocast(device.type, self.autocast))
            chosen = weights if weights is not None else self.casts.read() or self.reads
            if chosen is not None:
                stack.enter_context(self._slots.filled(chosen))
            try:
                recording(False)
                yield
            finally:
                ops.statistics_frozen = frozen

    def _device(self) -> torch.device:
        first = next(iter(self.parameters.values()), None)
        return self.device or (device_of_model(self.root) if first is None else first.device)

    @property
    def is_stateful(self) -> bool:
        """Do its layers change buffers in every call? Known once it has run."""
        return not self._stateful.is_empty

    @property
    def outlives_updates(self) -> bool:
        """Are parameters updated while graphs that use them are kept?"""
        return outlives_updates(self.program)
