"""Ctrl-C: the step in progress ends and is saved; one line says how to go on, no traceback.

Import this first: importing torch takes seconds, and Ctrl-C may come then.
"""

import os
import signal
import sys
from collections.abc import Iterable, Iterator
from types import FrameType, TracebackType
from typing import TypeVar

T = TypeVar("T")

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


def as_termination(batches: Iterable[T]) -> Iterator[T]:
    """The batches of `trainer.save_on_signal`, which saves after a SIGTERM: Ctrl-C is one, too.

    Only the first: a second Ctrl-C stops at once.
    """
    before = signal.getsignal(signal.SIGINT)

    def terminate(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, before)
        signal.raise_signal(signal.SIGTERM)

    try:
        for count, batch in enumerate(batches):
            if count == 0:  # now save_on_signal listens
                signal.signal(signal.SIGINT, terminate)
            yield batch
    finally:
        signal.signal(signal.SIGINT, before)
