"""Runs one step again and again: by calling it, or as a CUDA graph that is captured once.

The addresses in a CUDA graph are fixed, but its micro-batches are in other slots in each step. So
kernels read the slot numbers of rings from the device. The host writes them there before each step
(`SlotNumbers`).
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
    """A step cannot be captured: a CUDA graph cannot hold it, or memory is short."""


Pass = tuple[int, int]
"""A stage, and a micro-batch relative to the one that enters in the step."""
RandomKeys = Callable[[], Mapping[Pass, int]]
"""Returns the keys that seed the random numbers of a step's passes; few steps draw any."""


Section = Callable[[], None]
"""A part of a step without messages to or from other ranks."""


class EagerReplay:
    """Runs steps of several kinds by calling them, on any device and visible to a debugger.

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
        """Whether steps of this kind are replayed instead of called."""
        return False

    def clear(self) -> None:
        """Forget all captured steps."""


@dataclass
class _Capture:
    """The state of one section of a kind of step: warmed up, then captured."""

    draws: list[tuple[Pass, int] | None] | None = None
    """For each seeding of random numbers: the pass and the piece; None if it drew no numbers."""
    graph: Callable[[], None] | None = None
    """Replays the section."""
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

    A graph cannot seed random numbers. Each piece that draws numbers gets its own generator, which
    the host seeds before each replay. No other thread draws from it, except during the capture,
    when it serves as the default generator: a thread that draws then gets an error from torch.
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
        """What to call instead: the warm-up, or a replay. Captures at the second call of a kind."""
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
        """Call the section; pieces that advance the generator are noted as drawing numbers."""
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
        default.graphsafe_set_state(state.clone_state())  # a failed capture would keep the original

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
        """Capture the section; returns the replay. Kernels do not run during the capture.

        Args:
            generators: Generators that the section draws from, besides the default one.
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
            # A capture begins with kernels that write the generators' seeds. The current stream
            # waits for them: a replay writes the seeds again, a failed capture frees their memory.
            assert context.capture_stream is not None
            stream.wait_stream(context.capture_stream)
        return graph.replay


def missing_memory(copied: Any, snapshots: int, device: torch.device) -> str | None:
    """Why captured steps would not fit into the device's memory; None if they do.

    They need copies of a step's inputs and messages, and twice the memory that one step allocates:
    in the ordinary pool during the warm-up, and in the pool of the graphs.

    Args:
        copied: Inputs and messages that are copied to static buffers.
        snapshots: Bytes that an update copies in order to restore them if its flag is set.
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
    """Slot numbers for the rings of stages, and of messages on some routes, on the device."""

    def __init__(
        self, executors: Sequence[StageExecutor], transport: Transport, device: torch.device
    ) -> None:
        self._executors, self._transport, self._device = executors, transport, device
        self.clear()

    def clear(self) -> None:
        """Drop all rings."""
        self._rings: list[tuple[Ring, Route | None, int]] = []
        """Each ring, its route if it is for messages, and its stage."""
        self._numbers = torch.zeros((0, 2), dtype=torch.int64, device=self._device)
        """For each ring, the slots that a step writes and reads; the last entry is for `row`."""

    def follow_rings(self) -> None:
        """Use the rings that exist now."""
        found = [
            *((executor.stage.ring, None, executor.index) for executor in self._executors),
            *((each.ring, route, route[1]) for route, each in self._transport.slots.items()),
        ]
        self._rings = [(ring, route, stage) for ring, route, stage in found if ring is not None]
        numbers = torch.zeros(len(self._rings) + 1, 2, dtype=torch.int64)
        self._numbers = numbers.to(self._device)

    def set(self, schedule: Schedule, due: Mapping[int, int], row: int) -> None:
        """Write the numbers for a step, before it runs.

        Args:
            due: By stage, the micro-batch of its backward pass.
            row: The value of the property `row`.
        """
        updates, places = schedule.updates, []
        for ring, route, stage in self._rings:
            new, old = schedule.injected, due[stage]
            if route is not None:
                new, old = updates[route[0]], updates[route[1]]
            places.append((new % ring.count, old % ring.count))
        places.append((row, 0))
        self._numbers.copy_(torch.tensor(places, dtype=torch.int64), non_blocking=True)

    @property
    def row(self) -> Tensor:
        """The row to which a step writes its flags."""
        return self._numbers[-1, :1]

    def begin_step(self) -> None:
        """Have rings read their numbers on the device."""
        for (ring, *_), (new, old) in zip(self._rings, self._numbers, strict=False):
            ring.ends = new.reshape(1), old.reshape(1)

    def end_step(self) -> None:
        for ring, *_ in self._rings:
            ring.ends = None
