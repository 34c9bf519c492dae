"""What stages keep of the micro-batches in flight, and how it gets to where a round reads it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from revcompile.runtime.executor.captured.static_buffers import StaticBuffers

__all__ = ["Ring", "RingBuffers", "Side", "SideStream"]


class Ring:
    """One stage's micro-batches; a round reads the oldest, adds the next.

    Which slot that is changes from round to round, and a recorded round cannot: it reads a copy in
    `due`. With two of those one can be filled while a round reads the other.
    """

    def __init__(self, like: Any, count: int, turns: int = 1) -> None:
        self.slots = [StaticBuffers(like) for _ in range(count)]
        self.dues = [StaticBuffers(like) for _ in range(turns)]

    def slot(self, microbatch: int) -> StaticBuffers:
        """Where a micro-batch is kept."""
        return self.slots[microbatch % len(self.slots)]

    def due(self, turn: int) -> StaticBuffers:
        """Where a round of this turn reads."""
        return self.dues[turn % len(self.dues)]

    def oldest(self, entering: int) -> int:
        """The micro-batch that a round reads."""
        return entering - len(self.slots)

    def lend(self, entering: int, turn: int) -> None:
        """The round in which a micro-batch enters reads the oldest one."""
        self.due(turn).fill(self.slot(self.oldest(entering)).value)


class Side(Protocol):
    """A second queue of work for a device, beside the one in use."""

    def mark(self) -> Any:
        """A moment in the queue in use."""
        ...

    def wait(self, moment: Any) -> None:
        """The queue in use goes on after that moment of the other."""
        ...

    def follow(self, moment: Any) -> None:
        """The other goes on after that moment of the queue in use."""
        ...

    def beside(self) -> AbstractContextManager[Any]:
        """What is asked for inside goes to the other queue; `mark` is a moment there."""
        ...


class SideStream:
    """A CUDA stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def mark(self) -> torch.cuda.Event:
        """A moment of the current stream."""
        moment = torch.cuda.Event()
        moment.record(torch.cuda.current_stream(self._stream.device))
        return moment

    def wait(self, moment: torch.cuda.Event) -> None:
        """The current stream waits."""
        torch.cuda.current_stream(self._stream.device).wait_event(moment)

    def follow(self, moment: torch.cuda.Event) -> None:
        """This stream waits."""
        self._stream.wait_event(moment)

    def beside(self) -> AbstractContextManager[Any]:
        """Work for this stream."""
        return torch.cuda.stream(self._stream)


class RingBuffers:
    """Carries what is due from the rings to the rounds, and what is new from rounds to rings.

    With a `side` both run beside rounds: while round e runs, what is due in round e + 1 is brought
    to where that one reads, and what round e - 1 has left is put into its slot. Rounds in a row
    then have to leave what is new at different places.
    """

    def __init__(self, rings: Mapping[int, Ring], side: Side | None = None) -> None:
        self._rings, self._side = rings, side
        self._ready: Any = None
        """When what the next round reads is there."""
        self._last: Any = None
        """When all that was asked for so far is done."""

    def bring(self, entering: int, turn: int) -> None:
        """Before a round: what it reads is there."""
        if self._side is not None and self._ready is not None:
            self._side.wait(self._ready)
            self._ready = None
            return
        for ring in self._rings.values():
            ring.lend(entering, turn)
        if self._side is not None:
            self._side.follow(self._side.mark())

    def take(self, entering: int, turn: int, fresh: Mapping[int, Any]) -> None:
        """After a round: what it has left is kept, and the next round's is on its way."""
        rings, side = self._rings, self._side
        if side is None:
            self._keep(entering, fresh)
            return
        over = side.mark()
        with side.beside():
            # Its place was read by the round before this one; a slot that is filled only now waits.
            for ring in rings.values():
                if ring.oldest(entering + 1) < entering:
                    ring.lend(entering + 1, 1 - turn)
            side.follow(over)
            for stage, ring in rings.items():
                if ring.oldest(entering + 1) == entering:
                    ring.due(1 - turn).fill(fresh[stage])
            self._ready = side.mark()
            self._keep(entering, fresh)
            self._last = side.mark()

    def stop(self) -> None:
        """Everything lies in the rings, for whoever comes next in the queue in use."""
        if self._side is not None and self._last is not None:
            self._side.wait(self._last)
        self._ready = self._last = None

    def _keep(self, entering: int, fresh: Mapping[int, Any]) -> None:
        for stage, kept in fresh.items():
            self._rings[stage].slot(entering).fill(kept)
