"""How a call of the model maps to the inputs of its graph, and errors for calls that do not fit."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from revcompile.errors import InputError

NESTED: Final = (
    "a nested tensor, whose sizes differ from sample to sample; pad it (x.to_padded_tensor(0.0)) "
    "and pass a mask"
)
_NOTHING: Final = pytree.tree_structure(())


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
    out_spec: pytree.TreeSpec = _NOTHING
    eval_out_spec: pytree.TreeSpec | None = None
    """The structure of the outputs in eval mode, if it is different."""

    @functools.cached_property
    def is_positional(self) -> bool:
        """Whether a call consists of tensors as positional arguments, and nothing else."""
        call: tuple[Any, Any] = (0,) * len(self.placeholders), {}
        return bool(self.in_spec == pytree.tree_structure(call))

    def __deepcopy__(self, memo: dict[int, Any]) -> Signature:
        """The signature itself: it is immutable, and torch 2.11 warns if a `TreeSpec` is copied."""
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Structures as rows of plain values: torch 2.11 warns if a `TreeSpec` is unpickled."""
        own = vars(self).items()
        return {n: _row(value) if isinstance(value, pytree.TreeSpec) else value for n, value in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        given = state.items()
        vars(self).update({n: _spec(v) if isinstance(v, _Row) else v for n, v in given})


class _Row(NamedTuple):
    """A node of a structure; a leaf has no type."""

    kind: Any
    context: Any
    children: list[_Row]


def _row(spec: pytree.TreeSpec) -> _Row:
    return _Row(spec.type, spec.context, list(map(_row, spec.children())))


def _spec(row: _Row) -> pytree.TreeSpec:
    if row.kind is None:
        return pytree.tree_structure(0)
    return pytree.TreeSpec(row.kind, row.context, list(map(_spec, row.children)))


def bind(
    signature: Signature, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The graph's input values from a call of the model."""
    is_usual = signature.is_positional and not kwargs and len(args) == len(signature.placeholders)
    if is_usual and all(isinstance(value, Tensor) and not value.is_nested for value in args):
        return dict(zip(signature.placeholders, args, strict=True))
    try:
        bound = signature.forward.bind(*args, **kwargs)
    except TypeError as error:
        raise InputError(f"{name}{signature.forward}: {error}") from None
    _fit_defaults(signature, bound)
    leaves, spec = pytree.tree_flatten((bound.args, bound.kwargs))
    fixed = dict(signature.fixed)
    is_same = spec == signature.in_spec and not any(
        isinstance(leaves[i], Tensor) or leaves[i] != value for i, value in signature.fixed
    )
    if not is_same:
        raise InputError(f"{name}: {_what_differs(signature, bound)}")
    given = [leaf for index, leaf in enumerate(leaves) if index not in fixed]
    for label, leaf in zip(signature.labels, given, strict=True):
        if not isinstance(leaf, Tensor):
            raise (LeftOutError if leaf is None else InputError)(
                f"{name}: expected a tensor for {label}, got {_form(leaf)}; it was one in the "
                "example: pass a tensor, or compile the model again with an example like this call"
            )
        if leaf.is_nested:
            raise InputError(f"{name}: {label} is {NESTED}")
    return dict(zip(signature.placeholders, given, strict=True))


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
        (old, old_form), (new, new_form) = _plain(then[argument]), _plain(value)
        differing = [pair for pair in zip(old, new, strict=False) if pair[0] != pair[1]]
        if old_form != new_form or differing:
            was, has = differing[0] if old_form == new_form else (then[argument], value)
            return (
                f"argument {argument} was {_form(was)} in the example and is {_form(has)} now"
                f"{_cache_advice(argument, has)}; all but tensors is part of the captured graph: "
                f"pass it as in the example, {_ANEW}"
            )
    return f"the arguments are passed in another way than in the example; pass them alike, {_ANEW}"


def _plain(value: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """The parts of an argument that must be the same in every call: plain leaves and structure."""
    leaves, spec = pytree.tree_flatten(value)
    return [Tensor if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec


def _example(signature: Signature) -> dict[str, Any]:
    """The example's arguments, with an empty tensor for each tensor."""
    leaves: list[Any] = [torch.empty(0)] * signature.in_spec.num_leaves
    for index, value in signature.fixed:
        leaves[index] = value
    args, kwargs = pytree.tree_unflatten(leaves, signature.in_spec)
    return _arguments(signature, signature.forward.bind(*args, **kwargs).arguments)


def _arguments(signature: Signature, given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by the names a user knows, including those in `**kwargs`."""
    by_name: dict[str, Any] = {}
    for name, value in given.items():
        is_rest = signature.forward.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
        by_name |= value if is_rest else {name: value}
    return by_name


def _cache_advice(argument: str, value: Any) -> str:
    # Caches of transformers have this method.
    is_cache = hasattr(value, "get_seq_length") or argument in ("past_key_values", "cache")
    return " (a cache of keys and values: pass use_cache=False)" if is_cache else ""


def _form(value: Any) -> str:
    """The form of a nested value in words."""
    if isinstance(value, Tensor) or value is Tensor:
        return "a tensor"
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with {', '.join(map(repr, value)) or 'nothing'}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"
