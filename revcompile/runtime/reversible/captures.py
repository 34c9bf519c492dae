"""The captures of one model: which one is the model for this call?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from torch import nn

from revcompile.ir.guards import Guards
from revcompile.ir.types import Rewired
from revcompile.runtime.reversible.guards import GuardChecker, Mismatch

__all__ = ["Cases", "Recapture"]

Recapture = Callable[[nn.Module, tuple[Guards, ...], tuple[Any, ...], Mapping[str, Any]], Rewired]
"""Captures the model of a root as it is now, for the arguments of a call."""

_MOST: Final = 64
"""So many cases of one model are an accident: a size that is new at every call."""


class Cases:
    """A rewired model for each combination of sizes, flags and attributes that was met.

    The first is what was compiled; the others are captured when a call needs them.
    """

    def __init__(self, first: Rewired, recapture: Recapture | None = None) -> None:
        self.recapture = recapture
        self._cases = [(first, GuardChecker(first.guards))]
        self._last = self._cases[0]

    def fitting(
        self,
        root: nn.Module,
        values: Mapping[str, Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Rewired:
        """The rewired model whose guards hold for a call."""
        problem = self._last[1].failing(root, values)
        if problem is None:
            return self._last[0]
        for case in self._cases:
            if case[1].failing(root, values) is None:
                self._last = case
                return case[0]
        return self._captured_anew(problem, root, values, args, kwargs)

    def _captured_anew(
        self,
        problem: Mismatch,
        root: nn.Module,
        values: Mapping[str, Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Rewired:
        name = self._cases[0][0].name
        if self.recapture is None:
            raise problem.error(name, "Make the model anew for this case.")
        if len(self._cases) >= _MOST:
            raise problem.error(
                name,
                f"It has been captured for {_MOST} cases already; give it inputs of fewer sizes "
                "(pad them), or keep the module that reads this with leaf_modules=[...].",
            )
        try:
            rewired = self.recapture(root, tuple(r.guards for r, _ in self._cases), args, kwargs)
        except Exception as error:
            raise problem.error(
                name,
                f"Capturing the model anew for this case failed: {error}\nMake it anew with "
                "example inputs of this case, or keep the module that reads this as one piece with "
                "leaf_modules=[...].",
            ) from error
        rewired = replace(rewired, root=root)
        case = rewired, GuardChecker(rewired.guards)
        remaining = case[1].failing(root, values)
        if remaining is not None:
            raise remaining.error(name, "Make the model anew with example inputs of this case.")
        self._cases.append(case)
        self._last = case
        return rewired
