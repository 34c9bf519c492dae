"""Folders of checkpoints: written aside by all ranks at once, then renamed into place.

    folder/
      step_00000120/             complete: it gets this name when all of it is on disk
        checkpoint.json          its files, with their sizes and digests
        rank_00000.json          everything that is not a tensor
        rank_00000.safetensors
      saving_1f2e3d4c.tmp/       a save in progress, or one that was killed
      latest                     the name of the newest checkpoint

`torch.distributed.checkpoint.load` reads these folders with its `HuggingFaceStorageReader`: all
tensors, under the names `model.<name>` and `optimizer.<name>.<entry>`. Its writers are not used:
they pickle, or drop what is not a tensor, and neither renames a complete folder into place.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from revcompile.errors import InputError
from revcompile.runtime.checkpoint.tree import (
    StoredTensor,
    TensorFile,
    decode_tree,
    encode_tree,
    sync,
    well_formed,
    write_tensors,
)

Gather = Callable[[Any], Sequence[Any]]
"""Returns the values of all ranks, on every rank. Values are plain, as JSON can hold them."""

_FORMAT: Final = "revcompile checkpoint"
_VERSION: Final = 3
_INDEX: Final = "checkpoint.json"
_LATEST: Final = "latest"
_SHARED: Final = "all ranks must save to one folder that they share"
_NAME: Final = re.compile(r"step_\d{8,}(_\d+)?")


def on_all(where: str, act: Callable[[], Any], gather: Gather = lambda value: [value]) -> list[Any]:
    """Every rank's result of an action; if it fails on one rank, all raise. Every rank calls it."""
    result, problem, cause = None, None, None
    try:
        result = act()
    except InputError as error:
        problem, cause = str(error), error.__cause__ or error
    except Exception as error:
        problem, cause = f"{type(error).__name__}: {error}", error
    gathered = gather([problem, result])
    for rank, (found, _) in enumerate(gathered):
        if found is not None:
            who = f"rank {rank}: " if len(gathered) > 1 else ""
            raise InputError(f"{where}: {who}{found}") from cause
    return [result for _, result in gathered]


# -- writing --------------------------------------------------------------------------------------


def save_checkpoint(
    folder: Path,
    tree: Any,
    *,
    step: int,
    rank: int = 0,
    gather: Gather = lambda value: [value],
    keep_last: int = 2,
) -> Path:
    """Write one more checkpoint into a folder that all ranks see; returns its path.

    Every rank calls it with a tree of its own. The newest `keep_last` checkpoints stay. If a rank
    fails, all of them raise, and the earlier checkpoints are unchanged.

    >>> import pathlib, tempfile, torch
    >>> with tempfile.TemporaryDirectory() as name:
    ...     folder, tree = pathlib.Path(name), {"model": {"w": torch.ones(2)}, "note": "x"}
    ...     saved = save_checkpoint(folder, tree, step=7)
    ...     found = Checkpoint(find_checkpoint(folder))
    ...     saved.name, found.read(found.trees())
    ('step_00000007', [{'model': {'w': tensor([1., 1.])}, 'note': 'x'}])
    """

    def all_ranks(act: Callable[[], Any]) -> list[Any]:
        return on_all("trainer.save", act, gather)

    is_first = rank == 0
    try:
        names = all_ranks(lambda: _prepare(folder, keep_last) if is_first else None)
        place = folder / names[0]
        written = all_ranks(lambda: _write_rank(place, rank, tree))
        files = {file: entry for of_rank in written for file, entry in of_rank.items()}
        names = all_ranks(lambda: _commit(place, step, files, keep_last) if is_first else None)
    except InputError as error:
        what = f"{error}; the checkpoints in {folder} are as before"
        raise InputError(what) from error.__cause__
    return folder / str(names[0])


def _prepare(folder: Path, keep_last: int) -> str:
    """Make a folder under a name that no rank has cached; remove remains of earlier saves."""
    if not isinstance(keep_last, int) or keep_last < 1:
        raise InputError(f"keep_last={keep_last!r}; keep at least 1 checkpoint")
    folder.mkdir(parents=True, exist_ok=True)
    for left in (*folder.glob("saving_*.tmp"), *folder.glob("step_*.tmp")):
        shutil.rmtree(left, ignore_errors=True)
    name = f"saving_{secrets.token_hex(4)}.tmp"
    (folder / name).mkdir()
    return name


def _write_rank(place: Path, rank: int, tree: Any) -> dict[str, Any]:
    """Write a rank's files; returns their entries for the index."""
    if not place.is_dir():
        raise InputError(f"there is no {place}; {_SHARED}")
    plain, tensors = encode_tree(tree)
    files = place / f"rank_{rank:05d}.json", place / f"rank_{rank:05d}.safetensors"
    _write(files[0], json.dumps(plain))
    write_tensors(files[1], tensors)
    return {file.name: {"bytes": file.stat().st_size, "sha256": _digest(file)} for file in files}


def _commit(place: Path, step: int, files: Mapping[str, Any], keep_last: int) -> str:
    """Write the index and rename the folder: from then on it is a checkpoint."""
    folder = place.parent
    for file in files:
        if not (place / file).is_file():
            raise InputError(f"there is no {file} in {place}; {_SHARED}")
    # The step is not enough to order checkpoints: a run may have continued from an earlier one.
    serial = 1 + max(map(_serial, _all(folder)), default=0)
    about = {"format": _FORMAT, "version": _VERSION, "step": step, "serial": serial}
    _write(place / _INDEX, json.dumps({**about, "files": files}, indent=1))
    sync(place)
    name, again = f"step_{step:08d}", 1
    while (folder / name).exists():
        again += 1
        name = f"step_{step:08d}_{again}"
    os.rename(place, folder / name)
    sync(folder)
    _write(folder / f"{_LATEST}.tmp", name + "\n")
    os.replace(folder / f"{_LATEST}.tmp", folder / _LATEST)
    sync(folder)
    for old in sorted(_all(folder), key=_serial)[:-keep_last]:
        with suppress(OSError):  # the next save tries again
            # Renamed first: a half-removed checkpoint must not look like a checkpoint.
            shutil.rmtree(old.rename(old.with_name(f"{old.name}.tmp")))
    return name


def _write(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8")
    sync(file)


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


# -- reading --------------------------------------------------------------------------------------


def find_checkpoint(place: Path) -> Path:
    """The checkpoint at a place, or the newest one of a folder of checkpoints."""
    try:
        if (place / _INDEX).is_file():
            return place
        if not place.is_dir():
            raise InputError(f"checkpoint: there is no folder {place}; look for a typing mistake")
        complete = _all(place)
        with suppress(FileNotFoundError, UnicodeDecodeError):
            named = place / (place / _LATEST).read_text().strip()
            if named in complete:
                return named
        if complete:
            return max(complete, key=_serial)
    except OSError as error:
        raise InputError(f"checkpoint: {place} cannot be read ({error})") from error
    died = any(place.glob("saving_*.tmp"))
    raise InputError(
        f"checkpoint: there is no whole checkpoint in {place}"
        + ("; a save began there and did not finish: remove it to begin anew" if died else "")
        + ". Give the folder that trainer.save(folder) wrote to"
    )


def _all(folder: Path) -> list[Path]:
    return [p for p in folder.iterdir() if _NAME.fullmatch(p.name) and p.is_dir()]


def _serial(checkpoint: Path) -> int:
    """The running number of a checkpoint; 0 if its index cannot be read."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return int(json.loads((checkpoint / _INDEX).read_bytes())["serial"])
    return 0


class Checkpoint:
    """A complete checkpoint: its tensors are read on demand. Nothing is unpickled.

    A file is compared with its digest when it is first read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open_files: dict[str, TensorFile] = {}
        try:
            index = json.loads((path / _INDEX).read_bytes())
        except (OSError, ValueError) as error:
            raise self._unusable(f"{_INDEX}: {error}") from error
        if not isinstance(index, dict) or index.get("format") != _FORMAT:
            raise InputError(f"checkpoint: {path / _INDEX} was not written by trainer.save")
        if index.get("version") != _VERSION:
            raise InputError(
                f"checkpoint: {path} has format version {index.get('version')}, but this "
                f"revcompile reads {_VERSION}; load it with the revcompile that saved it"
            )
        with well_formed(f"what trainer.save writes: {path / _INDEX}"):
            self.step = int(index["step"])
            """How many micro-batches had been fed."""
            self._files = {n: (e["bytes"], e["sha256"]) for n, e in index["files"].items()}

    def trees(self) -> list[Any]:
        """The tree of each rank, with a `StoredTensor` for each tensor."""
        found = []
        for name in (f"rank_{rank:05d}" for rank in range(len(self._files) // 2)):
            plain = json.loads(self._verified(f"{name}.json").read_bytes())
            found.append(decode_tree(plain, f"{name}.safetensors"))
        return found

    def read(self, tree: Any, devices: Mapping[str, torch.device] = MappingProxyType({})) -> Any:
        """The tree with its tensors, on the CPU or where `devices` maps their device type."""

        def tensor_of(stored: StoredTensor) -> Tensor:
            if stored.file not in self._open_files:
                self._open_files[stored.file] = TensorFile(self._verified(stored.file))
            tensor = self._open_files[stored.file].read(stored.name)
            tensor = tensor.to(devices.get(stored.device, tensor.device))
            if stored.stride is None:
                return tensor
            return tensor.new_empty_strided(tensor.shape, stored.stride).copy_(tensor)

        def is_leaf(value: Any) -> bool:
            return isinstance(value, torch.Size)  # pytree would take it for a tuple

        return pytree.tree_map_only(StoredTensor, tensor_of, tree, is_leaf)

    def _verified(self, name: str) -> Path:
        """The path of a file, which is checked to be as it was written."""
        try:
            file, (size, digest) = self.path / name, self._files[name]
            if (found := file.stat().st_size) != size:
                raise self._unusable(f"{name}: expected {size} bytes, got {found}")
            if _digest(file) != digest:
                raise self._unusable(f"{name}: it is not what was written")
        except (OSError, KeyError) as error:
            raise self._unusable(f"{name}: {error}") from error
        return file

    def _unusable(self, what: str) -> InputError:
        others = []
        with suppress(OSError):
            others = [p for p in _all(self.path.parent) if p != self.path and _serial(p)]
        advice = "save again"
        if others:
            advice = f"to go on from the one before, load {max(others, key=_serial)}"
        return InputError(f"checkpoint: {self.path} cannot be used: {what}; {advice}")
