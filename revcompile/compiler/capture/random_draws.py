"""Random numbers that decide nothing: `torch.rand([]) < p` with p = 0 (LayerDrop switched off).

A number from [0, 1) is never less than 0, whatever it is. Such a comparison is decided without
the number, and the draw itself is left out of the graph.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from typing import Any, Final

import torch
from torch import fx
from torch.fx.proxy import TraceError
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from revcompile.compiler.capture.trace_errors import user_line

_RAND: Final = torch.rand
_MIRRORED: Final = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}
_UNDECIDED: Final = (
    "control flow depends on random numbers (LayerDrop with p = {bound}); set that probability to "
    "0 before capturing, or drop layers by multiplying with a random mask"
)


def decided_draw(node: fx.Node) -> tuple[bool, fx.Node] | None:
    """The outcome of comparing a random number with a bound outside its range, and the draw."""
    name = str(getattr(node.target, "__name__", node.target)).strip("_")
    if name not in _MIRRORED or len(node.args) != 2:
        return None
    left, right = node.args
    if not _is_draw(left):
        left, right, name = right, left, _MIRRORED[name]
    if not (isinstance(left, fx.Node) and _is_draw(left) and isinstance(right, int | float)):
        return None
    return _compared(name, right), left


def _is_draw(value: Any) -> bool:
    return isinstance(value, fx.Node) and value.target is _RAND


def _compared(name: str, bound: float) -> bool:
    """`draw < bound` and its relatives, for any draw from [0, 1)."""
    compare: Callable[[float, float], bool] = getattr(operator, name)
    least, most = compare(0.0, bound), compare(1.0, bound)
    if name in ("lt", "ge") and bound >= 1:  # the draw is less than 1
        most = least
    if least != most:
        raise TraceError(_UNDECIDED.format(bound=bound))
    return least


class NoDraws(TorchDispatchMode):
    """Raises if torch draws random numbers in this thread; other threads may draw."""

    def __init__(self, reason: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._reason = reason

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise TraceError(self._reason)
        return func(*args, **(kwargs or {}))


class DrawsLeftOut(TorchFunctionMode):
    """Restores the random generator after the draws on these lines, which the graph leaves out."""

    def __init__(self, lines: Collection[str]) -> None:
        super().__init__()
        self._lines = lines

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        state = torch.get_rng_state() if func is _RAND and user_line() in self._lines else None
        result = func(*args, **(kwargs or {}))
        if state is not None:
            torch.set_rng_state(state)
        return result
