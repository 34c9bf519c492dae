"""Captured steps of stages that share parameters: the same training as action by action."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from training import SCHEDULES, Steep, adam, feed, fresh, momentum, reported

from revcompile.runtime.executor.messages import Message, MessageSlot
from revcompile.runtime.stage.slots import StaticBuffers
from revcompile.runtime.trainer.trainer import Trainer
from tests.runtime.executor.test_captured import FULL, both, even, is_active, losses_on, made


class Shared(nn.Module):
    """Of three stages the ends share a matrix, all of them a weight, the last two a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 6, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(6))
        for block in (self.blocks[2], self.blocks[5]):
            block.weight = self.blocks[0].weight
        self.blocks[4].bias = self.blocks[2].bias

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return F.linear(x, self.stem.weight.T)


class Detached(Shared):
    """Neither gradients of the shared weight, nor of the matrix as a head."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + torch.tanh(F.linear(x, block.weight.detach(), block.bias))
        return F.linear(x, self.stem.weight.detach().T)


class Steeper(Shared):
    def __init__(self) -> None:
        super().__init__()
        self.stem = Steep(5, 6, bias=False)


SETTINGS: Final[dict[str, dict[str, Any]]] = {
    "petra": {},
    "adam, accumulated": {"optimizer": adam, "accumulation_steps": 2},
    "paper order": {"in_flight_per_stage": 2, "clip_grad_norm": 0.1, "accumulation_steps": 3},
    "stashed": {"weights": "stashed"},
    "predicted": {"weights": "predicted", "accumulation_steps": 3},
    "backprop": {"method": "backprop"},
}


def alike(make: type[Shared], run: Callable[[Trainer], Any], settings: Any) -> dict[str, Tensor]:
    """The weights that a training ends with, which is the same with captured steps."""
    _, end, rates, _ = both(run, make, lambda stages: stages, **settings)
    assert len(rates) == 1
    return end


def test_each_stage_shares_with_each_other() -> None:
    ties = fresh(Shared, 3)._partition.ties
    assert {(tie.owner, tie.holder) for tie in ties} == {(0, 1), (0, 2), (1, 2)}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_pipeline_that_is_drained_at_any_moment(name: str) -> None:
    def run(trainer: Trainer) -> list[float]:
        losses, data = [], iter(even(40))
        for steps in range(1, FULL + 1):
            trainer.flush()
            losses += [trainer.step(*next(data)).loss for _ in range(steps)]
        return losses

    alike(Shared, run, SETTINGS[name])


@pytest.mark.parametrize("name", ["petra", "paper order", "backprop"])
def test_parameters_without_gradients_in_some_stages(name: str) -> None:
    """What no stage differentiates is never updated, and does not decay."""
    starts = []

    def run(trainer: Trainer) -> list[float]:
        starts.append(trainer.model.get_parameter("blocks.0.weight").detach().clone())
        return losses_on(even(FULL + 1))(trainer)

    end = alike(Detached, run, SETTINGS[name])
    assert torch.equal(end["blocks.0.weight"], starts[0])


def test_gradients_of_another_rank_that_has_not_computed_all_of_them() -> None:
    """What is missing is zero, not that of the message before."""
    names, flag = ("a", "b"), torch.zeros(1)
    like = Message(0, {}, {name: torch.ones(2) for name in names}).flagged(flag)
    static = MessageSlot(StaticBuffers(like.payload))
    for sent in (("a", "b"), ("b",), ()):
        message = Message(1, {}, {name: torch.full((2,), 3.0) for name in sent})
        assert static.copy_if_alike(message)
        found = Message.of_payload(1, static.buffers).gradients
        assert [float(found[name].sum()) for name in names] == [6.0 * (n in sent) for n in names]
        assert static.copy_if_alike(replace(message, found_inf=torch.ones(1)))
        assert static.flag == 1
    assert not static.copy_if_alike(Message(2, {}, {"c": torch.ones(2)}))
    assert not static.copy_if_alike(Message(2, {"x": torch.ones(2)}))


@pytest.mark.parametrize("optimizer", [momentum, adam])
@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_a_micro_batch_that_the_owner_leaves_out(optimizer: Any, accumulation_steps: int) -> None:
    """Of an update without any of its own it applies no gradients of holders either."""
    bad = (0, 1, 2, 13, 16, 17)

    def run(trainer: Trainer) -> None:
        data = [(x * (index not in bad), y) for index, (x, y) in enumerate(even(26))]
        assert reported(trainer, data) == [(0, index) for index in bad]

    settings = {"optimizer": optimizer, "accumulation_steps": accumulation_steps}
    end = alike(Steeper, run, {**settings, "lr_schedule": SCHEDULES["lambda"]})
    assert all(bool(tensor.isfinite().all()) for tensor in end.values())


def test_a_state_loaded_within_an_update() -> None:
    """Steps are captured once every route has had a message: none is allocated within a step."""
    settings: dict[str, Any] = {"accumulation_steps": 8}
    seen = 11  # the gradients of an update were received, those of the next are not sent yet
    data = even(40)
    first = made("static", Shared, **settings)[1]
    feed(first, data[:seen])
    trainer = made("static", Shared, **settings)[1]
    trainer.load_state_dict(first.state_dict())
    for batch in data[seen:]:
        assert trainer.step(*batch).loss == first.step(*batch).loss
        slots = trainer._transport.slots.values()
        assert not is_active(trainer) or all(each.slots for each in slots)
    assert is_active(trainer)
