"""Weights that a stage's passes compute with, while updates change its parameters.

    latest              both passes with the parameters as they are then
    stashed             backward with copies of those of the forward pass (with kept graphs: both)
    predicted           forward with the parameters as they will be when its gradient arrives
    in low precision    made once per update, where autocast would cast them again in every call

`parameter_entries` are the places where modules read their parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from revcompile.ir.module_tree import TreeReads, is_cast
from revcompile.ir.program import StageProgram
from revcompile.ir.snapshot import versions
from revcompile.runtime.reversible.bindings import Slot
from revcompile.runtime.stage.tensors import TreeCopy
from revcompile.schedule import Order, Weights


class Used(NamedTuple):
    """Which weights a forward pass has computed with."""

    copies: Mapping[str, Tensor] | None = None
    """Copies that its graph refers to, if there are any."""
    updates: int | None = None
    """How many updates came before it; None: unknown, or it did not use the latest weights."""


class PassWeights:
    """The weights that passes of one stage compute with; None stands for the parameters."""

    def __init__(
        self, program: StageProgram, parameters: Mapping[str, Tensor], delay: float
    ) -> None:
        self._parameters = parameters
        weights = program.method.weights
        stashes, is_late = weights is Weights.STASHED, delay > 0
        self._has_copies = stashes and program.keeps_graphs_in_flight
        self._copies: Mapping[str, Tensor] | None = None
        """Copies of the latest weights."""
        self.stash = StashedWeights(parameters) if stashes and not self._has_copies else None
        """Past weights for backward passes; None: not used, or graphs refer to copies of them."""
        predicts = weights is Weights.PREDICTED and is_late
        self.predicted = PredictedWeights(parameters, delay) if predicts else None
        self._updates = 0

    def forward(self) -> Mapping[str, Tensor] | None:
        """The weights that a forward pass computes with now."""
        if self.predicted is not None:
            return self.predicted.current
        if self._has_copies and self._copies is None:
            self._copies = detached_copies(self._parameters)
        return self._copies

    def used(self, weights: Mapping[str, Tensor] | None) -> Used:
        """The record of a forward pass with these weights."""
        is_latest = weights is None or self._has_copies
        return Used(weights if self._has_copies else None, self._updates if is_latest else None)

    def age(self, used: Used) -> int:
        """How many updates there were since a forward pass with the latest weights.

        With stashed weights an update counts only if a micro-batch in flight has used the weights
        that it replaced.
        """
        assert used.updates is not None
        return self._updates - used.updates

    def backward(self, used: Used) -> Mapping[str, Tensor] | None:
        """The weights that the backward pass computes with."""
        if self.stash is not None and (age := self.age(used)):
            return self.stash.past[age - 1]
        return used.copies

    def are_unchanged(self, used: Used) -> bool:
        """Whether the backward pass computes with the weights of the forward pass."""
        is_stashed = used.copies is not None or self.stash is not None
        return is_stashed or used.updates == self._updates

    @contextmanager
    def updating(self, names: Iterable[str], in_flight: Sequence[Used]) -> Iterator[None]:
        """Around a change of some of the parameters."""
        if self.stash is not None:
            self.stash.shift([self.age(used) for used in in_flight])
        with nullcontext() if self.predicted is None else self.predicted.following(names):
            yield
        self.count_update(in_flight)

    def count_update(self, in_flight: Sequence[Used]) -> None:
        """Count a change of the parameters. Stashed weights were shifted before it."""
        is_kept = any(self.age(used) == 0 for used in in_flight if self.stash is not None)
        self._updates += self.stash is None or is_kept
        self._copies = None

    def noted(self) -> tuple[Any, ...]:
        """The host's record of updates, which `note` restores."""
        return self._updates, self._copies

    def note(self, noted: tuple[Any, ...]) -> None:
        self._updates, self._copies = noted

    def loaded(self) -> None:
        """Take note that parameters were written to, not by an update; nothing is in flight."""
        if self.predicted is not None:
            self.predicted.load(None)
        self.count_update(())

    # -- checkpoints --------------------------------------------------------------------------

    def state(
        self, in_flight: Sequence[Used], copy: TreeCopy
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The state for `load`, and for each micro-batch in flight the state for `load_used`.

        No micro-batch in flight may have a graph, which cannot be saved, or copies for a graph.
        """
        ages = [0 if self.stash is None else self.age(used) for used in in_flight]
        count = max(ages, default=0)
        versions = self.stash.past[:count][::-1] if self.stash is not None else []
        trained = [n for n, p in self._parameters.items() if p.requires_grad]
        state: dict[str, Any] = {"versions": [copy({n: v[n] for n in trained}) for v in versions]}
        if self.predicted is not None and (predicted := self.predicted.state()) is not None:
            state["predicted"] = copy(predicted)
        return state, [{"version": count - age if age else None} for age in ages]

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        if self.predicted is not None:
            self.predicted.load(state.get("predicted"))
        versions = [
            detached_copies({n: p for n, p in self._parameters.items() if n not in v})
            | {n: t.clone().requires_grad_(self._parameters[n].requires_grad) for n, t in v.items()}
            for v in state["versions"]
        ]
        if self.stash is not None:
            self.stash.load(versions[::-1])  # the oldest is saved first

    def load_used(self, saved: Mapping[str, Any], state: Mapping[str, Any]) -> Used:
        """The record of a forward pass that is part of a state."""
        number, count = saved["version"], len(state["versions"])
        age = 0 if number is None else count - number
        return Used(updates=None if self.stash is None else self._updates - age)


# -- stashed weights ------------------------------------------------------------------------------


class StashedWeights:
    """A stage's weights of one update ago, of two, and so on, as long as they are needed.

    >>> w = {"w": torch.tensor([1.0], requires_grad=True)}
    >>> stash = StashedWeights(w)
    >>> stash.shift([0])
    >>> with torch.no_grad():
    ...     _ = w["w"].sub_(0.25)
    >>> stash.past[0]["w"]
    tensor([1.], requires_grad=True)
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = parameters
        self.past: list[dict[str, Tensor]] = []
        """The weights of one update ago, of two, and so on."""
        self.count: int | None = None
        """How many versions to keep in static buffers; None: as many as needed, not static."""

    def shift(self, ages: Collection[int]) -> None:
        """Before an update: stash the current weights, if a micro-batch in flight has used them.

        `ages`: how many updates old the weights of each are. Versions that none of them needs are
        dropped, unless buffers are static.
        """
        if self.count is None:
            del self.past[max(ages, default=0) :]
        if 0 in ages and self.count is None:
            self.past.insert(0, detached_copies(self._parameters))
        elif 0 in ages:
            past = self._static()
            for new, old in reversed(list(zip([self._parameters, *past], past, strict=False))):
                _copy_weights(new, old)

    def _static(self) -> list[dict[str, Tensor]]:
        missing = range(len(self.past), self.count or 0)
        self.past += [detached_copies(self._parameters) for _ in missing]
        return self.past

    def load(self, past: Sequence[Mapping[str, Tensor]]) -> None:
        """Continue from the weights of one update ago, of two, and so on."""
        if self.count is None:
            self.past = [dict(weights) for weights in past]
        else:
            for old, saved in zip(self._static(), past, strict=False):
                _copy_weights(saved, old)


def _copy_weights(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    if names := [name for name, weight in target.items() if weight.requires_grad]:
        targets = [target[name].detach() for name in names]
        torch._foreach_copy_(targets, [source[name].detach() for name in names])


class PredictedWeights:
    """The weights that forward passes compute with: y - t u.

    y are the parameters, u is what the last update subtracted from them, and t is the delay of the
    stage in updates. Before the first update forward passes compute with y.

    >>> y = {"w": torch.tensor([1.0], requires_grad=True)}
    >>> weights = PredictedWeights(y, delay=3.0)
    >>> weights.current
    >>> with torch.no_grad(), weights.following(y):
    ...     _ = y["w"].sub_(0.25)
    >>> weights.current
    {'w': tensor([0.], requires_grad=True)}
    """

    def __init__(self, parameters: Mapping[str, Tensor], delay: float) -> None:
        self._parameters, self.delay = parameters, delay
        self.current: dict[str, Tensor] | None = None
        """The same tensors from the first update on. Frozen parameters are not copied."""

    @contextmanager
    def following(self, names: Iterable[str]) -> Iterator[None]:
        """Around an update of some of the parameters."""
        if self.current is None:
            self.load(self._parameters)
        assert self.current is not None
        chosen = [name for name in names if self._parameters[name].requires_grad]
        parameters = [self._parameters[name].detach() for name in chosen]
        predicted = [self.current[name].detach() for name in chosen]
        if chosen:
            torch._foreach_copy_(predicted, parameters)
        yield
        if chosen:
            torch._foreach_lerp_(predicted, parameters, 1 + self.delay)

    def load(self, values: Mapping[str, Tensor] | None) -> None:
        """Continue from these values; None: from the parameters.

        Existing tensors are overwritten in place: captured steps hold their addresses.
        """
        if self.current is None:
            if values is None:
                return
            self.current = {
                name: torch.empty_like(p, requires_grad=True) if p.requires_grad else p
                for name, p in self._parameters.items()
            }
        for name, p in self._parameters.items():
            if p.requires_grad:
                self.current[name].detach().copy_((p if values is None else values[name]).detach())

    def state(self) -> dict[str, Tensor] | None:
        """The values for `load`; None before the first update."""
        return self.current and {
            name: value
            for name, value in self.current.items()
            if self._parameters[name].requires_grad
        }


def parameter_entries(root: nn.Module, parameters: Mapping[str, Tensor]) -> list[tuple[Slot, str]]:
    """Every entry of a module tree that holds one of the given parameters, and its name."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    return [
        ((module._parameters, attribute), names[id(parameter)])
        for module in root.modules()
        for attribute, parameter in module._parameters.items()
        if id(parameter) in names
    ]


def detached_copies(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies that no optimizer updates; frozen weights are not copied."""
    return {
        n: p.detach().clone().requires_grad_() if p.requires_grad else p for n, p in weights.items()
    }


@contextmanager
def at_versions(tensors: tuple[Tensor, ...], versions: tuple[int, ...]) -> Iterator[None]:
    """Differentiate graphs made when the tensors had these versions, with their present values.

    Autograd saves parameters (and views of them) by reference, and raises if they were written to
    since. PETRA writes to them on purpose: backward uses the latest weights. So their version
    counters are set back inside the context.

    >>> weight, x = torch.tensor([2.0], requires_grad=True), torch.ones(1, requires_grad=True)
    >>> y, version = x * weight, weight._version
    >>> with torch.no_grad():
    ...     _ = weight.add_(1)
    >>> with at_versions((weight,), (version,)):
    ...     torch.autograd.grad(y, x)
    (tensor([3.]),)
    """
    now = tuple(tensor._version for tensor in tensors)
    torch._C._autograd._unsafe_set_version_counter(tensors, versions)
    try:
        yield
    finally:
        torch._C._autograd._unsafe_set_version_counter(tensors, now)


# -- weights in low precision ---------------------------------------------------------------------


class CastWeights:
    """Copies of some of a stage's weights in the dtype in which autocast uses them.

    A weight's version counter shows in-place changes, except those through `.data` and by fused
    optimizers: every update ends with `refresh`.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], names: Sequence[str], dtype: torch.dtype | None
    ) -> None:
        self._parameters, self._names, self._dtype = parameters, tuple(names), dtype
        self.copies: dict[str, Tensor] = {}
        self.weights = [parameters[name] for name in names]
        self._fresh_for: list[int] = []

    def current(self) -> dict[str, Tensor] | None:
        """All parameters, cast where possible; None if none can be cast."""
        self.refresh_if_changed()
        return {**self._parameters, **self.copies} if self._names else None

    def refresh(self) -> None:
        if not self._names:
            return
        if not self.copies:
            for name, master in zip(self._names, self.weights, strict=True):
                copy = torch.empty_like(master, dtype=self._dtype, requires_grad=False)
                self.copies[name] = copy.requires_grad_(master.requires_grad)
        copies = [tensor.detach() for tensor in self.copies.values()]
        torch._foreach_copy_(copies, [weight.detach() for weight in self.weights])
        self._fresh_for = versions(self.weights)

    def refresh_if_changed(self) -> None:
        """Copy the weights again if they were updated, loaded or averaged since."""
        if self._fresh_for != versions(self.weights):
            self.refresh()

    def like_weights(self, gradients: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        """Gradients in the dtypes and memory layouts of the weights, as fused optimizers need."""
        given = {n: g for n, g in gradients.items() if g is not None}
        differ = [n for n, g in given.items() if not _is_laid_out_as(g, self._parameters[n])]
        if not differ:
            return dict(gradients)
        copies = [torch.empty_like(self._parameters[n], requires_grad=False) for n in differ]
        torch._foreach_copy_(copies, [given[n] for n in differ])
        return {**gradients, **dict(zip(differ, copies, strict=True))}


def _is_laid_out_as(gradient: Tensor, weight: Tensor) -> bool:
    if gradient.dtype != weight.dtype or gradient.stride() == weight.stride():
        return gradient.dtype == weight.dtype
    pairs = zip(gradient.stride(), weight.stride(), weight.shape, strict=True)
    return all(a == b or size == 1 for a, b, size in pairs)


def castable_parameters(
    program: StageProgram,
    reads: TreeReads,
    entries: Iterable[tuple[Slot, str]],
    parameters: Mapping[str, Tensor],
) -> list[str]:
    """Float32 parameters that are read only by layers whose weights autocast casts.

    `entries` are the places of parameters in the model. Empty where weights may change while graphs
    or copies of them are in flight.
    """
    method = program.method
    if method.weights is Weights.STASHED or method.order in (Order.GPIPE, Order.ONE_F_ONE_B):
        return []
    casting = {id(module._parameters) for module in reads.called.values() if is_cast(module)}
    others = {name for (owner, _), name in entries if id(owner) not in casting}
    others.update(reads.targets)
    return [n for n, p in parameters.items() if p.dtype == torch.float32 and n not in others]
