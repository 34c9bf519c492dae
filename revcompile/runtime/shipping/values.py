"""Values as JSON: what JSON has no word for is an object with one key that says what it is."""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import nn

from revcompile.errors import InputError
from revcompile.ir import TensorType
from revcompile.program import Port, Unit
from revcompile.runtime.shipping.names import Names, name_of
from revcompile.schedule import Method

__all__ = ["Special", "decode", "encode", "written"]

Special = Callable[[Any], dict[str, Any] | None]
"""How a value that means something only here (a node, a tensor) is written; None: as any other."""

_RECORDS: Final = {kind.__name__: kind for kind in (Method, Port, Unit)}
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
    # FX keeps lists and dicts of arguments as immutable subclasses of its own.
    if type(value) is list or type(value).__module__ == "torch.fx.immutable_collections":
        return _pairs(value, inner) if isinstance(value, dict) else [inner(v) for v in value]
    if type(value) is dict:
        return _pairs(value, inner)
    for tag, kind in _SEQUENCES.items():
        if type(value) is kind:
            listed = sorted(value, key=repr) if kind in (set, frozenset) else value
            return {tag: [inner(v) for v in listed]}
    return _encode_named(value, inner)


def _pairs(value: Mapping[Any, Any], inner: Callable[[Any], Any]) -> dict[str, Any]:
    return {"dict": [[inner(k), inner(v)] for k, v in value.items()]}


def _encode_named(value: Any, inner: Callable[[Any], Any]) -> dict[str, Any]:
    """Values that have a name or parts of their own."""
    if isinstance(value, slice):
        return {"slice": [inner(v) for v in (value.start, value.stop, value.step)]}
    if type(value) is complex:
        return {"complex": [inner(value.real), inner(value.imag)]}
    for tag, kind in _TORCH.items():
        if isinstance(value, kind):
            return {tag: str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, TensorType):
        dtype = str(value.dtype).removeprefix("torch.")
        return {"type": [dtype, list(value.shape), list(value.per_sample), value.batch]}
    if isinstance(value, enum.Enum):
        return {"enum": [name_of(type(value)), value.name]}
    if type(value) in _RECORDS.values():
        fields = {f.name: inner(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {type(value).__name__: fields}
    if type(value) is functools.partial:
        parts = (inner(value.func), inner(value.args), inner(value.keywords))
        return {"partial": list(parts)}
    if isinstance(value, type) and issubclass(value, nn.Module):
        return {"layer": name_of(value)}
    if value is not getattr and callable(value) and not isinstance(value, nn.Module):
        return {"function": name_of(value)}
    raise InputError(f"a value of type {type(value).__module__}.{type(value).__qualname__}")


def decode(
    data: Any, names: Names, special: Mapping[str, Callable[[Any], Any]] | None = None
) -> Any:
    """The value that `encode` wrote; `special` reads the tags that mean something only here."""
    special = special or {}
    inner = functools.partial(decode, names=names, special=special)
    if data is None or isinstance(data, (bool, int, float, str)):
        return data
    if isinstance(data, list):
        return [inner(item) for item in data]
    if len(data) != 1:
        raise InputError(f"expected an object with one key, got {sorted(data)}")
    tag, content = next(iter(data.items()))
    if tag in special:
        return special[tag](content)
    if tag in _SEQUENCES:
        return _SEQUENCES[tag](inner(item) for item in content)
    if tag in _RECORDS:
        return _RECORDS[tag](**{key: inner(item) for key, item in content.items()})
    if tag in _TORCH:
        return _constant(content, tag)
    return _decode_named(tag, content, inner, names)


def _decode_named(tag: str, content: Any, inner: Callable[[Any], Any], names: Names) -> Any:
    match tag:
        case "dict":
            return {inner(key): inner(item) for key, item in content}
        case "slice":
            start, stop, step = map(inner, content)
            return slice(start, stop, step)
        case "float":
            return float(content)
        case "complex":
            return complex(*map(inner, content))
        case "ellipsis":
            return ...
        case "device":
            return torch.device(content)
        case "type":
            dtype, shape, per_sample, batch = content
            kind = _constant(dtype, "dtype")
            return TensorType(tuple(shape), tuple(per_sample), kind, batch)
        case "enum":
            kind, member = names.choice(content[0]), content[1]
            return kind[member]
        case "layer":
            return names.layer(content)
        case "function":
            return _function(names, content)
        case "partial":
            function, args, kwargs = map(inner, content)
            return functools.partial(function, *args, **kwargs)
    raise InputError(f"{tag!r} is no kind of value that a stage has")


def _constant(name: str, tag: str) -> Any:
    found = getattr(torch, name, None)
    if not isinstance(found, _TORCH[tag]):
        raise InputError(f"torch has no {tag} {name!r}")
    return found


def _function(names: Names, name: str) -> Any:
    """A function as a value: whoever gets it may call it with anything, so never `getattr`."""
    found = names.function(name)
    if found is getattr:
        raise InputError("getattr may be called by a graph, but not handed on")
    return found


def written(value: Any, indent: str = "") -> str:
    """JSON for readers: what fits on a line is on one."""
    line = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if len(indent) + len(line) <= 100 or not isinstance(value, (dict, list)):
        return line
    deeper = indent + " "
    if isinstance(value, list):
        items = [written(item, deeper) for item in value]
    else:
        items = [f"{json.dumps(key)}: {written(item, deeper)}" for key, item in value.items()]
    opening, closing = "[]" if isinstance(value, list) else "{}"
    body = f",\n{deeper}".join(items)
    return f"{opening}\n{deeper}{body}\n{indent}{closing}"
