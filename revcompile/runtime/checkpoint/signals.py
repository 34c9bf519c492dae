"""Saving when the machine is taken away: a signal asks, the next step's end answers."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any, NoReturn, TypeVar

from revcompile.errors import InputError

__all__ = ["until_signal"]

T = TypeVar("T")


def until_signal(
    loader: Iterable[T],
    save: Callable[[], Any],
    signals: Sequence[int] = (signal.SIGTERM,),
    agree: Callable[[bool], bool] = lambda asked: asked,
    settle: Callable[[], bool] = lambda: False,
) -> Iterator[T]:
    """The loader's batches; after a signal, when the next one is asked for, save and exit.

    The exit status is a shell's for the signal: 143 for SIGTERM. Where several ranks train,
    `agree` is told at every step whether this one got a signal and says whether any did, then or
    some steps ago; `settle` says at the end what `agree` has not said yet.
    """
    if threading.current_thread() is not threading.main_thread():
        raise InputError(
            "trainer.save_on_signal: Python delivers signals to the main thread, but this is "
            f"{threading.current_thread().name}; train there"
        )
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    def leave() -> NoReturn:
        save()
        raise SystemExit(128 + (received[0] if received else signal.SIGTERM))

    before = {number: signal.signal(number, note) for number in signals}
    try:
        for batch in loader:
            yield batch
            if agree(bool(received)):
                leave()
        if settle():
            leave()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
