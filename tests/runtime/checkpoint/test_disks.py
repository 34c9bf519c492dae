"""What disks and other processes do to checkpoints: a clear error, and the last good one stays."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from revcompile.errors import InputError
from revcompile.runtime.checkpoint import storage
from revcompile.runtime.checkpoint.storage import Checkpoint, find_checkpoint, save_checkpoint
from revcompile.runtime.checkpoint.weights import load_weights


def put(folder: Path, step: int) -> Path:
    tensors = {"model.w": torch.full((500,), float(step)), "model.n": torch.tensor(step)}
    return save_checkpoint(folder, tensors, {"aliases": {}, "step": step}, step=step)


def step_in(folder: Path) -> int:
    """The step that would be loaded, seen to be whole."""
    checkpoint = Checkpoint(find_checkpoint(folder))
    tensors = checkpoint.tensors()
    assert set(tensors["model.w"].tolist()) == {checkpoint.step} == {int(tensors["model.n"])}
    assert checkpoint.plain == [{"aliases": {}, "step": checkpoint.step}]
    return checkpoint.step


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Writing past so many bytes of any file fails in the kernel."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [0, 30, 300, 1000])
def test_a_file_that_cannot_grow(tmp_path: Path, size: int) -> None:
    put(tmp_path, 1)
    with file_size_limit(size), pytest.raises(InputError, match=r"cannot write to .* as before"):
        put(tmp_path, 2)
    assert step_in(tmp_path) == 1
    put(tmp_path, 2)
    assert step_in(tmp_path) == 2


@pytest.mark.parametrize(
    ("call", "code"),
    [
        *(("fsync", errno.ENOSPC), ("fsync", errno.EIO), ("rename", errno.EROFS)),
        *(("replace", errno.EDQUOT), ("mkdir", errno.EROFS), ("open", errno.EMFILE)),
    ],
)
def test_a_disk_that_fails_at_any_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    put(tmp_path, 1)
    real, last = getattr(os, call), 0
    for moment in range(20):
        calls = 0

        def failing(*args: Any, doomed: int = moment + 1, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == doomed:
                raise OSError(code, os.strerror(code))
            return real(*args, **kwargs)

        with monkeypatch.context() as patched:
            patched.setattr(os, call, failing)
            try:
                put(tmp_path, 2 + moment)
            except InputError as error:
                assert os.strerror(code) in str(error)
            else:
                last = 2 + moment
        assert step_in(tmp_path) in (1, last, 2 + moment)  # the one before, or all of the new one
        if calls <= moment:
            break
    assert calls > 0
    put(tmp_path, 99)
    assert step_in(tmp_path) == 99
    assert sorted(p.name for p in tmp_path.iterdir() if "step" not in p.name) == ["latest"]


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    place = put(tmp_path, 3)
    noticed = 0
    for file in sorted(place.iterdir()):
        content = file.read_bytes()
        for at in range(0, len(content), 29):
            changed = bytearray(content)
            changed[at] ^= 1 << at % 8
            file.write_bytes(changed)
            try:
                assert step_in(place) == 3  # else in white space
            except InputError:
                noticed += 1
        file.write_bytes(content)
    assert step_in(place) == 3
    assert noticed > 90


def hours(ahead: float) -> Callable[[], float]:
    return lambda: 1e9 + 3600 * ahead


def test_the_newest_is_the_last_one_whatever_the_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step, clock in ((5, hours(0)), (6, hours(-9)), (2, hours(100)), (4, hours(-100))):
        monkeypatch.setattr(time, "time", clock)
        place = put(tmp_path, step)
        os.utime(place, (clock(), clock()))
        assert step_in(tmp_path) == step


# -- other processes ------------------------------------------------------------------------------


def in_a_child(act: Callable[[], Any]) -> str:
    """What another process says that does it: its error, or nothing."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        try:
            act()
        except BaseException as error:
            os.write(writes, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.close(writes)
    os.waitpid(child, 0)
    with os.fdopen(reads) as said:
        return said.read()


def test_two_runs_in_one_folder_are_told(tmp_path: Path) -> None:
    put(tmp_path, 1)
    storage._newest_known.clear()  # as in a new process
    assert in_a_child(lambda: put(tmp_path, 2)) == ""
    put(tmp_path, 3)  # the first save of a run: it may begin in a folder that was used before
    assert in_a_child(lambda: put(tmp_path, 4)) == ""  # forked here, it knows of 3
    with pytest.raises(InputError, match=r"step_00000004 was saved by another run"):
        put(tmp_path, 5)
    assert step_in(tmp_path) == 4  # this one has looked: it goes on from there
    put(tmp_path, 5)
    assert step_in(tmp_path) == 5


def test_a_save_waits_for_nobody_and_mixes_with_nobody(tmp_path: Path) -> None:
    put(tmp_path, 1)
    said: list[str] = []

    def barrier() -> None:  # in the middle of a save
        said.append(in_a_child(lambda: put(tmp_path, 3)))

    tensors = {"model.w": torch.full((500,), 2.0), "model.n": torch.tensor(2)}
    plain = {"aliases": {}, "step": 2}
    save_checkpoint(tmp_path, tensors, plain, step=2, barrier=barrier)
    assert len(said) == 3 and all("another run is saving" in text for text in said)
    assert step_in(tmp_path) == 2
    assert in_a_child(lambda: put(tmp_path, 3)) == ""  # the lock is gone
    assert step_in(tmp_path) == 3


def as_nobody(act: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> Any:
        if os.geteuid() == 0:
            os.setgid(65534)
            os.setuid(65534)
        return act()

    return run


def test_without_permission(tmp_path: Path) -> None:
    for part in (tmp_path, *tmp_path.parents):
        if part.stat().st_uid == os.geteuid() and part != Path("/"):
            part.chmod(part.stat().st_mode | 0o011)
    folder = tmp_path / "run"
    place = put(folder, 1)
    folder.chmod(0o555)
    assert "InputError: trainer.save: rank 0 cannot write" in in_a_child(
        as_nobody(lambda: put(folder, 2))
    )
    for closed in (*place.iterdir(), place, folder):
        before = closed.stat().st_mode
        closed.chmod(0)
        said = in_a_child(as_nobody(lambda: load_weights(folder)))
        assert said.startswith("InputError: checkpoint:"), (closed, said)
        assert "ermission" in said or "no whole checkpoint" in said
        closed.chmod(before)
    folder.chmod(0o755)
    assert step_in(folder) == 1


def test_links_are_not_written_through(tmp_path: Path) -> None:
    folder, outside = tmp_path / "run", tmp_path / "outside"
    put(folder, 1)
    outside.mkdir()
    (outside / "precious").write_text("keep")
    (folder / "saving.tmp").symlink_to(outside)
    (folder / "latest.tmp").symlink_to(outside / "precious")
    (folder / "latest").unlink()
    (folder / "latest").symlink_to(outside / "precious")
    shutil.copytree(put(tmp_path / "other", 7), outside / "step_00000007")
    (folder / "step_00000007").symlink_to(outside / "step_00000007")
    for step in (2, 3, 4):
        put(folder, step)
    assert step_in(folder) == 4
    assert sorted(p.name for p in folder.iterdir()) == ["latest", "step_00000003", "step_00000004"]
    assert (outside / "precious").read_text() == "keep"
    assert step_in(outside / "step_00000007") == 7
    (tmp_path / "link").symlink_to(folder)
    assert step_in(tmp_path / "link") == 4


def test_pipes_and_giants_are_not_read(tmp_path: Path) -> None:
    place = put(tmp_path, 1)
    for name in ("rank_00000.json", "checkpoint.json", "rank_00000.safetensors"):
        kept = (place / name).read_bytes()
        (place / name).unlink()
        os.mkfifo(place / name)
        with pytest.raises(InputError, match="checkpoint"):
            load_weights(tmp_path)
        (place / name).unlink()
        with (place / name).open("wb") as giant:
            giant.truncate(1 << 40)  # sparse
        with pytest.raises(InputError, match="checkpoint"):
            load_weights(tmp_path)
        (place / name).write_bytes(kept)
    assert step_in(tmp_path) == 1
