"""In how many bits inputs wait for their backward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from training import same, weights

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
