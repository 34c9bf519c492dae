"""Weights in low precision, made once an update: the same training, and never an old weight."""

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
import training
from helpers import cases
from torch.nn import functional as F
from training import drained, feed, fresh, momentum, same, settings_of, through_a_file, weights

from revcompile.runtime.stage import stage
from revcompile.runtime.trainer.trainer import Trainer
from tests.runtime.executor.test_captured import Loose

DATA: Final[list[training.Batch]] = training.batches(12, dtype=torch.float32)


def made(dtype: torch.dtype = torch.bfloat16, **settings: Any) -> Trainer:
    net = fresh(Loose, 3, torch.float32)
    optimizer = settings.pop("optimizer", momentum)
    return net.trainer(optimizer, F.cross_entropy, autocast=dtype, **settings_of(**settings))


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Trainer]:
    """A trainer whose weights autocast makes anew at every call."""

    def make(**settings: Any) -> Trainer:
        with monkeypatch.context() as patched:
            patched.setattr(stage, "castable_parameters", lambda *_: [])
            return made(**settings)

    return make


CASES: Final = [
    *(
        (method, 1 + 2 * (number % 2), torch.bfloat16)
        for number, method in enumerate(training.METHODS)
    ),
    ("petra", 3, torch.bfloat16),
    ("dsp", 1, torch.bfloat16),
    ("dni", 1, torch.bfloat16),
]


@pytest.mark.parametrize(("method", "accumulation_steps", "dtype"), CASES)
def test_the_same_training_to_the_bit(
    method: str, accumulation_steps: int, dtype: torch.dtype, plain: Callable[..., Trainer]
) -> None:
    how = {"method": method, "accumulation_steps": accumulation_steps, "dtype": dtype}
    found = []
    for trainer in (plain(**how), made(**how)):
        losses = drained(trainer, DATA)
        found.append((losses, trainer.model.state_dict()))
    assert same(*found)


def doubled(trainer: Trainer) -> None:
    with torch.no_grad():
        for layer in (trainer.model.stem, trainer.model.head):
            layer.weight.mul_(2)


def replaced(trainer: Trainer) -> None:
    for layer in (trainer.model.stem, trainer.model.head):
        layer.weight.data = layer.weight.detach() * 2


def loaded(trainer: Trainer) -> None:
    other = made(accumulation_steps=4)
    drained(other, DATA[:3])
    doubled(other)
    trainer.load_state_dict(through_a_file(other.state_dict()))


def taken_over(trainer: Trainer) -> None:
    state = weights(fresh(Loose, 3, torch.float32))
    trainer.model.load_state_dict({name: 0.5 * tensor for name, tensor in state.items()})


@cases(
    "change, method",
    (doubled, "petra"),
    (replaced, "petra"),
    (loaded, "petra"),
    (taken_over, "petra"),
)
def test_a_weight_that_somebody_changes_is_the_one_that_is_used(
    change: Callable[[Trainer], None], method: str, plain: Callable[..., Trainer]
) -> None:
    found = []
    how = {"accumulation_steps": 4, "method": method}
    for trainer in (plain(**how), made(**how)):
        losses = drained(trainer, DATA[:5])
        change(trainer)
        losses += feed(trainer, DATA[5:])
        found.append((losses, trainer.model.state_dict()))
    assert same(*found)
