"""Does a chain rebuild the input it was given? A few hundred elements are compared in every call.

A chain whose activations grow (`|a| << |F(b)|`) rebuilds `a = y - F(b)` with few correct digits, or
none, and its gradients are then wrong without being infinite. Whether that happens depends on the
weights and on the batch, so every call is checked:

    on the CPU                      backward() raises
    on a GPU, every n-th call       backward() waits for the device and raises
    on a GPU, all other calls       the device writes the largest error so far into pinned memory;
                                    nothing waits, and a later forward pass raises
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Sequence
from typing import Final, Literal

import torch
from torch import Tensor

from revcompile.errors import InversionError

__all__ = ["ReconstructionCheck", "Samples", "Tolerance", "relative_error", "tolerance_for"]

Tolerance = float | Literal["auto"] | None
"""The largest relative error allowed; "auto": by the dtype of the streams; None: no check."""

_BY_DTYPE: Final = {torch.float64: 1e-9}
_OTHER_DTYPES: Final = 1e-3
_SAMPLES: Final = 256
_TINY: Final = 1e-30


def tolerance_for(dtype: torch.dtype, tolerance: Tolerance) -> float:
    """The tolerance of a chain whose streams have this dtype.

    >>> tolerance_for(torch.float64, "auto"), tolerance_for(torch.float32, "auto")
    (1e-09, 0.001)
    """
    if isinstance(tolerance, str) or tolerance is None:
        return _BY_DTYPE.get(dtype, _OTHER_DTYPES)
    return tolerance


def relative_error(expected: Tensor, actual: Tensor) -> float:
    """Largest deviation relative to the largest value."""
    if not expected.numel():
        return 0.0
    precise = torch.complex128 if expected.is_complex() else torch.float64
    difference = (expected.to(precise) - actual.to(precise)).abs().max()
    error = float(difference / expected.to(precise).abs().max().clamp_min(_TINY))
    return error if error == error else math.inf


@functools.lru_cache(maxsize=256)
def _sample_index(shape: torch.Size) -> tuple[slice, ...]:
    """Slices that select at most `_SAMPLES` elements, spread over all dimensions."""
    index, budget = [slice(None)] * len(shape), _SAMPLES
    by_size = sorted(range(len(shape)), key=shape.__getitem__)
    for done, dim in enumerate(by_size):
        share = max(1, int(budget ** (1 / (len(shape) - done)) + 1e-9))
        step = max(1, math.ceil(shape[dim] / share))
        index[dim] = slice((step - 1) // 2, None, step)
        budget = max(1, budget // max(1, len(range(shape[dim])[index[dim]])))
    return tuple(index)


def _samples(stream: Tensor) -> Tensor:
    """A view of a few elements: no pass over the whole stream, whatever its memory format."""
    return stream.detach()[_sample_index(stream.shape)]


Samples = tuple[Tensor, ...]
"""Elements of a chain's input streams, copied in the forward pass."""


class ReconstructionCheck:
    """Compares what one chain rebuilds with what it was given, call by call.

    Args:
        chain: the chain's name, for the error.
        tolerance: the largest relative error allowed; None: nothing is compared.
        wait_every: the first and every `wait_every`-th call waits for the GPU.
        failures_allowed: consecutive calls that may fail without an error.
    """

    def __init__(
        self, chain: str, tolerance: Tolerance, wait_every: int, failures_allowed: int = 0
    ) -> None:
        self._chain, self._tolerance = chain, tolerance
        self._wait_every = wait_every
        self._calls = 0
        self._recent = deque[Tensor](maxlen=failures_allowed + 1)
        """Errors of the latest calls. The smallest counts: all of them must be too large."""
        self._largest: Tensor | None = None
        """On the GPU: the largest error of the calls that were not waited for."""
        self._report: Tensor | None = None
        """The same in pinned memory, as of the latest call that the GPU has finished."""

    @property
    def is_on(self) -> bool:
        return self._tolerance is not None

    def start(self, *streams: Tensor) -> tuple[bool, Samples]:
        """In forward: samples of the streams, and whether backward is to wait for the device.

        Raises:
            InversionError: an earlier call on the GPU rebuilt its input wrongly.
        """
        limit = tolerance_for(streams[0].dtype, self._tolerance)
        if self._report is not None and (error := self._report.item()) > limit:
            self._largest = self._report = None
            raise self._error(error, limit, " in an earlier step")
        waits = self._calls % self._wait_every == 0
        self._calls += 1
        return waits, tuple(_samples(stream).clone() for stream in streams)

    def finish(self, started: tuple[bool, Samples], *rebuilt: Tensor) -> None:
        """In backward: compare the samples with the rebuilt streams.

        Values that are not finite are an error only in the calls that wait: they show in the loss
        and in the gradients, and `torch.amp.GradScaler` leaves such steps out.

        Raises:
            InversionError: a stream was rebuilt wrongly.
        """
        waits, samples = started
        errors = [
            _error_on_device(expected, _samples(stream))
            for expected, stream in zip(samples, rebuilt, strict=True)
            if expected.numel()
        ]
        if not errors:
            return
        if self._recent and self._recent[0].device != errors[0].device:  # the model was moved
            self._recent.clear()
            self._largest = self._report = None
        self._recent.append(functools.reduce(torch.maximum, errors))
        if len(self._recent) < (self._recent.maxlen or 1):
            return
        error = functools.reduce(torch.fmin, self._recent)
        if _is_asynchronous(error.device) and not waits:
            self._report_later(error)
            return
        value, limit = error.item(), tolerance_for(rebuilt[0].dtype, self._tolerance)
        if value > limit and (waits or value < math.inf):
            raise self._error(value, limit)
        if waits and value != value:
            raise self._error(math.inf, limit)

    def _report_later(self, error: Tensor) -> None:
        error = error.nan_to_num(0.0, 0.0, 0.0).float()
        if self._largest is None or self._report is None:
            self._largest, self._report = error, torch.zeros((), pin_memory=error.is_cuda)
        self._largest = torch.maximum(self._largest, error)
        self._report.copy_(self._largest, non_blocking=True)

    def _error(self, error: float, limit: float, when: str = "") -> InversionError:
        return InversionError(
            f"the chain {self._chain} reconstructs its input only to {error:.1e} "
            f"(tolerance {limit:.1e}){when}, so its gradients are wrong. "
            "revcompile.check_invertible(model, x) shows which block loses the precision; "
            "keep the streams in float32, lower the scale of that branch, or raise tolerance="
        )


def _is_asynchronous(device: torch.device) -> bool:
    """Would reading a number wait for everything that the device has been given to do?"""
    return device.type == "cuda"


def _error_on_device(expected: Tensor, actual: Tensor) -> Tensor:
    """`relative_error` without waiting for the device; not finite if anything is not."""
    largest: Sequence[Tensor] = [
        torch.linalg.vector_norm(values, math.inf) for values in (expected - actual, expected)
    ]
    return largest[0] / largest[1].clamp_min(_TINY)
