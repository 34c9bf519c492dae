"""Safetensors files with a digest of every tensor in their header: damage is noticed on reading.

A digest is of the dtype, the shape and the bytes, made in memory on both sides: no file is read
twice, and of a file that is read in part only that part is checked.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from revcompile.errors import InputError
from revcompile.runtime.checkpoint.codec import parse_json

_COMPLEX: Final = "revcompile.complex"
"""In a file's header: the names of tensors stored as pairs of real numbers, as JSON."""
_DIGESTS: Final = "revcompile.digests"
"""In a file's header: the digest of every tensor, as JSON."""


def digest(content: bytes | memoryview, about: str = "") -> str:
    """Of some bytes; it tells damage, not forgery."""
    total = hashlib.sha256(about.encode())
    total.update(content)
    return total.hexdigest()[:32]


def _tensor_digest(tensor: Tensor) -> str:
    content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
    return digest(content, f"{tensor.dtype} {list(tensor.shape)}")


# -- writing --------------------------------------------------------------------------------------


def write_tensors(
    file: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str] | None = None
) -> None:
    """Write one safetensors file and flush it to the disk."""
    separate: dict[str, Tensor] = {}  # safetensors refuses tensors that share memory
    seen: set[int] = set()
    for name, tensor in tensors.items():
        stored = tensor.detach().cpu()
        if tensor.is_complex():  # which safetensors cannot hold: as pairs of real numbers
            stored = torch.view_as_real(stored.resolve_conj())
        stored = stored.contiguous()
        address = stored.untyped_storage().data_ptr()
        separate[name] = stored.clone() if address in seen else stored
        seen.add(address)
    pairs = [name for name, tensor in tensors.items() if tensor.is_complex()]
    digests = {name: _tensor_digest(stored) for name, stored in separate.items()}
    header = {"format": "pt", _DIGESTS: json.dumps(digests), **(about or {})}
    header |= {_COMPLEX: json.dumps(pairs)} if pairs else {}
    try:
        safetensors.torch.save_file(separate, file, header)
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        if "os error" in str(error):  # of the system, by way of safetensors
            raise OSError(str(error)) from error
        raise InputError(f"trainer.save: safetensors cannot write {file.name} ({error})") from error
    sync(file)


def sync(path: Path) -> None:
    """Flush a file or folder to the disk, so that it survives a power failure."""
    if os.name == "nt" and path.is_dir():
        return  # folders cannot be opened there
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# -- reading --------------------------------------------------------------------------------------


@contextmanager
def open_tensors(file: Path) -> Iterator[TensorFile]:
    """Open a safetensors file; whatever is wrong with its content is an `InputError`."""
    try:
        with safe_open(file, framework="pt") as opened:
            yield TensorFile(opened)
    except InputError:
        raise
    except Exception as error:  # of safetensors, and of torch where a header asks for the absurd
        raise InputError(f"{type(error).__name__}: {error}") from error


class TensorFile:
    """An open file; tensors are read by name, and compared with their digests where it has any."""

    def __init__(self, opened: Any) -> None:
        self._opened = opened
        self.about: dict[str, str] = opened.metadata() or {}
        self.names: list[str] = list(opened.keys())
        self._digests = parse_json(self.about.get(_DIGESTS, "{}"))
        self._pairs = frozenset(parse_json(self.about.get(_COMPLEX, "[]")))

    @property
    def has_digests(self) -> bool:
        return _DIGESTS in self.about

    def read(self, name: str) -> Tensor:
        stored: Tensor = self._opened.get_tensor(name)
        if self.has_digests and self._digests.get(name) != _tensor_digest(stored):
            raise InputError(f"the tensor {name!r} is not what was written")
        if name not in self._pairs:
            return stored
        # A copy: a file may hold pairs at any multiple of 8 bytes, and x86_64 processors load
        # complex numbers from multiples of 16 only.
        return torch.view_as_complex(stored.clone())
