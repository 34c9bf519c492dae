"""Captured steps of stages that share parameters: the same training as action by action."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from training import adam, momentum, next_word, same, seeded, sentences, settings_of, weights

import revcompile
from revcompile.errors import NonFiniteError
from revcompile.runtime.executor.messages import Message, MessageSlot
from revcompile.runtime.stage.slots import StaticBuffers
from revcompile.runtime.trainer.trainer import Trainer

MOST: Final = 8
"""Steps of which the last is captured, in any order tested here."""


class Shared(nn.Module):
    """Of three stages the ends share the embedding, all of them a weight, the last two a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))
        for block in (self.blocks[2], self.blocks[5]):
            block.weight = self.blocks[0].weight
        self.blocks[4].bias = self.blocks[2].bias

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return F.linear(x, self.embed.weight)


class Detached(Shared):
    """Neither gradients of the shared weight, nor of the embedding as a head."""

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = x + torch.tanh(F.linear(x, block.weight.detach(), block.bias))
        return F.linear(x, self.embed.weight.detach())


class Steep(Shared):
    """The gradient of the first stage is not finite where a sentence has the last word."""

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        x = x + ((0 * x).abs() + (words != 6).unsqueeze(-1)).sqrt()
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return F.linear(x, self.embed.weight)


@functools.cache
def compiled(make: type[Shared]) -> revcompile.StagedModel:
    example = torch.zeros(2, 3, dtype=torch.long)
    net = revcompile.petrafy(seeded(make), 3, example, check="off", policy="same_parameters")
    assert {(tie.owner, tie.holder) for tie in net._partition.ties} == {(0, 1), (0, 2), (1, 2)}
    return net


class Training:
    """A training whose trainer can be replaced by a new one, which loads the state of the last."""

    def __init__(self, make: type[Shared], backend: str, settings: dict[str, Any]) -> None:
        self._made, self._settings = compiled(make), {"backend": backend, **settings}
        self._data = iter(sentences(40, 7, (2, 4)))
        self.losses: list[float] = []
        self.trainer = self._new()

    def _new(self) -> Trainer:
        made = self._made
        self.net = type(made)(copy.deepcopy(made.model), made._partition, made.method)
        self.net._lowered = made._lowered
        return self.net.trainer(
            loss=next_word, **settings_of(**{"optimizer": momentum, **self._settings})
        )

    def steps(self, count: int) -> bool:
        """So many; was the last one captured?"""
        self.losses += [self.trainer.step(*next(self._data)).loss for _ in range(count)]
        return self.trainer._runner.is_active

    def restart(self) -> None:
        state = self.trainer.state_dict()
        self.trainer = self._new()
        self.trainer.load_state_dict(state)

    def end(self) -> tuple[Any, ...]:
        """All there is to compare."""
        state = self.trainer.state_dict()
        self.trainer.flush()
        return self.losses, state["stages"], weights(self.net)


SETTINGS: Final[dict[str, dict[str, Any]]] = {
    "petra": {},
    "adam, synchronous": {"optimizer": adam, "accumulation_steps": 2, "synchronous_updates": 2},
    "clipped": {"clip_grad_norm": 0.1, "accumulation_steps": 3},
    "paper order": {"in_flight_per_stage": 2},
    "inputs kept": {"method": "dsp", "accumulation_steps": 4},
    "stashed": {"weights": "stashed"},
    "predicted": {"weights": "predicted", "accumulation_steps": 3},
    "backprop": {"method": "backprop"},
    "reversible": {"method": "reversible_backprop", "accumulation_steps": 3, "clip_grad_norm": 0.1},
}


def alike(make: type[Shared], name: str, run: Callable[[Training], bool]) -> dict[str, Tensor]:
    """The weights that a training ends with, which is the same with captured steps.

    Args:
        run: Trains; was the last step captured?
    """
    found = []
    for backend in ("eager", "static"):
        training = Training(make, backend, SETTINGS[name])
        assert run(training) == (backend == "static")
        found.append(training.end())
    assert same(*found)
    end: dict[str, Tensor] = found[0][-1]
    return end


@pytest.mark.parametrize("name", SETTINGS)
def test_a_pipeline_that_is_drained_at_any_moment(name: str) -> None:
    """By a flush; after some of them training goes on in a new trainer."""

    def run(training: Training) -> bool:
        for steps in range(1, MOST + 1):
            is_captured = training.steps(steps)
            training.trainer.flush()
            if steps % 3 == 0:
                training.restart()
        return is_captured

    alike(Shared, name, run)


@pytest.mark.parametrize("name", ["petra", "clipped", "paper order", "backprop"])
def test_parameters_without_gradients_in_some_stages(name: str) -> None:
    """What no stage differentiates is never updated, and does not decay."""
    end = alike(Detached, name, lambda training: training.steps(MOST + 1))
    start = compiled(Detached).model.get_parameter("blocks.0.weight")
    assert torch.equal(end["blocks.0.weight"], start)


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
    found = []
    bad = (0, 1, 2, 13, 16, 17)
    for backend in ("eager", "static"):
        settings = {
            "optimizer": optimizer,
            "accumulation_steps": accumulation_steps,
            "lr_schedule": falling,
        }
        training, reported = Training(Steep, backend, settings), []
        for index, (words, target) in enumerate(sentences(26, 7, (2, 4))):
            words = words.clamp(max=5).index_fill(0, torch.tensor(0), 6 if index in bad else 5)
            try:
                training.trainer.step(words, target)
            except NonFiniteError as error:
                reported.append((error.stage, error.microbatch))
        assert training.trainer._runner.is_active == (backend == "static")
        training.trainer.flush()
        rates = {e.updater.lr for e in training.trainer._executors}
        assert len(rates) == 1
        found.append((reported, rates, weights(training.net)))
    assert reported == [(0, index) for index in bad]
    assert same(*found)
    assert all(bool(tensor.isfinite().all()) for tensor in found[0][2].values())


def falling(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.ExponentialLR(optimizer, 0.9)
