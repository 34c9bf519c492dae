"""Random numbers kept for a second use, where a generator cannot be set back.

While a CUDA graph is recorded a generator's state can be neither read nor set. What a branch draws
is then kept instead: stochastic depth draws a number a sample, which is little. Dropout draws one
an element, inside kernels that do not give them away, and is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from revcompile.errors import InputError
from revcompile.ir.ops import writes_self

__all__ = ["Masks"]

_DRAWING: Final = frozenset(
    (
        *("bernoulli", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like"),
        *("bernoulli_", "exponential_", "normal_", "random_", "uniform_"),
    )
)
"""Operations that give nothing but what they have drawn."""


class Masks:
    """What one run of a branch has drawn, in order."""

    def __init__(self) -> None:
        self._drawn: list[Tensor] = []

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep what is drawn."""
        with _Watch(self._drawn, None):
            yield

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """Give what was kept instead of drawing."""
        with _Watch(self._drawn, iter(self._drawn)):
            yield


class _Watch(TorchDispatchMode):
    """Sees every operation; `again` are the numbers to give instead of new ones."""

    def __init__(self, drawn: list[Tensor], again: Iterator[Tensor] | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._drawn, self._again = drawn, again

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _draws(func, args, kwargs):
            return func(*args, **kwargs)
        in_place = writes_self(func.overloadpacket.__name__)
        if self._again is not None:
            known = next(self._again)
            return args[0].copy_(known) if in_place else known.clone()
        out = func(*args, **kwargs)
        self._drawn.append(out.clone())
        return out


def _draws(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Does an operation draw random numbers? Stops at those whose numbers cannot be had."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    if _rate(func, args, kwargs) == 0.0:
        return False
    name = func.overloadpacket.__name__
    if name not in _DRAWING:
        raise InputError(
            f"reversify: a CUDA graph is recorded of a branch with {name}, whose random numbers "
            "cannot be repeated in backward there; set the dropout rate to 0 (stochastic depth "
            "may stay), or leave the step unrecorded"
        )
    return True


def _rate(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The dropout rate of an attention; None for what has none."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            given = args[place] if place < len(args) else argument.default_value
            return kwargs.get("dropout_p", given)
    return None
