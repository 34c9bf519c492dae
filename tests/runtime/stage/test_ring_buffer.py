"""Slots in a ring, with numbers on the host or on the device: what is put comes back bit by bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from revcompile.runtime.stage.slots import Ring

FORMS: dict[str, Tensor] = {
    "dense": torch.randn(3, 4),
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "a number": torch.tensor(0.5),
    "odd bytes": torch.arange(3, dtype=torch.uint8),
    "bfloat16": torch.randn(4, 2).bfloat16(),
    "integers": torch.arange(5),
    "true or false": torch.tensor([True, False, True]),
    "complex": torch.randn(3, dtype=torch.complex64),
    "empty": torch.zeros(0, 3),
    "with gaps": torch.randn(4, 6)[:, :3],
    "not aligned": torch.randn(7)[1:],
}


def changed(tensor: Tensor, number: int) -> Tensor:
    """Other contents of the same form."""
    return tensor.roll(number)


@pytest.mark.parametrize("is_on_device", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_values_come_back_in_their_order(form: str, is_on_device: bool) -> None:
    tensor, ring = FORMS[form], Ring((FORMS[form], "size"), 3)
    values = [(changed(tensor, number), "size") for number in range(7)]
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
