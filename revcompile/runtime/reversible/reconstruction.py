"""Checks that a chain rebuilds its input: a few hundred elements are compared in every call.

A chain whose activations grow (`|a| << |F(b)|`) rebuilds `a = y - F(b)` with few correct digits, or
none, and its gradients are then wrong without being infinite. Whether that happens depends on the
weights and on the batch, so every call is checked:

    on the CPU                      backward() raises
    on a GPU, every n-th call       backward() waits for the device and raises
    on a GPU, all other calls       the device writes the largest error so far into pinned memory;
                                    nothing waits, and a later forward pass raises

In float32, errors between 1e-3 and 1e-2 only cause one warning, unless a tolerance was given.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final, Literal

import torch
from torch import Tensor

from revcompile.errors import InversionError, RevcompileWarning
from revcompile.kernels.autocast import widest_dtype

Tolerance = float | Literal["auto"] | None
"""The largest relative error allowed; "auto": by the dtype of the streams; None: no check."""

_BY_DTYPE: Final = {torch.float64: 1e-9}
_OTHER_DTYPES: Final = 1e-3
_WARNED: Final = 10
"""With "auto", errors of up to this many tolerances only cause a warning: they do not hurt."""
_SAMPLES: Final = 256
_TINY: Final = 1e-30
_NOISE: Final = 64
"""A stream is rounding noise if it is below this many eps of the larger stream."""


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
    wide = widest_dtype(expected.device)
    precise = wide.to_complex() if expected.is_complex() else wide
    error = float(_error_on_device([(expected.to(precise), actual.to(precise))]))
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


def samples_of(stream: Tensor) -> Tensor:
    """A view of a few elements: no pass over the whole stream, whatever its memory format."""
    return stream.detach()[_sample_index(stream.shape)]


Samples = Mapping[str, Tensor]
"""Elements of streams, by name."""
StartedCheck = tuple[bool, Samples]
"""Whether backward waits for the device, and copies of the samples of forward."""


class ReconstructionCheck:
    """Compares the input that a chain or stage rebuilds with the actual one, in every call.

    Args:
        name: of the chain or stage, for the error.
        tolerance: the largest relative error allowed; None: nothing is compared.
        wait_every: the first and every `wait_every`-th call waits for the GPU.
        failures_allowed: consecutive calls that may fail without an error.
    """

    def __init__(
        self, name: str, tolerance: Tolerance, wait_every: int = 50, failures_allowed: int = 0
    ) -> None:
        self._name, self._tolerance = name, tolerance
        self._wait_every = wait_every
        self._calls = 0
        self._has_warned = False
        self._recent = deque[Tensor](maxlen=failures_allowed + 1)
        """Errors of the latest calls. A check fails only if all of them are too large."""
        self._largest: Tensor | None = None
        """On the GPU: the largest error of the calls in which backward did not wait."""
        self._report: Tensor | None = None
        """The same in pinned memory, as of the latest call that the GPU has finished."""

    @property
    def is_on(self) -> bool:
        return self._tolerance is not None

    def start(self, samples: Samples) -> StartedCheck:
        """Start a check in forward, with samples of the input streams.

        Raises:
            InversionError: an earlier call on the GPU rebuilt its input wrongly.
        """
        dtype = next(iter(samples.values())).dtype
        limit = tolerance_for(dtype, self._tolerance)
        if self._report is not None and (error := self._report.item()) > limit:
            self._largest = self._report = None
            self._refuse(error, dtype, " in an earlier step")
        waits = self._calls % self._wait_every == 0
        self._calls += 1
        return waits, {name: sample.clone() for name, sample in samples.items()}

    def finish(self, started: StartedCheck, rebuilt: Samples) -> None:
        """Finish a check in backward, with samples of the rebuilt streams.

        Values that are not finite are an error only in the calls that wait: they also show in the
        loss and in the gradients, and `torch.amp.GradScaler` skips such steps.

        Raises:
            InversionError: a stream was rebuilt wrongly.
        """
        waits, samples = started
        pairs = [(x, rebuilt[n]) for n, x in samples.items() if n in rebuilt and x.numel()]
        if not pairs:
            return
        error, dtype = _error_on_device(pairs), pairs[0][1].dtype
        if self._recent and self._recent[0].device != error.device:  # the model was moved
            self._recent.clear()
            self._largest = self._report = None
        self._recent.append(error)
        if len(self._recent) < (self._recent.maxlen or 1):
            return
        error = functools.reduce(torch.fmin, self._recent)
        if _is_asynchronous(error.device) and not waits:
            error = error.nan_to_num(0.0, 0.0, 0.0).float()
            if self._largest is None or self._report is None:
                self._largest = error
                self._report = torch.zeros((), dtype=error.dtype, pin_memory=error.is_cuda)
            self._largest = torch.maximum(self._largest, error)
            self._report.copy_(self._largest, non_blocking=True)
            return
        value, limit = error.item(), tolerance_for(dtype, self._tolerance)
        if value > limit and (waits or value < math.inf):
            self._refuse(value, dtype)
        if waits and value != value:
            self._refuse(math.inf, dtype)

    def _refuse(self, error: float, dtype: torch.dtype, when: str = "") -> None:
        """Raise, or warn once if the error is small and the user has set no tolerance."""
        limit = tolerance_for(dtype, self._tolerance)
        is_small = self._tolerance == "auto" and dtype not in _BY_DTYPE and error <= _WARNED * limit
        effect = "are no more precise" if is_small else "are wrong"
        message = (
            f"{self._name} reconstructs its input only to {error:.1e} "
            f"(tolerance {limit:.1e}){when}, so its gradients {effect}. "
            "Either its branches have become too large for this precision: "
            "revcompile.check_invertible(net, x) shows which; keep the streams in float32, lower "
            "the scale of that branch or the learning rate, or raise tolerance=. Or a branch "
            "computes something else when it runs again in backward: a forward hook of it returns "
            "other values in each call, torch.utils.checkpoint draws other masks with "
            "preserve_rng_state=False, it counts, it reads torch.is_grad_enabled(), or its "
            "parameters were written through .data between forward and backward"
        )
        if not is_small:
            raise InversionError(message)
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{message} (from {_WARNED * limit:.0e} on this is an error)",
                RevcompileWarning,
                stacklevel=2,
            )


def _is_asynchronous(device: torch.device) -> bool:
    """Whether reading a number waits for all work that the device has been given."""
    return device.type == "cuda"


def _error_on_device(pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """The largest relative error, without waiting for the device; not finite if a value is not.

    The error of a stream that is only rounding noise beside the other one counts as 0: a batch norm
    of equal rows should be 0, and is not quite.
    """
    scales = [_largest(expected) for expected, _ in pairs]
    noise = _NOISE * torch.finfo(scales[0].dtype).eps * functools.reduce(torch.maximum, scales)
    errors = [
        torch.where(scale < noise, 0.0, _largest(expected - actual) / scale.clamp_min(_TINY))
        for scale, (expected, actual) in zip(scales, pairs, strict=True)
    ]
    return functools.reduce(torch.maximum, errors)


def _largest(values: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(values, math.inf)
    return norm
