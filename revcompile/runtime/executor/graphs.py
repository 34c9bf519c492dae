"""Running one step again and again: by calling it, or as a CUDA graph that is captured once.

The addresses in a CUDA graph are fixed, the slots of its micro-batches are not. So kernels read the
numbers of slots in rings, which the host writes before each step (`SlotNumbers`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from revcompile.errors import RevcompileError
from revcompile.ir.coupling_ops import seed_of, seeding
from revcompile.runtime.executor.executor import StageExecutor
from revcompile.runtime.executor.messages import Route, Transport
from revcompile.runtime.reversible.overlap import on_side_streams
from revcompile.runtime.stage.slots import Ring
from revcompile.schedule import Schedule
from revcompile.units import format_size


class CaptureUnsupported(RevcompileError):
    """A step does something that a CUDA graph cannot hold."""


Pass = tuple[int, int]
"""A stage, and a micro-batch counted from the one that enters with the step."""
RandomKeys = Callable[[], Mapping[Pass, int]]
"""What the random numbers of each pass of a step are seeded with; few steps draw any."""


Section = Callable[[], None]
"""A part of a step without messages to or from other ranks."""


class EagerReplay:
    """Runs steps of several kinds by calling them: on any device, and open to a debugger.

    All steps of one kind do the same with the same static buffers.
    """

    def plan(
        self, kind: Hashable, sections: Callable[[], Sequence[Section]], keys: RandomKeys
    ) -> Sequence[Section]:
        """What to call instead of a step's sections, in the same order.

        Raises:
            CaptureUnsupported: The step cannot be captured; nothing has been run.
        """
        return sections()

    def is_captured(self, kind: Hashable) -> bool:
        """Whether steps of this kind are replayed, and not called."""
        return False

    def clear(self) -> None:
        """Forget all captured steps."""


@dataclass
class _Capture:
    """The state of one section of a kind of step: warmed up, then captured."""

    draws: list[tuple[Pass, int] | None] | None = None
    """For each seeding of random numbers: what was seeded, if numbers were drawn."""
    graph: Callable[[], None] | None = None
    """Replays it."""
    generators: list[tuple[torch.Generator, Pass, int]] = field(default_factory=list)

    def replay(self, keys: RandomKeys) -> None:
        seeds = keys() if self.generators else {}
        for generator, seeded, piece in self.generators:
            generator.manual_seed(seed_of(seeds[seeded], piece))
        assert self.graph is not None
        self.graph()


class CudaGraphReplay(EagerReplay):
    """A CUDA graph for each section of each kind of step, all in one memory pool.

        1st step of a kind    warm-up: called, which also shows where random numbers are drawn
        2nd                   all its sections are captured, then replayed
        from the 3rd on       replayed

    A graph cannot seed random numbers. Each place that draws some gets a generator of its own,
    which is seeded from the host before the graph is replayed. No other thread draws from it. Only
    during the capture it is the default generator: who draws from that then gets an error of torch.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._captures: dict[Hashable, list[_Capture]] = {}
        self._pool: Any = None

    def is_captured(self, kind: Hashable) -> bool:
        captures = self._captures.get(kind)
        return captures is not None and all(capture.graph is not None for capture in captures)

    def clear(self) -> None:
        self._captures.clear()

    def plan(
        self, kind: Hashable, sections: Callable[[], Sequence[Section]], keys: RandomKeys
    ) -> Sequence[Section]:
        """Warm up; or capture, and replay."""
        if not self.is_captured(kind):
            called = sections()
            captures = self._captures.setdefault(kind, [_Capture() for _ in called])
            pairs = list(zip(captures, called, strict=True))
            if any(capture.draws is None for capture in captures):
                return [partial(self._warm_up, *pair, keys) for pair in pairs]
            for capture, section in pairs:
                self._capture(capture, section)
        return [partial(capture.replay, keys) for capture in self._captures[kind]]

    def _default_generator(self) -> torch.Generator:
        index = self.device.index
        return torch.cuda.default_generators[index if index is not None else 0]

    def _warm_up(self, capture: _Capture, section: Section, keys: RandomKeys) -> None:
        """Call the section. A piece draws random numbers if it advances the generator."""
        passes = {key: seeded for seeded, key in keys().items()}
        seeded: list[tuple[Pass, int]] = []
        has_drawn: list[bool] = []
        generator = self._default_generator()

        def end_piece() -> None:
            if len(has_drawn) < len(seeded):
                has_drawn.append(generator.get_offset() > 0)

        def seeder(key: int, piece: int) -> None:
            end_piece()
            seeded.append((passes[key], piece))
            torch.manual_seed(seed_of(key, piece))

        with torch.random.fork_rng([self.device]), seeding(seeder), on_side_streams():
            section()
            end_piece()
        pieces = zip(seeded, has_drawn, strict=True)
        capture.draws = [entry if drew else None for entry, drew in pieces]

    def _capture(self, capture: _Capture, section: Section) -> None:
        generators = [
            (torch.Generator(self.device), *draw) if draw is not None else None
            for draw in capture.draws or ()
        ]
        capture.generators = [entry for entry in generators if entry is not None]
        default, entries = self._default_generator(), iter(generators)
        state = default.graphsafe_get_state()
        default.graphsafe_set_state(state.clone_state())  # a capture that fails would keep it

        def seeder(key: int, piece: int) -> None:
            entry = next(entries)
            if entry is not None:
                default.graphsafe_set_state(entry[0])

        try:
            with seeding(seeder):
                capture.graph = self._graph_of(section, [g for g, *_ in capture.generators])
        except Exception as error:
            raise CaptureUnsupported(f"{type(error).__name__}: {error}") from error
        finally:
            default.graphsafe_set_state(state)

    def _graph_of(
        self, section: Section, generators: Iterable[torch.Generator]
    ) -> Callable[[], None]:
        """Replays the section, which has been run without effect.

        Args:
            generators: Those that it draws from, besides the default one.
        """
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        for each in generators:
            graph.register_generator_state(each)
        context = torch.cuda.graph(graph, self._pool, capture_error_mode="thread_local")
        try:
            with context:
                section()
        except BaseException:
            # A capture that fails leaves its stream current, and the pool in use.
            torch.cuda.set_stream(stream)
            self._pool = None
            raise
        finally:
            # A capture begins with kernels of its own, which write the generators' seeds. A replay
            # writes them again on the current stream, and a failed capture frees their memory.
            assert context.capture_stream is not None
            stream.wait_stream(context.capture_stream)
        return graph.replay


def missing_memory(copied: Any, snapshots: int, device: torch.device) -> str | None:
    """Why captured steps would not fit into the device's memory; None if they do.

    They need copies of what a step is given, and twice what one step allocates for itself: in the
    ordinary pool during the warm-up, and in the pool of the graphs.

    Args:
        snapshots: Bytes that updates copy to be able to restore them.
    """
    if device.type != "cuda":
        return None
    allocated = torch.cuda.memory_allocated(device)
    transient = torch.cuda.max_memory_allocated(device) - allocated
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - allocated
    tensors = (leaf for leaf in pytree.tree_leaves(copied) if isinstance(leaf, Tensor))
    copies = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    need = copies + 2 * (transient + snapshots)
    if need <= free:
        return None
    return f"they need about {format_size(need)} more, but {format_size(free)} are free"


# -- slots of a step ------------------------------------------------------------------------------


class SlotNumbers:
    """Those of the rings of stages, and of messages on some routes."""

    def __init__(
        self, executors: Sequence[StageExecutor], transport: Transport, device: torch.device
    ) -> None:
        self._executors, self._transport, self._device = executors, transport, device
        self.clear()

    def clear(self) -> None:
        """Let go of all rings."""
        self._rings: list[tuple[Ring, Route | None, int]] = []
        """Each with its route, if it has one, and its stage."""
        self._numbers = torch.empty(0, 2, device=self._device)
        """For each ring where a step writes, and where it reads; the last is for `row`."""

    def follow_rings(self) -> None:
        """Take over the rings there are."""
        found = [
            *((executor.stage.ring, None, executor.index) for executor in self._executors),
            *((each.ring, route, route[1]) for route, each in self._transport.slots.items()),
        ]
        self._rings = [(ring, route, stage) for ring, route, stage in found if ring is not None]
        numbers = torch.zeros(len(self._rings) + 1, 2, dtype=torch.int64)
        self._numbers = numbers.to(self._device)

    def set(self, schedule: Schedule, due: Mapping[int, int], row: int) -> None:
        """Before a step.

        Args:
            due: By stage, the micro-batch of its backward pass.
            row: See there.
        """
        updates, places = schedule.updates, []
        for ring, route, stage in self._rings:
            new, old = schedule.injected, due[stage]
            if route is not None:
                new, old = updates[route[0]], updates[route[1]]
            places.append((new % ring.count, old % ring.count))
        places.append((row, 0))
        self._numbers.copy_(torch.tensor(places), non_blocking=True)

    @property
    def row(self) -> Tensor:
        """In which row a step writes its flags."""
        return self._numbers[-1, :1]

    def begin_step(self) -> None:
        """Have rings read their numbers on the device."""
        for (ring, *_), (new, old) in zip(self._rings, self._numbers, strict=False):
            ring.ends = new.reshape(1), old.reshape(1)

    def end_step(self) -> None:
        for ring, *_ in self._rings:
            ring.ends = None
