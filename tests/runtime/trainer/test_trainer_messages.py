"""A trainer that is called wrongly says what it was given and how to call it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import cases, refuses
from torch import nn
from torch.nn import functional as F
from training import Plain, batches, fresh, same, trainer_of

from revcompile import Metrics
from revcompile.errors import InputError, NonFiniteError
from revcompile.runtime.trainer.trainer import Trainer

X, Y = batches(1)[0]
Call = Callable[[Trainer], Any]


@cases(
    "call, said",
    (lambda t: t.step(X), r"call trainer.step\(x, y\)"),
    (lambda t: t.step(), r"Call trainer.step\(inputs, target\)"),
    (lambda t: t.step((X, Y)), r"Call trainer.step\(x, y\), not trainer.step\(\(x, y\)\)"),
    (lambda t: t.step({"x": X, "y": Y}), "targets taken out of the dict"),
    (lambda t: t.step(X.numpy(), Y), r"expected a tensor for x(.|\n)*ndarray float64\[4, 5\]"),
    (lambda t: t.step(X, Y.numpy()), r"target: ndarray int64\[4\]"),
    (lambda t: t.step(X[:0], Y[:0]), r"the batch has no samples \(float64\[0, 5\]\)"),
    (lambda t: t.step(X.to("meta"), Y), r"meta device, .* \(float64\[4, 5\]\)"),
    (lambda t: t.step(X, Y.to("meta")), "meta device"),
)
def test_a_wrong_step_says_how_to_call_and_is_left_out(call: Call, said: str) -> None:
    trainer, expected = (trainer_of(fresh(Plain, 2)) for _ in range(2))
    for each in (trainer, expected):
        each.step(X, Y)
    refuses(InputError, said, call, trainer)
    with pytest.raises(NonFiniteError):
        expected.step(X * torch.nan, Y)
    for each in (trainer, expected):
        each.step(X, Y)
    assert same(trainer.state_dict(), expected.state_dict())


@cases(
    "call, said",
    (lambda t: t.evaluate(None), r"expected a loader of batches \(inputs, target\), got None"),
    (lambda t: t.evaluate([]), "the loader is empty"),
    (lambda t: t.evaluate([X]), r"expected batches of \(inputs, target\), got float64\[4, 5\]"),
    (
        lambda t: t.evaluate([(X, torch.zeros(2, 2))]),
        r"loss, evaluation, batch 0: .*\n.*output: float64\[4, 3\]",
    ),
    (lambda t: t.evaluate([(X[:, :2], Y)]), "evaluation, batch 0: the model failed on it"),
    (lambda t: t.evaluate([(X[:0], Y[:0])]), "evaluation, batch 0: the batch has no samples"),
    (lambda t: t.evaluate([(None, Y)]), "evaluation, batch 0: .*expected a tensor"),
    (lambda t: t.evaluate([(X, Y)], [F.l1_loss]), "metrics= is a dict .* got list"),
    (lambda t: t.evaluate([(X, Y)], {"loss": F.l1_loss}), '"loss" is taken'),
    (lambda t: t.evaluate([(X, Y)], {"a": lambda o, y: o}), "metric 'a' raised .*one number"),
    (lambda t: t.save(None), "trainer.save: expected a path, got None"),
    (lambda t: t.save("x", keep_last="a"), "keep_last='a'"),
    (lambda t: t.load(3), "expected a path, got 3"),
    (lambda t: t.load_state_dict({"format": 4}), "lacks the entry 'policy'"),
)
def test_a_wrong_call_says_how_to_call_and_changes_nothing(call: Call, said: str) -> None:
    trainer = trainer_of(fresh(Plain, 2))
    trainer.step(X, Y)
    before = trainer.state_dict()
    refuses(InputError, said, call, trainer)
    assert trainer.model.training and same(trainer.state_dict(), before)


@cases(
    "loss, said",
    (nn.CrossEntropyLoss, r"got the class CrossEntropyLoss; write loss=CrossEntropyLoss\(\)"),
    (lambda o, y: o, r"expected a scalar tensor, got float64\[4, 3\]"),
    (lambda o, y: 1.0, "expected a scalar tensor, got 1.0"),
    (lambda o, y: o.sum().detach(), "does not depend on the model's output"),
    (lambda o, y: torch.complex(o.sum(), o.sum()), "expected a real number"),
    (lambda o, y: _backward(o.square().sum()), "without calling backward"),
    (lambda o, y: o.mul_(2).sum(), r"changes the output in place.* output\.clone\(\)"),
)
def test_a_loss_that_cannot_be_used_is_named(loss: Any, said: str) -> None:
    refuses(InputError, said, lambda: trainer_of(fresh(Plain, 2), loss=loss).step(X, Y))


def test_a_penalty_on_parameters_in_the_loss_is_refused() -> None:
    net = fresh(Plain, 2)
    trainer = trainer_of(net, loss=lambda o, y: o.sum() + next(net.model.parameters()).norm())
    refuses(InputError, "such as a penalty", trainer.step, X, Y)


def _backward(loss: torch.Tensor) -> torch.Tensor:
    loss.backward()
    return loss


def test_a_loss_that_needs_no_target_is_given_none() -> None:
    assert trainer_of(fresh(Plain, 2), loss=lambda o, y: o.square().mean()).step(X).loss > 0


def test_a_trainer_prints_what_it_trains() -> None:
    trainer = trainer_of(fresh(Plain, 3), accumulation_steps=2)
    trainer.step(X, Y)
    said = "Trainer(Plain: 3 stages, petra, accumulation_steps=2, largest delay 1, "
    assert repr(trainer) == said + "1 micro-batches seen)"


def test_metrics_of_a_rank_without_the_loss_say_where_it_is() -> None:
    metrics = Metrics(0, 1, delays=(1, 0), updates=(0, 0), lr=None, throughput=2.0)
    assert "loss on the last stage's rank, largest delay 1" in str(metrics)
