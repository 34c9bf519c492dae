"""Running a branch a second time exactly as the first: same masks, same precision, no side effects.

Dropout masks, autocast and buffers are as they were; batch norms leave their running statistics
alone, so that they move once a step however often a branch is computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from revcompile.errors import ModifiedError
from revcompile.ir import ops
from revcompile.kernels.batch_norm import Statistics
from revcompile.runtime.reversible.masks import Masks

__all__ = ["Replay", "ReplayContext", "StatefulBuffers", "is_recorded"]

Mark = tuple[Tensor | None, int, int]
"""A buffer, its version, and where its contents are: `buffer.data = ...` changes only that."""

Snapshot = tuple[nn.Module, str, Tensor, int, Tensor]
"""Module, buffer name, the buffer, its version, and a copy of its contents."""


class StatefulBuffers:
    """Buffers a branch changes while it runs (spectral norm's vectors, for one).

    Which ones do is learned from the first run in each mode; from then on only those are copied
    per call. The others are compared after each run, which copies nothing: one that changes later
    than that is an error, because its contents before the run are gone.
    """

    def __init__(self, candidates: Sequence[tuple[nn.Module, str]]) -> None:
        self._candidates = list(candidates)
        self._changing: set[int] = set()
        self._modes_seen: set[tuple[bool, ...]] = set()

    def before(self) -> list[Snapshot]:
        """A snapshot of the buffers that may change."""
        is_new = bool(self._candidates) and self._modes() not in self._modes_seen
        found = []
        for place, (module, name) in enumerate(self._candidates):
            buffer = module._buffers.get(name) if is_new or place in self._changing else None
            if buffer is not None:
                found.append((module, name, buffer, buffer._version, buffer.detach().clone()))
        return found

    def marks(self) -> list[Mark]:
        """What tells whether a buffer has changed, of all that could."""
        return [_mark(module._buffers.get(name)) for module, name in self._candidates]

    def after(self, before: list[Snapshot], marks: list[Mark]) -> list[Snapshot]:
        """Those of the snapshots whose buffer has changed since."""
        if not self._candidates:
            return []
        self._modes_seen.add(self._modes())
        pairs = enumerate(zip(marks, self.marks(), strict=True))
        changed = [p for p, (old, new) in pairs if old[0] is not new[0] or old[1:] != new[1:]]
        self._changing.update(changed)
        kept = {(entry[0], entry[1]): entry for entry in before}
        for place in changed:
            module, name = self._candidates[place]
            if (module, name) not in kept:
                raise ModifiedError(
                    f"{type(module).__name__}.forward has changed its buffer {name!r}, which it "
                    "left alone in its first call: the backward pass runs the module again and "
                    "needs what was in the buffer before; let the module write into the buffer "
                    "in every call (the old value, if need be). From the next call on the buffer "
                    "is kept"
                )
        return [kept[self._candidates[place]] for place in changed]

    @property
    def is_empty(self) -> bool:
        """Does no buffer change, as far as is known?"""
        return not (self._changing if self._modes_seen else self._candidates)

    def _modes(self) -> tuple[bool, ...]:
        return tuple(module.training for module, _ in self._candidates)

    @contextmanager
    def replayed(self, before: list[Snapshot]) -> Iterator[None]:
        """Put the buffers back as they were before the run, for the time being."""
        current = [(module, name, module._buffers[name]) for module, name, *_ in before]
        for module, name, _, _, snapshot in before:
            module._buffers[name] = snapshot.clone()
        try:
            yield
        finally:
            for module, name, buffer in current:
                module._buffers[name] = buffer


@dataclass(frozen=True)
class ReplayContext:
    """What a branch touches besides its inputs: batch norms and other stateful buffers."""

    norms: tuple[nn.Module, ...] = ()
    stateful: StatefulBuffers = field(default_factory=lambda: StatefulBuffers(()))


class Replay:
    """The replay_context of one run of a branch: random state, autocast, buffers before it."""

    def __init__(self, branch: ReplayContext, like: Tensor) -> None:
        self.branch = branch
        self.device = like.device
        self.autocast = [
            (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            for device in {"cpu", self.device.type} - {"meta"}
        ]
        self.cached = torch.is_autocast_cache_enabled()
        self.masks = Masks() if is_recorded(self.device) else None
        self.random = _random_state(self.device) if self.masks is None else None
        self.buffers = branch.stateful.before()
        self._marks = branch.stateful.marks()
        self.statistics = Statistics()

    @contextmanager
    def record(self) -> Iterator[None]:
        """The first run.

        Autocast would keep every weight it has cast until the model is through, though a branch
        reads each once.
        """
        torch.set_autocast_cache_enabled(False)
        try:
            masks = nullcontext() if self.masks is None else self.masks.kept()
            with masks, self.statistics.kept():
                yield
        finally:
            torch.set_autocast_cache_enabled(self.cached)

    def settle(self) -> Replay:
        """Forget the random state if the branch drew nothing."""
        if self.random is not None and _same_state(self.random, _random_state(self.device)):
            self.random = None
        self.buffers = self.branch.stateful.after(self.buffers, self._marks)
        self._marks = []
        return self

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Make the replay_context hold again, and statistics stand still."""
        with ExitStack() as stack:
            for device, enabled, dtype in self.autocast:
                if enabled or torch.is_autocast_enabled(device):
                    stack.enter_context(
                        torch.autocast(device, dtype, enabled, cache_enabled=self.cached)
                    )
            if self.random is not None:
                stack.enter_context(_random_set(self.device, self.random))
            if self.masks is not None:
                stack.enter_context(self.masks.repeated())
            stack.enter_context(self.branch.stateful.replayed(self.buffers))
            stack.enter_context(_statistics_frozen(self.branch.norms))
            stack.enter_context(self.statistics.repeated())
            yield


def _mark(buffer: Tensor | None) -> Mark:
    if buffer is None:
        return None, 0, 0
    where = buffer.untyped_storage()._cdata if buffer.layout is torch.strided else 0
    return buffer, 0 if buffer.is_inference() else buffer._version, where


def is_recorded(device: torch.device) -> bool:
    """Is a CUDA graph of the caller's being recorded, which cannot be waited for or looked into?"""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return torch.get_rng_state(), on_device


def _same_state(a: tuple[Tensor, Tensor | None], b: tuple[Tensor, Tensor | None]) -> bool:
    same_device = a[1] is None or (b[1] is not None and torch.equal(a[1], b[1]))
    return same_device and torch.equal(a[0], b[0])


@contextmanager
def _random_set(device: torch.device, state: tuple[Tensor, Tensor | None]) -> Iterator[None]:
    now = _random_state(device)

    def load(wanted: tuple[Tensor, Tensor | None]) -> None:
        torch.set_rng_state(wanted[0])
        if wanted[1] is not None:
            torch.cuda.set_rng_state(wanted[1], device)

    load(state)
    try:
        yield
    finally:
        load(now)


@contextmanager
def _statistics_frozen(norms: Sequence[nn.Module]) -> Iterator[None]:
    """Batch norms use batch statistics and leave their running statistics alone."""
    moving = [n for n in norms if isinstance(n, _BatchNorm) and n.training]
    moving = [n for n in moving if n.track_running_stats]
    before = ops.statistics_frozen
    ops.statistics_frozen = True
    for norm in moving:
        norm.track_running_stats = False
    try:
        yield
    finally:
        ops.statistics_frozen = before
        for norm in moving:
            norm.track_running_stats = True
