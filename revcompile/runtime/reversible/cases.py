"""The captures of one model: for calls that break a guard it is captured again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from torch import nn

from revcompile.errors import InputError
from revcompile.ir.signature import LeftOutError, bind
from revcompile.ir.types import Rewired
from revcompile.runtime.reversible.guards import GuardChecker, Mismatch

Recapture = Callable[[nn.Module, tuple[Any, ...], Mapping[str, Any], bool], Rewired]
"""Captures the model of a root in its present state, for the arguments of a call; the last
argument: for its batch size alone?"""

_MOST: Final = 64
"""More captures of one model are an accident: a size that is new at every call."""
_MOST_FORMS: Final = 8
"""The same of the arguments' forms: a number that is new at every call."""


def _checker(rewired: Rewired) -> GuardChecker:
    return GuardChecker(rewired.guards, rewired.root)


class Cases:
    """A rewired model for each combination of sizes, flags and attributes seen so far.

    The first is the one that was compiled; the others are captured when a call needs them. With
    `any_arguments`, so are calls with other arguments than the example's, and without it calls
    that leave out an optional tensor: each form of a call has cases of its own.
    """

    def __init__(
        self, first: Rewired, recapture: Recapture | None = None, any_arguments: bool = False
    ) -> None:
        self.recapture, self.any_arguments = recapture, any_arguments
        self._cases = [(first, _checker(first))]
        self._last = self._cases[0]
        self._forms = [self]

    def first_only(self, recapture: Recapture | None) -> Cases:
        """The first case, as it was when it was captured, for a copy that is stored."""
        twin = copy.copy(self)
        twin._cases, twin._last, twin._forms = self._cases[:1], self._cases[0], [twin]
        twin.recapture = recapture
        return twin

    @property
    def checker(self) -> GuardChecker:
        """Of the first case."""
        return self._cases[0][1]

    def bound(
        self,
        root: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        only_known: bool = False,
    ) -> tuple[Rewired, dict[str, Any]]:
        """The graph for a call, and its inputs; with `only_known`, of a known form."""
        if self.any_arguments:  # of transformers, for whom None is the same as nothing
            kwargs = {name: value for name, value in kwargs.items() if value is not None}
        problem: InputError | None = None
        for index, form in enumerate(self._forms):
            first = form._cases[0][0]
            try:
                values = bind(first.signature, first.name, args, kwargs)
            except InputError as error:
                problem = problem or error
                continue
            self._forms.insert(0, self._forms.pop(index))  # the latest is tried first
            return form.matching(root, values, partial(form._captured, root, args, kwargs)), values
        assert problem is not None
        is_open = self.any_arguments or isinstance(problem, LeftOutError)
        is_closed = only_known or not is_open or self.recapture is None
        if is_closed or len(self._forms) >= _MOST_FORMS:
            raise problem
        self._forms.insert(0, Cases(self._captured(root, args, kwargs, False), self.recapture))
        return self.bound(root, args, kwargs)

    def _captured(
        self, root: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], fixed_batch: bool
    ) -> Rewired:
        assert self.recapture is not None
        return replace(self.recapture(root, args, kwargs, fixed_batch), root=root)

    def matching(
        self, root: nn.Module, values: Mapping[str, Any], capture: Callable[[bool], Rewired]
    ) -> Rewired:
        """The case whose guards hold for a call; `capture` makes another, for its batch size alone
        if it is given True.
        """
        problem = self._last[1].failing(root, values)
        if problem is None:
            return self._last[0]
        for case in self._cases:
            if case[1].failing(root, values) is None:
                self._last = case
                return case[0]
        name = self._cases[0][0].name
        if self.recapture is None:
            raise problem.error(name, "Compile the model again for this case.")
        if problem.is_structural:
            raise problem.error(
                name,
                "Capturing it again does not follow new or missing modules and parameters: undo "
                "the change, or make it in the original model and compile that.",
            )
        if len(self._cases) >= _MOST:
            raise problem.error(
                name,
                f"It has been captured for {_MOST} cases already; give it inputs of fewer sizes "
                "(pad them), or keep the module that reads this with leaf_modules=[...].",
            )
        remaining: Mismatch | None = problem
        for fixed_batch in (False, True):
            try:
                rewired = capture(fixed_batch)
            except Exception as error:
                raise problem.error(
                    name,
                    f"Capturing the model for this case failed: {error}\nCompile it again with "
                    "example inputs of this case, or keep the module that reads this as one piece "
                    "with leaf_modules=[...].",
                ) from error
            case = rewired, _checker(rewired)
            remaining = case[1].failing(root, values)
            if remaining is None:
                break
        if remaining is not None:
            raise remaining.error(name, "Compile it again with example inputs of this case.")
        self._cases.append(case)
        self._last = case
        return rewired
