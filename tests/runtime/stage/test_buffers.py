"""In how many bits inputs wait for their backward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from training import plain_sgd, same, weights

import revcompile
from revcompile import TrainerOptions
from revcompile.errors import InputError
from revcompile.runtime.trainer.trainer import Trainer
from tests.runtime.executor.test_captured import FULL, even, is_active, made

# -- training -------------------------------------------------------------------------------------


def kept(trainer: Trainer, stage: int = 0) -> list[Any]:
    return [held.kept[0] for held in trainer._executors[stage].stage.in_flight.values()]


def test_inputs_wait_in_fewer_bits() -> None:
    ends = []
    for dtype in (torch.float16, None):
        net, trainer = made("eager", dtype=torch.float32, kept_input_dtype=dtype)
        for x, y in even(5):
            trainer.step(x.float(), y)
        assert {value.dtype for value in kept(trainer)} == {dtype or torch.float32}
        ends.append(weights(net))
    assert not same(*ends)


class Mixed(nn.Module):
    """A transition in the middle, between couplings."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.middle, self.head = nn.Linear(5, 8), nn.Linear(8, 64), nn.Linear(64, 3)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = torch.tanh(self.middle(x + torch.tanh(self.first(x))))
        return self.head(x + torch.tanh(self.second(x)))


def test_inputs_of_what_is_not_reversible_wait_wherever_it_is_in_a_stage() -> None:
    net = revcompile.petrafy(Mixed(), 2, torch.zeros(4, 5), check="off")
    assert len(net._partition.parts[0].pieces) > 2
    trainer = net.trainer(
        plain_sgd, F.cross_entropy, options=TrainerOptions(kept_input_dtype=torch.bfloat16)
    )
    trainer.step(torch.randn(4, 5), torch.zeros(4, dtype=torch.long))
    stage = trainer._executors[0].stage
    (held,) = stage.in_flight.values()
    found = [value for value in held.kept if isinstance(value, Tensor)]
    assert sorted(value.shape[1] for value in found) == [5, 8, 8]  # before stem and transition
    assert {value.dtype for value in found} == {torch.bfloat16}


def test_a_model_in_low_precision_is_trained_with_its_inputs_as_they_are() -> None:
    found = []
    for buffers in (None, torch.bfloat16):
        torch.manual_seed(0)
        layers = (layer for _ in range(3) for layer in (nn.Linear(5, 5), nn.Tanh()))
        x = torch.randn(4, 5, dtype=torch.bfloat16)
        net = revcompile.petrafy(nn.Sequential(*layers).bfloat16(), 3, x, check="off")
        trainer = net.trainer(
            plain_sgd, F.cross_entropy, options=TrainerOptions(kept_input_dtype=buffers)
        )
        for _ in range(4):
            trainer.step(x, torch.zeros(4, dtype=torch.long))
        trainer.flush()
        found.append(weights(net))
    assert same(*found)


# -- messages -------------------------------------------------------------------------------------


def test_gradients_are_sent_in_fewer_bits_and_values_are_not() -> None:
    data = [(x.float(), y) for x, y in even(2 * FULL)]
    found = []
    for backend in ("eager", "static"):
        net, trainer = made(backend, dtype=torch.float32, gradient_message_dtype=torch.bfloat16)
        for batch in data:
            trainer.step(*batch)
        assert is_active(trainer) == (backend == "static")
        trainer._runner.leave()
        back = [m for queue in trainer._transport.queues.values() for m in queue if m.gradients]
        assert {t.dtype for m in back for t in m.gradients.values()} == {torch.bfloat16}
        values = [t for m in back for t in m.values.values() if t is not None]
        assert {t.dtype for t in values} == {torch.float32}
        trainer.flush()
        found.append(weights(net))
    assert same(*found)
    net, trainer = made("eager", dtype=torch.float32)
    for batch in data:
        trainer.step(*batch)
    trainer.flush()
    exact = weights(net)
    assert not same(exact, found[0])
    for name, value in exact.items():
        torch.testing.assert_close(found[0][name], value, rtol=0.02, atol=0.02)
    with pytest.raises(InputError, match=r"gradient_message_dtype=torch\.float16"):
        made("eager", gradient_message_dtype=torch.float16)


@pytest.mark.parametrize("given", [torch.float32, torch.float8_e4m3fn, "offload"])
def test_other_buffers_do_not_exist(given: Any) -> None:
    with pytest.raises(InputError, match=f"kept_input_dtype={given!r}; use torch.bfloat16"):
        made("eager", kept_input_dtype=given)
