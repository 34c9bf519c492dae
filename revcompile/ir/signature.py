"""How a call of the model maps to the inputs of its graph, and why one does not."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from revcompile.errors import InputError


class LeftOutError(InputError):
    """A call without an optional tensor that the example has."""


@dataclass(frozen=True)
class Signature:
    """How a call of the model maps to the graph's placeholders and back.

    Arguments are flattened as a pytree: tensors become placeholders in order; other values are
    constants of the graph, and must be the same in every call.
    """

    forward: inspect.Signature
    given: tuple[str, ...]
    """Names of the arguments that the example has."""
    in_spec: pytree.TreeSpec
    fixed: tuple[tuple[int, Any], ...]
    """Position and value of each flat argument that is no tensor."""
    placeholders: tuple[str, ...]
    labels: tuple[str, ...]
    """For each placeholder, the argument as a user writes it: `batch['mask']`."""
    out_spec: pytree.TreeSpec
    eval_out_spec: pytree.TreeSpec | None = None
    """If the model returns another structure in eval mode, that one."""

    @functools.cached_property
    def is_positional(self) -> bool:
        """Does a call consist of tensors as positional arguments, and nothing else?"""
        call: tuple[Any, Any] = (0,) * len(self.placeholders), {}
        return bool(self.in_spec == pytree.tree_structure(call))

    def __deepcopy__(self, memo: dict[int, Any]) -> Signature:
        """Immutable; and torch 2.11 warns when a `TreeSpec` is copied."""
        return self


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
                raise InputError(f"{name}: {_other_value(signature, bound)}")
            continue
        placeholder, label = next(names)
        if not isinstance(leaf, Tensor):
            raise (LeftOutError if leaf is None else InputError)(
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


def _other_value(signature: Signature, bound: inspect.BoundArguments) -> str:
    now, then = _arguments(signature, bound.arguments), _example(signature)
    argument, leaf, before = next(
        (name, *pair)
        for name in now
        for pair in zip(pytree.tree_leaves(now[name]), pytree.tree_leaves(then[name]), strict=True)
        if not isinstance(pair[1], Tensor) and (isinstance(pair[0], Tensor) or pair[0] != pair[1])
    )
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
