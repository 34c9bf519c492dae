"""The CUDA streams of a captured step: which work runs concurrently, and what it waits for.

In a full pipeline the forward and the backward pass of a stage belong to different micro-batches,
and so do the backward passes of different stages. Four stages, two backward streams:

    current      F0  F1  F2  F3  B3             the last stage: both are of one micro-batch
    backward 0    '-----> B0  B2                B0 after F0: B0 is followed by an update of the
    backward 1        '-> B1                    weights that F0 reads
    updates                U0  U1  U2  U3

A stage's backward pass waits only for its own forward pass, and its update for its backward pass.
Stages with large tensors stay on the current stream: their kernels fill the GPU on their own, and
there they can reuse the memory that the forward passes have freed.

Two streams use the same memory in these places, each ordered by an event:

    backward, update   slots, messages, weights   `StepStreams`; `join` ends each step
    capture            seeds of a graph           `CudaGraphReplay`, after the capture
    send               messages to other ranks    `DevicePayload`: before it, and when it is done
    receive            messages of other ranks    `Packet.wait`, then `ReceiveThread._release`
    all-reduce         sums of gradients          `ReplicaAverage._run`; captured steps wait
    overlap            streams of a chain         `TwoStreams`, at both ends
    copies to the host flags of a step            `NonFiniteReports.submit`
    ... from the host  batches in pinned memory   `when_copied`: a step ends after its copies
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from revcompile.ir.program import StageProgram
from revcompile.ir.types import TYPE, TensorType
from revcompile.runtime.reversible.overlap import SMALL


@functools.cache
def stream_for(purpose: str, device: torch.device) -> torch.cuda.Stream:
    """The stream for a purpose, always the same.

    torch hands out its 32 streams in turn. If each call took a new one, two purposes would in the
    end share a stream, and one would wait for the other or be captured with it.
    """
    return torch.cuda.Stream(device)


def large_stages(programs: Sequence[StageProgram], kind: TensorType | None, value: Any) -> set[int]:
    """Stages with tensors so large that each of their kernels fills the GPU.

    Args:
        kind: The type of the first input.
        value: The first input itself, which gives the number of samples.
    """
    dim = None if kind is None else kind.batch_dim
    if dim is None or not isinstance(value, Tensor) or value.ndim <= dim:
        return set()
    samples = value.shape[dim]
    types = ((p.index, node.meta.get(TYPE)) for p in programs for node in p.forward.nodes)
    return {i for i, t in types if isinstance(t, TensorType) and math.prod(t.at(samples)) > SMALL}


def current_stream(tensor: Tensor) -> torch.cuda.Stream:
    """The current stream of a tensor's device."""
    device = tensor.get_device()
    return _stream_at(device, torch._C._cuda_getCurrentRawStream(device))


@functools.lru_cache(maxsize=64)
def _stream_at(device: int, address: int) -> torch.cuda.Stream:
    """The current stream, which has this address; cached: torch makes a new object in each call."""
    return torch.cuda.current_stream(device)


class StepStreams:
    """The streams of a step.

    Args:
        last: The index of the last stage.
        width: How many streams backward passes are spread over.
    """

    def __init__(self, device: torch.device, last: int, width: int = 2) -> None:
        self.staying: set[int] = {last}
        """The stages whose forward and backward passes are on the current stream."""
        # Streams of its own for each thread: work launched on a stream that another thread
        # captures would go to that thread's graph.
        own = threading.get_ident()
        self._backward_streams = [stream_for(f"{own} backward {n}", device) for n in range(width)]
        self._update_stream = stream_for(f"{own} update", device)
        self._forward_done: dict[int, torch.cuda.Event] = {}
        self._backward_done: dict[int, torch.cuda.Event] = {}
        self._used: dict[torch.cuda.Stream, None] = {}
        self._referenced: list[Tensor] = []

    def after_forward(self, stage: int) -> None:
        """Note where a stage's forward pass ends in the current stream."""
        self._forward_done[stage] = torch.cuda.current_stream().record_event()

    def after_all_forward(self, stages: Iterable[int]) -> None:
        """Note that all forward passes were enqueued before, in a graph of their own."""
        self._forward_done = dict.fromkeys(stages, torch.cuda.current_stream().record_event())

    @contextmanager
    def backward(self, stage: int) -> Iterator[None]:
        """The stream of a stage's backward pass."""
        if stage in self.staying:
            yield
            self._backward_done[stage] = torch.cuda.current_stream().record_event()
            return
        stream = self._backward_stream(stage)
        stream.wait_event(self._forward_done[stage])
        self._used[stream] = None
        with torch.cuda.stream(stream):
            yield
        self._backward_done[stage] = stream.record_event()

    @contextmanager
    def send(self, stage: int) -> Iterator[None]:
        """The stream on which a stage sends gradients to the stage before it.

        It waits until the stage before has read its last message, and has sent its own. Parts of
        both can be the same memory, because a coupling passes one residual stream on.
        """
        stays = stage in self.staying
        stream = torch.cuda.current_stream() if stays else self._backward_stream(stage)
        if (reader := self._backward_done.get(stage - 1)) is not None:
            stream.wait_event(reader)
        with torch.cuda.stream(stream):
            yield
        self._backward_done[stage] = stream.record_event()

    @contextmanager
    def update(self, stage: int, read: Iterable[Tensor]) -> Iterator[None]:
        """The stream of a stage's update.

        Args:
            read: Tensors of the backward pass that the update reads. If that pass was in a graph of
                its own, its end is not known here: the update stays on the current stream.
        """
        if stage not in self._backward_done:
            yield
            return
        # The allocator reuses freed memory at once on the stream that allocated it: the backward
        # stream could write to these tensors while the update still reads them.
        self._referenced += read
        self._update_stream.wait_event(self._backward_done[stage])
        self._used[self._update_stream] = None
        with torch.cuda.stream(self._update_stream):
            yield

    def join(self) -> None:
        """Have the current stream wait for all the others.

        A stream without work (no stage updates in this step) is not part of the capture, and must
        not be waited for.
        """
        for stream in self._used:
            torch.cuda.current_stream().wait_stream(stream)
        self.clear()

    def clear(self) -> None:
        """Forget the events of a step that is over, or has failed."""
        self._used.clear()
        self._forward_done.clear()
        self._backward_done.clear()
        self._referenced.clear()

    def _backward_stream(self, stage: int) -> torch.cuda.Stream:
        return self._backward_streams[stage % len(self._backward_streams)]
