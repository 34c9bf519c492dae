"""Fake tensors of our mode are those of torch's."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from revcompile.compiler.capture.fake_values import FakeMode

FORMATS = {"contiguous": torch.contiguous_format, "channels last": torch.channels_last}
PAIRS = [  # what is known of the first serves the second, where sizes of 1 are at the same places
    ((4, 6), (5, 3)),
    ((4, 6, 5), (2, 3, 4)),
    ((4, 6, 5, 7), (3, 8, 9, 9)),
    ((4, 6, 1, 1), (5, 7, 1, 1)),
    ((2, 1, 3, 3), (3, 1, 4, 5)),
    ((1, 6, 5, 5), (1, 9, 2, 3)),
    ((4, 6, 1, 5), (5, 3, 1, 9)),
    ((2, 3, 4, 5, 6), (4, 2, 3, 3, 7)),
]


def described(tensor: Tensor) -> tuple[Any, ...]:
    place = tensor.stride(), tensor.storage_offset(), tensor.device
    return tensor.shape, tensor.dtype, tensor.requires_grad, tensor._version, *place


def normalized(
    mode: FakeTensorMode,
    shape: tuple[int, ...],
    memory_format: torch.memory_format,
    dtypes: tuple[torch.dtype, torch.dtype],
    *flags: bool,
) -> list[Any]:
    """The result of a batch norm, its running statistics and what it saves for backward."""
    is_affine, has_statistics, training = flags
    with mode:
        made = torch.empty(shape, dtype=dtypes[0])
        x = made.contiguous(memory_format=memory_format).requires_grad_()
        channels = torch.empty(shape[1], dtype=dtypes[1])
        weights = [channels.clone().requires_grad_() if is_affine else None for _ in range(2)]
        means = [channels.clone() if has_statistics else None for _ in range(2)]
        try:
            y = torch.batch_norm(x, *weights, *means, training, 0.1, 1e-5, False)  # type: ignore[call-arg]
        except (RuntimeError, AssertionError) as error:  # evaluation without statistics
            return [type(error)]
        saved = [getattr(y.grad_fn, f"_saved_result{i}") for i in (1, 2)]
        return [described(t) for t in (y, *means, *saved) if t is not None]


CASES = [
    (shapes, name)
    for shapes, name in itertools.product(PAIRS, FORMATS)
    if name == "contiguous" or len(shapes[0]) == 4
]


@pytest.mark.parametrize(("shapes", "name"), CASES, ids=str)
def test_batch_norms_are_torchs(shapes: tuple[tuple[int, ...], ...], name: str) -> None:
    kinds = (torch.float64, torch.float64), (torch.bfloat16, torch.float32)
    flags = (True, True, True), (True, True, False), (False, False, True), (False, False, False)
    for case in itertools.product(kinds, flags, shapes):
        given = case[2], FORMATS[name], case[0], *case[1]
        expected = normalized(FakeTensorMode(allow_non_fake_inputs=True), *given)
        assert normalized(FakeMode(), *given) == expected, given
