"""Non-finite gradients in a captured step: flags on the device, which the host reads later.

A captured step cannot branch, and must not wait for the device. Each backward pass computes a flag
`found_inf`, 1 where a gradient is not finite (as `torch.amp.GradScaler` has it). The flag goes with
the message to the stage before, and masks what the micro-batch would change: gradients become
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
from revcompile.runtime.stage.loss import OVERFLOW
from revcompile.runtime.stage.tensors import copy_parts


class RunningStatistics:
    """Running statistics of batch norms, which a bad micro-batch must not change.

    There are many and they are small: those of one type, of all stages, are handled as one flat
    tensor.

    Args:
        stages: Return the buffers that each stage has now.
    """

    def __init__(self, stages: Sequence[Callable[[], Sequence[Tensor]]]) -> None:
        self._stages = stages
        owners: dict[int, int] = {}
        for stage, buffers in enumerate(stages):
            for buffer in buffers():  # of a layer that stages share: restored for any of them
                is_shared = owners.get(id(buffer), stage) != stage
                owners[id(buffer)] = len(stages) if is_shared else stage
        self._has_shared = len(stages) in owners.values()
        self._buffers = self._present()
        self._owners = {
            dtype: _flat([torch.full_like(b, owners[id(b)], dtype=torch.int64) for b in group])
            for dtype, group in self._buffers.items()
        }
        """For each element its stage."""
        self._before = {dtype: _flat(group) for dtype, group in self._buffers.items()}

    def _present(self) -> dict[torch.dtype, list[Tensor]]:
        """The buffers of each type, each once."""
        found: dict[torch.dtype, list[Tensor]] = {}
        for buffer in {id(b): b for buffers in self._stages for b in buffers()}.values():
            found.setdefault(buffer.dtype, []).append(buffer)
        return found

    def snapshot(self) -> None:
        """Before a step, or a pass."""
        self._buffers = self._present()
        for dtype, group in self._buffers.items():
            torch.cat([buffer.reshape(-1) for buffer in group], out=self._before[dtype])

    def restore_if(self, flags: Tensor) -> None:
        """After it: where a stage's flag is set, as they were before."""
        if self._has_shared:
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
    """Flags on their way from the device to the host, and the errors they amount to.

    Each step writes a row of flags on the device. Once all rows are written, one copy takes them to
    the host, which looks at them when they have arrived. It waits for those of the time before: so
    the device is never behind by more than the steps of two copies.

    Args:
        stages: Those in this process; others report their own.
        advice: To add to every error.
    """

    def __init__(self, stages: Sequence[int], advice: str = "") -> None:
        self._stages, self._advice = stages, advice
        self._steps: list[tuple[int, Mapping[int, int]]] = []
        """Of steps whose flags are on the device: the row, and each stage's micro-batch."""
        self._copied: deque[tuple[Tensor, torch.cuda.Event | None, list[Any]]] = deque()
        self._arrived: deque[tuple[list[float], Mapping[int, int]]] = deque()
        self._reported: set[int] = set()

    def stepped(self, flags: Tensor, row: int, microbatches: Mapping[int, int]) -> None:
        """After a step, which has written its flags to a row.

        Args:
            flags: In each row one for each stage, in the order of `microbatches`.
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
            event = torch.cuda.Event(blocking=True)  # whoever waits leaves the processor to others
            event.record(current_stream(flags))
        self._copied.append((host, event, self._steps))
        self._steps = []

    def collect(self, wait: bool = False) -> list[NonFiniteError]:
        """Errors of bad micro-batches that have become known: those of one step at a time.

        Args:
            wait: For all flags that were submitted; those of all steps then.
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
        """One for each micro-batch, from the last stage that has flagged it: there it began."""
        errors = []
        flagged = list(zip(microbatches.items(), flags, strict=True))
        for (stage, microbatch), flag in reversed(flagged):
            if flag and microbatch not in self._reported:
                self._reported.add(microbatch)
                if stage in self._stages and flag != OVERFLOW:
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
    """Of how many steps the host reads the flags by one copy.

    On a GPU to copy them, and to wait for the copy, takes it about as long as to launch a step.
    """
    return 4 if device.type == "cuda" else 1
