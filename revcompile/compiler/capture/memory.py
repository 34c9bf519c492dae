"""Memory: which values of a traced graph share it, and which nodes write to it.

Observed on the fake tensors while tracing, not guessed from names: an in-place layer, a dropout
that returns its input in eval mode and `mask.div_(keep)` are all seen the same way. The results are
facts in `node.meta` (the keys below), which `functional.py` uses and removes. After that the only
nodes that write are layers that overwrite a value with no other reader.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Final

import torch
from torch import fx, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils._python_dispatch import TorchDispatchMode

from revcompile.ir.module_tree import NORMS, called_module
from revcompile.ir.types import TYPE

STORAGES: Final = "revcompile_storages"
"""`node.meta` key: the storages of the tensors in the node's value."""

WRITES: Final = "revcompile_writes"
"""`node.meta` key: the storages of the node's inputs that the node writes to."""

LOCATIONS: Final = "revcompile_locations"
"""`node.meta` key: a `Location` for each tensor of the node's value, in `tensors_in` order."""

MOVES: Final = "revcompile_moves"
"""`node.meta` key: paths of parameters and buffers that a leaf module writes to or replaces."""

NO_GRAD: Final = "revcompile_no_grad"
"""`node.meta` key: whether the node was traced while gradients were disabled."""

INPLACE_OPERATORS: Final[dict[Any, Callable[..., Any]]] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
    operator.ifloordiv: operator.floordiv,
    operator.imod: operator.mod,
    operator.ipow: operator.pow,
    operator.iand: operator.and_,
    operator.ior: operator.or_,
    operator.ixor: operator.xor,
    operator.ilshift: operator.lshift,
    operator.irshift: operator.rshift,
}

_MAKE_NEW_MEMORY: Final = (_ConvNd, nn.Linear, *NORMS)
"""Layers whose result never shares memory with their input."""


@dataclass(frozen=True, slots=True)
class Location:
    """Where in memory a tensor is.

    `layout` has offset, shape and strides at both batch sizes; `tensor` tells tensor objects apart.
    """

    storage: int
    layout: tuple[Any, ...]
    dtype: torch.dtype
    tensor: int

    def same_elements(self, other: Location) -> bool:
        """Whether both name the same elements, at every batch size."""
        own = self.storage, self.layout, self.dtype
        return own == (other.storage, other.layout, other.dtype)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors in a nested value, dataclasses included."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = value.values()
    elif is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in fields(value)]
    elif not isinstance(value, (tuple, list)):
        return []
    return [tensor for item in value for tensor in tensors_in(item)]


# -- observing ------------------------------------------------------------------------------------


@contextmanager
def watch_memory(node: fx.Node, values: Mapping[fx.Node, Any]) -> Iterator[None]:
    """Note which memory an evaluation of `node` writes to, and where its value is."""
    inputs = [t for source in node.all_input_nodes for t in tensors_in(values[source].first)]
    versions = [t._version for t in inputs]
    yield
    written = [t for t, version in zip(inputs, versions, strict=True) if t._version != version]
    node.meta[WRITES] = _storages(written)
    pairs = zip(tensors_in(values[node].first), tensors_in(values[node].second), strict=False)
    node.meta[LOCATIONS] = tuple(_location(a, b) for a, b in pairs if torch._C._has_storage(a))
    node.meta[STORAGES] = frozenset(location.storage for location in node.meta[LOCATIONS])


class _StateWatch(TorchDispatchMode):
    """Notes storages that operations write to, even if no version counter changes.

    Writes through `.data` change none, nor do batch norms, which move running statistics in C++.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.written: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, declared = kwargs or {}, func._schema.arguments
        given = {**dict(zip((a.name for a in declared), args, strict=False)), **kwargs}
        for argument in declared:
            is_write = argument.alias_info is not None and argument.alias_info.is_write
            if is_write or argument.name in ("running_mean", "running_var"):
                self.written |= _storages(tensors_in(given.get(argument.name)))
        return func(*args, **kwargs)


@contextmanager
def watch_state(module: nn.Module) -> Iterator[set[str]]:
    """Collect the names of the parameters and buffers that a call writes to or replaces."""
    before = _state_of(module)
    moved: set[str] = set()
    with _StateWatch() as watch:
        yield moved
    now, written = _state_of(module), watch.written
    moved |= {n for n, t in before.items() if now.get(n) is not t or storage_of(t) in written}


def _state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _location(first: torch.Tensor, second: torch.Tensor) -> Location:
    layout = (*_layout(first), *_layout(second))
    return Location(storage_of(first), layout, first.dtype, id(first))


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    if tensor.layout is not torch.strided:
        return (tuple(tensor.shape),)
    return tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


def _storages(tensors: Iterable[torch.Tensor]) -> frozenset[int]:
    return frozenset(map(storage_of, tensors)) - {0}


def storage_of(tensor: torch.Tensor) -> int:
    """The identity of a tensor's storage; 0 if it has none."""
    return tensor.untyped_storage()._cdata if torch._C._has_storage(tensor) else 0


# -- names of values ------------------------------------------------------------------------------


def location_of(node: fx.Node) -> Location | None:
    """Where the node's value is in memory, if it is a single tensor."""
    locations = node.meta.get(LOCATIONS, ())
    return locations[0] if len(locations) == 1 and not is_structured(node) else None


def is_structured(node: fx.Node) -> bool:
    """Whether the node's value is a container of tensors."""
    return isinstance(node.meta.get(TYPE), tuple)


def other_name_of(node: fx.Node, root: nn.Module) -> fx.Node | None:
    """The input that a node, which writes nothing, returns as its own value, if it does so."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return None
    if node.op != "call_module":
        return source if _converts_to_itself(node) else None
    result, given = location_of(node), location_of(source)
    if result is None or given is None or not result.same_elements(given):
        return None
    of_torch = type(root.get_submodule(str(node.target))).__module__.startswith("torch.nn")
    return source if of_torch or result.tensor == given.tensor else None  # layers do not detach


def _converts_to_itself(node: fx.Node) -> bool:
    """Whether it is `x.to(x.dtype)`, `x.to(x)` or the like: `x` itself in any precision."""
    x, *rest = node.args

    def is_own(given: Any) -> bool:
        if not isinstance(given, fx.Node):
            return isinstance(given, bool)
        return given is x or (given.target is getattr and given.args == (x, "dtype"))

    converts = node.op == "call_method" and node.target in ("to", "type", "type_as")
    return converts and all(map(is_own, (*rest, *node.kwargs.values())))


# -- nodes with effects ---------------------------------------------------------------------------


def is_effect(node: fx.Node) -> bool:
    """Whether the node writes to one of its inputs, or changes it otherwise, as `detach_` does."""
    schema = getattr(node.target, "_schema", None)
    name = str(getattr(node.target, "__name__", node.target))
    is_seen = bool(node.meta.get(WRITES))
    is_said = getattr(schema, "is_mutable", False) or bool(node.kwargs.get("inplace"))
    is_written = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
    is_named = is_written and hasattr(torch.Tensor, name)
    return is_seen or is_said or (is_named and node.op in ("call_method", "call_function"))


def works_in_place(module: nn.Module) -> bool:
    """Whether the layer, or one inside it, has `inplace=True`."""
    return any(getattr(inner, "inplace", False) is True for inner in module.modules())


def overwrites_unshared(node: fx.Node, root: nn.Module) -> bool:
    """Whether the layer's input is new memory without other readers, and may be overwritten."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or len(source.users) > 1:
        return False
    return isinstance(called_module(source, root), _MAKE_NEW_MEMORY)


def eliminate_dead_code(graph: fx.Graph) -> None:
    """Remove pure nodes without users, assertions, and parameters without readers."""
    kept = ("placeholder", "output", "call_module")
    graph.eliminate_dead_code(lambda node: node.op in kept or is_effect(node))
