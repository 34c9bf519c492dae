"""Activation memory of a training step: from the allocator of a GPU, or by counting storages."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True)
class Memory:
    """Bytes one training step takes on top of parameters, their gradients and the batch.

    `held` is what the forward pass leaves behind for the backward pass, `peak` the most there is at
    any moment of the two.
    """

    held: int
    peak: int


def measure_memory(forward: Callable[[], Tensor], device: torch.device) -> Memory:
    """The memory of `forward().backward()`.

    A step runs first, unmeasured: it creates the parameters' gradients (which then stay, and so do
    not count) and the libraries' workspaces.
    """
    forward().backward()
    return memory_of_step(forward, device)


def memory_of_step(forward: Callable[[], Tensor], device: torch.device) -> Memory:
    """The memory of a single `forward().backward()`; gradients that it creates count."""
    if device.type != "cuda":
        with LiveStorages() as storages:
            loss = forward()
            held = storages.live
            loss.backward()
        return Memory(held, storages.peak)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    loss = forward()
    held = torch.cuda.memory_allocated(device) - before
    loss.backward()
    torch.cuda.synchronize(device)
    return Memory(held, torch.cuda.max_memory_allocated(device) - before)


class LiveStorages(TorchDispatchMode):
    """Counts the bytes of all storages that operations inside it create, while they are alive.

    Storages that existed before do not count. Scratch space inside a kernel is not seen. Counting
    bytes, instead of asking the operating system, makes the result exact and the same in every run.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for value in pytree.tree_leaves((args, kwargs)):
            self._watch(value, counts=False)
        out = func(*args, **kwargs)
        for value in pytree.tree_leaves(out):
            self._watch(value, counts=True)
        self.peak = max(self.peak, self.live)
        return out

    def _watch(self, value: Any, counts: bool) -> None:
        if not isinstance(value, Tensor):
            return
        storage = value.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes() if counts else 0
        self._known[key] = size
        self.live += size
        weakref.finalize(storage, self._forget, key).atexit = False

    def _forget(self, key: int) -> None:
        self.live -= self._known.pop(key)
