"""Where the time of a step goes: the kernels that take most of it, steps side by side."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.harness import show, synchronize

STEPS: Final = 3
_WIDTH: Final = 60


@dataclass(frozen=True)
class Spent:
    """What one kernel takes of a step."""

    seconds: float
    calls: float


def spent(step: Callable[[], None], device: torch.device, warmup: int) -> dict[str, Spent]:
    """Every kernel of a step; on a CPU every operation of torch's, without those it calls."""
    for _ in range(warmup):
        step()
    synchronize(device)
    is_cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    with profile(activities=activities, acc_events=True) as profiler:
        for _ in range(STEPS):
            step()
        synchronize(device)
    return collected(profiler.key_averages(), is_cuda)


def collected(events: Iterable[Any], is_cuda: bool) -> dict[str, Spent]:
    """Kernels, or operations, by a name that is short enough to be read."""
    by_kernel: dict[str, Spent] = {}
    for event in events:
        is_kernel = event.device_type == DeviceType.CUDA
        if is_kernel != is_cuda or getattr(event, "is_user_annotation", False):
            continue
        time = event.self_device_time_total if is_cuda else event.self_cpu_time_total
        name = short(event.key)
        before = by_kernel.get(name, Spent(0.0, 0.0))
        seconds, calls = time * 1e-6 / STEPS, event.count / STEPS
        by_kernel[name] = Spent(before.seconds + seconds, before.calls + calls)
    return by_kernel


def short(name: str) -> str:
    """A kernel's name without what a compiler says of it.

    >>> short("void at::native::vectorized_kernel<4, at::native::relu(float)>(int, float)")
    'vectorized_kernel<4, relu(float)>'
    """
    name = re.sub(r"\bvoid |\(anonymous namespace\)::|\b(?:at|native|cuda|std|detail)::", "", name)
    head, bracket, _ = name.rpartition(">(")
    name = head + ">" if bracket else name
    return name if len(name) <= _WIDTH else name[: _WIDTH - 1] + "…"


def hottest(steps: Mapping[str, Mapping[str, Spent]], count: int) -> list[str]:
    """The names of those kernels that take most of any step."""
    names = {name for step in steps.values() for name in step}
    nothing = Spent(0.0, 0.0)

    def most(name: str) -> float:
        return max(step.get(name, nothing).seconds for step in steps.values())

    return sorted(names, key=lambda name: (-most(name), name))[:count]


def report(title: str, steps: Mapping[str, Mapping[str, Spent]], count: int) -> None:
    """Print the hottest kernels of all steps: milliseconds, and how often each is started."""
    chosen = hottest(steps, count)
    rows = [(name, *(_cell(step.get(name)) for step in steps.values())) for name in chosen]
    others = [[s for name, s in step.items() if name not in chosen] for step in steps.values()]
    rows.append(("all others", *(_cell(_sum(rest)) for rest in others)))
    rows.append(("together", *(_cell(_sum(step.values())) for step in steps.values())))
    show(title, ("ms a step (calls)", *steps), rows)


def _sum(parts: Iterable[Spent]) -> Spent:
    each = list(parts)
    return Spent(sum(part.seconds for part in each), sum(part.calls for part in each))


def _cell(part: Spent | None) -> str:
    return "" if part is None else f"{part.seconds * 1e3:.2f} ({part.calls:.0f})"
