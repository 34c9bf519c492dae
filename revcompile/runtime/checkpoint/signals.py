"""Saving on SIGTERM: the step in progress ends first, then all ranks save and exit."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any, NoReturn, TypeVar

from revcompile.errors import InputError

T = TypeVar("T")


def until_signal(
    loader: Iterable[T],
    save: Callable[[], Any],
    signals: Sequence[int] = (signal.SIGTERM,),
    agree: Callable[[bool], bool] = lambda received: received,
    agree_at_end: Callable[[], bool] = lambda: False,
) -> Iterator[T]:
    """The loader's batches; after a signal, at the end of the step, save and exit.

    The exit status is a shell's for the signal: 143 for SIGTERM.

    Args:
        loader: the batches.
        save: writes a checkpoint.
        signals: numbers of the signals to wait for.
        agree: called after every step with "has this rank received a signal?"; on several ranks
            it returns whether any rank had, then or some steps earlier.
        agree_at_end: returns at the end of the loader whether any rank had, where `agree` has not
            said so yet.
    """
    if threading.current_thread() is not threading.main_thread():
        raise InputError(
            "trainer.save_on_signal: Python delivers signals to the main thread, but this is "
            f"{threading.current_thread().name}; train there"
        )
    received: list[int] = []

    def receive(number: int, frame: FrameType | None) -> None:
        received.append(number)

    def save_and_exit() -> NoReturn:
        save()
        raise SystemExit(128 + (received[0] if received else signal.SIGTERM))

    before = {number: signal.signal(number, receive) for number in signals}
    try:
        for batch in loader:
            yield batch
            if agree(bool(received)):
                save_and_exit()
        if agree_at_end():
            save_and_exit()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
