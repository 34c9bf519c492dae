"""Stages that keep graphs while parameters move: the forward's activations, the latest parameters.

`transcription` is plain autograd whose parameters are written to as `.data`; float64, every
parameter, 1e-10.
"""

import functools
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest
import training
from helpers import cases, refuses
from torch import Tensor
from torch.nn import functional as F
from transcription import Row, Transcription

import revcompile
import tests.test_equivalence as spine
from revcompile.errors import InputError
from revcompile.runtime.stage.settings import Backend, Settings, Task
from revcompile.runtime.trainer.placement import Placement
from revcompile.runtime.trainer.trainer import Trainer
from revcompile.schedule import Keep, choose
from tests.recorded import Recorded
from tests.test_equivalence import assert_same, batches, fresh, momentum, stage_of

N, I, G = Keep.NOTHING, Keep.INPUT, Keep.GRAPH  # noqa: E741
ROWS: Final = {N: Row.RECONSTRUCT, I: Row.REPLAY, G: Row.GRAPH}
PLANS: Final = {"all": (G, G, G, G), "turns": (N, G, N, G), "mixed": (G, N, I, G)}

Keeps = tuple[Keep, ...]


def keeping(
    net: revcompile.StagedModel,
    keeps: Keeps,
    optimizer: Any = momentum,
    *,
    method: str = "petra",
    in_flight_per_stage: float | None = None,
    **settings: Any,
) -> Trainer:
    """A trainer whose stages keep just this, whatever the memory."""
    programs = net._programs(choose(method, in_flight_per_stage=in_flight_per_stage), keeps)
    chosen, loss = Settings(**training.settings_of(**settings)), F.cross_entropy
    task = Task(net.model, net._partition, programs, optimizer, loss, chosen)
    trainer = Trainer(task, Placement(task, ExitStack()))
    trainer._take_over()
    return trainer


def trained(
    name: str, keeps: Keeps, optimizer: Any = momentum, **settings: Any
) -> tuple[Trainer, list[dict[str, Tensor]]]:
    """The trainer after all micro-batches, and the gradients of all updates."""
    record = Recorded(optimizer)
    trainer = keeping(fresh(name), keeps, record, **settings)
    for inputs, target in batches(name):
        trainer.step(inputs, target)
    trainer.flush()
    return trainer, record.gradients({id(p): n for n, p in trainer.named_parameters()})


@functools.cache
def written_out(
    name: str, keeps: Keeps, in_flight_per_stage: float, accumulation_steps: int
) -> Transcription:
    rows = [ROWS[keep] for keep in keeps]
    order = {"in_flight_per_stage": in_flight_per_stage}
    return spine.paper(name, "petra", **order, accumulation_steps=accumulation_steps, rows=rows)


# -- what is computed -----------------------------------------------------------------------------


@pytest.mark.parametrize("accumulation_steps", [1, 3])
@pytest.mark.parametrize("in_flight_per_stage", spine.ORDERS)
@cases("name, plan", ("resnet", "all"), ("vit", "turns"), ("skips", "mixed"), ("words", "all"))
def test_activations_of_forward_and_the_latest_parameters(
    name: str, plan: str, in_flight_per_stage: float, accumulation_steps: int
) -> None:
    expected = written_out(name, PLANS[plan], in_flight_per_stage, accumulation_steps)
    trainer, gradients = trained(
        name,
        PLANS[plan],
        in_flight_per_stage=in_flight_per_stage,
        accumulation_steps=accumulation_steps,
    )
    assert_same(expected.gradients(), gradients, stage_of(name))
    spine.assert_parameters(expected.parameters(), trainer)


@pytest.mark.parametrize("plan", PLANS)
def test_without_delay_what_is_kept_changes_nothing(plan: str) -> None:
    expected, module = spine.plain("resnet", 1)
    trainer, actual = trained("resnet", PLANS[plan], method="reversible_backprop")
    assert_same(expected, actual, stage_of("resnet"))
    spine.assert_buffers(module, trainer.model)


# -- what is sent ---------------------------------------------------------------------------------


def streams(names: Sequence[str]) -> list[str]:
    """Without grids, which are a number or nothing."""
    return [name for name in names if not name.endswith("grid")]


def test_values_go_back_only_to_stages_that_rebuild() -> None:
    programs = fresh("vit")._programs(choose("petra"), (N, G, I, G))
    assert [len(streams(program.needs_back)) for program in programs] == [2, 0, 0, 0]
    assert [len(streams(program.sends_back)) for program in programs] == [0, 2, 0, 0]


# -- replay_context --------------------------------------------------------------------------------
#
# Net has dropout, batch norms and a layer that two distant stages share; every fifth micro-batch is
# smaller.


@pytest.fixture(params=PLANS)
def keeps(request: pytest.FixtureRequest) -> Keeps:
    return PLANS[request.param]


def pair(keeps: Keeps, make: Any = training.Net, **settings: Any) -> list[Trainer]:
    nets = [training.fresh(make) for _ in range(2)]
    return [keeping(net, keeps, training.momentum, **settings) for net in nets]


def test_a_checkpoint_waits_until_graphs_are_gone(keeps: Keeps, tmp_path: Path) -> None:
    whole, resumed = pair(keeps)
    training.feed(whole, training.batches(5))
    with pytest.raises(InputError, match=r"keeps graphs of micro-batches in flight.* drain=True"):
        whole.save(tmp_path)
    whole.save(tmp_path, drain=True)
    resumed.load(tmp_path)
    for trainer in (whole, resumed):
        training.drained(trainer, training.batches(7, seed=2))
    assert training.same(whole.model.state_dict(), resumed.model.state_dict())


def test_what_is_in_flight_stays_with_stages_that_keep_the_same() -> None:
    """An input that one budget has kept is nothing to stages that rebuild it, and vice versa."""
    one, _ = pair((I, N, N, N))
    other, _ = pair((N, N, N, N))
    training.feed(one, training.batches(4))
    refuses(InputError, "another budget of memory", other.load_state_dict, one.state_dict())
    one.flush()
    other.load_state_dict(one.state_dict())
    assert training.same(one.model.state_dict(), other.model.state_dict())


def test_captured_steps_compute_the_same(keeps: Keeps) -> None:
    eager, _ = pair(keeps)
    captured, _ = pair(keeps, backend=Backend.STATIC)
    data = [batch for batch in training.batches(40) if len(batch[0]) == 4]
    losses = [[trainer.step(*batch).loss for batch in data] for trainer in (eager, captured)]
    assert captured._runner.is_active
    for trainer in (eager, captured):
        trainer.flush()
    assert losses[0] == losses[1]
    assert training.same(eager.model.state_dict(), captured.model.state_dict())
