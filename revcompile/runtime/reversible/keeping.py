"""Which couplings keep their graphs: as many as a budget of memory allows.

A chain may keep a coupling's graph from forward to backward, which costs memory, or rebuild it,
which costs one more forward pass of the branch. The first training step of an input shape rebuilds
every coupling and is measured phase by phase. A phase is the time between two marks: forward up to
the end of coupling i, from there to the loss and back, backward of coupling i, and so on. With
kept couplings a step needs

    max over phases (peak of the phase + graphs of the kept couplings before it)

because a graph lives from its coupling's forward pass to its backward pass. So the last couplings
are the cheapest to keep: their graphs are gone before an early coupling is differentiated. The
couplings are chosen from the last one backwards, or by saved work per byte, whichever saves more.

On CUDA, phases are measured by the allocator, whose peak (`torch.cuda.max_memory_allocated`) is
reset in that step. Elsewhere they are estimated from the tensors that autograd has saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from revcompile.errors import InputError
from revcompile.ir.types import Coupling, Rewired
from revcompile.runtime.reversible.replay import is_capturing
from revcompile.units import bytes_of, format_size

LEAST: Final = "least"
AUTO: Final = "auto"
Budget = int | str | None
"""Bytes; "least": keep nothing; "auto": four fifths of what is free; None: what raises no peak."""


def checked_budget(caller: str, budget: Budget) -> Budget:
    """The budget, a size as a number.

    >>> checked_budget("reversify", "2GiB"), checked_budget("reversify", "auto")
    (2147483648, 'auto')
    """
    if budget is None or budget in (LEAST, AUTO):
        return budget
    try:
        return bytes_of(budget)
    except InputError as error:
        raise InputError(f'{caller}: {error}, or "auto", "least", None') from None


# -- measuring ------------------------------------------------------------------------------------


@dataclass
class Measurement:
    """One training step in which every coupling was rebuilt, in bytes."""

    graphs: dict[int, int] = field(default_factory=dict)
    """What each coupling's graph holds, by the coupling's number."""
    streams: dict[int, int] = field(default_factory=dict)
    """The size of each coupling's two streams."""
    phases: list[tuple[int, int]] = field(default_factory=list)
    """How many couplings run before a phase, and its peak."""
    free: int = 0
    """What the device had free for activations after the step."""

    @property
    def least(self) -> int:
        """The peak of the step."""
        return max((peak for _, peak in self.phases), default=0)


class Meter:
    """Measures one training step; activations are what it holds beside gradients."""

    def __init__(
        self, parameters: Iterable[Tensor], device: torch.device, done: Callable[[Meter], None]
    ) -> None:
        self.measured = Measurement()
        self.outer = 0
        """On other devices than CUDA: what autograd has saved outside of couplings."""
        self._parameters = [p for p in parameters if p.requires_grad and p.is_leaf]
        self._known = frozenset(map(_storage, self._parameters))
        self._device, self._done = device, done
        self.rebuilds = False
        """Whether any chain of the step rebuilds; short chains may keep inputs instead."""
        self._has_ended = self._is_queued = False
        if device.type == "cuda":
            self._base = torch.cuda.memory_allocated(device) - self._gradients()
            torch.cuda.reset_peak_memory_stats(device)

    def mark(self, position: int) -> None:
        """End a phase, which `position` couplings run before."""
        if self._device.type != "cuda" or self._has_ended:
            return
        peak = torch.cuda.max_memory_allocated(self._device) - self._base - self._gradients()
        torch.cuda.reset_peak_memory_stats(self._device)
        self.measured.phases.append((position, peak))

    def begin_backward(self, position: int) -> None:
        """Called when coupling `position` is about to be differentiated."""
        self._begin_backward()
        self.mark(position + 1)

    def _begin_backward(self, *_: Any) -> None:
        if not self._is_queued:
            self._is_queued = True
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._end)

    def rebuilt(self, position: int, results: Sequence[Any], streams: Sequence[Tensor]) -> None:
        """Note the graph of a coupling with these streams; its ends are kept with it."""
        known = frozenset(map(_storage, streams))
        ends = {
            key: r.untyped_storage().nbytes() for r in results if (key := _storage(r)) not in known
        }
        graph = _saved_bytes(results, self._known) + sum(ends.values())
        self.measured.graphs[position] = graph
        self.measured.streams[position] = size = sum(stream.nbytes for stream in streams)
        if self._device.type != "cuda":
            self.measured.phases.append((position, self.outer + 2 * (graph + size)))

    def end_forward(self, outputs: Any) -> None:
        """Note what autograd has saved for `outputs`, outside of couplings."""
        if self._device.type != "cuda":
            self.outer = _saved_bytes(outputs, self._known)
        nodes = (t.grad_fn for t in pytree.tree_leaves(outputs) if isinstance(t, Tensor))
        if not self.rebuilds and (node := next(filter(None, nodes), None)) is not None:
            node.register_prehook(self._begin_backward)

    def _end(self) -> None:
        self.mark(0)
        self._has_ended = True
        self._done(self)

    def _gradients(self) -> int:
        """Bytes of the parameters' gradients."""
        return sum(_bytes(p.grad) for p in self._parameters if p.grad is not None)


def _bytes(tensor: Tensor) -> int:
    """Bytes of a tensor on this rank; a sparse one is that of an embedding."""
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    if local.layout is torch.sparse_coo:
        return local._values().nbytes + local._indices().nbytes
    return local.nbytes


def _storage(tensor: Tensor) -> int:
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local.untyped_storage()._cdata if local.layout is torch.strided else id(local)


def _saved_bytes(outputs: Any, known: frozenset[int]) -> int:
    """Bytes of the storages that the autograd graph of some tensors holds, but for known ones."""
    leaves = pytree.tree_leaves(outputs)
    nodes = [t.grad_fn for t in leaves if isinstance(t, Tensor) and t.grad_fn is not None]
    seen, found = set(nodes), dict[int, int]()
    while nodes:
        node: Any = nodes.pop()
        for tensor in _saved_by(node):
            if tensor.layout is torch.strided and (key := _storage(tensor)) not in known:
                found[key] = tensor.untyped_storage().nbytes()
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return sum(found.values())


def _saved_by(node: Any) -> list[Tensor]:
    """The tensors that a node of an autograd graph holds."""
    names = (name for name in dir(node) if name.startswith("_saved_") or name == "saved_tensors")
    values: list[Any] = [*getattr(node, "__dict__", {}).values()]
    for name in names:
        try:
            values.append(getattr(node, name))
        except RuntimeError:  # written to since, or freed
            continue
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


# -- planning -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MemoryPlan:
    """Which couplings keep their graphs, and what that is expected to cost."""

    kept: frozenset[int]
    """Numbers of couplings, in the order of forward."""
    count: int
    """How many couplings could be kept: those of short chains may keep their inputs instead."""
    peak: int
    """Activations of a step, in bytes."""
    time: float
    """Time relative to a step that rebuilds nothing, if all work takes time alike."""

    def __str__(self) -> str:
        return (
            f"{len(self.kept)} of {self.count} couplings keep their graphs, the others are "
            f"rebuilt: {format_size(self.peak)} of activations, about {self.time:.2f} x the time "
            "of storing all"
        )


def plan_for(
    measured: Measurement, work: Sequence[float], starts: frozenset[int], budget: int | None
) -> MemoryPlan:
    """The couplings to keep within a budget; without one, those that do not raise the peak.

    Args:
        measured: A step in which every coupling was rebuilt.
        work: Of each coupling's branch, in any unit; then that of everything else.
        starts: The first couplings of chains.
        budget: Bytes, at least the measured peak.

    >>> measured = Measurement(dict.fromkeys(range(4), 10), {}, [(i, 30) for i in range(5)])
    >>> [sorted(plan_for(measured, [1.0] * 5, frozenset({0}), b).kept) for b in (40, 55, 99)]
    [[3], [2, 3], [0, 1, 2, 3]]
    """
    *branches, other = work
    count = len(branches)
    limit = measured.least if budget is None else budget
    graphs = [measured.graphs.get(i, 0) for i in range(count)]
    by_gain = sorted(range(count), key=lambda i: (branches[i] / max(graphs[i], 1), i))
    orders = range(count - 1, -1, -1), by_gain[::-1]

    def peak(kept: frozenset[int]) -> int:
        # Where a kept coupling follows a rebuilt one, the rebuild starts from streams that are
        # saved there. One of them is the kept coupling's own input.
        held = [
            graphs[i] + (0 if i - 1 in kept or i in starts else measured.streams.get(i, 0) // 2)
            if i in kept
            else 0
            for i in range(count)
        ]
        before = list(accumulate(held, initial=0))
        return max((size + before[at] for at, size in measured.phases), default=0)

    def filled(order: Iterable[int]) -> frozenset[int]:
        kept = frozenset[int]()
        for index in order:
            if index in measured.graphs and peak(kept | {index}) <= limit:
                kept |= {index}
        return kept

    kept = max(map(filled, orders), key=lambda each: sum(branches[i] for i in each))
    again = sum(branches[i] for i in measured.graphs if i not in kept)
    return MemoryPlan(
        kept, len(measured.graphs), peak(kept), 1 + again / (3 * (sum(branches) + other) or 1.0)
    )


@dataclass(frozen=True)
class ChainMemory:
    """For one call of a chain: which of its couplings keep their graphs, and what is measured.

    Couplings are numbered from the first of the chain.
    """

    first: int = 0
    """The number of the chain's first coupling in the model."""
    kept: frozenset[int] = frozenset()
    meter: Meter | None = None

    def keeps(self, index: int) -> bool:
        """Whether a coupling keeps its graph."""
        return self.first + index in self.kept

    def mark(self, index: int) -> None:
        """End the phase of a coupling."""
        if self.meter is not None:
            self.meter.mark(self.first + index)

    def begin_backward(self, index: int) -> None:
        """End the phase before the backward pass of a coupling."""
        if self.meter is not None:
            self.meter.begin_backward(self.first + index)

    def rebuilt(self, index: int, results: Sequence[Any], streams: Sequence[Tensor]) -> None:
        """Note the graph of a coupling that was rebuilt."""
        if self.meter is not None:
            self.meter.rebuilt(self.first + index, results, streams)


NOTHING_KEPT: Final = ChainMemory()


Sizes = tuple[tuple[int, ...], ...]


class Memory:
    """The budget of a module, and its plans by the kind and the sizes of inputs."""

    def __init__(self, budget: Budget = None, optimizer_copies: int = 2) -> None:
        self.budget, self.optimizer_copies = budget, optimizer_copies
        self.work_of: Callable[[Rewired], Sequence[float] | None] | None = None
        """The work of each coupling of a model, and that of everything else, if it is known."""
        self._measured: dict[Any, dict[Sizes, tuple[Measurement, MemoryPlan | None]]] = {}
        self._meter: Meter | None = None

    def __getstate__(self) -> dict[str, Any]:
        own = vars(Memory(self.budget, self.optimizer_copies))
        return {**own, "work_of": self.work_of}

    def set(self, budget: Budget) -> None:
        """Plan for another budget from now on, by what has been measured."""
        self.budget = checked_budget("net", budget)
        if budget == AUTO:  # what is free is measured again
            self._measured.clear()
        for by_sizes in self._measured.values():
            for sizes, (measured, _) in by_sizes.items():
                by_sizes[sizes] = measured, None

    @property
    def plans(self) -> dict[Sizes, MemoryPlan]:
        """The plans in use, by the sizes of inputs."""
        entries = (entry for by_sizes in self._measured.values() for entry in by_sizes.items())
        return {sizes: plan for sizes, (_, plan) in entries if plan is not None}

    def begin(
        self, net: nn.Module, rewired: Rewired, inputs: Sequence[Tensor], is_compiled: bool
    ) -> tuple[frozenset[int], Meter | None]:
        """For a training step: the couplings that keep their graphs, and what measures it.

        A plan also holds for inputs that are smaller in every dimension.
        """
        if self.budget == LEAST or not rewired.couplings or self.work_of is None:
            return frozenset(), None
        if any(each.layout is not torch.strided for each in inputs):  # sizes need not be numbers
            return frozenset(), None
        device = inputs[0].device if inputs else torch.device("cpu")
        if self.budget is None and device.type != "cuda":  # an estimate does not tell what is free
            return frozenset(), None
        sizes = tuple(tuple(each.shape) for each in inputs)
        is_low = torch.is_autocast_enabled(device.type) if device.type != "meta" else False
        dtypes = tuple(each.dtype for each in inputs)
        key = id(rewired), is_compiled, is_low, device, dtypes, tuple(map(len, sizes))
        known = self._measured.setdefault(key, {})
        covering = [each for each in known if _covers(each, sizes)]
        if covering:
            best = min(covering, key=lambda each: sum(map(sum, each)))
            measured, plan = known[best]
            if plan is None:
                plan = self._planned(rewired, measured, best)
                known[best] = measured, plan
            return plan.kept, None
        if device.type == "meta" or is_capturing(device):
            return frozenset(), None
        done = partial(self._note, rewired, known, sizes)
        self._meter = Meter(net.parameters(), device, done)
        return frozenset(), self._meter

    def _note(self, rewired: Rewired, known: Any, sizes: Sizes, meter: Meter) -> None:
        """Plan after a step that was measured, unless another one has begun in the meantime."""
        if meter is not self._meter:
            return
        self._meter = None
        device, parameters = meter._device, meter._parameters
        if self.budget == AUTO:
            if device.type != "cuda":
                raise InputError(
                    f'memory_budget="auto" needs a CUDA device, but the inputs are on {device}; '
                    'give bytes, such as "8GiB"'
                )
            reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            state = self.optimizer_copies * sum(map(_bytes, parameters))
            meter.measured.free = torch.cuda.mem_get_info(device)[0] + reserved - state
        plan = self._planned(rewired, meter.measured, sizes)
        known[sizes] = meter.measured, plan

    def _planned(self, rewired: Rewired, measured: Measurement, sizes: Sizes) -> MemoryPlan:
        assert self.work_of is not None
        lengths = [len(run) for run in rewired.body.chains() if isinstance(run[0], Coupling)]
        starts = frozenset(accumulate(lengths[:-1], initial=0))
        budget = self.budget
        if budget == AUTO:
            budget = max(4 * measured.free // 5, 1)
        assert not isinstance(budget, str)
        if budget is not None and budget < measured.least:
            batch = sizes[0][0] if sizes and sizes[0] else 1
            fits = batch * budget // measured.least
            smaller = f", or a batch of {fits} instead of {batch}" if fits else ""
            raise InputError(
                f"memory_budget={format_size(budget)}: a training step of {rewired.name} with "
                f"inputs {[list(each) for each in sizes]} needs {format_size(measured.least)} "
                "for activations even if every coupling is rebuilt. Give at least that"
                f"{smaller}"
            )
        graphs = [float(measured.graphs.get(i, 0)) for i in range(len(rewired.couplings))]
        return plan_for(measured, self.work_of(rewired) or [*graphs, 0.0], starts, budget)


def _covers(planned: Sizes, sizes: Sizes) -> bool:
    pairs = zip(planned, sizes, strict=True)
    return all(all(map(int.__ge__, map(int, a), map(int, b))) for a, b in pairs)
