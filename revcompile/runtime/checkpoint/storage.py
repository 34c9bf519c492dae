"""Checkpoints as folders: written by all ranks at once, then renamed into place atomically.

    folder/
      step_00000120/             always complete: it gets this name once all of it is on disk
        checkpoint.json          the files, their sizes, and which tensor is in which
        rank_00000.json          everything that is not a tensor
        rank_00000.safetensors
      saving.tmp/                a save in progress, or one that was killed
      latest                     the name of the newest checkpoint

`torch.distributed.checkpoint.load` reads these folders with its `HuggingFaceStorageReader`: all
tensors, under the names `model.<name>` and `optimizer.<name>.<entry>`. Its writers are not used:
the default one pickles its metadata; the one for safetensors writes no index where every rank saves
its own file, silently drops what is not a tensor, keeps one of two tensors of the same name, and
builds the file in memory first; neither renames a complete folder into place.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from revcompile.errors import InputError
from revcompile.runtime.checkpoint.codec import as_text

Barrier = Callable[[], None]
"""Returns when every rank has called it."""

_FORMAT: Final = "revcompile checkpoint"
_VERSION: Final = 1
_INDEX: Final = "checkpoint.json"
_LATEST: Final = "latest"
_UNFINISHED: Final = "saving.tmp"
_REMOVED: Final = ".removed.tmp"
_NAME: Final = re.compile(r"step_(\d{8,})(_\d+)?")
_COMPLEX: Final = "revcompile.complex"
"""In a file's header: the names of tensors stored as pairs of real numbers, as JSON."""


# -- writing --------------------------------------------------------------------------------------


def save_checkpoint(
    folder: str | Path,
    tensors: Mapping[str, Tensor],
    plain: Any,
    *,
    step: int,
    rank: int = 0,
    world: int = 1,
    barrier: Barrier = lambda: None,
    keep: int = 2,
) -> Path:
    """Write one more checkpoint into a folder that all ranks see; returns its path.

    Every rank calls it with what it alone holds: tensors by name, and `plain` JSON values. Older
    checkpoints are removed down to `keep`. If a rank fails, all of them raise, and the earlier
    checkpoints are unchanged.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saved = save_checkpoint(folder, {"model.w": torch.ones(2)}, {"note": "x"}, step=7)
    ...     found = Checkpoint(find_checkpoint(folder))
    ...     saved.name, found.plain, found.tensors()
    ('step_00000007', [{'note': 'x'}], {'model.w': tensor([1., 1.])})
    """
    try:
        folder = _checked(folder, keep)
    except InputError:
        join_barriers(barrier)  # so that the other ranks do not wait
        raise
    is_first, before = rank == 0, _latest(folder)
    failure = _run_phases(
        barrier,
        (lambda: _prepare(folder)) if is_first else None,
        lambda: _write_rank(folder / _UNFINISHED, rank, tensors, plain),
        (lambda: _commit(folder, step, world)) if is_first else None,
    )
    if failure is not None:
        raise _explained(failure, folder, rank)
    saved = _latest(folder)
    if saved is None or saved == before:
        raise InputError(
            f"trainer.save: another rank failed to write to {folder}; the checkpoints there are "
            "as before. Its own error says why"
        )
    if is_first:
        _prune(folder, keep)
    return saved


def _checked(folder: Any, keep: Any) -> Path:
    if not isinstance(keep, int) or keep < 1:
        raise InputError(f"trainer.save: keep={keep!r}; keep at least 1 checkpoint")
    return _path(folder, "trainer.save")


def _path(place: Any, where: str) -> Path:
    if not isinstance(place, str | os.PathLike):
        raise InputError(f"{where}: expected the path of a folder, got {place!r}")
    return Path(place)


def join_barriers(barrier: Barrier) -> None:
    """Take part in the barriers of a save with nothing to write."""
    _run_phases(barrier, None, None, None)


def _run_phases(barrier: Barrier, *phases: Callable[[], None] | None) -> Exception | None:
    """Run the phases with a barrier after each; a failure is returned after the last barrier."""
    failure: Exception | None = None
    for phase in phases:
        try:
            if phase is not None and failure is None:
                phase()
        except Exception as error:
            failure = error
        barrier()
    return failure


def _explained(failure: Exception, folder: Path, rank: int) -> Exception:
    if not isinstance(failure, OSError):
        return failure
    error = InputError(
        f"trainer.save: rank {rank} cannot write to {folder} ({failure}); the checkpoints there "
        "are as before. Free some space, or choose another folder"
    )
    error.__cause__ = failure
    return error


def _prepare(folder: Path) -> None:
    """Make the folder to write to, and remove what killed saves left behind."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in (folder / _UNFINISHED, *folder.glob(f"step_*{_REMOVED}")):
        shutil.rmtree(left, ignore_errors=True)
    (folder / _UNFINISHED).mkdir()


def _write_rank(place: Path, rank: int, tensors: Mapping[str, Tensor], plain: Any) -> None:
    if not place.is_dir():
        raise InputError(
            f"trainer.save: rank {rank} does not see {place}; all ranks must save to one folder "
            "that they share"
        )
    write_tensors(place / f"rank_{rank:05d}.safetensors", tensors)
    _write(place / f"rank_{rank:05d}.json", as_text(plain) + "\n")


def _as_stored(tensor: Tensor) -> Tensor:
    """Complex numbers as pairs of real ones, which is what safetensors can hold."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def write_tensors(
    file: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str] | None = None
) -> None:
    """Write one safetensors file and flush it to the disk."""
    separate: dict[str, Tensor] = {}  # safetensors refuses tensors that share memory
    seen: set[int] = set()
    for name, tensor in tensors.items():
        stored = _as_stored(tensor.detach().cpu()).contiguous()
        address = stored.untyped_storage().data_ptr()
        separate[name] = stored.clone() if address in seen else stored
        seen.add(address)
    pairs = [name for name, tensor in tensors.items() if tensor.is_complex()]
    header = {"format": "pt", **({_COMPLEX: json.dumps(pairs)} if pairs else {}), **(about or {})}
    try:
        safetensors.torch.save_file(separate, file, header)
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise InputError(f"trainer.save: safetensors cannot write {file.name} ({error})") from error
    _sync(file)


def read_tensor(opened: Any, name: str) -> Tensor:
    """A tensor of an open file that `write_tensors` wrote."""
    stored: Tensor = opened.get_tensor(name)
    pairs = json.loads((opened.metadata() or {}).get(_COMPLEX, "[]"))
    return torch.view_as_complex(stored) if name in pairs else stored


def _commit(folder: Path, step: int, world: int) -> None:
    """Write the index, then rename the folder: from then on it is a checkpoint."""
    place = folder / _UNFINISHED
    content = {
        "format": _FORMAT,
        "version": _VERSION,
        "step": step,
        "serial": 1 + max(map(_serial, _all(folder)), default=0),
        "world": world,
        "libraries": _libraries(),
        **_inventory(place, world),
    }
    _write(place / _INDEX, as_text(content) + "\n")
    _sync(place)
    name, again = f"step_{step:08d}", 1
    while (folder / name).exists():
        again += 1
        name = f"step_{step:08d}_{again}"
    os.rename(place, folder / name)
    _sync(folder)
    _write(folder / f"{_LATEST}.tmp", name + "\n")
    os.replace(folder / f"{_LATEST}.tmp", folder / _LATEST)
    _sync(folder)


def _inventory(place: Path, world: int) -> dict[str, Any]:
    """All ranks' files with their sizes, and the file of every tensor."""
    files: dict[str, int] = {}
    file_of: dict[str, str] = {}
    for rank in range(world):
        tensors, plain = f"rank_{rank:05d}.safetensors", f"rank_{rank:05d}.json"
        for name in (tensors, plain):
            if not (place / name).is_file():
                raise InputError(
                    f"trainer.save: {name} is missing; either rank {rank} failed, as its own "
                    f"error says, or it does not share the folder {place.parent} with rank 0"
                )
            files[name] = (place / name).stat().st_size
        with safe_open(place / tensors, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a mapping)
                if file_of.setdefault(name, tensors) != tensors:
                    raise InputError(
                        f"trainer.save: {file_of[name]} and {tensors} both hold {name!r}; every "
                        "rank must save only what it alone holds"
                    )
    return {"files": files, "tensors": file_of}


def _libraries() -> dict[str, str]:
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("revcompile", "safetensors"):
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def _prune(folder: Path, keep: int) -> None:
    """Remove the oldest: renamed first, so that half a checkpoint never looks like one."""
    for old in sorted(_all(folder), key=_serial)[:-keep]:
        doomed = old.with_name(old.name + _REMOVED)
        with suppress(OSError):  # the next save tries again
            os.rename(old, doomed)
            shutil.rmtree(doomed)


def _write(file: Path, text: str) -> None:
    with file.open("w", encoding="utf-8") as opened:
        opened.write(text)
        opened.flush()
        os.fsync(opened.fileno())


def _sync(path: Path) -> None:
    """Flush a file or folder to the disk, so that it survives a power failure."""
    if os.name == "nt" and path.is_dir():
        return  # folders cannot be opened there
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# -- reading --------------------------------------------------------------------------------------


def find_checkpoint(place: str | Path) -> Path:
    """The checkpoint at a place, or the newest one of a folder of checkpoints."""
    place = _path(place, "checkpoint")
    if (place / _INDEX).is_file():
        return place
    if not place.is_dir():
        raise InputError(f"checkpoint: there is no folder {place}; look for a typing mistake")
    complete = sorted(_all(place), key=_serial)
    named = _latest(place)
    if named is not None and not _serial(named):
        return named  # damaged: reading it raises, instead of silently using an older one
    if not complete:
        died = (place / _UNFINISHED).exists()
        raise InputError(
            f"checkpoint: there is no whole checkpoint in {place}"
            + ("; a save began there and did not finish" if died else "")
            + ". Give the folder that trainer.save(folder) wrote to"
        )
    return complete[-1]


def _latest(folder: Path) -> Path | None:
    """The checkpoint that the file `latest` names, if it is there."""
    named = folder / (_read(folder / _LATEST) or "-")
    return named if _NAME.fullmatch(named.name) and named.is_dir() else None


def _all(folder: Path) -> list[Path]:
    return [p for p in folder.iterdir() if _NAME.fullmatch(p.name) and p.is_dir()]


def _serial(checkpoint: Path) -> int:
    """The running number of a checkpoint; 0 if its index cannot be read."""
    try:
        return int(json.loads(_read(checkpoint / _INDEX) or "{}")["serial"])
    except (ValueError, KeyError, TypeError):
        return 0


def _read(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None


class Checkpoint:
    """A complete checkpoint; tensors are read on demand. Nothing is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path
        index = self._json(_INDEX)
        if not isinstance(index, dict) or index.get("format") != _FORMAT:
            raise InputError(f"checkpoint: {self.path / _INDEX} was not written by trainer.save")
        if index.get("version") != _VERSION:
            raise InputError(
                f"checkpoint: {self.path} has format version {index.get('version')}, but this "
                f"revcompile reads {_VERSION}; load it with the revcompile that saved it "
                f"({index.get('libraries', {}).get('revcompile', 'unknown')})"
            )
        self._index = index
        for name, expected in index["files"].items():
            file = self.path / name
            got = f"{file.stat().st_size} bytes" if file.is_file() else "no such file"
            if got != f"{expected} bytes":
                raise self._damaged(f"{name}: expected {expected} bytes, got {got}")

    @property
    def step(self) -> int:
        """How many micro-batches had been fed."""
        return int(self._index["step"])

    @property
    def world(self) -> int:
        """How many ranks saved it."""
        return int(self._index["world"])

    @property
    def plain(self) -> list[Any]:
        """The JSON values of each rank."""
        return [self._json(f"rank_{rank:05d}.json") for rank in range(self.world)]

    def tensors(self, prefix: str = "") -> dict[str, Tensor]:
        """All tensors whose names begin with `prefix`, on the CPU."""
        by_file: dict[str, list[str]] = {}
        for name, file in self._index["tensors"].items():
            if name.startswith(prefix):
                by_file.setdefault(file, []).append(name)
        return {n: t for file, names in by_file.items() for n, t in self._tensors(file, names)}

    def _tensors(self, file: str, names: list[str]) -> Iterator[tuple[str, Tensor]]:
        try:
            with safe_open(self.path / file, framework="pt") as opened:
                for name in names:
                    yield name, read_tensor(opened, name)
        except (OSError, SafetensorError) as error:
            raise self._damaged(f"{file}: {error}") from error

    def _json(self, name: str) -> Any:
        try:
            return json.loads((self.path / name).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise self._damaged(f"{name}: {error}") from error

    def _damaged(self, what: str) -> InputError:
        others = [p for p in _all(self.path.parent) if p != self.path and _serial(p)]
        advice = "save again"
        if others:
            before = max(others, key=_serial)
            advice = f"to go on from the one before, load {before}"
        return InputError(f"checkpoint: {self.path} is damaged: {what}; {advice}")
