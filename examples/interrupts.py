"""SIGTERM and Ctrl-C: training goes on for a few steps and is saved; a line says how to go on.

Import this first: importing torch takes seconds, and Ctrl-C may come then.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FrameType, TracebackType
from typing import TypeVar

T = TypeVar("T")

EVERY = 10
"""Batches between two questions to the other ranks: the answer waits for the slowest."""

advice = "nothing has been saved yet"
"""What the line says after "stopped"."""


def say_stopped() -> None:
    """Print the line, on one of several ranks."""
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"stopped; {advice}\n")


def _without_traceback(
    kind: type[BaseException], error: BaseException, where: TracebackType | None
) -> None:
    if issubclass(kind, KeyboardInterrupt):
        say_stopped()
    else:
        sys.__excepthook__(kind, error, where)


def quiet_on_ctrl_c() -> None:
    """From here on a KeyboardInterrupt that nobody catches is a line."""
    sys.excepthook = _without_traceback


def until_stopped(batches: Iterable[T], save: Callable[[], object]) -> Iterator[T]:
    """The batches; after a SIGTERM or a Ctrl-C on any rank all ranks save and exit.

    A second Ctrl-C stops at once.
    """
    received: list[int] = []
    every = EVERY if int(os.environ.get("WORLD_SIZE", "1")) > 1 else 1

    def receive(number: int, frame: FrameType | None) -> None:
        received.append(number)
        signal.signal(signal.SIGINT, before[signal.SIGINT])

    before = {number: signal.signal(number, receive) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        for count, batch in enumerate(batches, 1):
            yield batch
            if count % every == 0 and on_any_rank(bool(received)):
                break
        else:
            if not on_any_rank(bool(received)):
                return
        save()
        raise SystemExit(128 + signal.SIGTERM)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def on_any_rank(flag: bool) -> bool:
    """Whether the flag is set on any rank. Every rank calls it."""
    import torch
    from torch import distributed

    most = torch.tensor(int(flag))
    if distributed.is_initialized():
        distributed.all_reduce(most, distributed.ReduceOp.MAX)
    return bool(most)
