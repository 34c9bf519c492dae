"""An FX tracer that knows shapes while it traces.

Every proxy carries the fake values it would have at *two* batch sizes. What is equal at both
does not depend on the batch and may steer Python control flow (`if H % 7`, `range(depth)`,
`len(xs)`); what differs stays symbolic in the graph, so that no batch size is ever baked in.
That opens modules plain FX tracing must treat as leaves.

What FX would drop silently is caught here: `no_grad` regions become `detach`, autocast regions
and custom autograd functions make their module a leaf.
"""

from __future__ import annotations

import builtins
import copy
import math
import operator
import random
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from revcompile.ir import PATH, SOURCE, TYPE, VALUE, TensorType

__all__ = ["Traced", "Untraceable", "fake_copy", "size_of_values", "trace", "type_of_values"]


class Untraceable(Exception):
    """Tracing stopped; `path` is the innermost module whose forward was running."""

    def __init__(self, path: str, cause: str, source: str) -> None:
        super().__init__(f"{path or '(top level)'}: {cause} [{source}]")
        self.path = path
        self.cause = cause
        self.source = source


@dataclass(frozen=True)
class Traced:
    """The raw graph of one mode, its output structure, and tensors found on the way."""

    graph: fx.Graph
    out_spec: pytree.TreeSpec
    constants: dict[str, torch.Tensor]
    notes: tuple[str, ...]


_DESCEND: tuple[type[nn.Module], ...] = (
    nn.Sequential,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)
"""torch.nn containers that hold residual blocks of their own."""

_CONTAINERS: frozenset[type] = frozenset(
    {nn.Module, nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict}
)

_MODE_LEAVES = ("DropPath", "StochasticDepth", "DropBlock2d", "DropBlock2D", "DropBlock3d")
"""Stochastic depth by any name: identity in eval mode, a mask in training mode."""

_RANDOM_FACTORIES = ("rand", "randint", "randn", "randperm")
_FACTORIES = (
    *"arange empty eye full linspace logspace ones zeros tril_indices triu_indices".split(),
    *_RANDOM_FACTORIES,
)
"""Functions of plain numbers: they never reach a proxy's `__torch_function__` by themselves."""


def _is_torch_layer(module: nn.Module) -> bool:
    """Is the module, or what it derives from, a layer of torch.nn (and no mere container)?"""
    return any(
        cls.__module__.startswith(("torch.nn", "torch.ao.nn")) and cls not in _CONTAINERS
        for cls in type(module).__mro__
    )


class _Values:
    """The fake values of one node at the two batch sizes."""

    __slots__ = ("first", "second")

    def __init__(self, first: Any, second: Any) -> None:
        self.first = first
        self.second = second

    def plain(self) -> Any:
        """The one Python value both batch sizes agree on, or raise."""
        a, b = self.first, self.second
        if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
            raise fx.proxy.TraceError("control flow depends on the contents of a tensor")
        if type(a) is not type(b) or a != b:
            raise fx.proxy.TraceError(f"control flow depends on the batch size ({a} or {b})")
        return a


class ShapedProxy(fx.Proxy):
    """A proxy that can answer questions about its shape."""

    tracer: _Tracer

    @property
    def _values(self) -> _Values:
        return self.tracer.values[self.node]

    def _seen_type(self) -> type:
        """What `isinstance` is to believe: the type of the value this stands for.

        (Overriding `__class__` would fool torch's C++ argument parser too, which crashes.)
        """
        known = self.tracer.values.get(self.node)
        if known is None:
            return ShapedProxy
        if isinstance(known.first, torch.Tensor):
            is_parameter = isinstance(known.first, nn.Parameter)
            return nn.Parameter if is_parameter else torch.Tensor
        return type(known.first) if type(known.first) in (int, float, bool) else ShapedProxy

    def __bool__(self) -> bool:
        return bool(self._plain())

    def __index__(self) -> int:
        return operator.index(self._plain())

    def __int__(self) -> int:
        return int(self._plain())

    def __float__(self) -> float:
        return float(self._plain())

    def _plain(self) -> Any:
        """The Python value, where it depends neither on the batch nor on the data."""
        if isinstance(self._values.first, torch.Tensor):
            folded = [self.tracer.fold(self.node, which) for which in (0, 1)]
            return _Values(folded[0].tolist(), folded[1].tolist()).plain()
        return self._values.plain()

    def __len__(self) -> int:
        a, b = len(self._values.first), len(self._values.second)
        if a != b:
            raise fx.proxy.TraceError(f"len() depends on the batch size ({a} or {b})")
        return a

    def __iter__(self) -> Iterator[Any]:
        return iter([self[i] for i in range(len(self))])

    def __contains__(self, item: Any) -> bool:
        if isinstance(self._values.first, torch.Tensor):
            raise fx.proxy.TraceError("control flow depends on the contents of a tensor")
        return item in self._values.plain()

    def __hash__(self) -> int:
        return id(self)

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


def _inplace(name: str) -> Callable[[ShapedProxy, Any], Any]:
    function = getattr(operator, name)

    def record(self: ShapedProxy, other: Any) -> Any:
        if isinstance(self._values.first, torch.Tensor):
            return self._record(function, other)
        return self._record(getattr(operator, name[1:]), other)

    return record


for _name in ("iadd", "isub", "imul", "itruediv"):
    setattr(ShapedProxy, f"__{_name}__", _inplace(_name))


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True

    def __init__(
        self,
        in_spec: pytree.TreeSpec,
        leaves: Sequence[Any],
        names: Sequence[str],
        examples: tuple[Sequence[Any], Sequence[Any]],
        mode: FakeTensorMode,
        leaf_paths: frozenset[str],
    ) -> None:
        super().__init__(autowrap_modules=(math,))
        self.values: dict[fx.Node, _Values] = {}
        self.sources: dict[fx.Node, str] = {}
        self.notes: list[str] = []
        self._spec, self._leaves, self._names, self._examples = in_spec, leaves, names, examples
        self._mode = mode
        self._leaf_paths = leaf_paths
        self._evaluating = False
        self._autocast = _autocast_state()
        self.out_spec: pytree.TreeSpec | None = None
        self.where: list[str] = [""]

    # -- what FX asks of a tracer -------------------------------------------------------------

    def proxy(self, node: fx.Node) -> ShapedProxy:
        return ShapedProxy(node, self)

    def create_arg(self, a: Any) -> Any:
        if type(a) is ShapedProxy:
            return a.node
        if isinstance(a, torch.Size):
            return tuple(self.create_arg(n) for n in a)
        if isinstance(a, torch.Tensor) and not isinstance(a, nn.Parameter):
            self._refuse_lost_values(a)
        return super().create_arg(a)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if module_qualified_name in self._leaf_paths or type(m).__name__ in _MODE_LEAVES:
            return True
        return _is_torch_layer(m) and not isinstance(m, _DESCEND)

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        flat: list[Any] = list(self._leaves)
        for slot, name in enumerate(self._names):
            index = next(i for i, leaf in enumerate(flat) if leaf is _HOLE)
            proxy = self.create_proxy("placeholder", name, (), {})
            self._learn(proxy.node, self._examples[0][slot], self._examples[1][slot])
            flat[index] = proxy

        def flat_forward(*inputs: Any) -> Any:
            args, kwargs = pytree.tree_unflatten(list(inputs), self._spec)
            outputs, self.out_spec = pytree.tree_flatten(root_fn(self.root, *args, **kwargs))
            return tuple(outputs)

        return flat_forward, flat

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        if self._evaluating:
            return forward(*args, **kwargs)
        path = self.path_of_module(m)
        self.where.append(path)
        result = super().call_module(m, forward, args, kwargs)
        self.where.pop()
        return result

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: Any) -> Any:
        if self._evaluating:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_proxy(self, kind: Any, target: Any, args: Any, kwargs: Any, *a: Any, **k: Any) -> Any:
        if kind not in ("placeholder", "get_attr", "output") and _autocast_state() != self._autocast:
            raise fx.proxy.TraceError("an autocast region, which a graph cannot hold")
        proxy = super().create_proxy(kind, target, args, kwargs, *a, **k)
        node = proxy.node
        node.meta[PATH] = self.where[-1]
        node.meta[SOURCE] = _user_line()
        node.meta["no_grad"] = not torch.is_grad_enabled()
        if node not in self.values and kind != "placeholder":
            self._learn(node, self._evaluate(node, 0), self._evaluate(node, 1))
        return proxy

    def create_node(self, kind: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(kind, *args, **kwargs)
        if kind == "get_attr":  # FX makes those for constants without a proxy
            self._learn(node, self._evaluate(node, 0), self._evaluate(node, 1))
        return node

    # -- fake evaluation ----------------------------------------------------------------------

    def _learn(self, node: fx.Node, first: Any, second: Any) -> None:
        self.values[node] = _Values(first, second)

    def _evaluate(self, node: fx.Node, which: int) -> Any:
        def value(n: fx.Node) -> Any:
            return (self.values[n].first, self.values[n].second)[which]

        args = fx.node.map_arg(node.args, value)
        kwargs = fx.node.map_arg(node.kwargs, value)
        self._evaluating = True
        try:
            with self._mode:
                if node.op == "get_attr":
                    return _attribute(self.root, str(node.target))
                if node.op == "call_module":
                    return self.root.get_submodule(str(node.target))(*args, **kwargs)
                if node.op == "call_method":
                    return getattr(args[0], str(node.target))(*args[1:], **kwargs)
                assert callable(node.target)
                if kwargs.get("out") is not None:
                    raise fx.proxy.TraceError("an out= argument")
                return node.target(*args, **kwargs)
        finally:
            self._evaluating = False

    def fold(self, node: fx.Node, which: int) -> Any:
        """The real value of a node that is made from sizes alone (a mask of no padding)."""
        if node.op in ("placeholder", "get_attr", "call_module"):
            raise fx.proxy.TraceError("control flow depends on the contents of a tensor")
        known = (self.values[node].first, self.values[node].second)[which]
        if not isinstance(known, (torch.Tensor, tuple, list)):
            return known
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: self.fold(n, which))
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        assert callable(node.target)
        return node.target(*args, **kwargs)

    def _refuse_lost_values(self, tensor: torch.Tensor) -> None:
        """A fake tensor that is no attribute of the model has lost its numbers."""
        if isinstance(tensor, FakeTensor) and tensor not in self.tensor_attrs:
            raise fx.proxy.TraceError("a tensor made outside the graph")


class _Hole:
    """Marks the place of a tensor among the flattened arguments."""


_HOLE = _Hole()


def trace(
    model: nn.Module,
    in_spec: pytree.TreeSpec,
    leaves: Sequence[Any],
    names: Sequence[str],
    examples: tuple[Sequence[Any], Sequence[Any]],
    mode: FakeTensorMode,
    leaf_paths: frozenset[str],
) -> Traced:
    """Trace a fake copy of a model as it is (train or eval mode).

    `leaves` are the flattened arguments in which every tensor is replaced by its fake
    `examples` (one list per batch size) in order; `names` are the placeholders' names.
    """
    flat = [_HOLE if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    tracer = _Tracer(in_spec, flat, names, examples, mode, leaf_paths)
    python_random = random.getstate()
    try:
        with torch.enable_grad(), _patched(tracer):
            graph = tracer.trace(model)
    except Exception as error:
        path = tracer.where[-1]
        raise Untraceable(path, _reason(error), _error_line(error)) from error
    if random.getstate() != python_random:
        random.setstate(python_random)
        raise Untraceable("", "the forward pass draws from Python's random module", "?")
    batch = _batch(examples[0]), _batch(examples[1])
    for node in graph.nodes:
        known = tracer.values.get(node)
        node.meta[TYPE] = None if known is None else type_of_values(known.first, known.second, batch)
        node.meta[VALUE] = None if known is None else size_of_values(known.first, known.second)
        node.meta.setdefault(PATH, "")
    _detach_no_grad(graph)
    assert tracer.out_spec is not None
    constants = {
        str(n.target): _attribute(tracer.root, str(n.target))
        for n in graph.find_nodes(op="get_attr")
    }
    names_of_state = {name for name, _ in model.named_parameters()}
    names_of_state |= {name for name, _ in model.named_buffers()}
    constants = {k: v for k, v in constants.items() if k not in names_of_state}
    return Traced(graph, tracer.out_spec, constants, tuple(tracer.notes))


def fake_copy(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """A structural copy of a model with fake parameters and buffers: costs no memory."""
    memo: dict[int, Any] = {}
    tensors = list(model.named_parameters(remove_duplicate=True))
    for _, tensor in [*tensors, *model.named_buffers(remove_duplicate=True)]:
        with torch.no_grad():
            fake = mode.from_tensor(tensor, static_shapes=True)
        memo[id(tensor)] = fake
    return copy.deepcopy(model, memo)


def _attribute(root: nn.Module, path: str) -> Any:
    value: Any = root
    for atom in path.split("."):
        value = getattr(value, atom)
    return value


def _batch(tensors: Sequence[Any]) -> int:
    return next((t.shape[0] for t in tensors if t.dim()), 0)


def type_of_values(first: Any, second: Any, batch: tuple[int, int]) -> Any:
    """Tensor types of a value (nested as the value is); None for anything else."""
    if isinstance(first, torch.Tensor):
        shape = tuple(int(n) for n in first.shape)
        grown = batch[1] - batch[0]
        slope = tuple(
            (int(m) - n) // grown if grown else 0
            for n, m in zip(shape, second.shape, strict=True)
        )
        return TensorType(shape, slope, first.dtype, batch[0])
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


def _detach_no_grad(graph: fx.Graph) -> None:
    """Values made under `no_grad` pass no gradient: say so in the graph."""
    for node in list(graph.nodes):
        if not node.meta.get("no_grad") or not isinstance(node.meta.get(TYPE), TensorType):
            continue
        outside = [u for u in node.users if not u.meta.get("no_grad")]
        if node.op == "get_attr" or not outside:
            continue
        with graph.inserting_after(node):
            detached = graph.call_method("detach", (node,))
        detached.meta.update({k: node.meta.get(k) for k in (TYPE, PATH, SOURCE)})
        for user in outside:
            user.replace_input_with(node, detached)


def _autocast_state() -> tuple[Any, ...]:
    return tuple(
        (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        for device in ("cpu", "cuda")
    )


def _user_frames(stack: traceback.StackSummary) -> list[traceback.FrameSummary]:
    torch_home = torch.__path__[0]
    return [f for f in stack if not f.filename.startswith(torch_home) and f.filename != __file__]


def _user_line() -> str:
    """`file:line` of the innermost frame that belongs to neither torch nor this file."""
    import sys

    torch_home = torch.__path__[0]
    frame = sys._getframe(2)
    while frame is not None:
        filename = frame.f_code.co_filename
        if filename != __file__ and not filename.startswith((torch_home, "<")):
            return f"{filename}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return "?"


def _error_line(error: BaseException) -> str:
    frames = _user_frames(traceback.extract_tb(error.__traceback__))
    return f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else "?"


def _reason(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"


def _contains_proxy(values: Any) -> bool:
    if type(values) is ShapedProxy:
        return True
    if isinstance(values, dict):
        return any(_contains_proxy(v) for v in values.values())
    return type(values) in (tuple, list) and any(_contains_proxy(v) for v in values)


@contextmanager
def _patched(tracer: _Tracer) -> Iterator[None]:
    """Record factory functions of symbolic sizes; stop at custom autograd functions."""
    originals = {name: getattr(torch, name) for name in _FACTORIES}
    always = {originals[name] for name in _RANDOM_FACTORIES}
    apply = torch.autograd.Function.__dict__["apply"]

    def recorder(function: Callable[..., Any]) -> Callable[..., Any]:
        def factory(*args: Any, **kwargs: Any) -> Any:
            symbolic = function in always or _contains_proxy((args, kwargs))
            if symbolic and not tracer._evaluating:
                return tracer.create_proxy("call_function", function, args, kwargs)
            return function(*args, **kwargs)

        return factory

    def refuse(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not tracer._evaluating and _contains_proxy((args, kwargs)):
            raise fx.proxy.TraceError(f"the custom autograd function {cls.__name__}")
        return apply.__func__(cls, *args, **kwargs)

    is_instance = builtins.isinstance

    def seen_instance(value: Any, classes: Any) -> bool:
        if is_instance(value, classes):
            return True
        return type(value) is ShapedProxy and issubclass(value._seen_type(), classes)

    try:
        builtins.isinstance = seen_instance  # type: ignore[assignment]
        for name, function in originals.items():
            setattr(torch, name, recorder(function))
        torch.autograd.Function.apply = classmethod(refuse)  # type: ignore[assignment, method-assign]
        yield
    finally:
        builtins.isinstance = is_instance
        for name, function in originals.items():
            setattr(torch, name, function)
        torch.autograd.Function.apply = apply  # type: ignore[method-assign]
