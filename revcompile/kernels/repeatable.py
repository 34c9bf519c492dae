"""Layers that give the same bits when they run again.

cuDNN may split a convolution's sum and add the parts in any order, and with `cudnn.benchmark` each
thread chooses its algorithms by its own timing. Attention whose mask has a gradient cannot use the
flash kernel, but would use it in the forward pass of a chain, which has no gradients. An averaged
coupling multiplies such differences of a last bit by 16 in every block (`fixed_point`), so its
branches run deterministic convolutions, and such attention without the flash kernel.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

import torch


class Repeated(NamedTuple):
    """Which layers of a branch must be kept from choosing another kernel."""

    convolutions: bool = False
    attention: bool = False
    """Attention whose mask depends on parameters."""


class Setting:
    """A switch of torch for the whole process, which several threads may want to set.

    It is off while one of them wants it off, and restored when the last of them is done.
    """

    def __init__(self, get: Callable[[], bool], set_to: Callable[[bool], None]) -> None:
        self._get, self._set_to = get, set_to
        self._lock = threading.Lock()
        self._wanted: list[bool] = []
        self._before = False

    def want(self, on: bool) -> None:
        with self._lock:
            if not self._wanted:
                self._before = self._get()
            self._wanted.append(on)
            self._set_to(all(self._wanted))

    def release(self, on: bool) -> None:
        """End a `want`."""
        with self._lock:
            self._wanted.remove(on)
            self._set_to(all(self._wanted) if self._wanted else self._before)


CUDNN_BENCHMARK: Final = Setting(torch._C._get_cudnn_benchmark, torch._C._set_cudnn_benchmark)
_DETERMINISTIC: Final = Setting(
    torch._C._get_cudnn_deterministic, torch._C._set_cudnn_deterministic
)
_FLASH: Final = Setting(torch._C._get_flash_sdp_enabled, torch._C._set_sdp_use_flash)


@contextmanager
def repeatable(layers: Repeated) -> Iterator[None]:
    """Inside, these layers give the same bits in every run."""
    wanted: list[tuple[Setting, bool]] = []
    if layers.convolutions:
        wanted += [(_DETERMINISTIC, True), (CUDNN_BENCHMARK, False)]
    if layers.attention:
        wanted += [(_FLASH, False)]
    for setting, on in wanted:
        setting.want(on)
    try:
        yield
    finally:
        for setting, on in wanted:
            setting.release(on)
