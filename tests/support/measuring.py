"""Memory of a training step, counted; a step as a CUDA graph."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from revcompile.cli.step_memory import LiveStorages as LiveStorages
from revcompile.cli.step_memory import Memory as Memory
from revcompile.cli.step_memory import measure_memory as measure_memory
from revcompile.cli.step_memory import memory_of_step as memory_of_step


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
