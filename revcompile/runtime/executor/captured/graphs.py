"""Running a round again and again: by calling it, or as a CUDA graph recorded once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from revcompile.errors import RevcompileError
from revcompile.ir.stage_ops import seed_of, seeding

__all__ = ["CaptureUnsupported", "CudaGraphs", "Direct", "Keys", "Recorder"]


class CaptureUnsupported(RevcompileError):
    """A round does something that a graph cannot hold."""


Place = tuple[int, int]
"""A stage, and a micro-batch counted from the one that enters in this round."""
Keys = Mapping[Place, int]
"""What the random numbers of each stage and micro-batch of a round depend on."""


class Recorder(Protocol):
    """Runs rounds of one kind, each kind under a key."""

    def run(self, kind: Hashable, body: Callable[[], None], keys: Keys) -> None:
        """Run a round: by calling `body`, or by repeating what it did."""
        ...

    def is_known(self, kind: Hashable) -> bool:
        """Can this kind be run without calling anything?"""
        ...

    def forget(self) -> None:
        """Everything recorded is void."""
        ...


class Direct:
    """Calls the round each time: what is recorded elsewhere, one can step through here."""

    def run(self, kind: Hashable, body: Callable[[], None], keys: Keys) -> None:
        """Call it."""
        body()

    def is_known(self, kind: Hashable) -> bool:
        """No: it is called."""
        return False

    def forget(self) -> None:
        """There is nothing."""


@dataclass
class _Recorded:
    """One kind of round: the pieces that drew random numbers, then its graph."""

    draws: list[tuple[Place, int] | None] = field(default_factory=list)
    """For every time a piece is seeded: who, if it draws anything."""
    graph: torch.cuda.CUDAGraph | None = None
    generators: list[tuple[torch.Generator, Place, int]] = field(default_factory=list)


class CudaGraphs:
    """One CUDA graph for each kind of round, all in one pool of memory.

    A kind's first round is called, which warms everything up and shows which pieces draw random
    numbers; the second is recorded; from then on the graph runs.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._found: dict[Hashable, _Recorded] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def is_known(self, kind: Hashable) -> bool:
        """Is there a graph?"""
        return kind in self._found and self._found[kind].graph is not None

    def forget(self) -> None:
        """Drop all graphs."""
        self._found.clear()

    def run(self, kind: Hashable, body: Callable[[], None], keys: Keys) -> None:
        """Call, record or repeat a round."""
        if kind not in self._found:
            self._found[kind] = _Recorded(self._warm_up(body, keys))
            return
        found = self._found[kind]
        if found.graph is None:
            self._record(found, body)
        for generator, place, piece in found.generators:
            generator.manual_seed(seed_of(keys[place], piece))
        assert found.graph is not None
        found.graph.replay()

    def _default(self) -> torch.Generator:
        index = self.device.index
        return torch.cuda.default_generators[index if index is not None else 0]

    def _warm_up(self, body: Callable[[], None], keys: Keys) -> list[tuple[Place, int] | None]:
        """Call the round; who drew random numbers is seen by how far the generator got."""
        places = {key: place for place, key in keys.items()}
        seeded: list[tuple[Place, int]] = []
        drew: list[bool] = []
        generator = self._default()

        def look() -> None:
            if len(drew) < len(seeded):
                drew.append(generator.get_offset() > 0)

        def seeder(key: int, piece: int) -> None:
            look()
            seeded.append((places[key], piece))
            torch.manual_seed(seed_of(key, piece))

        with torch.random.fork_rng([self.device]), seeding(seeder):
            body()
            look()
        return [who if has else None for who, has in zip(seeded, drew, strict=True)]

    def _record(self, found: _Recorded, body: Callable[[], None]) -> None:
        graph = torch.cuda.CUDAGraph()
        generators = [
            (torch.Generator(self.device), *who) if who is not None else None for who in found.draws
        ]
        for entry in generators:
            if entry is not None:
                graph.register_generator_state(entry[0])
        default, count = self._default(), itertools.count()
        before = default.graphsafe_get_state()
        default.graphsafe_set_state(before.clone_state())  # a recording that fails would keep it

        def seeder(key: int, piece: int) -> None:
            entry = generators[next(count)]
            if entry is not None:
                default.graphsafe_set_state(entry[0])

        stream = torch.cuda.current_stream(self.device)
        recording = torch.cuda.graph(graph, self._pool, capture_error_mode="thread_local")
        try:
            with seeding(seeder), recording:
                body()
        except Exception as error:
            torch.cuda.set_stream(stream)  # which a recording that fails does not do
            self._pool = torch.cuda.graph_pool_handle()  # the old one may still be recorded to
            raise CaptureUnsupported(f"{type(error).__name__}: {error}") from error
        finally:
            default.graphsafe_set_state(before)
        found.graph = graph
        found.generators = [entry for entry in generators if entry is not None]
