"""Stashed weights in recorded rounds: those of so many updates ago, each at its own place."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from revcompile.runtime.stage.weights import detached_copies

__all__ = ["Versions", "age"]


def age(microbatch: int, entering: int, gathered: int, accumulate: int) -> int:
    """Updates of a stage since its forward pass of a micro-batch, once the pipeline is full.

    `entering` is the micro-batch of the round to come; `gathered` have been since the last update.

    >>> [age(microbatch, 7, 0, accumulate=1) for microbatch in (4, 5, 6, 7)]
    [3, 2, 1, 0]
    >>> [age(microbatch, 7, 1, accumulate=2) for microbatch in (4, 5, 6, 7)]
    [1, 1, 0, 0]
    """
    return max(0, (entering - 1 - gathered - microbatch) // accumulate + 1)


class Versions:
    """A stage's weights of one update ago, of two, and so on."""

    def __init__(self, parameters: Mapping[str, Tensor], count: int) -> None:
        self._parameters = parameters
        self._past = [detached_copies(parameters) for _ in range(count)]

    def ago(self, updates: int) -> dict[str, Tensor] | None:
        """Weights of so many updates ago; None: as they are."""
        return self._past[updates - 1] if updates else None

    def shift(self) -> None:
        """Before an update: what there is will be one update ago."""
        newer = [*reversed(self._past[:-1]), self._parameters]
        for old, new in zip(reversed(self._past), newer, strict=True):
            _copy(new, old)

    def take(self, updates: int, weights: Mapping[str, Tensor]) -> None:
        """Weights of so many updates ago, from somewhere else."""
        if updates:
            _copy(weights, self._past[updates - 1])

    def given(self, updates: int) -> dict[str, Tensor] | None:
        """A copy, for somewhere else; None: as they are."""
        return detached_copies(self._past[updates - 1]) if updates else None


def _copy(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    if target:
        names = list(target)
        there = [target[name].detach() for name in names]
        torch._foreach_copy_(there, [source[name].detach() for name in names])
