"""A start without delay: the first updates are those of 1F1B, then training is continuous."""

from typing import Any

import torch
from helpers import cases
from torch.nn import functional as F
from training import Net, batches, feed, fresh, momentum, same, settings_of, through_a_file, weights

from revcompile.optim import ErrorFeedback
from revcompile.schedule import Keep, Method, Order, Weights, actions

DRAINED = Method("petra, drained", Order.ONE_F_ONE_B, 0.0, Keep.NOTHING, Weights.LATEST)
DATA = [batch for batch in batches(22) if len(batch[0]) == 4]


def ahead(parameters: Any) -> torch.optim.Optimizer:
    return ErrorFeedback(momentum(parameters))


def test_the_lists_of_both_phases() -> None:
    first, second = (" ".join(map(str, s)) for s in actions("petra", 2, 4, synchronous_updates=2))
    assert first == "F0 SY0 RDY0 B0 U0 F1 SY1 RDY1 B1 U1 F2 SY2 F3 SY3 RDY2 B2 U2 RDY3 B3 U3"
    assert second == ("RX0 F0 B0 SDX0 U0 RX1 F1 B1 SDX1 U1 RX2 F2 B2 SDX2 U2 RX3 F3 B3 SDX3 U3")


@cases("kind, accumulation_steps", ("latest", 1), ("stashed", 3), ("predicted", 1))
def test_first_updates_are_those_of_1f1b(kind: str, accumulation_steps: int) -> None:
    """To the bit of the same programs; then as if training had begun with these weights."""
    options: Any = {"accumulation_steps": accumulation_steps, "clip_grad_norm": 0.5}
    first = DATA[: 3 * accumulation_steps]
    locked, plain, net, later = (fresh(Net, 3) for _ in range(4))
    reference = locked.trainer(ahead, F.cross_entropy, method=DRAINED, **settings_of(**options))
    trainer = net.trainer(
        ahead, F.cross_entropy, weights=kind, **settings_of(**options, synchronous_updates=3)
    )
    feed(reference, first)
    metrics = [trainer.step(*batch) for batch in first]
    assert trainer._schedule.updates == (3,) * 3
    assert not any(trainer._schedule.outstanding)
    assert {each.delays for each in metrics} == {(0,) * 3}
    assert same(weights(net), weights(locked))
    if kind == "latest":
        feed(plain.trainer(ahead, F.cross_entropy, method="1f1b", **settings_of(**options)), first)
        torch.testing.assert_close(weights(plain), weights(net), rtol=1e-10, atol=1e-10)
    other = later.trainer(ahead, F.cross_entropy, weights=kind, **settings_of(**options))
    reference.flush()  # tied weights arrive
    other.load_state_dict(through_a_file(reference.state_dict()))
    for each in (trainer, other):
        feed(each, DATA[3 * accumulation_steps :])
        each.flush()
    assert same(weights(net), weights(later))
