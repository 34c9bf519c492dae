"""Nested values as JSON and tensors, for checkpoints and messages: reading never runs code.

    {"lr": 0.1, "betas": (0.9, w)}  --encode_tree-->  JSON {"dict": [["lr", 0.1], ["betas", ...]]}
                                                      tensors {"betas.1": w}

A value that JSON cannot express is an object with one key, its type. Functions, classes and other
objects cannot be written, so reading never imports or calls anything.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import json
import math
import os
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor

from revcompile.errors import InputError, RevcompileError
from revcompile.runtime.stage.tensors import overlaps

Special = Callable[[Any, str], dict[str, Any] | None]
"""Encodes values that the caller handles (tensors), given their path; None: encode as usual."""

_PLAIN: Final = (bool, int, float, str)
_sorted: Final = functools.partial(sorted, key=repr)
"""Sorts a set, because its own order differs between processes."""


def _without_torch(value: Any) -> str:
    return str(value).removeprefix("torch.")


_constant: Final = vars(torch).__getitem__  # getattr would import what torch loads on demand
_KINDS: Final[Mapping[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]]] = {
    "tuple": (tuple, list, tuple),
    "size": (torch.Size, list, torch.Size),
    "set": (set, _sorted, set),
    "frozenset": (frozenset, _sorted, frozenset),
    "slice": (slice, lambda value: [value.start, value.stop, value.step], lambda p: slice(*p)),
    "complex": (complex, lambda value: [value.real, value.imag], lambda p: complex(*p)),
    "device": (torch.device, lambda value: [str(value)], lambda p: torch.device(*p)),
    "ellipsis": (type(...), lambda value: [], lambda p: ...),
    "dtype": (torch.dtype, _without_torch, _constant),
    "layout": (torch.layout, _without_torch, _constant),
    "memory_format": (torch.memory_format, _without_torch, _constant),
}
"""For each tag: the type, how to take a value apart, and how to make it from its parts."""
_COMPLEX: Final = "revcompile.complex"
"""In a file's header: the names of tensors stored as pairs of real numbers, as JSON."""


@contextlib.contextmanager
def located(where: str) -> Iterator[None]:
    """Prefix an `InputError` with where it happened."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{where}: {error}") from error.__cause__


@contextlib.contextmanager
def well_formed(expected: str) -> Iterator[None]:
    """Around code that reads foreign values: any error there becomes an `InputError`."""
    try:
        yield
    except RevcompileError:
        raise
    except Exception as error:
        raise InputError(f"it is not {expected} ({type(error).__name__}: {error})") from error


# -- values ---------------------------------------------------------------------------------------


def encode(
    value: Any, special: Special = lambda value, path: None, path: tuple[str, ...] = ()
) -> Any:
    """A value as JSON.

    >>> encode((1, [None, torch.float16], slice(2)))
    {'tuple': [1, [None, {'dtype': 'float16'}], {'slice': [None, 2, None]}]}
    """

    def inner(item: Any, key: Any) -> Any:
        return encode(item, special, (*path, str(key)))

    encoded = special(value, ".".join(path))
    if encoded is not None:
        return encoded
    if value is None:
        return None
    if isinstance(value, _PLAIN) and not isinstance(value, enum.Enum):
        # Subclasses, such as numpy.float64, become plain.
        plain = next(kind(value) for kind in _PLAIN if isinstance(value, kind))
        is_json = not isinstance(plain, float) or math.isfinite(plain)
        return plain if is_json else {"float": repr(plain)}
    if type(value) is list:
        return [inner(item, index) for index, item in enumerate(value)]
    if type(value) in (dict, OrderedDict, defaultdict):
        return {"dict": [[encode(key), inner(item, key)] for key, item in value.items()]}
    for tag, (kind, parts, _) in _KINDS.items():
        if type(value) is kind:
            return {tag: encode(parts(value), special, path)}
    where = f"{'.'.join(path)}: " if path else ""
    raise InputError(f"{where}a value of type {type(value).__module__}.{type(value).__qualname__}")


def decode(data: Any, special: Mapping[str, Callable[[Any], Any]] | None = None) -> Any:
    """The value that `encode` wrote; `special` decodes the caller's own tags.

    >>> decode(encode({"a": (1, 2.5, torch.bfloat16)}))
    {'a': (1, 2.5, torch.bfloat16)}
    """

    def inner(item: Any) -> Any:
        return decode(item, special)

    if isinstance(data, list):
        return [inner(item) for item in data]
    if not isinstance(data, dict):
        return data
    ((tag, content),) = data.items()
    if special and tag in special:
        return special[tag](content)
    if tag == "dict":
        return {inner(key): inner(item) for key, item in content}
    if tag == "float":
        return float(content)
    kind, _, make = _KINDS[tag]
    value = make(inner(content))
    if type(value) is not kind:
        raise InputError(f"{content!r} is no {tag}")
    return value


# -- trees with tensors ---------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file that has not been read."""

    file: str
    name: str
    device: str
    """The type of the device that it was on."""
    stride: tuple[int, ...] | None
    """None if contiguous. Other strides are restored: the choice of kernels depends on them."""


def encode_tree(tree: Any) -> tuple[Any, dict[str, Tensor]]:
    """The tree as JSON, and its tensors under names made from their paths.

    >>> encode_tree({"model": {"head.bias": torch.zeros(1)}, "betas": (0.9, 0.99)})[1]
    {'model.head.bias': tensor([0.])}
    """
    tensors: dict[str, Tensor] = {}
    twice: list[str] = []

    def store(value: Any, name: str) -> dict[str, Any] | None:
        if not isinstance(value, Tensor):
            return None
        twice.extend({name} & tensors.keys())
        tensors[name], stride = value, value.stride()
        is_kept = stride != torch.empty(value.shape, device="meta").stride()
        is_kept = is_kept and not overlaps(value)
        return {"tensor": [name, value.device.type, stride if is_kept else None]}

    try:
        plain = encode(tree, store)
    except InputError as error:
        raise InputError(f"{error} cannot be saved; numbers, strings and tensors can") from None
    if twice:
        raise InputError(f"two tensors would be saved as {twice[0]!r}; rename one of their owners")
    return plain, tensors


def decode_tree(plain: Any, file: str) -> Any:
    """The tree that `encode_tree` took, with a `StoredTensor` of the file for each tensor."""

    def stored(content: Any) -> StoredTensor:
        name, device, stride = content
        return StoredTensor(file, name, device, None if stride is None else tuple(stride))

    return decode(plain, {"tensor": stored})


# -- files of tensors -----------------------------------------------------------------------------


def write_tensors(
    file: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str] | None = None
) -> None:
    """Write one safetensors file and flush it to the disk."""
    separate: dict[str, Tensor] = {}  # safetensors refuses tensors that share memory
    seen: set[int] = set()
    for name, tensor in tensors.items():
        stored = tensor.detach().cpu()
        if tensor.is_complex():  # which safetensors cannot hold
            stored = torch.view_as_real(stored.resolve_conj())
        stored = stored.contiguous()
        address = stored.untyped_storage().data_ptr()
        separate[name] = stored.clone() if address in seen else stored
        seen.add(address)
    pairs = [name for name, tensor in tensors.items() if tensor.is_complex()]
    header = {"format": "pt", _COMPLEX: json.dumps(pairs), **(about or {})}
    safetensors.torch.save_file(separate, file, header)
    sync(file)


def sync(path: Path) -> None:
    """Flush a file or folder to the disk, where it survives a power failure."""
    if os.name == "nt" and path.is_dir():
        return  # folders cannot be opened there
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class TensorFile:
    """An open safetensors file."""

    def __init__(self, file: Path) -> None:
        opened: Any = safe_open(file, framework="pt")
        self._opened = opened
        self.about: dict[str, str] = opened.metadata() or {}
        self.names: list[str] = list(opened.keys())
        self._pairs = frozenset(json.loads(self.about.get(_COMPLEX, "[]")))

    def read(self, name: str) -> Tensor:
        stored: Tensor = self._opened.get_tensor(name)
        if name not in self._pairs:
            return stored
        # A copy: a file may hold pairs at any multiple of 8 bytes, and x86_64 processors load
        # complex numbers from multiples of 16 only.
        return torch.view_as_complex(stored.clone())
