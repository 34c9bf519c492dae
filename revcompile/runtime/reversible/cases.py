"""The captures of one model: for calls that break a guard it is captured again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

from torch import nn

from revcompile.errors import InputError
from revcompile.ir.signature import LeftOutError, bind
from revcompile.ir.types import Rewired
from revcompile.runtime.reversible.guards import GuardChecker, Mismatch

Recapture = Callable[[nn.Module, tuple[Any, ...], Mapping[str, Any], bool], Rewired]
"""Captures the model of a root in its present state, for the arguments of a call; the last
argument: for its batch size alone?"""

_MOST: Final = 64
"""More captures of one model are an accident: a size or a number that is new at every call."""


class _Case(NamedTuple):
    rewired: Rewired
    checker: GuardChecker

    @staticmethod
    def of(rewired: Rewired) -> _Case:
        return _Case(rewired, GuardChecker(rewired.guards, rewired.root))

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs of its graph; raises if it was captured for other arguments."""
        return bind(self.rewired.signature, self.rewired.name, args, kwargs)


class Cases:
    """A rewired model for each combination of sizes, flags and attributes seen so far.

    The first is the one that was compiled; the others are captured when a call needs them. With
    `any_arguments`, so are calls with other arguments than the example's, and without it calls
    that leave out an optional tensor.
    """

    def __init__(self, first: Rewired) -> None:
        self.recapture: Recapture | None = None
        self.any_arguments = False
        self._first = _Case.of(first)
        self._cases = [self._first]
        """The latest that was used comes first."""

    def first_only(self, recapture: Recapture | None) -> Cases:
        """The first case, as it was when it was captured, for a copy that is stored."""
        twin = copy.copy(self)
        twin._cases, twin.recapture = [self._first], recapture
        return twin

    @property
    def checker(self) -> GuardChecker:
        """Of the first case."""
        return self._first.checker

    def bound(
        self,
        root: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        only_known: bool = False,
    ) -> tuple[Rewired, dict[str, Any]]:
        """The graph for a call, and its inputs; with `only_known`, of arguments seen before."""
        if self.any_arguments:  # in transformers, None and a missing argument are the same
            kwargs = {name: value for name, value in kwargs.items() if value is not None}
        other_arguments: InputError | None = None
        is_open = self.any_arguments
        mismatch: Mismatch | None = None
        for index, case in enumerate(self._cases):
            try:
                values = case.bind(args, kwargs)
            except InputError as error:
                other_arguments = other_arguments or error
                is_open = is_open or isinstance(error, LeftOutError)
                continue
            problem = case.checker.failing(root, values)
            if problem is None:
                self._cases.insert(0, self._cases.pop(index))
                return case.rewired, values
            mismatch = mismatch or problem
        is_full = len(self._cases) >= _MOST
        if mismatch is not None:
            self._refuse(mismatch, is_full)
        elif only_known or not is_open or self.recapture is None or is_full:
            assert other_arguments is not None
            raise other_arguments
        return self._captured(root, args, kwargs, mismatch)

    def _refuse(self, problem: Mismatch, is_full: bool) -> None:
        """Raise if a guard fails that capturing the model again would not mend."""
        name = self._first.rewired.name
        if self.recapture is None:
            raise problem.error(name, "Compile the model again for this case.")
        if problem.is_structural:
            raise problem.error(
                name,
                "Capturing it again does not follow new or missing modules and parameters: undo "
                "the change, or make it in the original model and compile that.",
            )
        if is_full:
            raise problem.error(
                name,
                f"It has been captured for {_MOST} cases already; give it inputs of fewer sizes "
                "(pad them), or keep the module that reads this with leaf_modules=[...].",
            )

    def _captured(
        self,
        root: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        mismatch: Mismatch | None,
    ) -> tuple[Rewired, dict[str, Any]]:
        """Another case, for the batch size of the call alone if nothing else holds for it."""
        assert self.recapture is not None
        name = self._first.rewired.name
        for fixed_batch in (False, True):
            try:
                rewired = self.recapture(root, args, kwargs, fixed_batch)
            except Exception as error:
                if mismatch is None:
                    raise
                raise mismatch.error(
                    name,
                    f"Capturing the model for this case failed: {error}\nCompile it again with "
                    "example inputs of this case, or keep the module that reads this as one piece "
                    "with leaf_modules=[...].",
                ) from error
            case = _Case.of(replace(rewired, root=root))
            values = case.bind(args, kwargs)
            remaining = case.checker.failing(root, values)
            if remaining is None:
                self._cases.insert(0, case)
                return case.rewired, values
        assert remaining is not None
        advice = "Compile it again with example inputs of this case."
        if remaining.is_flag:
            advice = (
                "Models are always captured with gradients enabled: call this one so as well, or "
                "move what reads it into a submodule, which then is called as it is."
            )
        raise remaining.error(name, advice)
