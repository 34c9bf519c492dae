"""Which weights passes use: the latest, stashed or predicted ones."""

from typing import Any

import pytest
import torch
from helpers import cases
from torch import Tensor, nn
from torch.nn import functional as F
from training import Plain, batches, feed, fresh, momentum, same, settings_of, weights
from transcription import Message, Stage

from revcompile.errors import InputError
from revcompile.optim import ErrorFeedback
from revcompile.schedule import METHODS, Keep, Method, Order, Weights, choose, mean_delay
from tests import test_equivalence as spine


class Predicting(Stage):
    """Forward at y - t u, backward at y; u is by how much the last update has lowered y."""

    t: float
    u: dict[str, Tensor]

    def forward(self, message: Message) -> Message:
        """A shared parameter's update, at a later stage, is what has arrived with a message."""
        before = {n: self.theta[n].detach().clone() for n in self.held}
        self._take_shared(message)
        y = self.theta
        self.u |= {n: old - y[n].detach() for n, old in before.items()}
        with torch.no_grad():
            self.theta = {n: nn.Parameter(p - self.t * self.u.get(n, 0 * p)) for n, p in y.items()}
        sent = super().forward(Message(message.microbatch, message.values))
        self.theta = y
        sent.shared = message.shared | {n: y[n].detach().clone() for n in self.owned}
        return sent

    def update(self, of_holders: Any, *, partial: bool = False) -> None:
        before = {n: p.detach().clone() for n, p in self.theta.items()}
        updates = len(self.groups)
        super().update(of_holders, partial=partial)
        if len(self.groups) > updates:
            own = self.theta.keys() - self.held.keys()
            self.u |= {n: before[n] - self.theta[n].detach() for n in own}


def transcribed(
    name: str, method: str, in_flight_per_stage: float, accumulation_steps: int
) -> dict[str, Tensor]:
    order = {"in_flight_per_stage": in_flight_per_stage}
    other = spine.paper(name, method, [], **order, accumulation_steps=accumulation_steps)
    for stage in other.stages:
        stage.__class__ = Predicting
        assert isinstance(stage, Predicting)
        chosen, count = choose(method, in_flight_per_stage=in_flight_per_stage), len(other.stages)
        stage.t, stage.u = mean_delay(chosen, count, stage.part.index, accumulation_steps), {}
    other.run(spine.batches(name))
    return other.parameters()


@cases(
    "name, method, in_flight_per_stage, accumulation_steps",
    ("skips", "petra", 2, 1),
    ("skips", "features_replay", 1, 3),
    ("words", "petra", 1, 1),  # has tied weights,
)
def test_predicted_weights_are_used_forward(
    name: str, method: str, in_flight_per_stage: float, accumulation_steps: int
) -> None:
    expected = transcribed(name, method, in_flight_per_stage, accumulation_steps)
    trainer, _ = spine.engine(
        name,
        method,
        spine.batches(name),
        in_flight_per_stage=in_flight_per_stage,
        accumulation_steps=accumulation_steps,
        weights="predicted",
    )
    spine.assert_parameters(expected, trainer)
    latest = spine.transcribed(
        name, spine.ROWS[method][0].name, in_flight_per_stage, accumulation_steps
    )[0]
    assert spine.worst(latest, spine.copied(dict(trainer.named_parameters())))[0] > 1e-6


STEPS = [batch for batch in batches(26) if len(batch[0]) == 4]


def test_the_delay_is_compensated_once() -> None:
    delays = {}
    for kind in ("stashed", "predicted"):
        trainer = fresh(Plain).trainer(
            lambda p: ErrorFeedback(momentum(p)), F.cross_entropy, weights=kind
        )
        delays[kind] = [executor.updater.optimizer.delay for executor in trainer._executors]
        assert trainer.delays == (3, 2, 1, 0)
    assert delays == {"stashed": [3, 2, 1, 0], "predicted": [0, 0, 0, 0]}


def test_memory_of_each_choice() -> None:
    """Stashed: a copy for each update of delay, so one if they accumulate; predicted: one."""
    net = fresh(Plain)
    copies = {}
    for kind in ("latest", "stashed", "predicted"):
        for accumulation_steps in (1, 3):
            workload = net.workload(weights=kind, accumulation_steps=accumulation_steps)
            stages = [stage.memory for stage in net.facts(workload)]
            copies[kind, accumulation_steps] = [
                (s.stashed + s.newest) / s.parameters for s in stages
            ]
    assert copies == {
        ("latest", 1): [0, 0, 0, 0],
        ("latest", 3): [0, 0, 0, 0],
        ("stashed", 1): [3, 2, 1, 0],
        ("stashed", 3): [1, 1, 1, 0],
        ("predicted", 1): [1, 1, 1, 0],
        ("predicted", 3): [1, 1, 1, 0],
    }


def test_a_choice_of_weights_is_a_row_of_the_table() -> None:
    assert choose("petra", weights="stashed") == METHODS["petra_stashed"]
    assert choose("petra_stashed", weights="latest") == METHODS["petra"]
    assert choose("delayed", weights="latest") == METHODS["dsp"]
    predicted = choose("petra", weights="predicted", in_flight_per_stage=2)
    assert (predicted.name, predicted.in_flight_per_stage, predicted.weights.value) == (
        "petra",
        2,
        "predicted",
    )
    assert choose("petra", weights="latest") == METHODS["petra"]


def failing(stage: int) -> Any:
    """A function that fails for this stage, after what is called for the stages before."""
    calls = iter(range(stage + 1))

    def fail(given: Any) -> Any:
        if next(calls) == stage:
            raise ValueError("not for this stage")
        return given

    return fail


@pytest.mark.parametrize("argument", ["optimizer", "no optimizer", "lr_schedule", "param_groups"])
def test_a_refused_trainer_changes_no_weights(argument: str) -> None:
    """And the trainer before goes on."""
    fail = failing(2)
    net = fresh(Plain, dtype=torch.float32)
    before = weights(net)
    trainer = net.trainer(momentum, F.cross_entropy)
    optimizer: Any = momentum
    refused: dict[str, Any] = {}
    if argument == "optimizer":
        optimizer = lambda p: momentum(fail(p))  # noqa: E731
    elif argument == "no optimizer":
        made = iter([momentum, momentum, len])
        optimizer = lambda p: next(made)(p)  # noqa: E731
    elif argument == "lr_schedule":
        refused[argument] = lambda o: torch.optim.lr_scheduler.LinearLR(fail(o))
    else:
        refused[argument] = lambda named: fail([{"params": [p for _, p in named]}])
    with pytest.raises(InputError, match="stage 2"):
        net.trainer(optimizer, F.cross_entropy, **settings_of(**refused))
    assert same(weights(net), before)
    feed(trainer, [(x.float(), y) for x, y in STEPS[:2]])


def test_graphs_cannot_be_predicted() -> None:
    with pytest.raises(InputError, match="which kept graphs do not"):
        Method("mine", Order.CONTINUOUS, 1.0, Keep.GRAPH, Weights.PREDICTED)
