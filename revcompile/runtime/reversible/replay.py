"""Running a branch a second time exactly as the first: same random numbers, dtypes and buffers.

Dropout masks, autocast and buffers are those of the first run. Batch norms leave their running
statistics alone, so that these move once a step however often a branch runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode

from revcompile.errors import InputError, ModifiedError
from revcompile.ir import ops
from revcompile.kernels.batch_norm import Statistics

__all__ = ["BufferSnapshot", "Masks", "Replay", "ReplayContext", "StatefulBuffers", "is_capturing"]


def is_capturing(device: torch.device) -> bool:
    """Is the caller capturing a CUDA graph? Then nothing may wait for the device."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


# -- random numbers -------------------------------------------------------------------------------

_DRAWING: Final = frozenset(
    (
        *("bernoulli", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like"),
        *("bernoulli_", "exponential_", "normal_", "random_", "uniform_"),
    )
)
"""Operations whose result is the random numbers themselves."""


class Masks:
    """The random tensors that one run of a branch drew, in order.

    While a CUDA graph is captured, a generator's state can be neither read nor set, so the numbers
    themselves are saved. Stochastic depth draws one per sample, which is little. Dropout draws one
    per element, inside kernels that do not return them, and is refused.
    """

    def __init__(self) -> None:
        self._drawn: list[Tensor] = []

    def record(self) -> AbstractContextManager[Any]:
        """Save what is drawn."""
        return _InterceptDraws(self._drawn, None)

    def replay(self) -> AbstractContextManager[Any]:
        """Return what was saved instead of drawing."""
        return _InterceptDraws(self._drawn, iter(self._drawn))


class _InterceptDraws(TorchDispatchMode):
    def __init__(self, drawn: list[Tensor], saved: Iterator[Tensor] | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._drawn, self._saved = drawn, saved

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _draws(func, args, kwargs):
            return func(*args, **kwargs)
        if self._saved is not None:
            saved = next(self._saved)
            is_in_place = ops.writes_self(func.overloadpacket.__name__)
            return args[0].copy_(saved) if is_in_place else saved.clone()
        out = func(*args, **kwargs)
        self._drawn.append(out.clone())
        return out


def _draws(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Does an operation draw random numbers? Raises if they cannot be saved."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    if _dropout_rate(func, args, kwargs) == 0.0:
        return False
    name = func.overloadpacket.__name__
    if name not in _DRAWING:
        raise InputError(
            f"reversify: a CUDA graph is captured of a branch with {name}, whose random numbers "
            "cannot be repeated in backward there; set the dropout rate to 0 (stochastic depth "
            "may stay), or do not capture the step"
        )
    return True


def _dropout_rate(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The dropout rate of an attention; None for other operations."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            given = args[position] if position < len(args) else argument.default_value
            return kwargs.get("dropout_p", given)
    return None


_RandomState = tuple[Tensor, Tensor | None]
"""Of the CPU's generator, and of the GPU's."""


def _random_state(device: torch.device) -> _RandomState:
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return torch.get_rng_state(), on_device


def _same_state(a: _RandomState, b: _RandomState) -> bool:
    same_device = a[1] is None or (b[1] is not None and torch.equal(a[1], b[1]))
    return same_device and torch.equal(a[0], b[0])


def _set_random_state(device: torch.device, state: _RandomState) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)


@contextmanager
def _random_state_as(device: torch.device, state: _RandomState) -> Iterator[None]:
    now = _random_state(device)
    _set_random_state(device, state)
    try:
        yield
    finally:
        _set_random_state(device, now)


# -- buffers --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BufferSnapshot:
    """A buffer of a module, and a copy of its contents."""

    module: nn.Module
    name: str
    buffer: Tensor
    copy: Tensor

    @classmethod
    def of(cls, module: nn.Module, name: str) -> BufferSnapshot | None:
        """Copy a buffer; None if it is None."""
        buffer = module._buffers.get(name)
        return None if buffer is None else cls(module, name, buffer, buffer.detach().clone())


_Identity = tuple[Tensor | None, int, int]
"""A buffer, its version, and its storage: `buffer.data = ...` changes only the last."""


class StatefulBuffers:
    """Buffers that a branch changes while it runs (the vectors of a spectral norm, for instance).

    Which ones those are is learned from the first run in each mode; from then on only those are
    copied per call. The others are compared after each run, which copies nothing: one that changes
    later is an error, because its contents before the run are lost.
    """

    def __init__(self, candidates: Sequence[tuple[nn.Module, str]]) -> None:
        self._candidates = list(candidates)
        self._changing: set[int] = set()
        self._modes_seen: set[tuple[bool, ...]] = set()

    def snapshot(self) -> list[BufferSnapshot]:
        """Before a run: copies of the buffers that may change."""
        is_new_mode = bool(self._candidates) and self._modes() not in self._modes_seen
        snapshots = (
            BufferSnapshot.of(module, name)
            for position, (module, name) in enumerate(self._candidates)
            if is_new_mode or position in self._changing
        )
        return [snapshot for snapshot in snapshots if snapshot is not None]

    def identities(self) -> list[_Identity]:
        """Before a run: what tells afterwards whether a buffer has changed."""
        return [_identity(module._buffers.get(name)) for module, name in self._candidates]

    def changed(
        self, snapshots: list[BufferSnapshot], identities: list[_Identity]
    ) -> list[BufferSnapshot]:
        """After a run: the snapshots of the buffers that it changed."""
        if not self._candidates:
            return []
        self._modes_seen.add(self._modes())
        pairs = enumerate(zip(identities, self.identities(), strict=True))
        changed = [p for p, (old, new) in pairs if old[0] is not new[0] or old[1:] != new[1:]]
        self._changing.update(changed)
        known = {(snapshot.module, snapshot.name): snapshot for snapshot in snapshots}
        for module, name in (self._candidates[position] for position in changed):
            if (module, name) not in known:
                raise ModifiedError(
                    f"{type(module).__name__}.forward has changed its buffer {name!r}, which it "
                    "left alone in its first call: the backward pass runs the module again and "
                    "needs what was in the buffer before; let the module write into the buffer "
                    "in every call (the old value, if need be). From the next call on the buffer "
                    "is copied"
                )
        return [known[self._candidates[position]] for position in changed]

    @property
    def is_empty(self) -> bool:
        """Does no buffer change, as far as is known?"""
        return not (self._changing if self._modes_seen else self._candidates)

    def _modes(self) -> tuple[bool, ...]:
        return tuple(module.training for module, _ in self._candidates)

    @contextmanager
    def replay(self, snapshots: list[BufferSnapshot]) -> Iterator[None]:
        """Around the second run: buffers with the contents they had before the first."""
        current = [(s.module, s.name, s.module._buffers[s.name]) for s in snapshots]
        for snapshot in snapshots:
            snapshot.module._buffers[snapshot.name] = snapshot.copy.clone()
        try:
            yield
        finally:
            for module, name, buffer in current:
                module._buffers[name] = buffer


def _identity(buffer: Tensor | None) -> _Identity:
    if buffer is None:
        return None, 0, 0
    storage = buffer.untyped_storage()._cdata if buffer.layout is torch.strided else 0
    return buffer, 0 if buffer.is_inference() else buffer._version, storage


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


# -- one run of a branch --------------------------------------------------------------------------


@dataclass(frozen=True)
class ReplayContext:
    """What a branch touches besides its inputs: batch norms and other stateful buffers."""

    norms: tuple[nn.Module, ...] = ()
    stateful: StatefulBuffers = field(default_factory=lambda: StatefulBuffers(()))


class Replay:
    """Random state, autocast and buffers of one run of a branch, for the second run.

    Created before the first run, which happens in `record()`; `finish()` ends it.
    """

    def __init__(self, branch: ReplayContext, like: Tensor) -> None:
        self.branch = branch
        self.device = like.device
        self.autocast = [
            (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            for device in dict.fromkeys(("cpu", self.device.type))
            if device != "meta"
        ]
        self.autocast_cache = torch.is_autocast_cache_enabled()
        self.masks = Masks() if is_capturing(self.device) else None
        self.random = _random_state(self.device) if self.masks is None else None
        self.buffers = branch.stateful.snapshot()
        self._identities = branch.stateful.identities()
        self.statistics = Statistics()

    @contextmanager
    def record(self) -> Iterator[None]:
        """Around the first run.

        Without autocast's cache, which would hold every cast weight until the model's forward pass
        ends, though a branch reads each once.
        """
        torch.set_autocast_cache_enabled(False)
        try:
            masks = nullcontext() if self.masks is None else self.masks.record()
            with masks, self.statistics.record():
                yield
        finally:
            torch.set_autocast_cache_enabled(self.autocast_cache)

    def finish(self) -> Replay:
        """After the first run: drop the random state if nothing was drawn, and unneeded copies."""
        if self.random is not None and _same_state(self.random, _random_state(self.device)):
            self.random = None
        self.buffers = self.branch.stateful.changed(self.buffers, self._identities)
        self._identities = []
        return self

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Around the second run."""
        with ExitStack() as stack:
            for device, enabled, dtype in self.autocast:
                if enabled or torch.is_autocast_enabled(device):
                    stack.enter_context(
                        torch.autocast(device, dtype, enabled, cache_enabled=self.autocast_cache)
                    )
            if self.random is not None:
                stack.enter_context(_random_state_as(self.device, self.random))
            if self.masks is not None:
                stack.enter_context(self.masks.replay())
            stack.enter_context(self.branch.stateful.replay(self.buffers))
            stack.enter_context(_statistics_frozen(self.branch.norms))
            stack.enter_context(self.statistics.replay())
            yield
