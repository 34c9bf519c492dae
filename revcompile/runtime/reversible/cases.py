"""The captures of one model: for calls that break a guard it is captured again."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from revcompile.errors import InputError
from revcompile.ir.guards import Guards
from revcompile.ir.types import Rewired, Signature
from revcompile.runtime.reversible.guards import GuardChecker, Mismatch

Recapture = Callable[
    [nn.Module, tuple[Guards, ...], tuple[Any, ...], Mapping[str, Any], bool], Rewired
]
"""Captures the model of a root in its present state, for the arguments of a call; the last
argument: for its batch size alone?"""

_MOST: Final = 64
"""More captures of one model are an accident: a size that is new at every call."""
_MOST_FORMS: Final = 8
"""The same of the arguments' forms: a number that is new at every call."""


class Cases:
    """A rewired model for each combination of sizes, flags and attributes seen so far.

    The first is the one that was compiled; the others are captured when a call needs them. With
    `any_arguments`, so are calls with other arguments than the example's: each form of a call has
    cases of its own.
    """

    def __init__(
        self, first: Rewired, recapture: Recapture | None = None, any_arguments: bool = False
    ) -> None:
        self.recapture, self.any_arguments = recapture, any_arguments
        self._cases = [(first, GuardChecker(first.guards))]
        self._last = self._cases[0]
        self._forms = [self]

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
            return form.matching(root, values, args, kwargs), values
        assert problem is not None
        is_closed = only_known or not self.any_arguments or self.recapture is None
        if is_closed or len(self._forms) >= _MOST_FORMS:
            raise problem
        self._forms.insert(0, Cases(self._captured(root, args, kwargs), self.recapture))
        return self.bound(root, args, kwargs)

    def _captured(
        self,
        root: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        fixed_batch: bool = False,
    ) -> Rewired:
        assert self.recapture is not None
        guards = tuple(rewired.guards for rewired, _ in self._cases)
        rewired = self.recapture(root, guards, args, kwargs, fixed_batch)
        return replace(rewired, root=root, guards=rewired.guards.for_copy(root))

    def matching(
        self,
        root: nn.Module,
        values: Mapping[str, Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Rewired:
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
                rewired = self._captured(root, args, kwargs, fixed_batch)
            except Exception as error:
                raise problem.error(
                    name,
                    f"Capturing the model for this case failed: {error}\nCompile it again with "
                    "example inputs of this case, or keep the module that reads this as one piece "
                    "with leaf_modules=[...].",
                ) from error
            case = rewired, GuardChecker(rewired.guards)
            remaining = case[1].failing(root, values)
            if remaining is None:
                break
        if remaining is not None:
            raise remaining.error(name, "Compile it again with example inputs of this case.")
        self._cases.append(case)
        self._last = case
        return rewired


def bind(
    signature: Signature, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The graph's input values from a call of the model."""
    is_usual = signature.is_positional and not kwargs and len(args) == len(signature.placeholders)
    if is_usual and all(isinstance(value, Tensor) for value in args):
        return dict(zip(signature.placeholders, args, strict=True))
    try:
        bound = signature.forward.bind(*args, **kwargs)
    except TypeError as error:
        raise InputError(f"{name}{signature.forward}: {error}") from None
    _fit_defaults(signature, bound)
    leaves, spec = pytree.tree_flatten((bound.args, bound.kwargs))
    if spec != signature.in_spec:
        raise InputError(f"{name}: {_what_differs(signature, bound)}")
    fixed = dict(signature.fixed)
    values: dict[str, Any] = {}
    names = iter(zip(signature.placeholders, signature.labels, strict=True))
    for index, leaf in enumerate(leaves):
        if index in fixed:
            if isinstance(leaf, Tensor) or leaf != fixed[index]:
                raise InputError(f"{name}: {_other_value(signature, bound, index, leaf)}")
            continue
        placeholder, label = next(names)
        if not isinstance(leaf, Tensor):
            raise InputError(
                f"{name}: expected a tensor for {label}, got {_shown(leaf)}; it was one in the "
                "example: pass a tensor, or compile the model again with an example like this call"
            )
        values[placeholder] = leaf
    return values


def _fit_defaults(signature: Signature, bound: inspect.BoundArguments) -> None:
    """Make a call with or without an explicit default match the captured one."""
    for name, parameter in signature.forward.parameters.items():
        default = parameter.default
        if default is inspect.Parameter.empty:
            continue
        if name in signature.given and name not in bound.arguments:
            bound.arguments[name] = default
        elif name not in signature.given and bound.arguments.get(name, ...) is default:
            del bound.arguments[name]


# -- errors --------------------------------------------------------------------------

_ANEW = "or compile the model again with an example like this call"


def _what_differs(signature: Signature, bound: inspect.BoundArguments) -> str:
    """How the structure of a call's arguments differs from the example's."""
    now, then = _arguments(signature, bound.arguments), _example(signature)
    for argument in (a for a in now if a not in then):
        cache = _cache_advice(argument, now[argument])
        return f"argument {argument} was not in the example{cache}; leave it out, {_ANEW}"
    for argument in (a for a in then if a not in now):
        return f"argument {argument} was in the example but is missing now; pass it, {_ANEW}"
    for argument, value in now.items():
        if pytree.tree_structure(value) != pytree.tree_structure(then[argument]):
            cache = _cache_advice(argument, value)
            return (
                f"argument {argument} was {_form(then[argument])} in the example and is "
                f"{_form(value)} now{cache}; pass it in the example's form, {_ANEW}"
            )
    return f"the arguments are passed in another way than in the example; pass them alike, {_ANEW}"


def _example(signature: Signature) -> dict[str, Any]:
    """The example's arguments, with an empty tensor for each tensor."""
    leaves: list[Any] = [torch.empty(0)] * signature.in_spec.num_leaves
    for index, value in signature.fixed:
        leaves[index] = value
    args, kwargs = pytree.tree_unflatten(leaves, signature.in_spec)
    return _arguments(signature, signature.forward.bind(*args, **kwargs).arguments)


def _arguments(signature: Signature, given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by the names a user knows, those in `**kwargs` included."""
    by_name: dict[str, Any] = {}
    for name, value in given.items():
        is_rest = signature.forward.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
        by_name |= value if is_rest else {name: value}
    return by_name


def _cache_advice(argument: str, value: Any) -> str:
    # Caches of transformers have this method.
    is_cache = hasattr(value, "get_seq_length") or argument in ("past_key_values", "cache")
    return " (a cache of keys and values: pass use_cache=False)" if is_cache else ""


def _other_value(signature: Signature, bound: inspect.BoundArguments, index: int, leaf: Any) -> str:
    marks = [object() for _ in range(signature.in_spec.num_leaves)]  # found again by identity
    args, kwargs = pytree.tree_unflatten(marks, signature.in_spec)
    places = _arguments(signature, signature.forward.bind(*args, **kwargs).arguments)
    argument = next(
        (name for name, tree in places.items() if marks[index] in pytree.tree_leaves(tree)), "?"
    )
    before = dict(signature.fixed)[index]
    return (
        f"argument {argument} was {before!r} in the example and is {_shown(leaf)} now"
        f"{_cache_advice(argument, leaf)}; it is no tensor, so its value is part of the captured "
        f"graph: pass {before!r}, {_ANEW}"
    )


def _shown(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"a tensor of shape {tuple(leaf.shape)}"
    plain = leaf is None or isinstance(leaf, (bool, int, float, str))
    return repr(leaf) if plain else f"a {type(leaf).__name__}"


def _form(value: Any) -> str:
    """The form of a nested value in words."""
    if isinstance(value, Tensor):
        return "a tensor"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with {', '.join(map(repr, value)) or 'nothing'}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return _shown(value)
