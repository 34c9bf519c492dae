"""Ranks that stop agree on the first cause, which is never a rank that only followed another."""

import sys
import threading
from datetime import timedelta
from typing import Any

import pytest
from helpers import refuses
from torch import distributed

from revcompile.errors import RankError
from revcompile.runtime.distributed import failures, layout, transport
from revcompile.runtime.distributed.failures import Failures
from revcompile.runtime.distributed.layout import Layout, Ranks
from revcompile.runtime.distributed.transport import DistributedTransport
from revcompile.runtime.trainer import placement

CLOSED = "RuntimeError: Connection closed by peer"
LAYOUT = Layout((0, 0, 1, 1), replicas=2)
"""Rank 2 has a channel from rank 3; ranks 0 and 2 meet only where replicas are averaged."""


class Gone:
    """A store whose rank is gone."""

    def __getattr__(self, name: str) -> Any:
        raise distributed.DistNetworkError("Connection was likely closed")


class Silent:
    """A store whose rank hangs: a call returns when it is let go."""

    def __init__(self) -> None:
        self.let_go = threading.Event()

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        self.let_go.wait(30)
        return value.encode()

    def check(self, keys: list[str]) -> bool:
        return False


def rank(number: int, store: Any, monkeypatch: pytest.MonkeyPatch) -> DistributedTransport:
    """A rank's transport without channels; the test says what happens on them."""
    nothing: Any = None
    monkeypatch.setattr(transport, "own_store", lambda: store)
    return DistributedTransport(Ranks(LAYOUT, number, nothing, nothing), [], timeout=30)


def loses(one: DistributedTransport, peer: int) -> None:
    """A connection to another rank closes."""
    one.on_lost(one.ranks.named(peer))(CLOSED)


def test_a_rank_whose_copy_followed_names_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    store: Any = distributed.HashStore()  # type: ignore[attr-defined]
    ranks = [rank(number, store, monkeypatch) for number in (2, 0, 1)]
    for one, peer in zip(ranks, (3, 2, 0), strict=True):
        loses(one, peer)
        with pytest.raises(RankError, match=r"^rank 3 \(stages 2, 3\) is gone: .*; last completed"):
            one.wait("stage 0 waits")
        assert one.close()


def test_a_rank_with_open_connections_hears_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    store: Any = distributed.HashStore()  # type: ignore[attr-defined]
    failing, waiting = (rank(number, store, monkeypatch) for number in (2, 1))
    failing.abort("rank 2 (stages 0, 1) stopped: ZeroDivisionError: some bug")
    assert waiting.failures.wait_for_failure(10)
    with pytest.raises(RankError, match=r"rank 2 .* stopped: ZeroDivisionError"):
        waiting.wait("stage 2 waits for stage 1")
    assert failing.close() and waiting.close()


def test_a_rank_that_ends_for_an_uncaught_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    store: Any = distributed.HashStore()  # type: ignore[attr-defined]
    failing, waiting = (rank(number, store, monkeypatch) for number in (2, 1))
    monkeypatch.setattr(placement, "_open", [failing])
    monkeypatch.setattr(sys, "last_value", OSError("disk full"), raising=False)
    placement.close_all()
    assert waiting.failures.wait_for_failure(10)
    assert waiting.failures.cause == "rank 2 (stages 0, 1) stopped: OSError: disk full"
    assert waiting.close()


def test_without_a_store_the_lost_rank_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    one = rank(3, Gone(), monkeypatch)
    monkeypatch.setattr(failures, "GRACE", 0.01)
    loses(one, 1)
    refuses(RankError, r"rank 1 .* is gone", one.wait, "stage 2 waits")


def test_a_store_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "GRACE", 0.01)
    store = Silent()
    one = Failures(store, 0, 2)
    one.conclude("rank 1 is gone")
    assert one.cause == "rank 1 is gone"
    one.conclude("rank 0 stopped")
    assert one.cause == "rank 1 is gone"
    store.let_go.set()
    monkeypatch.setattr(failures, "GRACE", 10)
    assert one.close()


def test_ranks_that_do_not_answer_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # nobody else will answer

    def missing(store: Any, rank: int) -> set[int]:
        one = Failures(store, rank, 3)
        found = one.missing()
        one.close()
        return found

    store: Any = distributed.HashStore()  # type: ignore[attr-defined]
    assert missing(store, 2) == {0, 1}
    assert missing(store, 0) == {1}
    assert missing(Gone(), 0) == set()
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    assert missing(Gone(), 2) == {0}  # which had the store
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert missing(Gone(), 2) == set()


def test_ranks_that_never_connect_are_an_error_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "GRACE", 0.05)
    for_ever = threading.Event()
    with pytest.raises(RankError, match=r"ranks 0, 2 were not connected within 0.05 s"):
        layout._bounded(for_ever.wait, (2, 0), timedelta(seconds=0.05))
    for_ever.set()

    def refuse() -> None:
        raise TimeoutError("of the store")

    refuses(TimeoutError, "of the store", layout._bounded, refuse, (0, 1), timedelta(seconds=5))
    assert layout._bounded(lambda: 3, (0, 1), timedelta(seconds=5)) == 3


def test_ranks_that_wait_for_each_other_are_told_to_make_the_same_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As if rank 1 had called flush, and rank 2 step."""
    monkeypatch.setattr(failures, "GRACE", 0.01)
    store: Any = distributed.HashStore()  # type: ignore[attr-defined]
    one = rank(2, store, monkeypatch)
    one.timeout = 0.01
    monkeypatch.setattr(one.failures, "missing", set)
    one._awaited = {3}
    said = (
        r"^rank 2 .* had no answer from rank 3 \(.*stage 1 for x.* another method .*equally often"
    )
    refuses(RankError, said, one.wait, "stage 1 for x of 12")
    assert one.close()
