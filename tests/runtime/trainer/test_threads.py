"""Threads beside a trainer: one that trains another net, one that draws random numbers."""

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import pytest
import torch
from helpers import refuses
from torch import Tensor, nn
from torch.nn import functional as F

import revcompile
from revcompile.errors import ModifiedError
from revcompile.kernels.repeatable import Repeated, repeatable
from revcompile.runtime.trainer.trainer import Trainer

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
    """Two blocks; in the first a gate comes before a batch norm and a dropout."""

    def __init__(self, name: str, rate: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.gate, self.norm, self.drop = Gate(name), nn.BatchNorm1d(5), nn.Dropout(rate)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.norm(self.gate(self.first(x))))
        return x + torch.tanh(self.second(x))


@pytest.fixture(autouse=True)
def no_gates() -> Iterator[None]:
    yield
    at_gate.clear()


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 5), torch.randint(0, 5, (4,))


def trainer_of(model: Gated, stages: int, backend: str = "eager") -> Trainer:
    net = revcompile.petrafy(model, stages, batch()[0], leaf_modules=[Gate], check="off")
    return net.trainer(lambda p: torch.optim.SGD(p, 0.1), F.cross_entropy, backend=backend)


def elsewhere(call: Callable[..., Any], *given: Any) -> None:
    """Call a function in another thread."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(call, *given).result(LIMIT)


# -- two trainings --------------------------------------------------------------------------------


def test_statistics_of_a_trainer_move_while_another_thread_rebuilds_a_chain() -> None:
    (x, y), trainer = batch(), trainer_of(Gated("staged"), 1)
    chain = revcompile.reversify(Gated("chain"), x, leaf_modules=[Gate])
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
    assert int(trainer.model.norm.num_batches_tracked) == 1
    assert int(chain.norm.num_batches_tracked) == 1


def test_settings_are_restored_when_the_last_thread_leaves() -> None:
    first, second = repeatable(Repeated(True, True)), repeatable(Repeated(True, True))
    before = torch._C._get_cudnn_deterministic(), torch._C._get_flash_sdp_enabled()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert (torch._C._get_cudnn_deterministic(), torch._C._get_flash_sdp_enabled()) == (True, False)
    second.__exit__(None, None, None)
    assert (torch._C._get_cudnn_deterministic(), torch._C._get_flash_sdp_enabled()) == before


# -- random numbers -------------------------------------------------------------------------------


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("backend", ["eager", "static"])
def test_dropout_that_another_thread_disturbs_is_refused(backend: str, in_backward: bool) -> None:
    trainer = trainer_of(Gated("staged", 0.5), 2, backend)
    for _ in range(6):
        trainer.step(*batch())
    assert trainer._runner.is_active == (backend == "static")

    def draw() -> None:
        if torch.is_grad_enabled() is in_backward:
            del at_gate["staged"]
            elsewhere(torch.rand, 3)

    at_gate["staged"] = draw
    with pytest.raises(ModifiedError, match=r"^stage 0, first: .* a torch\.Generator of its own"):
        for _ in range(2):
            trainer.step(*batch())


@pytest.mark.parametrize("in_backward", [False, True])
def test_dropout_of_a_chain_that_another_thread_disturbs_is_refused(in_backward: bool) -> None:
    x, _ = batch()
    net = revcompile.reversify(Gated("chain", 0.5), x, leaf_modules=[Gate])

    def draw() -> None:
        if torch.is_grad_enabled() is in_backward:
            elsewhere(torch.rand, 3)

    at_gate["chain"] = draw
    refuses(ModifiedError, r"^block first: .* a torch\.Generator of its own", net(x).sum().backward)


@pytest.mark.parametrize("kind", ["stages", "chain"])
def test_threads_may_draw_beside_a_model_that_does_not(kind: str) -> None:
    """A gate might draw, for all that is known; as many numbers as it likes, in any pass."""
    x, y = batch()
    if kind == "stages":
        trainer = trainer_of(Gated("model"), 2)
        model, step = trainer.model, lambda: trainer.step(x, y)
    else:
        model = revcompile.reversify(Gated("model"), x, leaf_modules=[Gate])
        step = lambda: model(x).sum().backward()  # noqa: E731
    counts = itertools.count(1)
    step()
    step()
    at_gate["model"] = lambda: elsewhere(torch.rand, next(counts))
    for _ in range(4):
        step()
    assert next(counts) > 7
    assert int(model.norm.num_batches_tracked) >= 4
