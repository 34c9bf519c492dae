"""Two CUDA streams for a chain's backward pass: rebuild a block while the next is differentiated.

Rebuilding a block needs the rebuilt input of the next block, which is known before that block's
gradient is (PaReprop, Sec. 3.3). Autograd differentiates an operation on the stream it ran on, so a
block is rebuilt and differentiated on one stream, and blocks alternate:

    stream 0   rebuild 3 | differentiate 3 | rebuild 1       | differentiate 1
    stream 1             | rebuild 2       | differentiate 2 | rebuild 0       | ...
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

from revcompile.runtime.reversible.replay import is_capturing

SMALL: Final = 2**25
"""Elements of a residual stream above which a block's kernels fill a large GPU on their own."""


class Overlap(enum.Enum):
    """Whether a block is rebuilt while the next one is differentiated.

    That uses what small kernels leave idle of a GPU, and holds the graphs of two blocks instead of
    one. `AUTO` does it where the step is captured as a CUDA graph and kernels are small: without
    capture, small kernels take longer to launch than to run.
    """

    AUTO = "auto"
    ON = "on"
    OFF = "off"

    def applies_to(self, stream: Tensor) -> bool:
        if self is Overlap.AUTO:
            return is_capturing(stream.device) and stream.numel() <= SMALL
        return self is Overlap.ON


class TwoStreams:
    """The caller's CUDA stream (number 0) and, if `on`, a side stream (number 1).

    They run concurrently inside the context. Before and after it, all work is ordered on the
    caller's stream, so accumulation, hooks, DDP and CUDA graph capture need not know of the side
    stream. `Tensor.record_stream` is unnecessary, too: a stream has waited for the other one before
    it reuses memory that was freed on it, provided that tensors read by both are held to the end.
    """

    def __init__(self, device: torch.device, on: bool) -> None:
        self._streams: tuple[torch.cuda.Stream, ...] = ()
        if on and device.type == "cuda":
            own = torch.cuda.current_stream(device)
            self._streams = own, _side_stream(own)

    def __enter__(self) -> TwoStreams:
        self._wait(1)
        return self

    def __exit__(self, *_: Any) -> None:
        self._wait(0)

    def _wait(self, number: int) -> None:
        """Let a stream wait for all work that the other has been given."""
        if self._streams:
            self._streams[number].wait_stream(self._streams[1 - number])

    def on(self, number: int) -> AbstractContextManager[Any]:
        if not self._streams or number == 0:
            return nullcontext()
        return torch.cuda.stream(self._streams[1])

    def backward_on(self, number: int) -> AbstractContextManager[Any]:
        """A context for `torch.autograd.grad` on a stream."""
        if not self._streams or number == 0:
            return nullcontext()
        return _differentiating_on(self._streams[1])


@functools.cache
def _side_stream(stream: torch.cuda.Stream) -> torch.cuda.Stream:
    """The side stream of a stream of the caller, the only other one that reads its allocations."""
    return torch.cuda.Stream(stream.device)


@contextmanager
def on_side_streams() -> Iterator[None]:
    """Silence torch's warning about gradients accumulated on another stream: torch waits for it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The AccumulateGrad node's stream does not match")
        yield


_has_warned = False


@contextmanager
def _differentiating_on(stream: torch.cuda.Stream) -> Iterator[None]:
    """Compute gradients on another stream than the one they are accumulated on."""
    global _has_warned
    with torch.cuda.stream(stream), nullcontext() if _has_warned else on_side_streams():
        yield
    _has_warned = True
