"""How ranks find out that another one is gone, hangs or failed, and agree on the first cause.

thread of a channel: connection closed ----+
poll of the ranks' store: first cause -----+--> Failures --> the main thread raises RankError
timeout: ranks that still answer there ----+
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, TypeVar

from torch import distributed
from torch.distributed import distributed_c10d

Answer = TypeVar("Answer")

GRACE: Final = 2.0
"""Seconds to wait for an answer of the store, for last messages, and for torch's own errors."""
_runs: Final = itertools.count()
_KEY: Final = "cause"
POLL_PERIOD: Final = 0.5
"""Seconds between two polls of the store."""


class Worker:
    """A thread that runs a function, and calls `on_failure` if that raises an error."""

    def __init__(self, run: Callable[[], None], on_failure: Callable[[str], object]) -> None:
        def guarded() -> None:
            try:
                run()
            except Exception as error:
                on_failure(short_error(error))

        self._thread = threading.Thread(target=guarded, daemon=True)
        self._thread.start()

    def join(self, timeout: float) -> bool:
        """Wait for its end; False if that does not come in time."""
        self._thread.join(timeout)
        return not self._thread.is_alive()


class Failures:
    """The first cause of failure on any rank, and a signal that something has arrived.

    A rank that stops writes the cause to the ranks' store before its connections close, and all
    ranks poll the store. So a rank that loses a connection reads why the other rank failed, and the
    first cause is never a consequence. Other threads call `notify` and `fail`, which end a `wait`
    of the main thread.
    """

    def __init__(self, store: Any, rank: int, world: int) -> None:
        self.cause: str | None = None
        self._store, self._rank, self._world = store, rank, world
        self._failed, self._closed = threading.Event(), threading.Event()
        self._first = threading.Lock()
        # Locked: nothing has arrived since the last call of `wait`. A condition variable would
        # run Python code for every message.
        self._nothing_new = threading.Lock()
        self._nothing_new.acquire()
        self._poll = Worker(self._watch, on_failure=lambda _: None)  # the store is gone

    # -- this rank's threads ------------------------------------------------------------------

    def notify(self) -> None:
        """Have the main thread check again, if it waits: something has arrived."""
        with contextlib.suppress(RuntimeError):  # it is unlocked
            self._nothing_new.release()

    def wait(self, timeout: float) -> bool:
        """Wait for an arrival (since the last call) or a failure; False after the timeout."""
        return self.cause is not None or self._nothing_new.acquire(timeout=timeout)

    def fail(self, cause: str) -> None:
        """Have this rank stop for a cause, unless it has one already."""
        with self._first:
            self.cause = self.cause or cause
        self._failed.set()
        self.notify()

    def wait_for_failure(self, timeout: float) -> bool:
        """Whether there is a failure, now or within the timeout."""
        return self._failed.wait(timeout)

    # -- all ranks ----------------------------------------------------------------------------

    def conclude(self, cause: str) -> None:
        """Have this rank stop for the first cause of any rank: `cause`, if there is none yet."""
        if self.cause is not None:
            return
        # compare_set waits for the store: once it returns, the cause is visible to all ranks.
        first = _ask_store(lambda: self._store.compare_set(_KEY, "", cause), GRACE)
        if first is None:
            self.wait_for_failure(GRACE)  # a neighbour may still send its cause
        self.fail(cause if first is None else first.decode())

    def missing(self) -> set[int]:
        """The ranks that hang; none if the store does not answer.

        Ranks wait for each other along the pipeline. Each rank that times out writes a key; a rank
        that hangs does not. If the store's process has ended, the rank that had the store is the
        missing one: rank 0, unless torchrun's agent has the store.
        """

        def check() -> set[int]:
            try:
                self._store.set(f"here/{self._rank}", "yes")
                time.sleep(GRACE)
                return {r for r in range(self._world) if not self._store.check([f"here/{r}"])}
            except distributed.DistNetworkError:
                has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
                return set() if has_agent else {0} - {self._rank}

        return _ask_store(check, 2 * GRACE) or set()

    def close(self) -> bool:
        """Stop polling; False if the thread does not end in time."""
        self._closed.set()
        return self._poll.join(GRACE)

    def _watch(self) -> None:
        while not self._closed.wait(POLL_PERIOD):
            if self._store.check([_KEY]):
                self.fail(self._store.get(_KEY).decode())
                return


def own_store() -> Any:
    """The ranks' store with a prefix for this trainer; all ranks count their trainers alike."""
    store = distributed_c10d._get_default_store()
    return distributed.PrefixStore(f"revcompile/{next(_runs)}", store)  # type: ignore[attr-defined]


def _ask_store(ask: Callable[[], Answer], limit: float) -> Answer | None:
    """The store's answer; None if it does not come in time: the store's rank may be gone.

    The call runs in a thread: if the store's process is gone, it may block for minutes.
    """
    try:
        return in_thread(ask).result(limit)
    except Exception:
        return None


def in_thread(ask: Callable[[], Answer]) -> Future[Answer]:
    """Run a function in a daemon thread; the future gets its result or its exception."""
    answer: Future[Answer] = Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return answer


def short_error(error: Exception) -> str:
    """A torch error without its source location and its guess at the reason."""
    text = re.sub(r"^\[[^]]*\]\s*", "", str(error)).split(". This is typically", 1)[0]
    return f"{type(error).__name__}: {text}"
