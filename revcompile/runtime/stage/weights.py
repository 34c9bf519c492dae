"""Weights that a stage computes with instead of the parameters in its modules.

    stashed             a copy of the parameters as they were in a micro-batch's forward pass
    predicted           where the parameters will be when the gradient of a forward pass arrives
    in low precision    made once per update, where autocast would cast them again in every call

`parameter_slots` are where the modules read them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Final

import torch
from torch import Tensor, nn

from revcompile.ir.module_tree import TreeReads, is_cast
from revcompile.ir.program import StageProgram
from revcompile.runtime.reversible.slots import Slot
from revcompile.schedule import Order, Weights

version: Final = attrgetter("_version")


# -- stashed weights ------------------------------------------------------------------------------


class StashedWeights:
    """A stage's weights of one update ago, of two, and so on, as long as they are needed.

    >>> w = {"w": torch.tensor([1.0], requires_grad=True)}
    >>> stash = StashedWeights(w)
    >>> with torch.no_grad(), stash.following([0]):
    ...     _ = w["w"].sub_(0.25)
    >>> stash.past(1)["w"]
    tensor([1.], requires_grad=True)
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = parameters
        self._past: list[dict[str, Tensor]] = []
        self.count: int | None = None
        """How many to have in static buffers; None: as many as are needed, anywhere."""
        self.added = 0
        """Did the last update make the weights before it one of these?"""

    @property
    def copies(self) -> list[Mapping[str, Tensor]]:
        return list(self._past)

    def past(self, updates: int) -> dict[str, Tensor]:
        """The weights of so many updates ago, at least one."""
        return self._past[updates - 1]

    @contextmanager
    def following(self, ages: Collection[int]) -> Iterator[None]:
        """Around an update, while the weights of micro-batches in flight are so many updates old.

        What none of them needs is not kept, and the update is not counted.
        """
        self.added = int(0 in ages)
        if self.count is None:
            del self._past[max(ages, default=0) :]
        if self.added and self.count is None:
            self._past.insert(0, detached_copies(self._parameters))
        elif self.added:
            self.shift()
        yield

    def shift(self) -> None:
        """In static buffers: all weights, the parameters too, become one update older."""
        past = self._static()
        for new, old in reversed(list(zip([self._parameters, *past], past, strict=False))):
            _copy_weights(new, old)

    def _static(self) -> list[dict[str, Tensor]]:
        missing = range(len(self._past), self.count or 0)
        self._past += [detached_copies(self._parameters) for _ in missing]
        return self._past

    def load(self, past: Sequence[Mapping[str, Tensor]]) -> None:
        """Go on from these: of one update ago, of two, and so on."""
        if self.count is None:
            self._past = [dict(weights) for weights in past]
        else:
            for old, saved in zip(self._static(), past, strict=False):
                _copy_weights(saved, old)


def _copy_weights(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    if names := [name for name, weight in target.items() if weight.requires_grad]:
        targets = [target[name].detach() for name in names]
        torch._foreach_copy_(targets, [source[name].detach() for name in names])


class PredictedWeights:
    """What forward passes compute with: y - t u.

    y are the parameters, u the last update, by which they were lowered, and t the delay of the
    stage in updates. Before the first update there is none, and forward passes compute with y.

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
        """The same tensors from the first update on. Frozen parameters are themselves."""

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
        """Go on from these; None: from the parameters.

        Tensors that exist are written to: captured steps hold their addresses.
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
        """What `load` needs."""
        return self.current and {
            name: value
            for name, value in self.current.items()
            if self._parameters[name].requires_grad
        }


def parameter_slots(root: nn.Module, parameters: Mapping[str, Tensor]) -> list[tuple[Slot, str]]:
    """Every entry of a module tree that holds one of the given parameters, and its name."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    return [
        ((module._parameters, attribute), names[id(parameter)])
        for module in root.modules()
        for attribute, parameter in module._parameters.items()
        if id(parameter) in names
    ]


def detached_copies(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies that no optimizer updates; frozen weights are themselves, as none does."""
    return {
        n: p.detach().clone().requires_grad_() if p.requires_grad else p for n, p in weights.items()
    }


@contextmanager
def at_versions(tensors: tuple[Tensor, ...], versions: tuple[int, ...]) -> Iterator[None]:
    """Differentiate graphs made when the tensors had these versions, with their present values.

    Autograd saves parameters (and views of them) by reference, and refuses to use those that were
    written to since. PETRA intends that: backward uses the latest weights. So their version
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

    In-place changes of a weight are noticed by its version counter, but not those through `.data`,
    nor those of fused optimizers: an update says so by `outdated`.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], names: Sequence[str], dtype: torch.dtype | None
    ) -> None:
        self._parameters, self._names, self._dtype = parameters, tuple(names), dtype
        self._copies: dict[str, Tensor] = {}
        self.weights = [parameters[name] for name in names]
        self._fresh_for: tuple[list[int], list[int]] = [], []

    def current(self) -> dict[str, Tensor] | None:
        """All parameters, cast where that is possible; None if it is for none."""
        self.refresh_if_changed()
        return {**self._parameters, **self._copies} if self._names else None

    @property
    def copies(self) -> list[Tensor]:
        return list(self._copies.values())

    def refresh(self) -> None:
        if not self._names:
            return
        if not self._copies:
            for name, master in zip(self._names, self.weights, strict=True):
                copy = torch.empty_like(master, dtype=self._dtype, requires_grad=False)
                self._copies[name] = copy.requires_grad_(master.requires_grad)
        copies = [tensor.detach() for tensor in self._copies.values()]
        torch._foreach_copy_(copies, [weight.detach() for weight in self.weights])
        self.mark_fresh()

    def refresh_if_changed(self) -> None:
        """Copy the weights again if they were updated, loaded or averaged since."""
        if self._fresh_for != self._versions():
            self.refresh()

    def outdated(self) -> None:
        """The weights have been updated."""
        self._fresh_for = [], []

    def mark_fresh(self) -> None:
        """The copies agree with the weights as these are now."""
        self._fresh_for = self._versions()

    def _versions(self) -> tuple[list[int], list[int]]:
        # Before every step, for every weight: no Python in the loop.
        return list(map(version, self.weights)), list(map(Tensor.data_ptr, self.weights))

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
    if gradient.dtype != weight.dtype:
        return False
    pairs = zip(gradient.stride(), weight.stride(), weight.shape, strict=True)
    return all(a == b or size == 1 for a, b, size in pairs)


def castable_parameters(
    program: StageProgram, root: nn.Module, parameters: Mapping[str, Tensor]
) -> list[str]:
    """Float32 parameters that only layers read which autocast casts them for.

    None where weights may change while graphs or copies of them are in flight.
    """
    method = program.method
    if method.weights is Weights.STASHED or method.order in (Order.GPIPE, Order.ONE_F_ONE_B):
        return []
    reads = TreeReads(program.forward, root)
    casting = {id(module) for module in reads.called.values() if is_cast(module)}
    readers: dict[int, set[int]] = {}
    for module in root.modules():
        for parameter in module._parameters.values():
            readers.setdefault(id(parameter), set()).add(id(module))
    return [
        name
        for name, parameter in parameters.items()
        if name not in reads.targets
        and parameter.dtype == torch.float32
        and readers.get(id(parameter), {-1}) <= casting
    ]
