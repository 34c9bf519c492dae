"""functionalize: a graph that computes the same without writing to the memory of its values.

Tracing has found where values are in memory (`memory.py`). The graph is copied node by node. After
a write, all names of the value refer to a new node:

    y = x * 2
    z = layer(y)       a dropout in eval mode: another name of y
    y.mul_(3)          y' = y.mul(3)
    z.sum()            reads y'

A write that another view of the memory would see is refused; `NotFunctional` names the nodes:

    v = y[:, :2]
    v.mul_(3)
    y.sum()            but y[:, :2] *= 3 is fine: Python assigns the part to y

A write that changes the shape of a tensor in place is refused, too. The enclosing module becomes a
leaf module. Only leaf modules write to parameters, buffers and constants (see `tracer.py`).
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from revcompile.compiler.capture.cleanup import passed_on, uncut_parts
from revcompile.compiler.capture.memory import (
    INPLACE_OPERATORS,
    LOCATIONS,
    MOVES,
    STORAGES,
    WRITES,
    eliminate_dead_code,
    is_effect,
    is_structured,
    location_of,
    other_name_of,
    overwrites_unshared,
    storage_of,
    works_in_place,
)
from revcompile.ir.ops import (
    attribute,
    batch_norm,
    op_name,
    out_of_place,
    with_item,
)
from revcompile.ir.types import PATH, SOURCE, TYPE, VALUE, TensorType

_NORMS: Final = frozenset(("batch_norm", "native_batch_norm", "cudnn_batch_norm"))
"""Functions that move running statistics: `F.batch_norm`, and torch's functions that it calls."""


class NotFunctional(Exception):
    """A write that has no out-of-place form; all `nodes` use the memory that is written."""

    def __init__(self, reason: str, nodes: Sequence[fx.Node]) -> None:
        super().__init__(reason)
        self.nodes = tuple(nodes)


def functionalize(graph: fx.Graph, root: nn.Module) -> fx.Graph:
    """A copy of the graph without in-place operations on values.

    Layers with an `inplace` flag are called as if they had none: see `forbid_inplace`.
    """
    return _Functional(graph, root).run()


def forbid_inplace(graph: fx.Graph, root: nn.Module) -> None:
    """Set `inplace=False` in layers of `root` that would overwrite a value with other readers.

    Layers inside of a leaf module work in place on memory of its own.
    """
    for node in graph.find_nodes(op="call_module"):
        module = root.get_submodule(str(node.target))
        is_layer = not any(module.children())
        if is_layer and works_in_place(module) and not overwrites_unshared(node, root):
            module.inplace = False  # type: ignore[assignment]


@dataclass(eq=False)
class _Value:
    """An original node's value, and the new node that has its contents now."""

    node: fx.Node
    new: fx.Node
    names: list[_Value]
    """All values that are the same tensor."""


class _Functional:
    """One walk over a traced ("original") graph, which builds a new one."""

    def __init__(self, graph: fx.Graph, root: nn.Module) -> None:
        self.original, self.root, self.graph = graph, root, fx.Graph()
        self.values: dict[fx.Node, _Value] = {}
        self.written = {s for node in graph.nodes for s in node.meta.get(WRITES, ())}

    def run(self) -> fx.Graph:
        self._refuse_reads_of_moving_state()
        for node in self.original.nodes:
            self._visit(node)
        eliminate_dead_code(self.graph)
        for node in self.graph.nodes:
            for key in (LOCATIONS, MOVES, STORAGES, WRITES):
                node.meta.pop(key, None)
        assert not any(map(is_effect, self.graph.nodes))
        self.graph.lint()
        return self.graph

    def _visit(self, node: fx.Node) -> None:
        if node.op == "output":
            self.graph.node_copy(node, self._read)
        elif node.target is functional.batch_norm:  # recomputing it must not move its statistics
            norm = self.graph.node_copy(node, self._read)
            norm.target, norm.meta[WRITES] = batch_norm, frozenset()
            self._define(node, norm)
        elif (source := passed_on(node, self.root)) is not None:
            self._define(node, self._read(source))
        elif (parts := uncut_parts(node)[0]) and all(
            _storages(each).isdisjoint(self.written) for each in (node, *parts)
        ):
            whole: Any = node.args[0]
            new = [self._read(part) for part in parts]
            if len(new) > 1:
                new = [self.graph.call_function(torch.cat, (new, *whole.args[1:]), whole.kwargs)]
                _describe(new[0], node, node)
            self._define(node, new[0])
        elif node.op == "placeholder" or not is_effect(node):
            self._define(node, self.graph.node_copy(node, self._read))
        elif node.op == "call_module":
            self._layer(node)
        else:
            self._operation(node)

    def _read(self, node: fx.Node) -> fx.Node:
        """The new node with the current contents of an original one."""
        return self.values[node].new

    def _define(self, node: fx.Node, new: fx.Node) -> _Value:
        """Note that a new node has an original one's value."""
        source = other_name_of(node, self.root)
        names = [] if source is None else self.values[source].names
        self.values[node] = value = _Value(node, new, names)
        names.append(value)
        return value

    # -- writing ------------------------------------------------------------------------------

    def _write(self, target: _Value, new: fx.Node, node: fx.Node) -> None:
        """Give the target, under all its names, new contents."""
        self._refuse_other_readers(node, _storages(target.node), target)
        for value in target.names:
            value.new = new

    def _refuse_other_readers(
        self, node: fx.Node, storages: Collection[int], target: _Value | None = None
    ) -> None:
        """Refuse a write to memory of values, other than the target, that are read later."""
        for name, value in self.values.items():
            if _storages(value.node).isdisjoint(storages) or (target and value in target.names):
                continue
            late = [u for u in name.users if u > node and _reads(u)]
            late = late[: late.index(end)] if (end := _assignment(node, name, late)) else late
            if late:
                what = node.target if node.op == "call_module" else node.name
                reason = (
                    f"{what} writes to {name.name}, which is read afterwards; write out of place"
                )
                raise NotFunctional(reason, [node, name, *late])

    def _operation(self, node: fx.Node) -> None:
        """An in-place function, method or operator."""
        argument, call = written_argument(node), out_of_place_call(node)
        target = self.values[argument] if argument is not None else None
        before = None if target is None else location_of(target.node)
        if target is None or before is None or call is None:
            raise NotFunctional(f"{node.name} writes in place and has no out-of-place form", [node])
        if not node.meta.get(WRITES, frozenset()) <= _storages(target.node):
            raise NotFunctional(f"{node.name} writes into more than one tensor", [node])
        after = location_of(node)
        changes_shape = after is not None and after.layout != before.layout
        if changes_shape or "out" in node.kwargs:
            reason = f"{node.name} changes {target.node.name} as a whole; assign its result instead"
            raise NotFunctional(reason, [node, target.node])
        new = self.graph.create_node(*fx.node.map_arg(call, self._read))
        _describe(new, node, target.node)
        self._write(target, new, node)
        self.values[node] = target

    def _layer(self, node: fx.Node) -> None:
        """A leaf module that writes to its input."""
        module = self.root.get_submodule(str(node.target))
        targets = [n for n in node.all_input_nodes if _storages(n) & node.meta[WRITES]]
        target = self.values[targets[0]]
        in_torch = type(module).__module__.startswith("torch.nn") and not any(module.children())
        result, given = location_of(node), location_of(targets[0])
        overwrites = result is not None and given is not None and result.same_elements(given)
        if in_torch and works_in_place(module) and len(targets) == 1 and overwrites:
            self._write(target, self.graph.node_copy(node, self._read), node)
            self.values[node] = target
            return
        self._refuse_other_readers(node, node.meta[WRITES])
        raise NotFunctional(f"{node.target} writes to its input; write out of place", [node])

    # -- state --------------------------------------------------------------------------------

    def _refuse_reads_of_moving_state(self) -> None:
        """Refuse other readers of tensors that a leaf module or a batch norm function writes.

        They might read before or after the write; in another stage they would read a copy.
        """
        calls = [n for n in self.original.nodes if n.op == "call_module" or any(_statistics(n))]
        for node in calls:
            if node.target is not functional.batch_norm and any(_statistics(node)):
                reason = f"{node.name} moves running statistics; call F.batch_norm"
                raise NotFunctional(reason, [node])
        moved = {node: self._moved(node) for node in calls}
        movers: dict[int, list[fx.Node]] = {}
        for node in calls:
            for storage in moved[node]:
                movers.setdefault(storage, []).append(node)
        if not movers:
            return
        for read in self.original.find_nodes(op="get_attr"):
            found = movers.get(self._storage(read), [])
            for reader in read.users if found else ():
                if _reads(reader) and read not in _statistics(reader):
                    reason = f"{reader.name} reads {read.target}, which {found[0].name} changes"
                    raise NotFunctional(reason, [reader, *found])
        for reader in self.original.find_nodes(op="call_module"):
            module = self.root.get_submodule(str(reader.target))
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                storage = storage_of(tensor)
                if storage in movers and storage not in moved[reader]:
                    found = movers[storage]
                    reason = f"{reader.target} reads {name}, which {found[0].name} changes"
                    raise NotFunctional(reason, [reader, *found])

    def _moved(self, node: fx.Node) -> set[int]:
        """Storages of parameters and buffers that a call changes."""
        if node.op != "call_module":
            given = [_storages(n) for n in _statistics(node) if isinstance(n, fx.Node)]
            reads = self.original.find_nodes(op="get_attr")
            return {self._storage(n) for n in reads if any(_storages(n) & s for s in given)}
        modules = self.root.get_submodule(str(node.target)).modules()
        moved = [held for m in modules if isinstance(m, _BatchNorm) for held in m.buffers()]
        moved += [attribute(self.root, path) for path in node.meta.get(MOVES, ())]
        return {*map(storage_of, moved)} - {0}

    def _storage(self, read: fx.Node) -> int:
        return storage_of(attribute(self.root, str(read.target)))


def _statistics(node: fx.Node) -> tuple[Any, ...]:
    """The running statistics that a batch norm function is given."""
    if op_name(node) not in _NORMS:
        return ()
    first = 1 if node.target is functional.batch_norm else 3
    names = ("running_mean", "running_var")
    return (*node.args[first : first + 2], *(node.kwargs.get(name) for name in names))


def written_inputs(graph: fx.Graph) -> tuple[str, ...]:
    """Notes about inputs that the model writes to."""
    written = {s for node in graph.nodes for s in node.meta.get(WRITES, ())}
    return tuple(
        f"the model writes to its input {node.target}; the captured graph does not"
        for node in graph.find_nodes(op="placeholder")
        if _storages(node) & written
    )


def _storages(node: fx.Node) -> frozenset[int]:
    storages: frozenset[int] = node.meta.get(STORAGES, frozenset())
    return storages


def _reads(node: fx.Node) -> bool:
    """Whether a node reads contents of its inputs, not sizes alone."""
    return node.op == "output" or bool(node.meta.get(LOCATIONS) or node.meta.get(WRITES))


def _assignment(write: fx.Node, base: fx.Node, readers: Sequence[fx.Node]) -> fx.Node | None:
    """The assignment with which `base[index] += x` ends, after the write to the part."""
    part = write.args[0] if write.args else None
    for node in readers:
        is_item = isinstance(part, fx.Node) and part.target is operator.getitem
        if is_item and node.target is operator.setitem and node.args[2] is write:
            return node if node.args[:2] == (base, part.args[1]) else None  # type: ignore[union-attr]
    return None


def _describe(new: fx.Node, node: fx.Node, target: fx.Node) -> None:
    """Copy a node's facts to a new one: the result of a write has its target's type."""
    new.meta.update({k: node.meta.get(k) for k in (PATH, SOURCE)})
    own = node.meta.get(TYPE)
    new.meta[TYPE] = own if own is not None and not is_structured(node) else target.meta.get(TYPE)
    new.meta[VALUE] = None


# -- single operations ----------------------------------------------------------------------------

_NEW_STORAGE: Final = ("resize_", "resize_as_", "set_", "share_memory_", "apply_", "map_", "map2_")
"""Methods that change more than the contents of a tensor, or call back into Python."""

_OTHER_MEANING: Final = frozenset(
    f"{name}_"
    for name in (
        *("eq", "ne", "lt", "le", "gt", "ge", "less", "less_equal", "greater", "greater_equal"),
        *("not_equal", "logical_and", "logical_or", "logical_xor", "logical_not"),
        *("bernoulli", "fill", "normal"),
    )
)
"""Methods that do something else, or return another type, without the underscore."""


Call = tuple[str, Any, tuple[Any, ...], dict[str, Any]]
"""The op, target and arguments of a node."""


def written_argument(node: fx.Node) -> fx.Node | None:
    """The input that an operation writes to."""
    target = node.kwargs.get("out")
    if target is None:
        first = (node.kwargs.get(name) for name in ("input", "self"))
        target = node.args[0] if node.args else next((f for f in first if f is not None), None)
    return target if isinstance(target, fx.Node) else None


def out_of_place_call(node: fx.Node) -> Call | None:
    """The out-of-place form of a node that writes to its `written_argument`, if there is one."""
    args, kwargs, name = node.args, dict(node.kwargs), op_name(node)
    if node.target is operator.setitem:
        return "call_function", with_item, args, kwargs
    if kwargs.pop("inplace", False):
        return "call_function", node.target, args, kwargs
    is_operator = node.target in INPLACE_OPERATORS
    in_place = f"__{name}__" if is_operator else name
    if not promotes(written_argument(node), node) and name not in _OTHER_MEANING:
        plain = name[:-1] if name.endswith("_") else ""
        if is_operator:
            return "call_function", INPLACE_OPERATORS[node.target], args, kwargs
        if node.op == "call_method" and name not in _NEW_STORAGE and hasattr(torch.Tensor, plain):
            return "call_method", plain, args, kwargs
        function = getattr(functional, plain, None) or getattr(torch, plain, None)
        if node.op == "call_function" and inspect.isroutine(function):
            return "call_function", function, args, kwargs
    if name in _NEW_STORAGE or not args or not hasattr(torch.Tensor, in_place):
        return None
    return "call_function", out_of_place, (args[0], in_place, *args[1:]), kwargs


def promotes(target: Any, node: fx.Node) -> bool:
    """Whether the out-of-place form would have another type than the target."""

    def empty(n: Any) -> torch.Tensor | None:
        known = n.meta.get(TYPE) if isinstance(n, fx.Node) else None
        if not isinstance(known, TensorType):
            return None
        return torch.empty(known.shape, dtype=known.dtype, device="meta")

    result, others = empty(target), [empty(n) for n in node.all_input_nodes]
    if result is None or result.dtype is torch.bool:
        return False
    return any(o is not None and torch.result_type(result, o) != result.dtype for o in others)
