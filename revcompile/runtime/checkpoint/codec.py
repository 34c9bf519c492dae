"""Nested values as JSON and tensors, for checkpoints and messages: nothing read is ever run.

    {"lr": 0.1, "betas": (0.9, w)}  --encode_tree-->  JSON {"dict": [["lr", 0.1], ["betas", ...]]}
                                                      tensors {"betas.1": w}

A value that JSON cannot express is an object with one key, its type. Functions, classes and other
objects cannot be written, so reading never imports or calls anything.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import reprlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from revcompile.errors import InputError, RevcompileError
from revcompile.runtime.stage.tensors import overlaps, span

Special = Callable[[Any], dict[str, Any] | None]
"""Encodes values that the caller treats itself (tensors); None: encode as usual."""

_TORCH: Final = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}
_KEY_BITS: Final = 64
"""Larger integers can be chosen so that all have one hash, which makes dictionaries slow."""
_GAPS: Final = 64
"""How many times as much memory as its elements a tensor with gaps may take."""
_SEQUENCES: Final = {"tuple": tuple, "size": torch.Size, "set": set, "frozenset": frozenset}


def parse_json(text: str | bytes) -> Any:
    """Parse JSON as the standard has it: no NaN, and no key twice.

    >>> parse_json('{"a": 1, "a": 2}')
    Traceback (most recent call last):
    ...
    revcompile.errors.InputError: the key 'a' is there twice
    """
    try:
        if isinstance(text, bytes):
            text = text.decode()  # json would guess other encodings, and import them
        return json.loads(text, object_pairs_hook=_once, parse_constant=_refuse_constant)
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InputError(f"it is not JSON ({type(error).__name__}: {error})") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        again = next(name for name, count in Counter(n for n, _ in pairs).items() if count > 1)
        raise InputError(f"the key {again!r:.80} is there twice")
    return found


def _refuse_constant(name: str) -> Any:
    raise InputError(f"{name} is no number of JSON")


@contextlib.contextmanager
def located(where: str) -> Iterator[None]:
    """Prefix an `InputError` with where it happened."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{where}: {error}") from error.__cause__


@contextlib.contextmanager
def well_formed(expected: str) -> Iterator[None]:
    """Around the reading of foreign values: whatever they break is an `InputError`."""
    try:
        yield
    except RevcompileError:
        raise
    except Exception as error:
        raise InputError(f"it is not {expected} ({type(error).__name__}: {error})") from error


def encode(value: Any, special: Special = lambda value: None) -> Any:
    """A value as JSON.

    >>> encode((1, [None, torch.float16], slice(2)))
    {'tuple': [1, [None, {'dtype': 'float16'}], {'slice': [None, 2, None]}]}
    """
    encoded = special(value)
    if encoded is not None:
        return encoded
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
        return {"dict": [[inner(_as_key(key)), inner(item)] for key, item in value.items()]}
    for tag, kind in _SEQUENCES.items():
        if type(value) is kind:
            # The order of a set differs between processes.
            listed = sorted(value, key=repr) if kind in (set, frozenset) else value
            if kind in (set, frozenset):
                listed = map(_as_key, listed)
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
    """The value that `encode` wrote; `special` decodes the caller's own tags.

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
        raise InputError(f"expected an object with one key, got {reprlib.repr(data)}")
    tag, content = next(iter(data.items()))
    try:
        return special[tag](content) if tag in special else _decode_tagged(tag, content, inner)
    except InputError:
        raise
    except RecursionError:
        raise InputError("values are nested too deeply") from None
    except Exception as error:
        raise InputError(f"cannot read {reprlib.repr(content)} as a {tag}: {error}") from error


def _as_key(value: Any) -> Any:
    """A value that is hashed."""
    if isinstance(value, int) and value.bit_length() > _KEY_BITS:
        raise InputError(f"an integer of {value.bit_length()} bits as a key")
    for item in value if isinstance(value, tuple | frozenset) else ():
        _as_key(item)
    return value


def _decode_tagged(tag: str, content: Any, inner: Callable[[Any], Any]) -> Any:
    if tag in _SEQUENCES:
        items = [inner(item) for item in content]
        return _SEQUENCES[tag](map(_as_key, items) if "set" in tag else items)
    if tag in _TORCH:
        constant = vars(torch).get(content)  # getattr would import what torch loads on demand
        if not isinstance(constant, _TORCH[tag]):
            raise InputError(f"torch has no {tag} {content!r}")
        return constant
    match tag:
        case "dict":
            return {_as_key(inner(key)): inner(item) for key, item in content}
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


# -- trees with tensors ---------------------------------------------------------------------------


def encode_tree(tree: Any) -> tuple[Any, dict[str, Tensor]]:
    """The tree as JSON, and its tensors under names made from their paths.

    >>> encode_tree({"model": {"head.bias": torch.zeros(1)}, "betas": (0.9, 0.99)})[1]
    {'model.head.bias': tensor([0.])}
    """
    tensors: dict[str, Tensor] = {}
    return _walk(tree, (), tensors), tensors


def decode_tree(
    plain: Any,
    tensors: Mapping[str, Tensor],
    device_for: Callable[[str, str], torch.device] = lambda name, kind: torch.device("cpu"),
) -> Any:
    """The tree that `encode_tree` took; tensors get their strides back: kernels depend on them.

    Args:
        plain: the JSON.
        tensors: its tensors by name.
        device_for: from a tensor's name and the type of device it was on to its new device.
    """
    taken: set[str] = set()

    def read(content: Any) -> Tensor:
        name, kind, stride = content
        if name not in tensors or name in taken:
            problem = "is there twice" if name in taken else "is missing"
            raise InputError(f"the tensor {name!r} {problem}")
        taken.add(name)
        tensor = tensors[name].to(device_for(name, kind))
        if stride is None:
            return tensor
        if not has_few_gaps(tensor.shape, stride):
            raise InputError(f"the tensor {name!r} has strides {reprlib.repr(stride)}")
        return tensor.new_empty_strided(tensor.shape, stride).copy_(tensor)

    return decode(plain, {"tensor": read})


def _walk(tree: Any, path: tuple[str, ...], tensors: dict[str, Tensor]) -> Any:
    if isinstance(tree, Tensor):
        return _store(tree, ".".join(path), tensors)
    if isinstance(tree, Mapping):
        items = {_leaf(k, path): _walk(v, (*path, str(k)), tensors) for k, v in tree.items()}
        return {"dict": [[encode(_as_key(key)), item] for key, item in items.items()]}
    if type(tree) in (list, tuple):
        listed = [_walk(v, (*path, str(i)), tensors) for i, v in enumerate(tree)]
        return listed if type(tree) is list else {"tuple": listed}
    return encode(_leaf(tree, path))


def _store(tensor: Tensor, name: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """A reference to a tensor: its name and device, and its strides if it is not contiguous."""
    if name in tensors:
        raise InputError(f"two tensors would be saved as {name!r}; rename one of their owners")
    tensors[name] = tensor
    rows = torch.empty(tensor.shape, device="meta").stride()
    is_kept = tensor.stride() != rows and not overlaps(tensor)
    is_kept = is_kept and has_few_gaps(tensor.shape, tensor.stride())
    stride = list(tensor.stride()) if is_kept else None
    return {"tensor": [name, tensor.device.type, stride]}


def has_few_gaps(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Is there a stride for every dimension, and no more than `_GAPS` times the memory needed?

    Strides with more are not kept: whoever reads them allocates that memory.
    """
    most = _GAPS * max(1, math.prod(shape))
    return min(stride, default=0) >= 0 and span(shape, stride) <= most


def _leaf(value: Any, path: tuple[str, ...]) -> Any:
    known = (torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, slice)
    if value is None or isinstance(value, (complex, *known)):
        return value
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)  # also of subclasses such as numpy.float64
    raise InputError(
        f"{'.'.join(path)}: a {type(value).__name__} cannot be saved; numbers, strings and tensors "
        "can. Remove it from the parameter groups or from the model's values"
    )


def as_text(value: Any, indent: str = "") -> str:
    """JSON with short values on one line."""
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
