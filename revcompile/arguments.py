"""Checks arguments before anything runs; errors name the value, the expectation and the fix.

The `Literal` types list the strings an argument may be, for type checkers and for `help()`.
"""

from __future__ import annotations

import difflib
import enum
import functools
import inspect
import math
import numbers
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, ParamSpec, SupportsIndex, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from revcompile.errors import InputError, nearest

Kind = TypeVar("Kind", bound=enum.Enum)
Given = ParamSpec("Given")
Result = TypeVar("Result")

MethodName = Literal[
    "backprop",
    "reversible_backprop",
    "gpipe",
    "1f1b",
    "pipedream",
    "ddg",
    "features_replay",
    "delayed",
    "dsp",
    "petra",
    "petra_stashed",
    "dni",
]
WeightsName = Literal["latest", "stashed", "predicted"]
KeepName = Literal["nothing", "input", "graph"]
BackendName = Literal["auto", "eager", "cudagraphs", "inductor", "static"]
PolicyName = Literal["paper", "pretrained", "same_parameters"]
CheckName = Literal["full", "fast", "off"]
CostName = Literal["analytic", "measured"]
OverlapName = Literal["auto", "on", "off"]
AutocastName = Literal["bf16", "bfloat16"]


def known_keywords(
    caller: str, others: Mapping[str, str] | None = None
) -> Callable[[Callable[Given, Result]], Callable[Given, Result]]:
    """Decorate a function: for an unknown keyword, the error suggests the nearest known one.

    `others` maps names that belong elsewhere to how to write them there.
    """

    def decorated(function: Callable[Given, Result]) -> Callable[Given, Result]:
        own = {name: name for name in inspect.signature(function).parameters if name != "self"}
        words = {**(others or {}), **own}

        @functools.wraps(function)
        def checked(*args: Given.args, **kwargs: Given.kwargs) -> Result:
            for name in (name for name in kwargs if name not in own):
                near = difflib.get_close_matches(name, words, 1)
                hint = f"did you mean {words[near[0]]}?" if near else f"use {', '.join(own)}"
                raise TypeError(f"{caller}: there is no argument {name!r}; {hint}")
            return function(*args, **kwargs)

        return checked

    return decorated


def check_model(caller: str, model: Any) -> None:
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
    """Refuse example arguments that can certainly not be inputs of the model."""
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


def check_meta(caller: str, model: nn.Module, inputs: Any) -> None:
    """Refuse a model on the meta device with inputs on another one, and the other way round."""
    on_meta = {parameter.is_meta for parameter in model.parameters()}
    tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
    if len(on_meta) == 1 and any(tensor.is_meta not in on_meta for tensor in tensors):
        on = {p.device.type for p in model.parameters()} | {t.device.type for t in tensors}
        raise InputError(
            f"{caller}: the model and the example are on different devices, "
            f"{' and '.join(sorted(on))}; move one of them: example_inputs=x.to('meta')"
        )


def _check_keywords(model: nn.Module, inputs: Mapping[Any, Any]) -> None:
    """Refuse a dict whose keys are arguments of forward: it was meant as keyword arguments."""
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


def check_leaf_modules(leaf_modules: Any) -> None:
    if isinstance(leaf_modules, str | type) or not isinstance(leaf_modules, Iterable):
        shown = leaf_modules.__name__ if isinstance(leaf_modules, type) else repr(leaf_modules)
        raise InputError(
            "leaf_modules: expected a list of paths or classes of modules, got "
            f"{shown}; write leaf_modules=[{shown}]"
        )


def check_device(caller: str, device: Any, *, allow_meta: bool = False) -> torch.device | None:
    """The device a user named, if it can be used here; None stays None."""
    if device is None:
        return None
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError):
        raise InputError(
            f"{caller}: device={device!r} does not exist; use 'cpu', 'cuda', 'cuda:1' or a "
            "torch.device"
        ) from None
    if parsed.type == "cuda":
        count = torch.cuda.device_count()
        if (parsed.index or 0) >= count:
            raise InputError(
                f"{caller}: device={str(parsed)!r}, but torch sees {count} CUDA devices here; "
                "check torch.cuda.is_available(), or leave out device="
            )
        # No test allocation: it would take memory on GPU 0, but each rank may have its own GPU.
        return parsed
    cannot = f"{caller}: device={str(parsed)!r} cannot be used here"
    if parsed.type == "meta" and not allow_meta:
        raise InputError(f"{cannot}: it holds no values")
    try:
        torch.empty(0, device=parsed)
    except (AssertionError, RuntimeError) as error:  # torch was built without this device
        why = str(error).partition("\n")[0]
        raise InputError(f"{cannot}: {why}") from None
    return parsed


def check_stage_to_rank(caller: str, values: Any, stages: int) -> None:
    """Refuse anything but a list of ranks or devices, one for each stage."""
    if isinstance(values, str) or not isinstance(values, Sequence) or len(values) != stages:
        raise InputError(
            f"{caller}: stage_to_rank={values!r}; expected a list of {stages} numbers, one for "
            "each stage"
        )
    for value in values:
        whole_number(caller, "an entry of stage_to_rank", value, 0)


def whole_number(caller: str, name: str, value: Any, least: int, hint: str = "") -> int:
    """`value` as an int of at least `least`; numpy's integers are accepted."""
    as_int = None
    if isinstance(value, SupportsIndex) and not isinstance(value, (bool, Tensor)):
        as_int = operator.index(value)
    if as_int is None or as_int < least:
        raise InputError(
            f"{caller}: {name}={_shown(value)}; expected a whole number, at least {least}{hint}"
        )
    return as_int


def number(caller: str, name: str, value: Any, hint: str, *, or_zero: bool = False) -> float:
    """`value` as a finite float above zero, or, with `or_zero`, of at least zero."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not 0 <= value < math.inf or (value == 0 and not or_zero):
        raise InputError(f"{caller}: {name}={_shown(value)}; {hint}")
    return float(value)


def check_optimizer_copies(caller: str, value: Any) -> None:
    hint = "use 0 for plain SGD, 1 for SGD with momentum, 2 for Adam"
    number(caller, "optimizer_copies", value, hint, or_zero=True)


def flag(caller: str, name: str, value: Any) -> bool:
    """`value` if it is True or False; "no" or None is refused instead of read as a bool."""
    if not isinstance(value, bool):
        raise InputError(f"{caller}: {name}={_shown(value)}; use True or False")
    return value


def file_path(caller: str, value: Any, example: str) -> Path:
    if not isinstance(value, str | os.PathLike):
        raise InputError(
            f"{caller}: expected a path, got {_shown(value)}; write e.g. {caller}({example!r})"
        )
    return Path(value)


def new_file(caller: str, value: Any, example: str) -> Path:
    """The path of a file to write; its folder exists."""
    path = file_path(caller, value, example)
    if not path.absolute().parent.is_dir():
        raise InputError(f"{caller}: there is no folder {path.absolute().parent}")
    return path


def member_of(caller: str, name: str, value: Any, kind: type[Kind]) -> Kind:
    """The member of an enum that `value` is or names; errors suggest the nearest name.

    >>> class Size(enum.Enum):
    ...     LARGE = "large"
    >>> member_of("f", "size", "large", Size)
    <Size.LARGE: 'large'>
    """
    if isinstance(value, kind):
        return value
    words = sorted(member.value for member in kind)
    if isinstance(value, str) and value in words:
        return kind(value)
    hint = nearest(value, words)
    listed = f"use one of: {', '.join(words)}{'; ' * bool(hint)}{hint}"
    raise InputError(f"{caller}: {name}={value!r}; {listed}")


def autocast_dtype(value: Any) -> Any:
    """The dtype that a word such as "bf16" means; anything else as it is, to be checked later.

    >>> autocast_dtype("bf16")
    torch.bfloat16
    """
    words = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16}
    words |= {"fp16": torch.float16, "float16": torch.float16}
    return words.get(value, value) if isinstance(value, str) else value


def _shown(value: Any) -> str:
    """The value as text for a message; only its type if it has tensors, which would fill pages."""
    fills_pages = any(isinstance(leaf, Tensor | nn.Module) for leaf in pytree.tree_leaves(value))
    return type(value).__name__ if fills_pages else repr(value)
