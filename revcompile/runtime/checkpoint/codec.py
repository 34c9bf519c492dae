"""Plain values as JSON, for checkpoints and messages: nothing in a file is ever run.

What JSON has no word for is an object with one key that says what it is. Functions, classes and
objects of other kinds cannot be written, so reading never imports or calls anything.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch

from revcompile.errors import InputError

__all__ = ["Special", "as_text", "decode", "encode", "located"]

Special = Callable[[Any], dict[str, Any] | None]
"""How a value that means something only here (a tensor's place) is written; None: as any other."""

_TORCH: Final = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}
_SEQUENCES: Final = {
    "tuple": tuple,
    "size": torch.Size,
    "set": set,
    "frozenset": frozenset,
}


@contextlib.contextmanager
def located(where: str) -> Iterator[None]:
    """Say where an error belongs."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{where}: {error}") from error.__cause__


def encode(value: Any, special: Special = lambda value: None) -> Any:
    """A value as JSON.

    >>> encode((1, [None, torch.float16], slice(2)))
    {'tuple': [1, [None, {'dtype': 'float16'}], {'slice': [None, 2, None]}]}
    """
    found = special(value)
    if found is not None:
        return found
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if value is ...:
        return {"ellipsis": True}
    inner = functools.partial(encode, special=special)
    if type(value) is list:
        return [inner(item) for item in value]
    if type(value) is dict:
        return {"dict": [[inner(key), inner(item)] for key, item in value.items()]}
    for tag, kind in _SEQUENCES.items():
        if type(value) is kind:
            # A set has no order of its own that another process would agree on.
            listed = sorted(value, key=repr) if kind in (set, frozenset) else value
            return {tag: [inner(item) for item in listed]}
    if isinstance(value, slice):
        return {"slice": [inner(v) for v in (value.start, value.stop, value.step)]}
    if type(value) is complex:
        return {"complex": [inner(value.real), inner(value.imag)]}
    for tag, constants in _TORCH.items():
        if isinstance(value, constants):
            return {tag: str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    raise InputError(f"a value of type {type(value).__module__}.{type(value).__qualname__}")


def decode(data: Any, special: Mapping[str, Callable[[Any], Any]] | None = None) -> Any:
    """The value that `encode` wrote; `special` reads the tags that mean something only here.

    >>> decode(encode({"a": (1, 2.5, torch.bfloat16)}))
    {'a': (1, 2.5, torch.bfloat16)}
    """
    special = special or {}
    inner = functools.partial(decode, special=special)
    if data is None or isinstance(data, (bool, int, float, str)):
        return data
    if isinstance(data, list):
        return [inner(item) for item in data]
    if not isinstance(data, dict) or len(data) != 1:
        raise InputError(f"expected an object with one key, got {data!r:.80}")
    tag, content = next(iter(data.items()))
    if tag in special:
        return special[tag](content)
    try:
        return _decode_tagged(tag, content, inner)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"cannot read {content!r:.80} as a {tag}: {error}") from error


def _decode_tagged(tag: str, content: Any, inner: Callable[[Any], Any]) -> Any:
    if tag in _SEQUENCES:
        return _SEQUENCES[tag](inner(item) for item in content)
    if tag in _TORCH:
        found = getattr(torch, content, None)
        if not isinstance(found, _TORCH[tag]):
            raise InputError(f"torch has no {tag} {content!r}")
        return found
    match tag:
        case "dict":
            return {inner(key): inner(item) for key, item in content}
        case "slice":
            start, stop, step = map(inner, content)
            return slice(start, stop, step)
        case "float":
            return float(content)
        case "complex":
            real, imaginary = map(inner, content)
            return complex(real, imaginary)
        case "ellipsis":
            return ...
        case "device":
            return torch.device(content)
    raise InputError(f"{tag!r} is no kind of value")


def as_text(value: Any, indent: str = "") -> str:
    """JSON for readers: what fits on a line is on one."""
    line = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if len(indent) + len(line) <= 100 or not isinstance(value, (dict, list)):
        return line
    deeper = indent + " "
    if isinstance(value, list):
        items = [as_text(item, deeper) for item in value]
    else:
        items = [f"{json.dumps(key)}: {as_text(item, deeper)}" for key, item in value.items()]
    opening, closing = "[]" if isinstance(value, list) else "{}"
    body = f",\n{deeper}".join(items)
    return f"{opening}\n{deeper}{body}\n{indent}{closing}"
