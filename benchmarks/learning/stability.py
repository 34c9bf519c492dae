"""How sharply curved may a loss be, if gradients come late? By optimizer and delay, computed.

    python -m benchmarks run stability --out docs/results/stability.svg

Where the loss is a parabola, the parameter, the mean of gradients and the delayed gradients are one
linear recurrence, which is stable as long as no eigenvalue is larger than 1. Printed is the largest
curvature for which that holds, times the effective step: how far a gradient moves its parameter in
the end.

Muon and Adam divide by what they find, so that no recurrence describes them. The second table
trains a matrix W on the loss tr(W' H W) / 2 with curvatures from 1 to 100 in directions of their
own, and noise in the gradients: printed is how many times larger the loss is in the end than
without delay, at the best of four learning rates each.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

from benchmarks.harness import show
from benchmarks.learning.pictures import draw_stability
from benchmarks.registry import Benchmark, Row
from revcompile.optim import DelayAwareAdamW, DelayAwareMuon, ErrorFeedback
from revcompile.optim.delay_aware import averaging_horizon, look_ahead

Momentum = Callable[[int], tuple[float, float]]
"""From a delay in updates to the averaging horizon of gradients, and the look-ahead, in updates."""

Make = Callable[[list[nn.Parameter], float], Optimizer]
_RATES: Final = (0.03, 0.06, 0.1, 0.2)
"""The same for all; 0.01 and 0.4 are worse for each of them."""
TRAINED: Final[Mapping[str, Make]] = {
    "AdamW": lambda p, rate: AdamW(p, rate, betas=(0.9, 0.99), weight_decay=0.0),
    "AdamW, error feedback": lambda p, rate: ErrorFeedback(
        AdamW(p, rate, betas=(0.9, 0.99), weight_decay=0.0)
    ),
    "DelayAwareAdamW": lambda p, rate: DelayAwareAdamW(p, rate, weight_decay=0.0),
    "Muon": lambda p, rate: DelayAwareMuon(p, rate, feedback=0.0, max_drift=None),
    "Muon, error feedback": lambda p, rate: DelayAwareMuon(p, rate, max_drift=None),
}
"""Muon without `max_drift`, which would slow down a matrix whose best value is zero."""

KINDS: Final[Mapping[str, Momentum]] = {
    "momentum 0.9, as Adam has it": lambda delay: (10, 0),
    "Nesterov momentum 0.9": lambda delay: (10, 1),
    "no momentum": lambda delay: (1, 0),
    "delay-aware": lambda delay: (averaging_horizon(delay), look_ahead(delay)),
}


def radius(horizon: float, ahead: float, delay: int, curvature: float) -> float:
    """The largest eigenvalue: how much an error grows in an update, in the long run.

    The state is the parameter now and at each update back to the delay, then the mean.
    """
    size, rate = delay + 2, 1 / horizon
    late, mean = torch.zeros(2, size, dtype=torch.float64)
    late[delay] = curvature
    mean[-1] = 1 - rate
    mean += rate * late
    fresh = min(ahead * rate, 1.0)
    update = torch.zeros(size, size, dtype=torch.float64)
    update[0, 0] = 1
    update[0] -= mean + fresh * (late - mean)
    for back in range(1, delay + 1):
        update[back, back - 1] = 1
    update[-1] = mean
    return float(torch.linalg.eigvals(update).abs().max())


def most_curved(horizon: float, ahead: float, delay: int) -> float:
    """The largest stable curvature.

    >>> round(most_curved(10, 1, 0), 1)
    13.6
    """
    low, high = 1e-3, 1e-3  # found by bisection
    while radius(horizon, ahead, delay, high) <= 1 + 1e-9:
        low, high = high, 1.1 * high
    for _ in range(30):
        middle = (low + high) / 2
        is_stable = radius(horizon, ahead, delay, middle) <= 1 + 1e-9
        low, high = (middle, high) if is_stable else (low, middle)
    return low


def trained(make: Make, rate: float, delay: int, updates: int, size: int = 12) -> float:
    """The loss after so many updates, each with the gradient of the weights `delay` updates ago."""
    generator = torch.Generator().manual_seed(0)
    axes = torch.linalg.qr(torch.randn(size, size, generator=generator))[0]
    curved = axes @ torch.diag(torch.logspace(0, 2, size)) @ axes.T
    weight = nn.Parameter(torch.randn(size, size, generator=generator))
    optimizer = make([weight], rate)
    if hasattr(optimizer, "delay"):
        optimizer.delay = delay
    schedule = CosineAnnealingLR(optimizer, updates)
    history = [weight.detach().clone()] * (delay + 1)
    with torch.no_grad():
        for _ in range(updates):
            weight.grad = curved @ history.pop(0)
            weight.grad += torch.randn(size, size, generator=generator)
            optimizer.step()
            schedule.step()
            history.append(weight.detach().clone())
        return float((weight * (curved @ weight)).sum() / 2)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    parser.add_argument("--delays", type=int, nargs="+", default=[0, 1, 2, 3, 5, 9, 18])
    parser.add_argument("--out", type=Path, help="draw it here")
    parser.add_argument("--updates", type=int, default=600, help="of trained matrices")


def main(options: argparse.Namespace) -> Iterator[Row]:
    """Print the table, draw the picture."""
    largest = {
        kind: [most_curved(*momentum(delay), delay) for delay in options.delays]
        for kind, momentum in KINDS.items()
    }
    show(
        "largest stable curvature, by delay in updates",
        ("", *map(str, options.delays)),
        [(kind, *(f"{value:.2f}" for value in values)) for kind, values in largest.items()],
    )
    losses = {
        kind: [
            min(trained(make, rate, delay, options.updates) for rate in _RATES) for delay in late
        ]
        for late in [[0, *(delay for delay in options.delays if 0 < delay < 10)]]
        for kind, make in TRAINED.items()
    }
    show(
        "loss of a matrix in the end, by delay in updates, relative to none",
        ("", "loss at 0", *(str(delay) for delay in options.delays if 0 < delay < 10)),
        [
            (kind, f"{first:.3g}", *(f"{value / first:.2f}" for value in rest))
            for kind, (first, *rest) in losses.items()
        ],
    )
    if options.out is not None:
        draw_stability(options.delays, largest, options.out)
    for kind, values in largest.items():
        yield {"kind": kind, **dict(zip(map(str, options.delays), values, strict=True))}


BENCHMARK = Benchmark(
    "stability", arguments, main, smallest=("--delays", "0", "2", "--updates", "9")
)
