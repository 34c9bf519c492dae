"""SIGTERM and Ctrl-C: training goes on for a few steps and is saved."""

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import TypeVar

import torch
from torch import distributed

T = TypeVar("T")

EVERY = 10
"""Batches between two questions to the other ranks: the answer waits for the slowest."""


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
    most = torch.tensor(int(flag))
    if distributed.is_initialized():
        distributed.all_reduce(most, distributed.ReduceOp.MAX)
    return bool(most)
