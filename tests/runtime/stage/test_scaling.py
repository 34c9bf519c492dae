"""Scaled losses: gradients are those of the loss itself, whatever the scale does on the way."""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import training
from distributed_worker import Run, fed, final, launch
from distributed_worker import batches as images
from distributed_worker import trainer_of as of_ranks
from helpers import cases, refuses, worst
from torch import Tensor
from torch.nn import functional as F
from training import Net, Plain, batches, feed, fresh, same, settings_of, trainer_of, weights

from revcompile.errors import NonFiniteError
from revcompile.runtime.executor.messages import Message
from revcompile.runtime.stage.loss import LOWEST, LossScale
from revcompile.runtime.trainer.trainer import Trainer
from tests.recorded import with_gradients
from tests.runtime.trainer.test_trainer import deep

EAGER: Final = LossScale(growth_interval=2)
"""Grows all the time."""


def overflowing(
    trainer: Trainer, stage: int, microbatches: Collection[int], above: float = 0.0
) -> None:
    """The stage's gradient is infinite for these, if the loss was scaled by more than this."""
    for executor in trainer._executors:
        if executor.index == stage:
            executor._differentiate = spoiled(executor._differentiate, microbatches, above)


def spoiled(
    differentiate: Callable[[Message], Message], microbatches: Collection[int], above: float
) -> Callable[[Message], Message]:
    def spoils(message: Message) -> Message:
        scale = 1.0 if message.scale is None else float(message.scale)
        if message.index in microbatches and scale > above:
            found = message.gradients.items()
            infinite = {n: g if g is None else g * torch.inf for n, g in found}
            message = dataclasses.replace(message, gradients=infinite)
        return differentiate(message)

    return spoils


# -- the same gradients ---------------------------------------------------------------------------


@cases(
    "method, accumulation_steps",
    ("petra", 1),
    *((method, 1 + 2 * (n % 2 == 0)) for n, method in enumerate(training.METHODS)),
)
def test_a_scale_that_changes_changes_nothing(method: str, accumulation_steps: int) -> None:
    """Powers of two are exact: to the bit."""
    found, scales = [], []
    for scale in (None, EAGER):
        net = fresh(Net)
        trainer = trainer_of(
            net, method=method, accumulation_steps=accumulation_steps, loss_scale=scale
        )
        for batch in batches(14):
            trainer.step(*batch)
            scales.append(trainer.metrics.loss_scale)
        trainer.flush()
        found.append(weights(net))
    assert same(*found)
    assert scales[:14] == 14 * [None]
    assert sorted(set(scales[14:])) == [
        2.0 ** (16 + n) for n in range({1: 7, 3: 3}[accumulation_steps])
    ]


def test_an_update_takes_gradients_of_several_scales() -> None:
    """The last stage hears of an overflow in the middle of three micro-batches."""
    found = []
    for scale in (None, "dynamic"):
        net = fresh(Plain)
        trainer = trainer_of(net, accumulation_steps=3, loss_scale=scale)
        overflowing(trainer, 1, [4])
        scales = []
        for batch in batches(12):
            with contextlib.suppress(NonFiniteError):
                trainer.step(*batch)
            scales.append(trainer._loss_head.scale)
        trainer.flush()
        found.append(weights(net))
    assert scales == 7 * [2.0**16] + 5 * [2.0**15]
    assert same(*found)


def gradients(loss: Any, **settings: Any) -> dict[str, Tensor]:
    """What one micro-batch gives with standing weights, all stages together."""
    net, data = fresh(deep, 3, torch.float32), batches(1, dtype=torch.float32)
    return with_gradients(net, data, loss, **settings_of(**settings))[1][0]


def faint(output: Tensor, target: Tensor) -> Tensor:
    """Gradients below what float16 can hold."""
    return 1e-6 * F.cross_entropy(output, target)


def test_small_gradients_survive_float16() -> None:
    expected = gradients(faint)
    scaled = gradients(faint, autocast=torch.float16)
    lost = gradients(faint, autocast=torch.float16, loss_scale=1.0)
    assert worst(expected, scaled)[0] < 0.02
    assert worst(expected, lost)[0] > 0.5


# -- overflows ------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("accumulation_steps", [1, 3])
def test_a_micro_batch_that_overflows_is_left_out(stage: int, accumulation_steps: int) -> None:
    found = []
    for scale in (None, "dynamic"):
        net = fresh(Net)
        trainer = trainer_of(net, accumulation_steps=accumulation_steps, loss_scale=scale)
        overflowing(trainer, stage, [4])
        assert training.reported(trainer, batches(14)) == ([] if scale else [(stage, 4)])
        trainer.flush()
        # Not running statistics: the forward pass of one that overflows was right.
        found.append(dict(net.to_module().named_parameters()))
    assert same(*found)
    assert trainer.metrics.skipped == 1 and trainer.metrics.loss_scale == 2.0**15


@cases(
    "method, stage",
    *(("petra", n) for n in range(4)),
    ("backprop", 1),
    ("gpipe", 0),
    ("1f1b", 2),
    ("ddg", 1),
)
def test_one_incident_is_one_step_down(stage: int, method: str) -> None:
    """All that is in flight has the same scale, and overflows; the scale falls once for it."""
    trainer = trainer_of(fresh(Plain), method=method, accumulation_steps=2, loss_scale="dynamic")
    overflowing(trainer, stage, range(3, 40), above=1000.0)
    scales = [trainer.step(*batch).loss_scale for batch in batches(40)]
    assert [scale for scale, _ in itertools.groupby(scales)] == [2.0**n for n in range(16, 8, -1)]
    skipped = trainer.metrics.skipped
    assert 7 <= skipped <= 7 * 4
    assert feed(trainer, batches(4)) and trainer.metrics.skipped == skipped


def test_the_scale_goes_the_way_of_torchs() -> None:
    """One stage, one micro-batch an update: exactly GradScaler's."""
    bad = {2, 3, 9, 16, 17, 18}
    torchs = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    expected = []
    for step in range(24):
        expected.append(torchs.get_scale())
        torchs.scale(weight.sum() * (torch.inf if step in bad else 1.0)).backward()
        torchs.step(optimizer)
        torchs.update()
        optimizer.zero_grad()
    how = LossScale(init_scale=256.0, growth_interval=3)
    trainer = trainer_of(fresh(Plain, 1), method="backprop", loss_scale=how)
    overflowing(trainer, 0, bad)
    assert [trainer.step(*batch).loss_scale for batch in batches(24)] == expected


def test_what_overflows_without_a_scale_is_an_error() -> None:
    trainer = trainer_of(fresh(Plain), loss_scale=LossScale(init_scale=4 * LOWEST))
    overflowing(trainer, 1, range(3, 30))
    with pytest.raises(NonFiniteError, match=r"stage 1, .* lower the loss scale \(1\.5.*e-05\)"):
        feed(trainer, batches(30))


def test_a_scale_that_stays_forgives_nothing() -> None:
    trainer = trainer_of(fresh(Plain), loss_scale=64.0)
    overflowing(trainer, 3, [2])
    data = batches(4)
    feed(trainer, data[:2])
    refuses(NonFiniteError, r"was left out .* lower the loss scale \(64\)", trainer.step, *data[2])
    trainer.step(*data[3])
    assert trainer.metrics.loss_scale == 64


# -- float16, everywhere the same -----------------------------------------------------------------

HALF: Final[dict[str, Any]] = {
    "autocast": torch.float16,
    "loss_scale": LossScale(init_scale=2.0**20, growth_interval=3),
}


def test_ranks_scale_as_one_process(tmp_path: Path) -> None:
    """With overflows that just happen, and tied weights, and micro-batches that are gathered."""
    runs = [
        Run(model="vit", steps=9),
        Run(model="words", accumulation_steps=2, steps=9, stage_to_rank=(0, 1, 0, 1)),
        Run(method="1f1b", accumulation_steps=3, steps=7),
    ]
    results = launch(tmp_path, 2, "train_all", runs=runs, trainer=HALF)
    for number, run in enumerate(runs):
        net, trainer = of_ranks(dataclasses.replace(run, stage_to_rank=None), **HALF)
        scales = {fed(trainer, batch).loss_scale for batch in images(run)}
        assert trainer.metrics.skipped and len(scales) > 2, run
        trainer.flush()
        expected = final(net, trainer)
        for found in results:
            assert same(found[number]["state"], expected), run
