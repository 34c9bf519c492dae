"""Which weights a stage's passes compute with, while updates change its parameters.

latest       both passes with the parameters as they are then
stashed      backward with copies of those of the forward pass; where graphs are kept, both
predicted    forward with the parameters as they will be when its gradient arrives
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

from torch import Tensor

from revcompile.ir.program import StageProgram
from revcompile.runtime.stage.tensors import TreeCopy
from revcompile.runtime.stage.weights import PredictedWeights, StashedWeights, detached_copies
from revcompile.schedule import Weights


class Used(NamedTuple):
    """Which weights a forward pass has computed with."""

    copies: Mapping[str, Tensor] | None = None
    """Copies, if its graph refers to them."""
    updates: int | None = None
    """How many updates there were when it ran with the latest weights; None: unknown."""


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
        """Of the latest weights."""
        self.stash = StashedWeights(parameters) if stashes and not self._has_copies else None
        predicts = weights is Weights.PREDICTED and is_late
        self.predicted = PredictedWeights(parameters, delay) if predicts else None
        self._updates = 0

    @property
    def has_past(self) -> bool:
        """Do backward passes compute with weights of the past, which are not in their graphs?"""
        return self.stash is not None

    def forward(self) -> Mapping[str, Tensor] | None:
        """What a forward pass computes with now."""
        if self.predicted is not None:
            return self.predicted.current
        if self._has_copies and self._copies is None:
            self._copies = detached_copies(self._parameters)
        return self._copies

    def used(self, weights: Mapping[str, Tensor] | None) -> Used:
        """The record of a forward pass with these weights."""
        is_latest = weights is None or self._has_copies
        return Used(weights if self._has_copies else None, self._updates if is_latest else None)

    def of_age(self, age: int) -> Used:
        """That of a forward pass so many updates ago."""
        return Used(updates=None if self.stash is None else self._updates - age)

    def age(self, used: Used) -> int:
        """How many updates there were since a forward pass with the latest weights.

        Where weights are stashed only those count before which a micro-batch in flight has run.
        """
        assert used.updates is not None
        return self._updates - used.updates

    def backward(self, used: Used) -> Mapping[str, Tensor] | None:
        """What the backward pass computes with."""
        if self.stash is not None and (age := self.age(used)):
            return self.stash.past(age)
        return used.copies

    def are_unchanged(self, used: Used) -> bool:
        """Are those of the backward pass those of the forward pass?"""
        is_stashed = used.copies is not None or self.stash is not None
        return is_stashed or used.updates == self._updates

    @contextmanager
    def updating(self, names: Iterable[str], in_flight: Sequence[Used]) -> Iterator[None]:
        """Around a change of some of the parameters."""
        following: AbstractContextManager[None] = nullcontext()
        if self.stash is not None:
            following = self.stash.following([self.age(used) for used in in_flight])
        elif self.predicted is not None:
            following = self.predicted.following(names)
        with following:
            yield
        self._updates += 1 if self.stash is None else self.stash.added
        self._copies = None

    def snapshot(self, names: Iterable[str]) -> Callable[[], None]:
        """Of these parameters, and of what an update of them changes; returns how to go back."""
        predicted = None if self.predicted is None else self.predicted.current
        tensors = [
            values[name].detach()
            for values in (self._parameters, predicted)
            if values is not None
            for name in names
        ]
        saved, copies, updates = [tensor.clone() for tensor in tensors], self._copies, self._updates
        past = [] if self.stash is None else self.stash.copies

        def go_back() -> None:
            for tensor, copy in zip(tensors, saved, strict=True):
                tensor.copy_(copy)
            self._copies = copies
            if self.predicted is not None:
                self.predicted.current = predicted
            if self.stash is not None and self.stash.count is not None:
                return  # in static buffers: no version is added when the same update comes again
            self._updates = updates
            if self.stash is not None:
                self.stash.load(past)

        return go_back

    def stashed(self, in_flight: Sequence[Used]) -> list[Mapping[str, Tensor]]:
        """The copies there are for backward passes, one for each version of the weights."""
        if self.stash is not None:
            return self.stash.copies
        return _distinct(used.copies for used in in_flight)

    def loaded(self) -> None:
        """Parameters were written to, not by an update, with nothing in flight."""
        self._copies = None
        if self.predicted is not None:
            self.predicted.load(None)

    # -- checkpoints --------------------------------------------------------------------------

    def state(
        self, in_flight: Sequence[Used], copy: TreeCopy
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """What `load` needs, and for each micro-batch in flight what `load_used` needs.

        None has a graph, which cannot be saved, nor copies to which that would refer.
        """
        each = [None if self.stash is None else self.backward(used) for used in in_flight]
        versions = _distinct(each)
        trained = [n for n, p in self._parameters.items() if p.requires_grad]
        state: dict[str, Any] = {"versions": [copy({n: v[n] for n in trained}) for v in versions]}
        if self.predicted is not None and (predicted := self.predicted.state()) is not None:
            state["predicted"] = copy(predicted)
        numbers: dict[int, int | None] = {id(v): number for number, v in enumerate(versions)}
        return state, [{"version": numbers.get(id(v))} for v in each]

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
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
        return self.of_age(0 if number is None else count - number)


def _distinct(weights: Iterable[Mapping[str, Tensor] | None]) -> list[Mapping[str, Tensor]]:
    return list({id(each): each for each in weights if each is not None}.values())
