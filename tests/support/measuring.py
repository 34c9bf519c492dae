"""Memory of a training step, counted; a step as a CUDA graph."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True)
class Memory:
    """Bytes one training step takes on top of parameters, their gradients and the batch.

    `held` is what the forward pass leaves behind for the backward pass, `peak` the most there is at
    any moment of the two. `largest` is what is alive at the peak by origin, on the CPU only.
    """

    held: int
    peak: int
    largest: tuple[tuple[str, int], ...] = ()


def measure_memory(forward: Callable[[], Tensor], device: torch.device) -> Memory:
    """The memory of `forward().backward()`.

    A step runs first, unmeasured: it creates the parameters' gradients (which then stay, and so do
    not count) and the libraries' workspaces.
    """
    forward().backward()
    if device.type == "cuda":
        return _measure_cuda(forward, device)
    with LiveStorages() as storages:
        loss = forward()
        held = storages.live
        loss.backward()
    return Memory(held, storages.peak, tuple(storages.largest))


def _measure_cuda(forward: Callable[[], Tensor], device: torch.device) -> Memory:
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    loss = forward()
    held = torch.cuda.memory_allocated(device) - before
    loss.backward()
    torch.cuda.synchronize(device)
    return Memory(held, torch.cuda.max_memory_allocated(device) - before)


def step_memory(
    net: nn.Module, x: Tensor, y: Tensor, device: torch.device, dtype: str = "fp32"
) -> Memory:
    """One training step of `net` in training mode."""
    net.train()

    def forward() -> Tensor:
        with autocast(device, dtype):
            return F.cross_entropy(net(x), y)

    measured = measure_memory(forward, device)
    net.zero_grad(set_to_none=True)
    return measured


def autocast(device: torch.device, dtype: str) -> AbstractContextManager[Any]:
    """Mixed precision if `dtype` is "bf16"; nothing for "fp32"."""
    if dtype == "bf16":
        return torch.autocast(device.type, torch.bfloat16)
    return nullcontext()


class LiveStorages(TorchDispatchMode):
    """Counts the bytes of all storages that operations under it create, while they are alive.

    What was there before does not count, nor do views of it. Scratch space inside a kernel is not
    seen. Counting bytes rather than asking the operating system makes the result exact and the same
    in every run.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self._known: dict[int, tuple[str, int]] = {}
        self._at_peak: list[tuple[str, int]] = []

    @property
    def largest(self) -> list[tuple[str, int]]:
        """What was alive at the peak: bytes by the operation and shape that made them."""
        total: Counter[str] = Counter()
        for origin, size in self._at_peak:
            total[origin] += size
        return total.most_common()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for tensor in _tensors((*args, *kwargs.values())):
            self._watch(tensor, "", counts=False)
        out = func(*args, **kwargs)
        for tensor in _tensors((out,)):
            self._watch(tensor, f"{func} {tuple(tensor.shape)}", counts=True)
        if self.live > self.peak:
            self.peak = self.live
            self._at_peak = [entry for entry in self._known.values() if entry[1]]
        return out

    def _watch(self, tensor: Tensor, origin: str, counts: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes() if counts else 0
        self._known[key] = (origin, size)
        self.live += size
        weakref.finalize(storage, self._forget, key).atexit = False

    def _forget(self, key: int) -> None:
        _, size = self._known.pop(key)
        self.live -= size


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """All tensors among an operator's arguments or results, which may be lists of them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def slope(depths: Sequence[float], values: Sequence[float]) -> float:
    """Growth per added block: the least-squares line through all depths.

    >>> slope([2, 4, 8], [7.0, 11.0, 19.0])
    2.0
    """
    mean_depth, mean_value = sum(depths) / len(depths), sum(values) / len(values)
    covariance = sum(
        (d - mean_depth) * (v - mean_value) for d, v in zip(depths, values, strict=True)
    )
    return covariance / sum((d - mean_depth) ** 2 for d in depths)


def capture_step(step: Callable[[], None], net: nn.Module) -> Callable[[], None]:
    """A step as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    net.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay
