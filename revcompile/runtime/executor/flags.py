"""Non-finite gradients in a captured step: flags on the device, which the host reads later.

A captured step cannot branch, and must not wait for the device. Each backward pass computes a flag
`found_inf`, 1 where a gradient is not finite (as in `torch.amp.GradScaler`). The flag goes with the
message to the stage before, and masks what the micro-batch would change: gradients become
zeros, running statistics and updates are undone. The host copies all flags of a step without
waiting, and raises an error some steps later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from revcompile.errors import NonFiniteError
from revcompile.runtime.executor.streams import current_stream
from revcompile.runtime.stage.tensors import copy_parts


class RunningStatistics:
    """Running statistics of batch norms, which a bad micro-batch must not change.

    There are many small buffers. The buffers of one dtype, of all stages, are handled as one flat
    tensor.

    Args:
        stages: For each stage, a function that returns its current buffers.
    """

    def __init__(self, stages: Sequence[Callable[[], Sequence[Tensor]]]) -> None:
        self._stages = stages
        owners: dict[int, int] = {}
        for stage, buffers in enumerate(stages):
            for buffer in buffers():  # one that stages share is restored if any flag is set
                is_shared = owners.get(id(buffer), stage) != stage
                owners[id(buffer)] = len(stages) if is_shared else stage
        self._buffers = self._present()
        self._owners = {
            dtype: _flat([torch.full_like(b, owners[id(b)], dtype=torch.int64) for b in group])
            for dtype, group in self._buffers.items()
        }
        """For each element the index of its stage; `len(stages)` if stages share it."""
        self._before = {dtype: _flat(group) for dtype, group in self._buffers.items()}

    def _present(self) -> dict[torch.dtype, list[Tensor]]:
        """The buffers of each type, each once."""
        found: dict[torch.dtype, list[Tensor]] = {}
        for buffer in {id(b): b for buffers in self._stages for b in buffers()}.values():
            found.setdefault(buffer.dtype, []).append(buffer)
        return found

    def snapshot(self) -> None:
        """Copy the buffers, before a step or a pass."""
        self._buffers = self._present()
        for dtype, group in self._buffers.items():
            torch.cat([buffer.reshape(-1) for buffer in group], out=self._before[dtype])

    def restore_if(self, flags: Tensor) -> None:
        """After the step or pass: restore the copies of stages whose flag is set."""
        flags = torch.cat([flags, flags.max().reshape(1)])
        for dtype, group in self._buffers.items():
            is_restored = flags[self._owners[dtype]] != 0
            merged = torch.where(is_restored, self._before[dtype], _flat(group))
            # `.data`: graphs in flight may have saved these buffers, and autograd would refuse to
            # use them after a write that it sees. Batch norm itself writes them unseen.
            copy_parts([buffer.data for buffer in group], merged)


def _flat(buffers: Sequence[Tensor]) -> Tensor:
    return torch.cat([buffer.reshape(-1) for buffer in buffers])


class NonFiniteReports:
    """Copies flags from the device to the host, and turns them into errors.

    Each step writes a row of flags on the device. Once all rows are written, one asynchronous copy
    takes them to the host, which reads them when they have arrived. Before it starts a copy, the
    host waits for the previous one: it is never ahead by more than the steps of two copies.

    Args:
        stages: The stages in this process; other processes report their own.
        advice: Text to add to every error.
    """

    def __init__(self, stages: Sequence[int], advice: str = "") -> None:
        self._stages, self._advice = stages, advice
        self._steps: list[tuple[int, Mapping[int, int]]] = []
        """For each step whose flags are on the device: the row, and each stage's micro-batch."""
        self._copied: deque[tuple[Tensor, torch.cuda.Event | None, list[Any]]] = deque()
        self._arrived: deque[tuple[list[float], Mapping[int, int]]] = deque()
        self._reported: set[int] = set()

    def stepped(self, flags: Tensor, row: int, microbatches: Mapping[int, int]) -> None:
        """Note a step that has written its flags to a row.

        Args:
            flags: All rows; a row has one flag per stage, in the order of `microbatches`.
            microbatches: The micro-batch of each stage's backward pass.
        """
        self._steps.append((row, microbatches))
        if len(self._steps) == len(flags):
            self._collect(wait=True)
            self.submit(flags)

    def submit(self, flags: Tensor) -> None:
        """Copy the flags of the last steps to the host, without waiting."""
        if not self._steps:
            return
        host, event = torch.empty_like(flags, device="cpu", pin_memory=flags.is_cuda), None
        host.copy_(flags, non_blocking=True)
        if flags.is_cuda:
            event = torch.cuda.Event(blocking=True)  # a thread that waits sleeps, and does not spin
            event.record(current_stream(flags))
        self._copied.append((host, event, self._steps))
        self._steps = []

    def collect(self, wait: bool = False) -> list[NonFiniteError]:
        """Errors of bad micro-batches whose flags have arrived, one step's errors at a time.

        Args:
            wait: Wait for all submitted flags, and return the errors of all steps.
        """
        self._collect(wait)
        errors: list[NonFiniteError] = []
        while self._arrived and (wait or not errors):
            errors += self._errors(*self._arrived.popleft())
        return errors

    def _collect(self, wait: bool) -> None:
        while self._copied:
            host, event, steps = self._copied[0]
            if event is not None and not event.query():
                if not wait:
                    return
                event.synchronize()
            self._copied.popleft()
            rows = host.tolist()
            self._arrived += [(rows[row], microbatches) for row, microbatches in steps]

    def _errors(self, flags: list[float], microbatches: Mapping[int, int]) -> list[NonFiniteError]:
        """One error per micro-batch, for the last stage that has flagged it: it began there."""
        errors = []
        flagged = list(zip(microbatches.items(), flags, strict=True))
        for (stage, microbatch), flag in reversed(flagged):
            if flag and microbatch not in self._reported:
                self._reported.add(microbatch)
                if stage in self._stages:
                    text = (
                        f"stage {stage}, micro-batch {microbatch}: the loss or the gradient of a "
                        "parameter is not finite. The micro-batch was left out of the updates of "
                        "this stage and of those before it, and moved no running statistics; lower "
                        "the learning rate, clip gradients, or look at this batch (backend='eager' "
                        f"says at once, and which parameter){self._advice}"
                    )
                    errors.append(NonFiniteError(text, stage=stage, microbatch=microbatch))
        oldest = min(microbatches.values(), default=0)
        self._reported = {microbatch for microbatch in self._reported if microbatch >= oldest}
        return errors


def steps_at_once(device: torch.device) -> int:
    """How many steps' flags the host reads with one copy.

    On a GPU, copying flags and waiting for the copy takes the host about as long as launching one
    step.
    """
    return 4 if device.type == "cuda" else 1
