"""What disks and other processes do to checkpoints: a clear error, and the last good one stays."""

from __future__ import annotations

import errno
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from revcompile.errors import InputError
from revcompile.runtime.checkpoint.folder import Checkpoint, find_checkpoint, save_checkpoint


def put(folder: Path, step: int) -> Path:
    model = {"w": torch.full((500,), float(step)), "n": torch.tensor(step)}
    return save_checkpoint(folder, {"model": model, "step": step}, step=step)


def step_in(folder: Path) -> int:
    """The step that would be loaded, seen to be whole."""
    checkpoint = Checkpoint(find_checkpoint(folder))
    ((model, step),) = (tree.values() for tree in checkpoint.read(checkpoint.trees()))
    assert set(model["w"].tolist()) == {int(model["n"])} == {step}
    return int(step)


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
    with file_size_limit(size), pytest.raises(InputError, match=r"trainer.save: .* as before"):
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
    said = in_a_child(as_nobody(lambda: put(folder, 2)))
    assert said.startswith("InputError: trainer.save: PermissionError")
    for closed in (*place.iterdir(), place, folder):
        before = closed.stat().st_mode
        closed.chmod(0)
        said = in_a_child(as_nobody(lambda: step_in(folder)))
        assert said.startswith("InputError: checkpoint:"), (closed, said)
        assert "ermission" in said or "no whole checkpoint" in said
        closed.chmod(before)
    folder.chmod(0o755)
    assert step_in(folder) == 1
