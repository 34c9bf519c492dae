"""Random numbers that decide nothing: `torch.rand([]) < p` with p = 0 (LayerDrop switched off).

A number from [0, 1) is never less than 0, whatever it is. Such a comparison is decided without
the number, and the draw itself is left out of the graph.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import fx
from torch.fx.proxy import TraceError

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


class _Draw:
    """A number from [0, 1) that is not drawn: it can only be compared."""

    def __init__(self, lines: set[str]) -> None:
        self._lines, self._line = lines, user_line()

    def _decide(self, name: str, bound: Any) -> bool:
        outcome = _compared(name, bound)
        self._lines.add(self._line)
        return outcome

    __lt__ = functools.partialmethod(_decide, "lt")
    __le__ = functools.partialmethod(_decide, "le")
    __gt__ = functools.partialmethod(_decide, "gt")
    __ge__ = functools.partialmethod(_decide, "ge")


@contextmanager
def draws_decided() -> Iterator[set[str]]:
    """Replace single random numbers by objects that can only be compared; yields their lines.

    For `torch.export`, which would stop at a comparison of a random number.
    """
    lines: set[str] = set()

    def rand(*size: Any, **kwargs: Any) -> Any:
        return _Draw(lines) if _is_single(size, kwargs) else _RAND(*size, **kwargs)

    torch.rand = rand
    try:
        yield lines
    finally:
        torch.rand = _RAND


@contextmanager
def draws_left_out(lines: Collection[str]) -> Iterator[None]:
    """Restore the random generator after the draws on these lines, which the graph leaves out."""

    def rand(*size: Any, **kwargs: Any) -> Any:
        if user_line() not in lines:
            return _RAND(*size, **kwargs)
        state = torch.get_rng_state()
        number = _RAND(*size, **kwargs)
        torch.set_rng_state(state)
        return number

    torch.rand = rand if lines else _RAND
    try:
        yield
    finally:
        torch.rand = _RAND


def _is_single(size: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return not kwargs and (not size or (len(size) == 1 and size[0] in ((), [], 1)))
