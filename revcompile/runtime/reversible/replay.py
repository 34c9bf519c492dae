"""Running a branch a second time exactly as the first: same random numbers, dtypes and buffers.

Dropout masks, autocast and buffers are those of the first run. Batch norms leave their running
statistics alone: these move once per step, however often a branch runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch._C import _len_torch_function_stack
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import _has_any_global_hook
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode

from revcompile.errors import InputError, ModifiedError
from revcompile.ir import ops
from revcompile.ir.random_numbers import RandomReads, random_reads
from revcompile.ir.types import Segment
from revcompile.runtime.reversible.bindings import filled

_NOTHING: Final = nullcontext()


def is_capturing(device: torch.device) -> bool:
    """Whether the caller is capturing a CUDA graph. Then nothing may wait for the device."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


# -- random numbers -------------------------------------------------------------------------------

_DRAWING: Final = frozenset(
    (
        *("bernoulli", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like"),
        *("bernoulli_", "exponential_", "normal_", "random_", "uniform_"),
    )
)
"""Operations whose result is the random numbers themselves."""


class Masks(TorchDispatchMode):
    """The random tensors that one run of a branch drew, in order: saves what is drawn inside.

    While a CUDA graph is captured, a generator's state can be neither read nor set, so the numbers
    themselves are saved. Stochastic depth draws one per sample, which is little. Dropout draws one
    per element, inside kernels that do not return them, and is refused.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._drawn: list[Tensor] = []
        self._saved: Iterator[Tensor] | None = None

    def replay(self) -> AbstractContextManager[Any]:
        """Return what was saved instead of drawing."""
        self._saved = iter(self._drawn)
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _draws(func, args, kwargs):
            return func(*args, **kwargs)
        if self._saved is not None:
            saved = next(self._saved)
            return args[0].copy_(saved) if func._schema.is_mutable else saved.clone()
        out = func(*args, **kwargs)
        self._drawn.append(out.clone())
        return out


def _draws(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an operation draws random numbers. Raises if they cannot be saved."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":  # of attention
            given = args[position] if position < len(args) else argument.default_value
            if kwargs.get("dropout_p", given) == 0.0:
                return False
    name = func.overloadpacket.__name__
    if name not in _DRAWING:
        raise InputError(
            f"reversify: a CUDA graph is captured of a branch with {name}, whose random numbers "
            "cannot be repeated in backward there; set the dropout rate to 0 (stochastic depth "
            "may stay), or do not capture the step"
        )
    return True


RandomStates = tuple[Tensor, ...]
"""The states of generators as int64: bytes take five times as long to compare."""


def default_generators(device: torch.device) -> tuple[torch.Generator, ...]:
    """The generators that layers on a device may draw from; the device's own is the last."""
    if device.type != "cuda":
        return (torch.default_generator,)
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.default_generator, torch.cuda.default_generators[index]


def random_states(generators: Iterable[torch.Generator]) -> RandomStates:
    return tuple(generator.get_state().view(torch.int64) for generator in generators)


def _set_random_states(generators: Iterable[torch.Generator], states: RandomStates) -> None:
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state.view(torch.uint8))


class DrawCheck:
    """Refuses second runs of a branch that have not drawn the random numbers of the first.

    All threads of a process draw from the same default generators. If another one draws during one
    of the runs, that run gets other numbers, and leaves the generators in other states. If the
    branch itself draws nothing, this does no harm. Runs that leave a generator in equal states show
    whether the branch draws from it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._draws: dict[int, bool] = {}
        """Whether the branch draws, by generator. The default: only from that of its device."""

    def has_drawn(self, before: RandomStates, after: RandomStates) -> bool:
        """Whether a first run has drawn anything."""
        is_same = list(map(torch.equal, before, after))
        for position in (position for position, same in enumerate(is_same) if same):
            self._draws.setdefault(position, False)
        return not all(is_same)

    def compare(
        self, start: Callable[[], RandomStates], first: RandomStates, second: RandomStates
    ) -> None:
        """Compare the states after two runs that began in the same state."""
        for position, (one, other) in enumerate(zip(first, second, strict=True)):
            if torch.equal(one, other):
                if not self._draws.get(position):
                    self._draws[position] = not torch.equal(one, start()[position])
            elif any(torch.equal(state, start()[position]) for state in (one, other)):
                self._draws[position] = False
            elif self._draws.get(position, position == len(first) - 1):
                raise ModifiedError(
                    f"{self._name}: the backward pass has not drawn the random numbers of the "
                    "forward pass again. Most likely another thread, which loads data or trains, "
                    "draws from torch's default generator at the same time; let it draw from a "
                    "torch.Generator of its own, or in another process (DataLoader with "
                    "num_workers). Hooks that draw, and layers that draw more or less depending on "
                    "their values, do the same"
                )


# -- buffers --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BufferSnapshot:
    """A buffer of a module, and a copy of its contents."""

    module: nn.Module
    name: str
    buffer: Tensor
    copy: Tensor


def restore_buffers(snapshots: Iterable[BufferSnapshot]) -> None:
    """Restore buffers and their contents.

    Writes to `.data`, as batch norm does: graphs in flight may have saved these buffers, and
    autograd would refuse to use them after a write that it sees.
    """
    for saved in snapshots:
        saved.buffer.data.copy_(saved.copy)
        saved.module._buffers[saved.name] = saved.buffer


_Identity = tuple[Tensor | None, int, torch.UntypedStorage | None]
"""A buffer, its version, and its storage: `buffer.data = ...` changes only the last.

The storage is held: a new one could otherwise have the address of one that was freed.
"""


class StatefulBuffers:
    """Buffers that a branch changes while it runs (the vectors of a spectral norm, for instance).

    The first run in each mode shows which ones change; from then on only those are copied per call.
    Versions of the others are compared after each run: one that changes later is an error, because
    its contents before the run are lost.
    """

    def __init__(self, candidates: Sequence[tuple[nn.Module, str]]) -> None:
        self._candidates = list(candidates)
        self._changing: set[tuple[nn.Module, str]] = set()
        self._modes_seen: set[tuple[bool, ...]] = set()

    @staticmethod
    def of(modules: Iterable[nn.Module]) -> StatefulBuffers:
        """All buffers of these modules but those of batch norms."""
        others = (module for module in modules if not isinstance(module, _BatchNorm))
        present = ((m, n) for m in others for n, buffer in m._buffers.items() if buffer is not None)
        return StatefulBuffers(list(present))

    @property
    def has_candidates(self) -> bool:
        """Whether the branch has any buffers besides those of batch norms."""
        return bool(self._candidates)

    @property
    def are_known(self) -> bool:
        """Whether a run in the modes of now has shown which buffers change."""
        return not self._candidates or self._modes() in self._modes_seen

    @property
    def may_compile(self) -> bool:
        """Whether a compiled run can be differentiated.

        What torch.compile computes again in backward it computes from the changed buffers.
        """
        return self.are_known and not self._changing

    def snapshot(self) -> list[BufferSnapshot]:
        """Copies of the buffers that may change in the next run."""
        if not self._candidates:  # most branches have none
            return []
        is_known = self._modes() in self._modes_seen
        slots = (s for s in self._candidates if not is_known or s in self._changing)
        present = ((module, name, module._buffers.get(name)) for module, name in slots)
        return [BufferSnapshot(m, n, b, b.detach().clone()) for m, n, b in present if b is not None]

    @contextmanager
    def recorded(self) -> Iterator[list[BufferSnapshot]]:
        """A context for a run; its list gets copies, from before it, of the buffers it changed."""
        found: list[BufferSnapshot] = []
        copies = {(copy.module, copy.name): copy for copy in self.snapshot()}
        before = {slot: _identity(*slot) for slot in self._candidates}
        yield found
        changed = {slot for slot in before if not _is_same(before[slot], _identity(*slot))}
        if (modes := self._modes()) not in self._modes_seen:  # all have been copied
            self._modes_seen.add(modes)
            changed |= {slot for slot, copy in copies.items() if _has_moved(copy)}
        self._changing |= changed
        for module, name in (s for s in self._candidates if s in changed and s not in copies):
            raise ModifiedError(
                f"{type(module).__name__}.forward has changed its buffer {name!r}, which it "
                "left alone in its first call: the backward pass runs the module again and "
                "needs what was in the buffer before; let the module write into the buffer "
                "in every call (the old value, if need be). From the next call on the buffer "
                "is copied"
            )
        found += (copy for slot, copy in copies.items() if slot in self._changing)

    @property
    def have_changed(self) -> bool:
        """Whether any run has changed a buffer."""
        return bool(self._changing)

    def _modes(self) -> tuple[bool, ...]:
        return tuple(module.training for module, _ in self._candidates)

    def replay(self, snapshots: list[BufferSnapshot]) -> AbstractContextManager[None]:
        """A context for the second run: buffers have the contents of before the first run."""
        return filled([((s.module._buffers, s.name), s.copy.clone()) for s in snapshots])


def _has_moved(snapshot: BufferSnapshot) -> bool:
    """Whether contents differ: versions miss writes to `.data`, and those of batch norms in C++."""
    copy, buffer = snapshot.copy, snapshot.buffer
    is_plain = copy.layout is torch.strided and not copy.is_meta and not is_capturing(copy.device)
    return is_plain and not torch.equal(copy, buffer)


def _identity(module: nn.Module, name: str) -> _Identity:
    if (buffer := module._buffers.get(name)) is None:
        return None, 0, None
    storage = buffer.untyped_storage() if buffer.layout is torch.strided else None
    return buffer, 0 if buffer.is_inference() else buffer._version, storage


def _is_same(old: _Identity, new: _Identity) -> bool:
    storages = [None if identity[2] is None else identity[2]._cdata for identity in (old, new)]
    return old[0] is new[0] and old[1] == new[1] and storages[0] == storages[1]


_scratch: Final = dict[Any, Tensor]()


def _scratch_statistics(norms: Sequence[_BatchNorm]) -> list[tuple[Any, Tensor]]:
    """Tensors in place of the running statistics of norms, for values that nobody reads."""
    found: list[tuple[Any, Tensor]] = []
    for position, norm in enumerate(norms):
        for name, buffer in norm._buffers.items():
            if buffer is None:
                continue
            key = position, name, buffer.shape, buffer.dtype, buffer.device
            if key not in _scratch or is_capturing(buffer.device):
                _scratch[key] = torch.zeros_like(buffer)
            found.append(((norm._buffers, name), _scratch[key]))
    return found


# -- autocast --------------------------------------------------------------------------------------


@contextmanager
def without_autocast_cache() -> Iterator[None]:
    """Disable autocast's cache, which would hold every cast weight until the forward pass ends."""
    is_caching = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(is_caching)


def _computed_weights_not_cached() -> AbstractContextManager[None]:
    """Disable the cache of `parametrize.cached()`: in it, weights of forward have no graph."""
    if not parametrize._cache_enabled:
        return _NOTHING
    return filled([((vars(parametrize), "_cache_enabled"), 0)])


# -- one run of a branch --------------------------------------------------------------------------


class ReplayContext(NamedTuple):
    """What a branch touches besides its inputs: batch norms, other buffers, random numbers."""

    norms: list[_BatchNorm]
    random: RandomReads
    stateful: StatefulBuffers
    draws: DrawCheck

    @staticmethod
    def of(segment: Segment, root: nn.Module, modules: Sequence[nn.Module]) -> ReplayContext:
        """The context of a coupling's branch, or of another segment, which runs these modules."""
        norms = [module for module in modules if isinstance(module, _BatchNorm)]
        random, draws = random_reads(segment.graph, root), DrawCheck(f"block {segment.name}")
        return ReplayContext(norms, random, StatefulBuffers.of(modules), draws)


class Surroundings:
    """The state in which the branches of a chain run in one call: autocast and random numbers.

    A call draws nothing between two branches, so the random state after one is the state before the
    next that may draw. (If another thread draws there, `DrawCheck` finds the next one disturbed.)
    """

    def __init__(self, device: torch.device) -> None:
        kinds = [kind for kind in dict.fromkeys(("cpu", device.type)) if kind != "meta"]
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in kinds
        ]
        self.captures = is_capturing(device)
        self.is_observed = _has_any_global_hook() or bool(_len_torch_function_stack())
        """Whether global hooks or function modes run: they may draw random numbers, too."""
        self.generators = () if self.captures else default_generators(device)
        self.random: RandomStates | None = None
        """The random state after the latest run that may draw."""

    def autocast(self) -> list[AbstractContextManager[Any]]:
        """Contexts that restore autocast; none if it was off and is off."""
        if not any(on or torch.is_autocast_enabled(kind) for kind, _, on in self._autocast):
            return []
        return [torch.autocast(*state, cache_enabled=False) for state in self._autocast]


class Replay:
    """Random state, autocast and buffers of one run of a branch, for the second run.

    The first run is inside `record()`, the second inside `again()`. The second is like the first,
    except that batch norms do not update running statistics.
    """

    def __init__(self, branch: ReplayContext, around: Surroundings, has_hooks: bool = True) -> None:
        self._branch, self._around = branch, around
        is_observed = has_hooks or around.is_observed
        self._may_draw = not around.captures and (is_observed or branch.random.may_draw)
        self._masks = Masks() if around.captures else None
        self._random: tuple[RandomStates, RandomStates] | None = None
        self._buffers: list[BufferSnapshot] = []

    @contextmanager
    def record(self) -> Iterator[None]:
        """A context for the first run; saves random states if it drew, and changed buffers."""
        stateful = self._branch.stateful
        around, before = self._around, self._around.random
        if self._may_draw:
            before = before or random_states(around.generators)
        recorded: AbstractContextManager[list[BufferSnapshot]] = nullcontext([])
        if stateful.has_candidates:
            recorded = stateful.recorded()
        with (
            recorded as self._buffers,
            self._masks or _NOTHING,
            _computed_weights_not_cached(),
        ):
            yield
        if self._may_draw and before is not None:
            around.random = after = random_states(around.generators)
            self._random = (before, after) if self._branch.draws.has_drawn(before, after) else None

    @contextmanager
    def again(self, is_compiled: bool = False) -> Iterator[None]:
        """A context for the second run.

        A compiled run is the same artifact only if batch norms update statistics: other ones.
        """
        norms = [n for n in self._branch.norms if n.training and n.track_running_stats]
        contexts = [*self._around.autocast(), _computed_weights_not_cached()]
        if self._random is not None:
            contexts.append(self._drawing_again(*self._random))
        if self._masks is not None:
            contexts.append(self._masks.replay())
        if self._buffers:
            contexts.append(self._branch.stateful.replay(self._buffers))
        if is_compiled:  # as in forward: it is a guard
            contexts.append(without_autocast_cache())
        if norms and is_compiled:
            contexts.append(filled(_scratch_statistics(norms)))
        elif norms:
            contexts.append(filled([((vars(n), "track_running_stats"), False) for n in norms]))
        frozen = ops.statistics_frozen.set(True)
        try:
            with ExitStack() as stack:
                for context in contexts:
                    stack.enter_context(context)
                yield
        finally:
            ops.statistics_frozen.reset(frozen)

    @contextmanager
    def _drawing_again(self, before: RandomStates, after: RandomStates) -> Iterator[None]:
        generators = self._around.generators
        now = random_states(generators)
        _set_random_states(generators, before)
        try:
            yield
            again = random_states(generators)
        finally:
            _set_random_states(generators, now)
        self._branch.draws.compare(lambda: before, after, again)
