"""What all benchmarks use: interleaved timing, peak memory, growth, tables.

Times are compared only within one run: the variants take turns, round by round, and a ratio is the
median of the rounds' own ratios, so that a machine that slows down slows all of them.
"""

from __future__ import annotations

import gc
import math
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

__all__ = [
    "LiveStorages",
    "Memory",
    "Ratio",
    "autocast",
    "count_flops",
    "device_bytes",
    "exponent",
    "interleave",
    "measure_memory",
    "measure_peak",
    "mib",
    "ratio",
    "show",
    "slope",
    "synchronize",
]

MIB = 2**20


# -- time ------------------------------------------------------------------------------------------


def interleave(
    variants: Mapping[str, Callable[[], object]],
    rounds: int,
    warmup: int,
    device: torch.device,
) -> dict[str, list[float]]:
    """Seconds of every variant in every round; who goes first moves on by one each round.

    One thread on the CPU is timed by the processor time it takes: other people's load on the
    machine then matters less.
    """
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.process_time if alone else time.perf_counter
    for _ in range(warmup):
        for run in variants.values():
            run()
    names = list(variants)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            synchronize(device)
            start = clock()
            variants[name]()
            synchronize(device)
            seconds[name].append(clock() - start)
    return seconds


@dataclass(frozen=True)
class Ratio:
    """How much longer one variant takes than another: the rounds' median and quartiles."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} – {self.high:.3f})"


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Round by round `ours / theirs`.

    >>> print(ratio([1.0, 2.0, 6.0], [1.0, 1.0, 2.0]))
    2.000 (1.500 – 2.500)
    """
    each = [a / b for a, b in zip(ours, theirs, strict=True)]
    low, _, high = quantiles(each, n=4, method="inclusive") if len(each) > 1 else each * 3
    return Ratio(median(each), low, high)


def count_flops(run: Callable[[], object]) -> int:
    """Floating-point operations of matrix products, convolutions and attention in one run."""
    with _Flops() as counter:
        run()
    total: int = counter.total
    return total


class _Flops(TorchDispatchMode):
    """torch's formulas; `FlopCounterMode` itself forbids `autograd.grad` in a backward."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if formula := flop_registry.get(func.overloadpacket):
            self.total += formula(*args, **kwargs, out_val=out)
        return out


def synchronize(device: torch.device) -> None:
    """Wait until the device has done everything asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# -- memory ----------------------------------------------------------------------------------------


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


def measure_peak(run: Callable[[], object], device: torch.device) -> int:
    """The most bytes that `run` adds at any moment, what it leaves behind included.

    CUDA graphs keep memory to themselves that the allocator does not count: there it is at least
    what the device has less afterwards.
    """
    if device.type != "cuda":
        with LiveStorages() as storages:
            run()
        return int(storages.peak)
    taken, before = device_bytes(device), torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    peak = torch.cuda.max_memory_allocated(device) - before
    return max(peak, device_bytes(device) - taken)


def device_bytes(device: torch.device) -> int:
    """Bytes of a GPU that are taken, caches left out."""
    synchronize(device)
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return total - free


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


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The power that `values` grow with: 1 in proportion, 2 as the square, 0 not at all.

    The slope of the least-squares line through the logarithms.

    >>> round(exponent([1, 2, 4], [3.0, 12.0, 48.0]), 3)
    2.0
    """
    return slope([math.log(size) for size in sizes], [math.log(value) for value in values])


def mib(size: float) -> str:
    """Bytes for a table.

    >>> mib(3 * 2**19)
    '1.50 MiB'
    """
    return f"{size / MIB:,.2f} MiB"


# -- settings, tables ------------------------------------------------------------------------------


def autocast(device: torch.device, dtype: str) -> AbstractContextManager[Any]:
    """Mixed precision if `dtype` is "bf16"; nothing for "fp32"."""
    if dtype == "bf16":
        return torch.autocast(device.type, torch.bfloat16)
    return nullcontext()


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table: names left, figures right."""
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(str, row))
    Console(width=130, force_jupyter=False).print(table)
