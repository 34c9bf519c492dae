"""Checkpoints as folders: written by all ranks at once, then renamed into place atomically.

    folder/
      step_00000120/             always complete: it gets this name once all of it is on disk
        checkpoint.json          the files, their sizes and digests, and which tensor is in which
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

import math
import os
import platform
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from revcompile.errors import InputError
from revcompile.runtime.checkpoint.codec import as_text, parse_json
from revcompile.runtime.checkpoint.tensor_files import digest, open_tensors, sync, write_tensors

try:
    import fcntl
except ImportError:  # not on this system
    fcntl = None  # type: ignore[assignment]

Barrier = Callable[[], None]
"""Returns when every rank has called it."""

_FORMAT: Final = "revcompile checkpoint"
_VERSION: Final = 2
_READABLE: Final = (1, 2)
"""Format versions; the first has no digests."""
_INDEX: Final = "checkpoint.json"
_LATEST: Final = "latest"
_UNFINISHED: Final = "saving.tmp"
_REMOVED: Final = ".removed.tmp"
_NAME: Final = re.compile(r"step_(\d{8,})(_\d+)?")
_newest_known: Final[dict[Path, int]] = {}
"""By folder: the serial number of its newest checkpoint when this process saved or looked there."""
_MOST_TEXT: Final = 1 << 28
"""Bytes of a JSON file: one that claims more is not read into memory."""


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
        if not isinstance(keep, int) or keep < 1:
            raise InputError(f"trainer.save: keep={keep!r}; keep at least 1 checkpoint")
        folder = _path(folder, "trainer.save")
    except InputError:
        join_barriers(barrier)  # so that the other ranks do not wait
        raise
    is_first, before = rank == 0, _latest(folder)
    with ExitStack() as stack:  # holds the lock of the folder
        failure = _run_phases(
            barrier,
            (lambda: _prepare(folder, stack)) if is_first else None,
            lambda: _write_rank(folder / _UNFINISHED, rank, tensors, plain),
            (lambda: _commit(folder, step, world)) if is_first else None,
        )
    if isinstance(failure, OSError):
        raise InputError(
            f"trainer.save: rank {rank} cannot write to {folder} ({failure}); the checkpoints there"
            " are as before. Free some space, or choose another folder"
        ) from failure
    if failure is not None:
        raise failure
    saved = _latest(folder)
    if saved is None or saved == before:
        raise InputError(
            f"trainer.save: another rank failed to write to {folder}; the checkpoints there are "
            "as before. Its own error says why"
        )
    if is_first:
        _prune(folder, keep)
    return saved


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


def _prepare(folder: Path, stack: ExitStack) -> None:
    """Lock the folder, make the one to write to, and remove what killed saves left behind."""
    folder.mkdir(parents=True, exist_ok=True)
    stack.enter_context(_locked(folder))
    newest = max(_all(folder), key=_serial, default=folder)
    if _serial(newest) > _newest_known.get(folder.resolve(), math.inf):
        raise InputError(
            f"trainer.save: {newest} was saved by another run, after this one had saved or loaded "
            f"in {folder}; give every run a folder of its own, else they remove each other's"
        )
    for left in (folder / _UNFINISHED, folder / f"{_LATEST}.tmp"):
        _remove(left)
    for left in folder.glob(f"step_*{_REMOVED}"):
        with suppress(OSError):
            _remove(left)
    (folder / _UNFINISHED).mkdir()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder against other processes; the system unlocks it when this one ends."""
    if fcntl is None:  # not on this system
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise InputError(
            f"trainer.save: another run is saving to {folder}; give every run a folder of its own"
        ) from error
    except OSError:
        pass  # a file system without locks
    try:
        yield
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    """A folder or a file; of a link the link alone."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif path.is_symlink() or path.exists():
        path.unlink()


def _write_rank(place: Path, rank: int, tensors: Mapping[str, Tensor], plain: Any) -> None:
    if not place.is_dir():
        raise InputError(
            f"trainer.save: rank {rank} does not see {place}; all ranks must save to one folder "
            "that they share"
        )
    write_tensors(place / f"rank_{rank:05d}.safetensors", tensors)
    _write(place / f"rank_{rank:05d}.json", as_text(plain) + "\n")


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
    content["digest"] = _index_digest(content)
    _write(place / _INDEX, as_text(content) + "\n")
    sync(place)
    name, again = f"step_{step:08d}", 1
    while (folder / name).exists():
        again += 1
        name = f"step_{step:08d}_{again}"
    os.rename(place, folder / name)
    _newest_known[folder.resolve()] = content["serial"]
    sync(folder)
    _write(folder / f"{_LATEST}.tmp", name + "\n")
    os.replace(folder / f"{_LATEST}.tmp", folder / _LATEST)
    sync(folder)


def _inventory(place: Path, world: int) -> dict[str, Any]:
    """All ranks' files with their sizes, and the file of every tensor."""
    files: dict[str, int] = {}
    digests: dict[str, str] = {}
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
        digests[plain] = digest(_content(place / plain))
        with open_tensors(place / tensors) as opened:
            for name in opened.names:
                if file_of.setdefault(name, tensors) != tensors:
                    raise InputError(
                        f"trainer.save: {file_of[name]} and {tensors} both hold {name!r}; every "
                        "rank must save only what it alone holds"
                    )
    return {"files": files, "digests": digests, "tensors": file_of}


def _index_digest(index: Mapping[str, Any]) -> str:
    """Of an index without its digest, whatever its line breaks."""
    text = as_text({key: index[key] for key in index if key != "digest"})
    return digest(text.encode(errors="surrogatepass"))


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
            _remove(doomed)


def _write(file: Path, text: str) -> None:
    if len(text) > _MOST_TEXT:
        raise InputError(
            f"trainer.save: {file.name} would have {len(text)} bytes of values that are no "
            "tensors, which could not be read again; make tensors of large lists"
        )
    with file.open("w", encoding="utf-8") as opened:
        opened.write(text)
        opened.flush()
        os.fsync(opened.fileno())


# -- reading --------------------------------------------------------------------------------------


def find_checkpoint(place: str | Path) -> Path:
    """The checkpoint at a place, or the newest one of a folder of checkpoints."""
    with _readable(place := _path(place, "checkpoint")):
        return _found(place)


@contextmanager
def _readable(place: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(f"checkpoint: {place} cannot be read ({error})") from error


def _found(place: Path) -> Path:
    if (place / _INDEX).is_file():
        return place
    if not place.is_dir():
        raise InputError(f"checkpoint: there is no folder {place}; look for a typing mistake")
    complete = sorted(_all(place), key=_serial)
    _newest_known[place.resolve()] = max(map(_serial, complete), default=0)
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
    try:
        name = _content(folder / _LATEST).decode().strip()
    except (OSError, UnicodeDecodeError):
        return None
    return folder / name if _NAME.fullmatch(name) and (folder / name).is_dir() else None


def _all(folder: Path) -> list[Path]:
    return [p for p in folder.iterdir() if _NAME.fullmatch(p.name) and p.is_dir()]


def _serial(checkpoint: Path) -> int:
    """The running number of a checkpoint; 0 if its index cannot be read."""
    try:
        serial = parse_json(_content(checkpoint / _INDEX))["serial"]
    except (OSError, InputError, KeyError, TypeError):
        return 0
    return serial if type(serial) is int else 0


def _content(file: Path) -> bytes:
    """A small file's bytes; a pipe or a device is not waited for."""
    about = file.stat()
    if not stat.S_ISREG(about.st_mode):
        raise OSError(f"{file.name} is no regular file")
    if about.st_size > _MOST_TEXT:
        raise OSError(f"{file.name} has {about.st_size} bytes, which is no index and no settings")
    with file.open("rb") as opened:
        return opened.read(_MOST_TEXT)


def _index_problem(index: Mapping[str, Any]) -> str | None:
    """What no save writes into an index; None if all entries are as they should be."""
    for name in ("step", "serial", "world"):
        if type(index.get(name)) is not int or index[name] < 0:
            return f"expected {name} to be a number, got {index.get(name)!r:.40}"
    for name, kind in (("files", int), ("tensors", str), ("digests", str)):
        entries = index.get(name, {} if name == "digests" else None)
        if not isinstance(entries, dict) or any(type(v) is not kind for v in entries.values()):
            return f"expected {name} by name, got {entries!r:.40}"
    files, world = index["files"], index["world"]
    if len(files) != 2 * world or files.keys() != set(_names(world)):
        return f"expected the files of {world} ranks, got {', '.join(sorted(files)):.80}"
    strange = sorted(set(index["tensors"].values()) - files.keys())
    return f"{strange[0]!r:.80} is no file of this checkpoint" if strange else None


def _names(world: int) -> list[str]:
    """The files of so many ranks."""
    kinds = ("safetensors", "json")
    return [f"rank_{rank:05d}.{kind}" for rank in range(world) for kind in kinds]


class Checkpoint:
    """A complete checkpoint; tensors are read on demand. Nothing is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with _readable(path):
            self._open()

    def _open(self) -> None:
        self._index = index = self._json(_INDEX)
        if not isinstance(index, dict) or index.get("format") != _FORMAT:
            raise InputError(f"checkpoint: {self.path / _INDEX} was not written by trainer.save")
        version, libraries = index.get("version"), index.get("libraries")
        if version not in _READABLE:
            saved_by = libraries.get("revcompile") if isinstance(libraries, dict) else None
            raise InputError(
                f"checkpoint: {self.path} has format version {version!r:.20}, but this revcompile "
                f"reads {' and '.join(map(str, _READABLE))}; load it with the revcompile that "
                f"saved it ({saved_by or 'unknown'!s:.40})"
            )
        self._has_digests = version != 1
        if self._has_digests and index.get("digest") != _index_digest(index):
            raise self._damaged(f"{_INDEX}: it is not what was written")
        problem = _index_problem(index)
        if problem is not None:
            raise self._damaged(f"{_INDEX}: {problem}")
        self.step: int = index["step"]
        """How many micro-batches had been fed."""
        self.world: int = index["world"]
        """How many ranks saved it."""
        for name, expected in index["files"].items():
            file = self.path / name
            got = f"{file.stat().st_size} bytes" if file.is_file() else "no such file"
            if got != f"{expected} bytes":
                raise self._damaged(f"{name}: expected {expected} bytes, got {got}")

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
            with open_tensors(self.path / file) as opened:
                if self._has_digests and not opened.has_digests:
                    raise InputError("the digests of its tensors are missing")
                for name in names:
                    yield name, opened.read(name)
        except InputError as error:
            raise self._damaged(f"{file}: {error}") from error

    def _json(self, name: str) -> Any:
        try:
            content = _content(self.path / name)
            is_checked = name != _INDEX and self._has_digests  # the index has its own digest
            if is_checked and digest(content) != self._index.get("digests", {}).get(name):
                raise InputError("it is not what was written")
            return parse_json(content)
        except PermissionError as error:
            raise InputError(f"checkpoint: {self.path} cannot be read ({error})") from error
        except (OSError, InputError) as error:
            raise self._damaged(f"{name}: {error}") from error

    def _damaged(self, what: str) -> InputError:
        others = [p for p in _all(self.path.parent) if p != self.path and _serial(p)]
        advice = "save again"
        if others:
            before = max(others, key=_serial)
            advice = f"to go on from the one before, load {before}"
        return InputError(f"checkpoint: {self.path} is damaged: {what}; {advice}")
