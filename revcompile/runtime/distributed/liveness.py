"""How ranks find out that another one is gone, hangs or failed, and agree on the first cause.

thread of a channel: connection closed --fail--> FailureMonitor --> main thread raises RankError
RootCause: the first cause in the ranks' store --fail------^
LivenessCheck: after a timeout, which ranks still answer in the store
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

_runs: Final = itertools.count()
_KEY: Final = "cause"
_PERIOD: Final = 0.5
"""Seconds between two polls of the store."""


class Worker:
    """A thread that runs a function. If that raises an error, `on_failure` is told."""

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


class FailureMonitor:
    """What the threads of a rank share: the first failure, and whether a message has arrived.

    Receiving threads notify it; the main thread waits for it.
    """

    def __init__(self) -> None:
        self.cause: str | None = None
        self._failed = threading.Event()
        self._first = threading.Lock()
        # Locked: nothing has arrived since the last call of `wait`. A condition variable would do
        # the same in Python, for every message.
        self._nothing_new = threading.Lock()
        self._nothing_new.acquire()

    def notify(self) -> None:
        """Something has arrived: whoever waits checks again."""
        with contextlib.suppress(RuntimeError):  # it is unlocked
            self._nothing_new.release()

    def fail(self, cause: str) -> bool:
        """Stop all threads of this rank; False if there was another cause before."""
        with self._first:
            is_first = self.cause is None
            if is_first:
                self.cause = cause
        self._failed.set()
        self.notify()
        return is_first

    def wait_for_failure(self, timeout: float) -> bool:
        """Is there a failure, now or within the timeout?"""
        return self._failed.wait(timeout)

    def wait(self, timeout: float) -> bool:
        """Wait for an arrival since the last call, or a failure; False after the timeout."""
        return self.cause is not None or self._nothing_new.acquire(timeout=timeout)


class RootCause:
    """The first cause of failure that any rank has written to the ranks' store; all poll it.

    A rank that stops writes why before its connections close. So a rank that loses the connection
    reads what the other one failed of, and the first cause is never a consequence.
    """

    def __init__(self, store: Any, on_failure: Callable[[str], object]) -> None:
        self._store, self._on_failure = store, on_failure
        self._closed = threading.Event()
        self._thread = Worker(self._watch, on_failure=lambda _: None)  # the store is gone

    def agree(self, cause: str, limit: float) -> str | None:
        """The first cause, `cause` if there was none; None if the store does not answer."""
        # compare_set waits for the store: once it returns, the cause is visible to all ranks.
        first = _ask_store(lambda: self._store.compare_set(_KEY, "", cause), limit)
        return None if first is None else first.decode()

    def linger(self) -> None:
        """Give the other ranks time to poll: the store may end with this process."""
        time.sleep(2 * _PERIOD)

    def close(self, timeout: float) -> bool:
        """Stop polling; False if the thread does not end in time."""
        self._closed.set()
        return self._thread.join(timeout)

    def _watch(self) -> None:
        while not self._closed.wait(_PERIOD):
            if self._store.check([_KEY]):
                self._on_failure(self._store.get(_KEY).decode())
                return


class LivenessCheck:
    """Which ranks still run when no message arrives: each rank that times out writes a key.

    Ranks wait for each other along the pipeline; the one that hangs is the one without a key.
    """

    def __init__(self, store: Any, rank: int, world: int) -> None:
        self._store, self._rank, self._world = store, rank, world

    def missing(self, grace: float) -> set[int]:
        """The ranks without a key after `grace` seconds; none if the store does not answer.

        If the store's process has ended, the rank that had it: the first one, unless torchrun's
        agent has it.
        """

        def check() -> set[int]:
            try:
                self._store.set(f"here/{self._rank}", "yes")
                time.sleep(grace)
                return {r for r in range(self._world) if not self._store.check([f"here/{r}"])}
            except distributed.DistNetworkError:
                has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
                return set() if has_agent else {0} - {self._rank}

        return _ask_store(check, 2 * grace) or set()


def own_store() -> Any:
    """A prefix of the ranks' store for one trainer: all ranks count their trainers alike."""
    store = distributed_c10d._get_default_store()
    return distributed.PrefixStore(f"revcompile/{next(_runs)}", store)  # type: ignore[attr-defined]


def _ask_store(ask: Callable[[], Answer], limit: float) -> Answer | None:
    """The store's answer; None if it does not come in time: its rank may be the one that is gone.

    In a thread, because a call to a store whose process is gone may block for minutes.
    """
    try:
        return in_thread(ask).result(limit)
    except Exception:
        return None


def in_thread(ask: Callable[[], Answer]) -> Future[Answer]:
    """What a function will return, or raise, in a thread of its own, which no process waits for."""
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
