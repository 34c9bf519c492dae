"""Wrong settings of optimizers are refused: what came, and what was expected."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any, Final

from torch import Tensor

from revcompile.errors import InputError

_BELOW_ONE: Final = ("momentum", "beta", "betas[0]", "betas[1]")


def is_number(value: Any) -> bool:
    """Also a tensor of one element."""
    return isinstance(value, numbers.Real | Tensor) and not isinstance(value, bool)


def check_settings(settings: Mapping[str, Any]) -> None:
    """Refuse what is no number, or out of range; tensors of one element are numbers."""
    for name, value in settings.items():
        bound = 1.0 if name in _BELOW_ONE else math.inf
        if not is_number(value) or not 0.0 <= value < bound:
            limit = "from 0 to below 1" if bound == 1.0 else "of 0 or more"
            raise InputError(f"{name}={value!r}: expected a number {limit}")


def two_betas(betas: Any) -> tuple[Any, Any]:
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise InputError(f"betas={betas!r}: expected two numbers, e.g. (0.9, 0.999)")
    return betas[0], betas[1]
