"""What stops a run on all ranks: a rank that is gone, hangs, or failed."""

from __future__ import annotations

import contextlib
import itertools
import re
import threading
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

from torch import distributed
from torch.distributed import distributed_c10d

__all__ = ["Alarm", "LivenessCheck", "RootCause", "own_store", "told"]

Answer = TypeVar("Answer")

_runs: Final = itertools.count()
_KEY: Final = "cause"
_PERIOD: Final = 0.5
"""Seconds between two looks at the store."""


class Alarm:
    """The first cause of a failure, and what wakes those who wait.

    Threads that receive report here; the main thread waits here.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.cause: str | None = None
        self._news = 0
        self._seen = 0

    def arrived(self) -> None:
        """Something has come in: whoever waits looks again."""
        with self.changed:
            self._news += 1
            self.changed.notify_all()

    def sound(self, cause: str) -> bool:
        """Stop everybody here; False if something else was the cause already."""
        with self.changed:
            is_first = self.cause is None
            if is_first:
                self.cause = cause
            self.changed.notify_all()
            return is_first

    def sounded(self, timeout: float) -> bool:
        """Is there an alarm, now or before long?"""
        with self.changed:
            return self.changed.wait_for(lambda: self.cause is not None, timeout)

    def wait(self, timeout: float) -> bool:
        """Until something has come in since the last time, or the alarm; False if neither."""
        with self.changed:
            woken = self.changed.wait_for(
                lambda: self.cause is not None or self._news > self._seen, timeout
            )
            self._seen = self._news
            return woken


class RootCause:
    """The cause all ranks agree on: the first that any of them has put down in the store.

    A rank that stops says why before its connections close. So whoever finds it gone learns what it
    followed, and what comes first is never a consequence. All look now and then.
    """

    def __init__(self, store: Any, heard: Callable[[str], object]) -> None:
        self._store, self._heard = store, heard
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def agree(self, cause: str, limit: float) -> str | None:
        """The first cause, this one if there was none; None if the store does not answer."""
        # One call that waits for the answer: the cause is there when it returns.
        found = _answer(lambda: self._store.compare_set(_KEY, "", cause), limit)
        return None if found is None else found.decode()

    def stay(self) -> None:
        """Give the others the time to look: the store may end with this process."""
        time.sleep(2 * _PERIOD)

    def close(self, timeout: float) -> bool:
        """Look no more; False if the thread does not come back."""
        self._over.set()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _watch(self) -> None:
        with contextlib.suppress(Exception):  # a store that is gone tells nothing any more
            while not self._over.wait(_PERIOD):
                if self._store.check([_KEY]):
                    self._heard(self._store.get(_KEY).decode())
                    return


class LivenessCheck:
    """Who is still there when nothing moves any more: each rank that gives up says so.

    Ranks wait for each other in a row; the one that hangs is the one that does not answer.
    """

    def __init__(self, store: Any, rank: int, world: int) -> None:
        self._store, self._rank, self._world = store, rank, world

    def missing(self, grace: float) -> set[int]:
        """The ranks that have not said so after a while; none if the store does not answer."""

        def ask() -> set[int]:
            self._store.set(f"here/{self._rank}", "yes")
            time.sleep(grace)
            return {r for r in range(self._world) if not self._store.check([f"here/{r}"])}

        return _answer(ask, 2 * grace) or set()


def own_store() -> Any:
    """The part of the ranks' store that belongs to one run: all ranks count their runs alike."""
    store = distributed_c10d._get_default_store()
    return distributed.PrefixStore(f"revcompile/{next(_runs)}", store)  # type: ignore[attr-defined]


def _answer(ask: Callable[[], Answer], limit: float) -> Answer | None:
    """What the store says; None if it does not in time: its rank may be the one that is gone."""
    found: list[Answer] = []

    def run() -> None:
        with contextlib.suppress(Exception):
            found.append(ask())

    asking = threading.Thread(target=run, daemon=True)
    asking.start()
    asking.join(limit)
    return found[0] if found else None


def told(error: Exception) -> str:
    """What torch says, without where in its sources it says so and what it suspects."""
    found = re.sub(r"^\[[^]]*\]\s*", "", str(error)).split(". This is typically", 1)[0]
    return f"{type(error).__name__}: {found}"
