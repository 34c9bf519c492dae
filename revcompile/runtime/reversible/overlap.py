"""Two lanes for a chain's backward pass: a block is rebuilt while the next one is differentiated.

What rebuilding a block needs, the reconstructed input of the block after it, is there before that
block's gradient is (PaReprop, Sec. 3.3). On CUDA the two run on two streams. Autograd
differentiates an operation on the stream it ran on, so a block's second evaluation and its gradient
share a lane, and blocks take the lanes in turns.
"""

from __future__ import annotations

import enum
import functools
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor

from revcompile.errors import InputError
from revcompile.runtime.reversible.replay import is_recorded

__all__ = ["Lanes", "Overlap", "side_by_side"]

SMALL: Final = 2**25
"""Elements of a stream above which a block's kernels fill a large GPU on their own."""


class Overlap(enum.Enum):
    """Is a block rebuilt while the next one is differentiated?

    It fills what small kernels leave unused of a GPU, and keeps the graphs of two blocks instead
    of one. `AUTO` does it where steps are recorded as CUDA graphs and kernels are small: of a
    step that is not recorded small kernels take less time than starting them does.
    """

    AUTO = "auto"
    ON = "on"
    OFF = "off"

    @staticmethod
    def parse(choice: Overlap | str) -> Overlap:
        """Accept the enum or its value.

        >>> Overlap.parse("on")
        <Overlap.ON: 'on'>
        """
        try:
            return Overlap(choice)
        except ValueError:
            known = ", ".join(repr(c.value) for c in Overlap)
            raise InputError(f"overlap: expected one of {known}, got {choice!r}") from None

    def applies_to(self, stream: Tensor) -> bool:
        """Does a chain with this stream overlap?"""
        if self is Overlap.AUTO:
            return is_recorded(stream.device) and stream.numel() <= SMALL
        return self is Overlap.ON


class Lanes:
    """The caller's CUDA stream, lane 0, and lane 1 beside it; none on other devices."""

    def __init__(self, device: torch.device | None) -> None:
        self._streams: tuple[torch.cuda.Stream, ...] = ()
        if device is not None and device.type == "cuda":
            own = torch.cuda.current_stream(device)
            self._streams = own, _beside(own)

    def wait(self, lane: int) -> None:
        """A lane waits for all that the other has been given."""
        if self._streams:
            self._streams[lane].wait_stream(self._streams[1 - lane])

    def on(self, lane: int) -> AbstractContextManager[Any]:
        """Work for a lane."""
        if not self._streams or lane == 0:
            return nullcontext()
        return torch.cuda.stream(self._streams[1])

    def differentiating(self, lane: int) -> AbstractContextManager[Any]:
        """The same for a gradient."""
        if not self._streams or lane == 0:
            return nullcontext()
        return _beside_accumulation(self._streams[1])


@contextmanager
def side_by_side(device: torch.device, is_wanted: bool = True) -> Iterator[Lanes]:
    """Let two lanes run, if that is wanted; elsewhere they are nothing but an order of work.

    At any other moment everything is in order on the caller's stream, so nobody who sees a gradient
    (accumulation, hooks, DDP, a CUDA graph that is being recorded) needs to know of the second one.
    That also makes memory safe without telling the allocator: before a lane writes to what was
    given back to it, it has waited for the other one, as long as what both read is held to the end.
    """
    lanes = Lanes(device if is_wanted else None)
    lanes.wait(1)
    try:
        yield lanes
    finally:
        lanes.wait(0)


@functools.cache
def _beside(stream: torch.cuda.Stream) -> torch.cuda.Stream:
    """One second lane for each stream: what it allocates is read by that stream only."""
    return torch.cuda.Stream(stream.device)


_has_warned = False


@contextmanager
def _beside_accumulation(stream: torch.cuda.Stream) -> Iterator[None]:
    """Parameters' gradients are found beside the stream they are added up on, as is intended.

    Torch warns of that, once in a process.
    """
    global _has_warned
    with torch.cuda.stream(stream):
        if _has_warned:
            yield
            return
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The AccumulateGrad node's stream does not match")
            yield
        _has_warned = True
