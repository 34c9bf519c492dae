"""Threads beside a trainer: one that trains another net, one that draws random numbers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import revcompile
from revcompile.kernels.repeatable import Repeatable, Repeated

LIMIT: Final = 60.0
"""Seconds after which a thread that waits for another one fails."""

at_gate: Final[dict[str, Callable[[], None]]] = {}
"""What the gates of a name call, once a model is compiled."""


class Gate(nn.Module):
    """Passes its input on. Each call runs `at_gate[name]`: a known point in a forward pass."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        if self.name in at_gate:
            at_gate[self.name]()
        return x * 1.0


class Gated(nn.Module):
    """Two blocks; in the second a gate comes before a batch norm."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.gate, self.norm = Gate(name), nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.first(x))
        return x + self.norm(self.gate(self.second(x)))


def test_statistics_of_a_trainer_move_while_another_thread_rebuilds_a_chain() -> None:
    x, y = torch.randn(4, 5), torch.randint(0, 5, (4,))
    chain = revcompile.reversify(Gated("chain"), x, leaf_modules=[Gate])
    staged = revcompile.petrafy(Gated("staged"), 1, x, leaf_modules=[Gate])
    trainer = staged.trainer(lambda p: torch.optim.SGD(p, 0.1), F.cross_entropy)
    rebuilds, is_over = threading.Event(), threading.Event()

    def rebuild() -> None:
        if torch.is_grad_enabled():
            rebuilds.set()
            assert is_over.wait(LIMIT)

    def train_chain() -> None:
        at_gate["chain"] = rebuild
        chain(x).sum().backward()

    with ThreadPoolExecutor() as threads:
        others = []

        def record() -> None:
            if torch.is_grad_enabled():
                others.append(threads.submit(train_chain))
                assert rebuilds.wait(LIMIT)

        at_gate["staged"] = record
        trainer.step(x, y)
        is_over.set()
        others[0].result(LIMIT)
    assert int(staged.model.norm.num_batches_tracked) == 1
    assert int(chain.norm.num_batches_tracked) == 1


def test_settings_are_restored_when_the_last_thread_leaves() -> None:
    first, second = Repeatable(Repeated(True, True)), Repeatable(Repeated(True, True))
    before = torch._C._get_cudnn_deterministic(), torch._C._get_flash_sdp_enabled()
    first.__enter__()
    second.__enter__()
    first.__exit__()
    assert (torch._C._get_cudnn_deterministic(), torch._C._get_flash_sdp_enabled()) == (True, False)
    second.__exit__()
    assert (torch._C._get_cudnn_deterministic(), torch._C._get_flash_sdp_enabled()) == before
