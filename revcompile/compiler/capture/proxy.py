"""Proxies that know the value they stand for at two batch sizes.

What is equal at both may steer Python control flow (`if H % 7`, `range(depth)`, `len(xs)`): the
graph is then the model only where it is equal again, and the tracer notes a guard (`ir/guards.py`).
What differs stays symbolic in the graph, so that no batch size is ever baked in.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from typing import Any, Final

import torch
from torch import fx, nn
from torch.fx.proxy import Attribute, TraceError

from revcompile.compiler.capture.guards import Reading
from revcompile.compiler.capture.random_draws import decided_draw
from revcompile.compiler.capture.side_effects import INPLACE_OPERATORS
from revcompile.compiler.capture.trace_errors import (
    Unseen,
    compares_types_by_identity,
    in_bare_call,
)
from revcompile.ir.types import TensorType

__all__ = [
    "ASSIGNED",
    "BATCH_DECIDES",
    "ShapedProxy",
    "ShapedTracer",
    "Values",
    "contains_proxy",
    "size_of_values",
    "type_of_values",
]


ASSIGNED: Final = (
    "the forward pass assigns to .{} of a tensor, which no graph holds; write into the tensor "
    "with copy_ under torch.no_grad(), or do it in a submodule, which is kept as one piece"
)
BATCH_DECIDES: Final = "control flow depends on the batch size"


class Values:
    """The fake values of one node at the two batch sizes."""

    __slots__ = ("first", "second")

    def __init__(self, first: Any, second: Any) -> None:
        self.first = first
        self.second = second

    def __getitem__(self, which: int) -> Any:
        return (self.first, self.second)[which]

    def plain(self) -> Any:
        """The one Python value both batch sizes agree on, or raise."""
        a, b = self.first, self.second
        if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
            raise TraceError("control flow depends on the contents of a tensor")
        if type(a) is not type(b) or a != b:
            raise TraceError(f"{BATCH_DECIDES} ({a} or {b})")
        return a


def type_of_values(first: Any, second: Any, batch: tuple[int, int]) -> Any:
    """Tensor types of a value (nested as the value is); None for anything else."""
    if isinstance(first, torch.Tensor):
        shape = tuple(int(n) for n in first.shape)
        grown = batch[1] - batch[0]
        slope = tuple(
            (int(m) - n) // grown if grown else 0 for n, m in zip(shape, second.shape, strict=True)
        )
        return TensorType(shape, slope, first.dtype, batch[0])
    if is_dataclass(first) and not isinstance(first, type):
        first, second = vars(first), vars(second)
    if isinstance(first, (tuple, list)):
        return tuple(type_of_values(a, b, batch) for a, b in zip(first, second, strict=True))
    if isinstance(first, dict):
        return {k: type_of_values(first[k], second[k], batch) for k in first}
    return None


def size_of_values(first: Any, second: Any) -> tuple[Any, Any] | None:
    """The pair itself if it is a number or a shape."""
    if type(first) is int and type(second) is int:
        return first, second
    if isinstance(first, tuple) and first and all(type(n) is int for n in (*first, *second)):
        return tuple(first), tuple(second)
    return None


class ShapedTracer(fx.Tracer):
    """A tracer that keeps the values of every node.

    While it is `evaluating` a node, nothing is recorded.
    """

    values: dict[fx.Node, Values]
    evaluating: bool

    def fold(self, node: fx.Node, which: int) -> Any:
        """The real value of a node that is made from sizes alone."""
        raise NotImplementedError

    def guard(self, node: fx.Node, value: Any, reading: Reading) -> None:
        """Remember that Python was told a plain value."""
        raise NotImplementedError

    def flag(self, name: str, args: tuple[Any, ...], value: Any) -> None:
        """Remember that Python was told a switch of torch."""
        raise NotImplementedError

    def leave_out(self, draw: fx.Node) -> None:
        """Remember that a random number was drawn, and decided nothing."""
        raise NotImplementedError


_HASHED: Final = (int, float, bool, str, torch.Size, torch.dtype, torch.device)
_COMPARED_BY_IDENTITY: Final = (torch.dtype, torch.layout)
"""Types of which each value is one object, so that `x.dtype is torch.float16` is right.

Elsewhere they stay in the graph: under autocast they are others at run time.
"""
_SEEN_TYPES: Final = (int, float, bool, tuple, list, dict, torch.Size, torch.dtype)


class ShapedProxy(fx.Proxy):
    """A proxy that can answer questions about its shape."""

    tracer: ShapedTracer

    @property
    def known(self) -> Values:
        """What the proxy stands for."""
        return self.tracer.values[self.node]

    def plain(self) -> Any:
        """The Python value, where it depends neither on the batch nor on the data."""
        known, reading = self.known, Reading.VALUE
        if isinstance(known.first, torch.Tensor):
            decided = decided_draw(self.node)
            if decided is not None:
                self.tracer.leave_out(decided[1])
                return decided[0]
            known = Values(*(self.tracer.fold(self.node, which).tolist() for which in (0, 1)))
            reading = Reading.CONTENTS
        value = known.plain()
        self.tracer.guard(self.node, value, reading)
        return value

    def seen_type(self) -> type:
        """What `isinstance` is to believe: the type of the value this stands for.

        (Overriding `__class__` would fool torch's C++ argument parser too, which crashes.)
        """
        known = self.tracer.values.get(self.node)
        if known is None:
            return ShapedProxy
        if isinstance(known.first, torch.Tensor):
            is_parameter = isinstance(known.first, nn.Parameter)
            return nn.Parameter if is_parameter else torch.Tensor
        return type(known.first) if type(known.first) in _SEEN_TYPES else ShapedProxy

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.known.first, name)
        if callable(value):
            return Attribute(self, name)
        found = self._record(getattr, name)
        if type(value) in _COMPARED_BY_IDENTITY and compares_types_by_identity():
            return found.plain()
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        """`x.data = y` is no operation that a graph could hold."""
        if name != "node" and hasattr(torch.Tensor, name):
            raise Unseen(ASSIGNED.format(name))
        super().__setattr__(name, value)

    def __bool__(self) -> bool:
        return bool(self.plain())

    def __index__(self) -> int:
        return operator.index(self.plain())

    def __int__(self) -> int:
        return int(self.plain())

    def __float__(self) -> float:
        return float(self.plain())

    def __len__(self) -> int:
        a, b = len(self.known.first), len(self.known.second)
        if a != b:
            raise TraceError(f"{BATCH_DECIDES} ({a} or {b})")
        self.tracer.guard(self.node, a, Reading.LENGTH)
        return a

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self.known.first, dict):
            return iter(list(self.known.first))
        return iter([self._record(operator.getitem, i) for i in range(len(self))])

    def __contains__(self, item: Any) -> bool:
        return item in self.plain()

    def __hash__(self) -> int:
        """By value where it is plain: `n in {8, 16}` must not look for the proxy itself."""
        known = self.tracer.values.get(self.node)
        if known is None or type(known.first) not in _HASHED or known.first != known.second:
            return id(self)
        return hash(self.plain())

    def __eq__(self, other: object) -> Any:
        if type(other) is ShapedProxy and other.tracer is not self.tracer:
            return False  # left in a cache by another trace
        return self._record(operator.eq, other)

    def __str__(self) -> str:
        return self._text("")

    def __format__(self, spec: str) -> str:
        return self._text(spec)

    def _text(self, spec: str) -> str:
        """The value as text where the text may matter; messages do not depend on it."""
        known = self.tracer.values.get(self.node)
        is_plain = known is not None and type(known.first) in _HASHED
        if known is None or not is_plain or known.first != known.second or in_bare_call():
            return repr(self)
        return format(self.plain(), spec)

    def _record(self, function: Callable[..., Any], *args: Any) -> Any:
        return self.tracer.create_proxy("call_function", function, (self, *args), {})

    def __ceil__(self) -> Any:
        return self._record(math.ceil)

    def __floor__(self) -> Any:
        return self._record(math.floor)

    def __trunc__(self) -> Any:
        return self._record(math.trunc)

    def __round__(self, digits: int | None = None) -> Any:
        return self._record(round) if digits is None else self._record(round, digits)

    def __setitem__(self, index: Any, value: Any) -> None:
        self._record(operator.setitem, index, value)


def _inplace(
    function: Callable[..., Any], plain: Callable[..., Any]
) -> Callable[[ShapedProxy, Any], Any]:
    """`x += y` writes into a tensor, and is plain arithmetic on a number."""

    def record(self: ShapedProxy, other: Any) -> Any:
        return self._record(
            function if isinstance(self.known.first, torch.Tensor) else plain, other
        )

    return record


for _function, _plain in INPLACE_OPERATORS.items():
    setattr(ShapedProxy, f"__{_function.__name__}__", _inplace(_function, _plain))


def contains_proxy(values: Any) -> bool:
    """Is there a proxy anywhere among arguments?"""
    if isinstance(values, fx.Proxy):
        return True
    if isinstance(values, dict):
        return any(map(contains_proxy, values.values()))
    return isinstance(values, (tuple, list)) and any(map(contains_proxy, values))
