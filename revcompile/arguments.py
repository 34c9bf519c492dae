"""Wrong arguments, refused in the user's words: what came, what was expected, what to write."""

from __future__ import annotations

import difflib
import inspect
import operator
from collections.abc import Iterable, Mapping
from typing import Any, SupportsIndex

from torch import Tensor, nn
from torch.utils.data import DataLoader

from revcompile.errors import InputError

__all__ = ["check_cost", "check_examples", "check_model", "one_of", "whole_number"]


def check_model(caller: str, model: Any) -> None:
    """Refuse what is not a module: a class, a name."""
    if isinstance(model, nn.Module):
        return
    expected = f"{caller}: expected a torch.nn.Module, got "
    if isinstance(model, type) and issubclass(model, nn.Module):
        name = model.__name__
        raise InputError(f"{expected}the class {name}; pass a model of it, {name}(...)")
    if isinstance(model, str):
        raise InputError(f"{expected}{model!r}; create it first: timm.create_model({model!r})")
    raise InputError(f"{expected}{type(model).__name__}")


def check_examples(model: nn.Module, inputs: Any, kwargs: Any) -> None:
    """Refuse example arguments that are certainly not what the model is called with."""
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise InputError(
            f"example_kwargs: expected a dict of keyword arguments, got {type(kwargs).__name__}; "
            "positional arguments go into example_inputs=(...)"
        )
    if isinstance(inputs, Mapping):
        _check_keywords(model, inputs)
    elif isinstance(inputs, (tuple, list)):
        if len(inputs) > 1 and all(type(item) is int for item in inputs):
            numbers = ", ".join(map(str, inputs))
            raise InputError(
                f"example_inputs: {inputs!r} is a shape; pass a tensor: torch.randn({numbers})"
            )
        for index, item in enumerate(inputs):
            _check_tensor_like(item, f"example_inputs[{index}]")
    elif inputs is not None and not isinstance(inputs, Tensor):
        _check_tensor_like(inputs, "example_inputs")


def _check_keywords(model: nn.Module, inputs: Mapping[Any, Any]) -> None:
    """A dict whose keys are arguments of forward was meant as keyword arguments."""
    parameters = list(inspect.signature(model.forward).parameters.values())
    names = {p.name for p in parameters}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if inputs and all(isinstance(k, str) and (k in names or takes_any) for k in inputs):
        raise InputError(
            f"example_inputs: got a {type(inputs).__name__} of {', '.join(map(str, inputs))}, "
            f"which {type(model).__name__}.forward takes as keyword arguments; pass it as "
            "example_kwargs=dict(...)"
        )


def _check_tensor_like(value: Any, where: str) -> None:
    kind = type(value)
    if kind.__module__.partition(".")[0] == "numpy" and hasattr(value, "__array__"):
        raise InputError(f"{where}: a numpy array; pass a tensor, torch.from_numpy(...)")
    if kind.__module__.partition(".")[0] == "PIL":
        raise InputError(f"{where}: an image; pass a batch of tensors, of shape (2, 3, H, W)")
    if isinstance(value, DataLoader) or inspect.isgenerator(value):
        raise InputError(
            f"{where}: a {kind.__name__}; pass the inputs of one batch: x, y = next(iter(loader))"
        )


def whole_number(caller: str, name: str, value: Any, least: int, hint: str = "") -> int:
    """A whole number of at least so much (numpy's are taken too)."""
    number = None
    if isinstance(value, SupportsIndex) and not isinstance(value, (bool, Tensor)):
        number = operator.index(value)
    if number is None or number < least:
        shown = type(value).__name__ if isinstance(value, (Tensor, nn.Module)) else repr(value)
        raise InputError(
            f"{caller}: {name}={shown}; expected a whole number, at least {least}{hint}"
        )
    return number


def one_of(caller: str, name: str, value: Any, known: Iterable[str]) -> str:
    """One of some words, or the nearest of them told."""
    words = sorted(known)
    if isinstance(value, str) and value in words:
        return value
    hint = _nearest(value, words)
    raise InputError(f"{caller}: {name}={value!r}; use one of: {', '.join(words)}{hint}")


def check_cost(cost: Any) -> None:
    """Refuse what says nothing about work: a word that is none of ours, a number."""
    words = ("analytic", "measured", "replayed")
    if cost in words if isinstance(cost, str) else isinstance(cost, Mapping) or callable(cost):
        return
    raise InputError(
        'cost: expected "analytic", "measured", "replayed", a mapping of names to numbers, or '
        f"a function of a name, got {cost!r}{_nearest(cost, words)}"
    )


def _nearest(value: Any, words: Iterable[str]) -> str:
    near = difflib.get_close_matches(value, list(words), 1) if isinstance(value, str) else []
    return f"; did you mean {near[0]!r}?" if near else ""
