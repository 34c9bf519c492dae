"""A look at whether a chain got back what it was given: a few elements, compared."""

from __future__ import annotations

from typing import Final, Literal

import torch
from torch import Tensor

from revcompile.errors import InversionError

__all__ = ["Tolerance", "compare", "probe", "relative_error", "tolerance_for"]

Tolerance = float | Literal["auto"] | None
"""The largest relative error allowed; "auto": by the type of the streams; None: nobody looks."""

_BY_TYPE: Final = {torch.float64: 1e-9}
_OTHERS: Final = 1e-3


def tolerance_for(dtype: torch.dtype, tolerance: Tolerance) -> float:
    """The tolerance of a chain whose streams are of a type.

    >>> tolerance_for(torch.float64, "auto"), tolerance_for(torch.float32, "auto")
    (1e-09, 0.001)
    """
    if isinstance(tolerance, str) or tolerance is None:
        return _BY_TYPE.get(dtype, _OTHERS)
    return tolerance


def relative_error(expected: Tensor, actual: Tensor) -> float:
    """Largest deviation relative to the largest value."""
    if not expected.numel():
        return 0.0
    precise = torch.complex128 if expected.is_complex() else torch.float64
    difference = (expected.to(precise) - actual.to(precise)).abs().max()
    error = float(difference / expected.to(precise).abs().max().clamp_min(1e-30))
    return error if error == error else float("inf")


def probe(stream: Tensor) -> Tensor:
    """A few hundred evenly spaced elements of a stream."""
    flat = stream.detach().reshape(-1) if stream.is_contiguous() else stream.detach().flatten()
    return flat[:: max(1, flat.numel() // 256)].clone()


def compare(
    before: tuple[Tensor, ...], streams: tuple[Tensor, ...], chain: str, tolerance: float
) -> None:
    """Stop training if streams have come back as something else than the probes of them say."""
    pairs = zip(before, streams, strict=True)
    error = max(relative_error(expected, probe(stream)) for expected, stream in pairs)
    if error > tolerance:
        raise InversionError(
            f"the chain {chain} reconstructs its input only to {error:.1e} "
            f"(tolerance {tolerance:.1e}), so its gradients would be wrong. "
            "revcompile.check_invertible(model, x) shows which block loses the precision; "
            "keep the streams in float32, lower the scale of that branch, or raise tolerance="
        )
