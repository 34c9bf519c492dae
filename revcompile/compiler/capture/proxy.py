"""Proxies that know the value they represent at two batch sizes.

A value that is equal at both may decide Python control flow (`if H % 7`, `range(depth)`,
`len(xs)`): the graph is then the model only where it has that value again, and the tracer notes a
guard (`ir/guards.py`). A value that differs stays symbolic, so that no batch size is baked in.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import fx, nn
from torch.fx.proxy import Attribute

from revcompile.compiler.capture.fake_values import Values
from revcompile.compiler.capture.guards import ReadKind
from revcompile.compiler.capture.memory import INPLACE_OPERATORS
from revcompile.compiler.capture.random_draws import decided_draw
from revcompile.compiler.capture.trace_errors import (
    BatchDependent,
    Unsupported,
    compares_types_by_identity,
    in_bare_call,
)

ASSIGNED: Final = (
    "the forward pass assigns to .{} of a tensor, which no graph can hold; write into the tensor "
    "with copy_ under torch.no_grad(), or do it in a submodule, which becomes a leaf module"
)


class ShapedTracer(fx.Tracer):
    """A tracer that keeps the values of every node.

    While it is `evaluating` a node, nothing is traced.
    """

    values: dict[fx.Node, Values]
    evaluating: bool

    def fold(self, node: fx.Node, which: int) -> Any:
        """The real value of a node that is computed from sizes alone."""
        raise NotImplementedError

    def guard(self, node: fx.Node, value: Any, reading: ReadKind) -> None:
        """Note that Python has read a plain value."""
        raise NotImplementedError

    def flag(self, name: str, args: tuple[Any, ...], value: Any) -> None:
        """Note that Python has read a flag of torch."""
        raise NotImplementedError

    def note_class(self, module: nn.Module, classes: Any, result: bool) -> None:
        """Note that Python has compared the class of a module."""
        raise NotImplementedError

    def leave_out(self, draw: fx.Node) -> None:
        """Note that a random number was drawn, and decided nothing."""
        raise NotImplementedError


_HASHED: Final = (int, float, bool, str, torch.Size, torch.dtype, torch.device)
_COMPARED_BY_IDENTITY: Final = (torch.dtype, torch.layout)
"""Types of which each value is one object, so that `x.dtype is torch.float16` is right.

Where they are not compared by identity they stay symbolic: under autocast they differ at run time.
"""
_SEEN_TYPES: Final = (int, float, bool, tuple, list, dict, torch.Size, torch.dtype)


class ShapedProxy(fx.Proxy):
    """A proxy whose shape, type and, if it is plain, value Python code may read."""

    tracer: ShapedTracer

    @property
    def known(self) -> Values:
        return self.tracer.values[self.node]

    def plain(self) -> Any:
        """The Python value, where it depends neither on the batch nor on the data."""
        known, reading = self.known, ReadKind.VALUE
        if isinstance(known.first, torch.Tensor):
            decided = decided_draw(self.node)
            if decided is not None:
                self.tracer.leave_out(decided[1])
                return decided[0]
            known = Values(*(self.tracer.fold(self.node, which).tolist() for which in (0, 1)))
            reading = ReadKind.CONTENTS
        value = known.plain()
        self.tracer.guard(self.node, value, reading)
        return value

    def seen_type(self) -> type:
        """The type of the value, for `isinstance`.

        (Overriding `__class__` would mislead torch's C++ argument parser too, which crashes.)
        """
        known = self.tracer.values.get(self.node)
        if known is None:
            return ShapedProxy
        if isinstance(known.first, torch.Tensor):
            is_parameter = isinstance(known.first, nn.Parameter)
            return nn.Parameter if is_parameter else torch.Tensor
        return type(known.first) if type(known.first) in _SEEN_TYPES else ShapedProxy

    def __getattr__(self, name: str) -> Any:
        if name == "grad":
            raise Unsupported("the forward pass reads .grad of a tensor, which no graph can hold")
        value = getattr(self.known.first, name)
        if callable(value):
            return Attribute(self, name)
        attribute = self._call(getattr, name)
        if type(value) in _COMPARED_BY_IDENTITY and compares_types_by_identity():
            return attribute.plain()
        return attribute

    def __setattr__(self, name: str, value: Any) -> None:
        """`x.data = y` is no operation that a graph can hold."""
        if name != "node" and hasattr(torch.Tensor, name):
            raise Unsupported(ASSIGNED.format(name))
        super().__setattr__(name, value)

    def __bool__(self) -> bool:
        is_number = type(self.known.first) is int  # whether it is 0 counts, not which one it is
        return bool(self._call(operator.ne, 0).plain() if is_number else self.plain())

    def __index__(self) -> int:
        return operator.index(self.plain())

    def __int__(self) -> int:
        return int(self.plain())

    def __float__(self) -> float:
        return float(self.plain())

    def __len__(self) -> int:
        a, b = len(self.known.first), len(self.known.second)
        if a != b:
            raise BatchDependent(a, b)
        self.tracer.guard(self.node, a, ReadKind.LENGTH)
        return a

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self.known.first, dict):
            return iter(list(self.known.first))
        return iter([self._call(operator.getitem, i) for i in range(len(self))])

    def __contains__(self, item: Any) -> bool:
        return item in self.plain()

    def __hash__(self) -> int:
        """By value where it is plain, so that `n in {8, 16}` compares values."""
        known = self.tracer.values.get(self.node)
        if known is None or type(known.first) not in _HASHED or known.first != known.second:
            return id(self)
        return hash(self.plain())

    def __eq__(self, other: object) -> Any:
        if type(other) is ShapedProxy and other.tracer is not self.tracer:
            return False  # left in a cache by another trace
        return self._call(operator.eq, other)

    def __str__(self) -> str:
        return self._text("")

    def __format__(self, spec: str) -> str:
        return self._text(spec)

    def _text(self, spec: str) -> str:
        """The value as text, unless the text only goes into a message."""
        known = self.tracer.values.get(self.node)
        is_plain = known is not None and type(known.first) in _HASHED
        if known is None or not is_plain or known.first != known.second or in_bare_call():
            return repr(self)
        return format(self.plain(), spec)

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        return self.tracer.create_proxy("call_function", function, (self, *args), {})

    def __ceil__(self) -> Any:
        return self._call(math.ceil)

    def __floor__(self) -> Any:
        return self._call(math.floor)

    def __trunc__(self) -> Any:
        return self._call(math.trunc)

    def __round__(self, digits: int | None = None) -> Any:
        return self._call(round) if digits is None else self._call(round, digits)

    def __setitem__(self, index: Any, value: Any) -> None:
        self._call(operator.setitem, index, value)


def _inplace(
    function: Callable[..., Any], plain: Callable[..., Any]
) -> Callable[[ShapedProxy, Any], Any]:
    """`x += y` writes to a tensor, and is plain arithmetic on a number."""

    def call(self: ShapedProxy, other: Any) -> Any:
        return self._call(function if isinstance(self.known.first, torch.Tensor) else plain, other)

    return call


for _function, _plain in INPLACE_OPERATORS.items():
    setattr(ShapedProxy, f"__{_function.__name__}__", _inplace(_function, _plain))


def contains_proxy(values: Any) -> bool:
    if isinstance(values, fx.Proxy):
        return True
    if isinstance(values, dict):
        return any(map(contains_proxy, values.values()))
    return isinstance(values, (tuple, list)) and any(map(contains_proxy, values))
