"""Proxies that know the value they represent at two batch sizes.

A value that is equal at both may decide Python control flow (`if H % 7`, `range(depth)`,
`len(xs)`). The graph is then valid only for calls with that value, and the tracer notes a guard
(`ir/guards.py`). A value that differs stays symbolic: no batch size is baked in.

    DataProxy      a tensor that is computed from inputs or parameters
    TensorProxy    a tensor that is computed from sizes alone
    NumberProxy    an int or a float
    ShapedProxy    any other value: a shape, a dtype, a tuple of tensors

To `isinstance` a proxy has the type of the value it represents. Proxies of tensors are tensors to
C++ code, too: it would read the memory of anything else that claims to be a tensor.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import fx, nn
from torch.fx.graph import magic_methods, reflectable_magic_methods
from torch.fx.proxy import TraceError
from torch.nn.modules import transformer

from revcompile.compiler.capture.fake_values import Values, fold
from revcompile.compiler.capture.guards import PythonRead, ReadKind
from revcompile.compiler.capture.memory import INPLACE_OPERATORS
from revcompile.compiler.capture.random_draws import NoDraws, decided_draw
from revcompile.compiler.capture.trace_errors import (
    BatchDependent,
    compares_types_by_identity,
    in_bare_call,
    is_torch_code,
    user_line,
)
from revcompile.ir.types import SOURCE

_ASSIGNED: Final = (
    "the forward pass assigns to .{} of a tensor, which no graph can hold; write into the tensor "
    "with copy_ under torch.no_grad(), or do it in a submodule, which becomes a leaf module"
)


class ShapedTracer(fx.Tracer):
    """A tracer that keeps the values of every node, and notes what Python code reads of them.

    While it is `evaluating` a node, nothing is traced.
    """

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[fx.Node, Values] = {}
        self.evaluating = False
        self.draws: set[str] = set()
        """Lines that draw random numbers which decide nothing; the graph does not draw them."""
        self.asked: set[tuple[str, str]] = set()
        """Names looked up on modules that are no plain attributes: module path, and name."""
        self.read_outside: set[str] = set()
        """Paths of modules whose mode another module's forward has read."""
        self._path = ""
        """The path of the module whose forward is running."""
        self._reads: list[PythonRead] = []
        self._reading_types: set[str] = set()

    def guard(self, node: fx.Node, value: Any, reading: ReadKind) -> None:
        """Note that Python has read a plain value."""
        if not self.evaluating:
            self._reads.append(PythonRead(node, value, reading, user_line(), is_torch_code()))

    def reads_types(self) -> bool:
        """Whether the running code gets dtypes as plain values."""
        return self._path in self._reading_types

    def note_asked(self, module: nn.Module, name: str) -> None:
        """Note that a module's mode, or a name that is no plain attribute, was looked up."""
        path = None if self.evaluating else (self.submodule_paths or {}).get(module)
        if path is None:
            return
        self.asked.add((path, name))
        if name == "training" and path != self._path:
            self.read_outside.add(path)

    def note_made(self, result: Any, given: Any) -> None:
        """Note the new tensors in the result of a function that was called without proxies."""

    def fold(self, node: fx.Node, which: int) -> Any:
        """The real value of a node that is computed from sizes alone."""
        self.evaluating = True
        try:
            with NoDraws("control flow depends on random numbers"):
                return fold(node, {n: v[which] for n, v in self.values.items()})
        finally:
            self.evaluating = False

    def called(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """What a call of a module returns."""

    def attribute(self, value: Any) -> Any:
        """What a read of a parameter or buffer returns."""


_HASHED: Final = (int, float, bool, str, torch.Size, torch.dtype, torch.device)
_COMPARED_BY_IDENTITY: Final = (torch.dtype, torch.layout)
"""Types whose values are unique objects: `x.dtype is torch.float16` is correct.

In code without such comparisons they stay symbolic: under autocast they differ at run time.
"""
_DETECTS_CAUSAL: Final = transformer._detect_is_causal_mask.__code__
"""torch's function that reads a mask to see whether it is causal, only to be faster."""
_SEEN_TYPES: Final = (bool, tuple, list, dict, torch.Size, torch.dtype)


class ShapedProxy:
    """A proxy whose shape, type and, if it is plain, value Python code may read."""

    node: fx.Node
    tracer: ShapedTracer

    def __init__(self, node: fx.Node, tracer: ShapedTracer) -> None:
        object.__setattr__(self, "node", node)
        object.__setattr__(self, "tracer", tracer)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Only reached outside the tracer's mode, where nothing can be traced."""
        raise TraceError("a value of the forward pass is used after it")

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        kind = type(self.tracer.values[self.node].first)
        return kind if kind in _SEEN_TYPES else type(self)

    @property
    def known(self) -> Values:
        return self.tracer.values[self.node]

    def plain(self) -> Any:
        """The Python value, where it depends neither on the batch nor on the data."""
        known, reading = self.known, ReadKind.VALUE
        if isinstance(known.first, torch.Tensor):
            decided = decided_draw(self.node)
            if decided is not None:
                self.tracer.draws.add(decided[1].meta[SOURCE])
                return decided[0]
            known = Values(*(self.tracer.fold(self.node, which).tolist() for which in (0, 1)))
            reading = ReadKind.CONTENTS
        value = known.plain()
        self.tracer.guard(self.node, value, reading)
        return value

    def __getattr__(self, name: str) -> Any:
        if name == "grad":
            raise TraceError("the forward pass reads .grad of a tensor, which no graph can hold")
        value = getattr(self.known.first, name)
        if callable(value):
            return lambda *args, **kwargs: self.tracer.create_proxy(
                "call_method", name, (self, *args), kwargs
            )
        if type(value) is str and is_torch_code():  # a device's type, which decides no value
            return value
        attribute = self._call(getattr, name)
        if isinstance(value, torch.dtype) and not value.is_floating_point:
            return attribute.plain()  # autocast does not change it
        is_type = type(value) in _COMPARED_BY_IDENTITY
        if is_type and (self.tracer.reads_types() or compares_types_by_identity()):
            return attribute.plain()
        return attribute

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse `x.data = y`, which no graph can hold."""
        if hasattr(torch.Tensor, name):
            raise TraceError(_ASSIGNED.format(name))
        object.__setattr__(self, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.tracer.create_proxy("call_method", "__call__", (self, *args), kwargs)

    def __bool__(self) -> bool:
        if sys._getframe(1).f_code is _DETECTS_CAUSAL:
            return False
        is_number = type(self.known.first) is int  # only whether it is 0 matters
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
        return iter([self._call(operator.getitem, i) for i in range(len(self))])

    def __contains__(self, item: Any) -> bool:
        return item in self.plain()

    def __hash__(self) -> int:
        """Hash plain values by value: `n in {8, 16}` then compares values."""
        return hash(self.plain()) if self._is_hashed() else id(self)

    def _is_hashed(self) -> bool:
        known = self.tracer.values.get(self.node)
        return known is not None and isinstance(known.first, _HASHED)

    def __eq__(self, other: object) -> Any:
        if isinstance(other, ShapedProxy) and other.tracer is not self.tracer:
            return False  # left in a cache by another trace
        return self._call(operator.eq, other)

    def __repr__(self) -> str:
        return self._text(repr)

    def __str__(self) -> str:
        return self._text(str)

    def __format__(self, spec: str) -> str:
        return self._text(lambda value: format(value, spec))

    def _text(self, text_of: Callable[[Any], str]) -> str:
        """The value as text, unless the text only goes into a message."""
        is_message = not self._is_hashed() or in_bare_call()
        return f"Proxy({self.node.name})" if is_message else text_of(self.plain())

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise TraceError("copy.deepcopy of a tensor; use clone()")

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        return self.tracer.create_proxy("call_function", function, (self, *args), {})

    def __setitem__(self, index: Any, value: Any) -> None:
        self._call(operator.setitem, index, value)


def _operator(function: Callable[..., Any], is_reflected: bool) -> Callable[..., Any]:
    def call(self: ShapedProxy, *others: Any) -> Any:
        args = (*others, self) if is_reflected else (self, *others)
        return self.tracer.create_proxy("call_function", function, args, {})

    return call


def _inplace(
    function: Callable[..., Any], plain: Callable[..., Any]
) -> Callable[[ShapedProxy, Any], Any]:
    """`x += y` writes to a tensor, and is plain arithmetic on a number."""

    def call(self: ShapedProxy, other: Any) -> Any:
        return self._call(function if isinstance(self.known.first, torch.Tensor) else plain, other)

    return call


for _name in (name for name in magic_methods if name != "eq" and hasattr(operator, name)):
    setattr(ShapedProxy, f"__{_name.strip('_')}__", _operator(getattr(operator, _name), False))
for _name in (name for name in reflectable_magic_methods if hasattr(operator, name)):
    setattr(ShapedProxy, f"__r{_name.strip('_')}__", _operator(getattr(operator, _name), True))
for _function in (divmod, operator.abs, math.ceil, math.floor, math.trunc, round):
    setattr(ShapedProxy, f"__{_function.__name__}__", _operator(_function, False))
for _function, _plain in INPLACE_OPERATORS.items():
    setattr(ShapedProxy, f"__{_function.__name__}__", _inplace(_function, _plain))


_INT: Final = type("Int", (int, torch.SymInt), {})
_FLOAT: Final = type("Float", (float, torch.SymFloat), {})
"""The classes that proxies of numbers claim to have.

torch's C++ code accepts a number without reading its value only if the number is symbolic; Python
code expects an int or a float.
"""


class NumberProxy(ShapedProxy):
    """An int or a float.

    It has no `__torch_function__`: torch would take the first of several sizes for all of them.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __array_ufunc__(self, function: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        """Trace a NumPy function of a number."""
        if method != "__call__":
            return NotImplemented
        return self.tracer.create_proxy("call_function", function, args, kwargs)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return _INT if type(self.known.first) is int else _FLOAT


class TypeProxy(ShapedProxy):
    """The dtype of a tensor of floating-point numbers.

    `torch.finfo` treats it as a dtype without a check. It reads the slot below, which is never set,
    as uint8, which it refuses. The tracer then gives out plain dtypes.
    """

    __slots__ = ("_never_set",)


class TensorProxy(ShapedProxy, torch.Tensor):  # type: ignore[misc]
    """A tensor. The C++ object has its shape and type, and no memory.

    A `DataProxy` of floating-point numbers requires a gradient: `torch.autograd.Function.apply`,
    which is C++, then sets its `grad_fn` (see `custom_function`).
    """

    @staticmethod
    def __new__(cls, node: fx.Node, tracer: ShapedTracer) -> TensorProxy:
        fake = tracer.values[node].first
        with torch._C.DisableTorchFunction():  # the tracer's mode must not record this
            made: Any = torch.Tensor._make_wrapper_subclass(
                cls,
                fake.shape,
                dtype=fake.dtype,
                device=torch.device("meta"),
                requires_grad=issubclass(cls, fx.Proxy) and fake.dtype.is_floating_point,
            )
        return made  # type: ignore[no-any-return]

    def __getattribute__(self, name: str) -> Any:
        if name in _OWN:
            return object.__getattribute__(self, name)
        return self.__getattr__(name)

    def __getattr__(self, name: str) -> Any:
        if name == "_is_param":  # `isinstance(x, nn.Parameter)` reads it
            return isinstance(self.known.first, nn.Parameter)
        return super().__getattr__(name)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise TraceError(f"{function} is called by code that cannot be traced")


class DataProxy(TensorProxy, fx.Proxy):  # type: ignore[misc]
    """A tensor whose contents are unknown while tracing.

    It is an `fx.Proxy`, which libraries check for before they read the contents of a tensor.
    """

    __init__ = ShapedProxy.__init__


_OWN: Final = frozenset(
    {"node", "tracer", *vars(object), *vars(ShapedProxy), *vars(TensorProxy)} - {"__doc__"}
)
"""Attributes that proxies of tensors have themselves; all others are those of the value."""


def custom_function(proxy: ShapedProxy) -> str | None:
    """The name of the `torch.autograd.Function` that has returned a proxy, or None."""
    if not isinstance(proxy, TensorProxy):
        return None
    with torch._C.DisableTorchFunction():
        node: Any = torch._C.TensorBase.grad_fn.__get__(proxy)  # type: ignore[union-attr]
    return None if node is None else type(node).__name__.removesuffix("Backward")


def proxy_for(node: fx.Node, tracer: ShapedTracer, is_data: bool) -> ShapedProxy:
    """A proxy of the class that fits the node's value."""
    value = tracer.values[node].first
    if isinstance(value, torch.Tensor):
        return (DataProxy if is_data else TensorProxy)(node, tracer)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return NumberProxy(node, tracer)
    return (TypeProxy if isinstance(value, torch.dtype) else ShapedProxy)(node, tracer)


def contains_proxy(values: Any) -> bool:
    if isinstance(values, ShapedProxy):
        return True
    if isinstance(values, dict):
        return any(map(contains_proxy, values.values()))
    if isinstance(values, slice):
        return any(map(contains_proxy, (values.start, values.stop, values.step)))
    return isinstance(values, (tuple, list)) and any(map(contains_proxy, values))
