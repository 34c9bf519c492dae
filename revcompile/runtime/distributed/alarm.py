"""What stops a run on all ranks: a rank that is gone, hangs, or failed."""

from __future__ import annotations

import contextlib
import itertools
import re
import threading
import time

from torch.distributed import distributed_c10d

__all__ = ["Alarm", "RollCall", "told"]


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


class RollCall:
    """Who is still there when nothing moves any more: each rank that gives up says so.

    Ranks wait for each other in a row; the one that hangs is the one that does not answer.
    """

    _numbers = itertools.count()

    def __init__(self, rank: int, world: int) -> None:
        self._rank, self._world = rank, world
        self._prefix = f"revcompile/{next(self._numbers)}/here"  # all ranks count alike
        self._store = distributed_c10d._get_default_store()

    def missing(self, grace: float) -> set[int]:
        """The ranks that have not said so after a while; none if the store does not answer."""
        found: set[int] = set()

        def ask() -> None:
            with contextlib.suppress(Exception):  # the rank that has the store may be the one
                self._store.set(f"{self._prefix}/{self._rank}", "yes")
                time.sleep(grace)
                keys = {rank: f"{self._prefix}/{rank}" for rank in range(self._world)}
                found.update(rank for rank, key in keys.items() if not self._store.check([key]))

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(2 * grace)
        return set(found)


def told(error: Exception) -> str:
    """What torch says, without where in its sources it says so and what it suspects."""
    found = re.sub(r"^\[[^]]*\]\s*", "", str(error)).split(". This is typically", 1)[0]
    return f"{type(error).__name__}: {found}"
