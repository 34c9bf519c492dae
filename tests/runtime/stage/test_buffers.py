"""Gradients that are sent in fewer bits, and values that wait in a ring of slots."""

from typing import Any

import pytest
import torch
from helpers import FORMS
from torch import Tensor
from training import drained, feed, same, weights

from revcompile.runtime.stage.slots import Ring
from tests.runtime.executor.test_captured import FULL, even, is_active, made

# -- messages -------------------------------------------------------------------------------------


def test_gradients_are_sent_in_fewer_bits_and_values_are_not() -> None:
    data = [(x.float(), y) for x, y in even(2 * FULL)]
    found = []
    for backend in ("eager", "static"):
        net, trainer = made(backend, dtype=torch.float32, gradient_message_dtype=torch.bfloat16)
        feed(trainer, data)
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
    drained(trainer, data)
    exact = weights(net)
    assert not same(exact, found[0])
    torch.testing.assert_close(found[0], exact, rtol=0.02, atol=0.02)


# -- slots in a ring ------------------------------------------------------------------------------


@pytest.mark.parametrize("is_on_device", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_values_come_back_in_their_order(form: str, is_on_device: bool) -> None:
    tensor, ring = FORMS[form], Ring((FORMS[form], "size"), 3)
    values = [(tensor.roll(number), "size") for number in range(7)]
    for number, value in enumerate(values):
        if is_on_device:
            ring.ends = torch.tensor([number % 3]), torch.tensor([(number - 2) % 3])
        assert ring.put(number, value)
        assert equal(ring.slot(number).value, value)
        if number >= 2:
            popped: Any = ring.take(number - 2)
            assert equal(popped, values[number - 2])
            assert popped[0].shape == tensor.shape and popped[0].dtype == tensor.dtype
            if tensor.dim() == 4:
                assert popped[0].stride() == tensor.stride()


def equal(a: tuple[Tensor, str], b: tuple[Tensor, str]) -> bool:
    same_bits = a[0].contiguous().view(-1).tolist() == b[0].contiguous().view(-1).tolist()
    return same_bits and a[1] == b[1]
