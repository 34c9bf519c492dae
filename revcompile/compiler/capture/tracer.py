"""An FX tracer that knows shapes while it traces.

Every node is evaluated on fake tensors as it is made, at two batch sizes (see `proxy.py`). Many
modules that plain FX would need as leaf modules can thus be traced. A module that still cannot be
traced becomes a leaf module, and tracing continues after it.

Effects that a trace would drop silently are caught here: `no_grad` regions become `detach`;
autocast regions, custom autograd functions, reassigned buffers and counters make their module a
leaf module; random numbers from outside torch are refused. Values that decided Python's control
flow become guards. `interception.py` defines how the tracer is called.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import AbstractContextManager, nullcontext
from numbers import Number
from typing import Any, Final

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.proxy import TraceError
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from revcompile.compiler.capture.attribute_reads import AttributeReads
from revcompile.compiler.capture.cleanup import detach_no_grad, remove_unused, uncut_parts
from revcompile.compiler.capture.decisions import DECIDES, DecisionWatch
from revcompile.compiler.capture.example import Example
from revcompile.compiler.capture.fake_values import (
    NEEDS_DATA,
    Values,
    run_on_data,
    size_of_values,
    type_of_values,
)
from revcompile.compiler.capture.guards import ReadKind, size_guards
from revcompile.compiler.capture.interception import (
    RANDOM,
    TracedFunctions,
    intercepted,
)
from revcompile.compiler.capture.isolation import foreign_rng_state, preserve_attributes
from revcompile.compiler.capture.leaf_modules import is_leaf
from revcompile.compiler.capture.memory import (
    MOVES,
    NO_GRAD,
    STORAGES,
    WRITES,
    storage_of,
    tensors_in,
    watch_memory,
    watch_state,
)
from revcompile.compiler.capture.proxy import (
    NumberProxy,
    ShapedProxy,
    ShapedTracer,
    custom_function,
    proxy_for,
)
from revcompile.compiler.capture.structures import (
    is_structure,
    refuse_hidden_tensors,
    refuse_lost_type,
    unpacked,
    with_fields,
)
from revcompile.compiler.capture.trace_errors import (
    AUTOCAST,
    BatchDependent,
    DrawsElsewhere,
    PythonState,
    Rejected,
    Untraceable,
    UntracedEffect,
    describe_failure,
    user_line,
)
from revcompile.ir.guards import ModeGuards, attempts_unlogged, autocast_state
from revcompile.ir.module_tree import Contents, called_module, child_path
from revcompile.ir.ops import attribute, called
from revcompile.ir.plain_attributes import CONSTANT_PREFIX, PLAIN, attributes_of, digest
from revcompile.ir.reached import reached
from revcompile.ir.types import PATH, SOURCE, STORES, TYPE, VALUE

_DATA: Final = ("placeholder", "get_attr", "call_module")
_CHECKPOINTING = ("CheckpointFunction", "_NoopSaveInputs")
"""Functions of `torch.utils.checkpoint`, which change no values."""
_DIFFERENTIATING = (torch.autograd.grad, torch.autograd.backward)
_MADE: Final = "a tensor made without its input; make it with x.new_zeros(...) or the like"
_FOUND: Final = "a tensor that is neither a parameter nor a buffer"
_COMPARED: Final = (*PLAIN, torch.Tensor, fx.Proxy)
"""Types of container items that are compared to see whether a forward pass changed them."""


class Tracer(ShapedTracer):
    """Traces one model in its current mode, see `capture.trace`."""

    def __init__(
        self,
        model: nn.Module,
        example: Example,
        mode: FakeTensorMode,
        leaf_paths: frozenset[str],
    ) -> None:
        super().__init__()
        self.failure: Untraceable | None = None
        self.untraceable: dict[str, str] = {}
        """Modules that became leaf modules, and why."""
        self.stateful: set[str] = set()
        """Modules of `untraceable` whose next call computes something else."""
        self.out_spec: pytree.TreeSpec = pytree.tree_structure(())
        self.guards = ModeGuards()
        """All values that Python has read, as conditions on later calls."""
        self.constants: dict[str, torch.Tensor] = {}
        """Tensors that the graph reads and that are neither parameters nor buffers."""
        self.restore: Callable[[nn.Module], None] = lambda module: None
        self.leaked: set[tuple[str, str, Any]] = set()
        """Attributes in which forward passes left tensors: path, name, key of a dict entry."""
        self.stored: set[tuple[str, str]] = set()
        """Attributes that the forward pass leaves for a loss outside the model."""
        self.written: set[tuple[str, str]] = set()
        """Attributes that the forward pass itself changes: path of the module, and name."""
        self.attribute_reads = AttributeReads(lambda: self.evaluating)
        self._model, self._example, self._mode = model, example, mode
        self._leaf_paths = leaf_paths
        self._autocast = autocast_state()
        self._foreign_rng = foreign_rng_state()
        self._names: dict[int, str] = {}
        """Names of parameters and buffers, by id."""
        self._kept: dict[int, tuple[str, type[UntracedEffect]]] = {}
        """For tensors that outlive a call, by storage: name, and the error that a write raises."""
        self._made: dict[int, torch.Tensor] = {}
        """Tensors that the forward pass has made without its inputs, by storage."""
        self._state_proxies: dict[str, Any] = {}
        self._held: dict[str, torch.Tensor] = {}
        """Buffers, as they were before the forward pass, and constants."""
        self._data: set[fx.Node] = set()
        """Nodes whose tensors are not computed from sizes alone."""

    # -- arguments and results ----------------------------------------------------------------

    def run(self, fake: nn.Module) -> Tracer:
        """Trace a fake copy of the model, without nodes that were only inspected."""
        try:
            with torch.enable_grad():
                graph = self.trace(fake)
        except Exception as error:
            raise (self.failure or describe_failure("", error)) from error
        remove_unused(graph)
        detach_no_grad(graph)
        return self

    def trace(self, root: nn.Module, concrete_args: Any = None) -> fx.Graph:  # type: ignore[override]
        """The graph of a fake copy of the model."""
        named = [*root.named_parameters(), *root.named_buffers()]
        self.root, self.graph = root, fx.Graph()
        self.submodule_paths = {module: path for path, module in root.named_modules()}
        plain = [
            (value, child_path(path, name), hasattr(type(module), name))
            for path, module in root.named_modules()
            for name, value in vars(module).items()
            if isinstance(value, torch.Tensor)
        ]
        # An attribute of the class would hide a buffer of that name: such a tensor is a constant.
        self.tensor_attrs = {value: name for value, name, is_hidden in plain if not is_hidden}
        self._names = {id(tensor): name for name, tensor in reversed(named)}
        self._held = dict(root.named_buffers(remove_duplicate=False))
        self._kept = {storage_of(value): (repr(name), PythonState) for value, name, _ in plain}
        self._kept |= {storage_of(t): (repr(n), UntracedEffect) for n, t in reversed(named)}
        with attempts_unlogged(), intercepted(root, self), preserve_attributes(root) as restore:
            self.restore = restore
            args, kwargs = self._example.arguments(self._inputs())
            with self.attribute_reads.of(root), TracedFunctions(self):
                result = self._traced(root, args, kwargs)
                outputs, self.out_spec = pytree.tree_flatten(with_fields(result))
                self.create_node("output", "output", (self.create_arg(tuple(outputs)),), {})
            self._note_stored()
        firsts = {node: values.first for node, values in self.values.items()}
        sizes = size_guards(self._reads, firsts, self._example.signature, root)
        readers = ((p, m) for p, m in root.named_modules() if (p, "training") in self.asked)
        self.guards = ModeGuards((sizes,), {path: module.training for path, module in readers})
        state = {name for name, _ in named}
        for node in self.graph.find_nodes(op="get_attr"):
            if node.target not in state:
                self.constants[str(node.target)] = self.values[node].first
        return self.graph

    def _inputs(self) -> list[Any]:
        """Proxies for the tensors among the arguments."""
        example, proxies = self._example, []
        pairs = zip(example.tensors(0), example.tensors(1), strict=True)
        for name, pair in zip(example.signature.placeholders, pairs, strict=True):
            node = self.create_node("placeholder", name, (), {})
            first, second = (self._mode.from_tensor(tensor.detach()) for tensor in pair)
            with watch_memory(node, self.values):
                self._learn(node, first, second)
            proxies.append(self.proxy(node))
        return proxies

    def proxy(self, node: fx.Node) -> Any:
        """What stands for a node in Python code: a proxy, or a structure of proxies."""
        value, grown = self.values[node]
        if not is_structure(value):
            return proxy_for(node, self, node in self._data)
        if isinstance(value, tuple | list):
            if len(value) != len(grown):
                raise BatchDependent(len(value), len(grown))
            self.guard(node, len(value), ReadKind.LENGTH)

        def take(function: Any, source: fx.Node, key: Any) -> fx.Node:
            return self.create_node("call_function", function, (source, key), {})

        return unpacked(node, value, take, self.proxy)

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, ShapedProxy):
            self._refuse_custom_function(a)
            return a.node
        if isinstance(a, torch.Generator):
            raise Rejected(
                "the forward pass draws from a torch.Generator of its own, whose numbers backward "
                "could not draw again; leave out generator=, and draw from torch's default "
                "generator, which torch.manual_seed seeds",
                self.root.get_submodule(self._path),
            )
        refuse_lost_type(a)
        if isinstance(a, Number) and hasattr(a, "item"):  # a NumPy scalar
            return a.item()
        if isinstance(a, torch.Size):
            return tuple(self.create_arg(n) for n in a)
        if isinstance(a, torch.Tensor) and not isinstance(a, nn.Parameter):
            known = a in self.tensor_attrs or any(a is b for b in self.root.buffers())
            if not known:
                self.tensor_attrs[a] = self._constant(a)
        try:
            return super().create_arg(a)
        except NotImplementedError:
            raise TraceError(
                f"a {type(a).__name__} is an argument, which no graph can hold"
            ) from None

    def _constant(self, tensor: torch.Tensor) -> str:
        """The name of a constant that the model has made; equal tensors share a name."""
        if isinstance(tensor, FakeTensor):
            raise TraceError(
                "a tensor made outside the graph, as from parameters that forward reads through "
                "self.parameters(); read them by name (self.weight)"
            )
        is_made = storage_of(tensor) in self._made
        if tensor.requires_grad and not (is_made and tensor.is_leaf):
            raise TraceError(
                f"a tensor {list(tensor.shape)} that requires a gradient, but is neither a "
                "parameter nor an attribute of a module"
            )
        name = f"{CONSTANT_PREFIX}{digest(tensor)}"
        self._held[name] = tensor
        effect = (_MADE, UntracedEffect) if is_made else (_FOUND, PythonState)
        self._kept.setdefault(storage_of(tensor), effect)
        return name

    def note_made(self, result: Any, given: Any) -> None:
        """Note the new tensors in the result of a function that was called without proxies."""
        known = {storage_of(tensor) for tensor in tensors_in(given)}
        self._made |= {storage_of(t): t for t in tensors_in(result) if storage_of(t) not in known}

    def _refuse_custom_function(self, result: Any) -> None:
        """Refuse custom autograd functions: a graph would keep only their forward."""
        for leaf in pytree.tree_leaves(result):
            name = custom_function(leaf)
            if name is not None and name not in _CHECKPOINTING:
                owner = self.root.get_submodule(self._path)
                raise UntracedEffect(f"the custom autograd function {name}", owner)

    # -- modules ------------------------------------------------------------------------------

    def called(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """What a call of a module returns."""
        path = None if self.evaluating else (self.submodule_paths or {}).get(module)
        if not path:  # the model itself
            return module._call_impl(*args, **kwargs)
        self._refuse_foreign_rng()
        self._refuse_custom_function((args, kwargs))
        outer, self._path = self._path, path
        try:
            if self._path in self._leaf_paths or is_leaf(module):
                return self.create_proxy("call_module", self._path, args, kwargs)
            return self._descend(module, args, kwargs)
        except Exception as error:
            self.failure = self.failure or describe_failure(self._path, error)
            raise
        finally:
            self._path = outer

    def _descend(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Trace into a module; if that fails, undo the attempt and make it a leaf module."""
        path, mark = self._path, self._mark()
        try:
            return self._traced(module, args, kwargs)
        except Rejected:
            raise
        except Exception as error:
            failure = self.failure = self.failure or describe_failure(path, error)
            self._roll_back(mark)
            self.restore(module)
            proxy = self.create_proxy("call_module", path, args, kwargs)
            inside = f"{path}."
            self.untraceable = {
                p: cause for p, cause in self.untraceable.items() if not p.startswith(inside)
            }
            self.untraceable[path] = failure.cause
            if isinstance(failure.error, PythonState):
                self.stateful.add(path)
            return proxy

    def _traced(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Call a forward; if it passes dtypes to `torch.finfo`, call it again with plain dtypes."""
        mark = self._mark()
        try:
            return self._watched(module, args, kwargs)
        except TypeError as error:
            if "finfo" not in str(error) or self.reads_types():
                raise
        self._roll_back(mark)
        self.restore(module)
        self._reading_types.add(self._path)
        return self._watched(module, args, kwargs)

    def _mark(self) -> tuple[fx.Node | None, int]:
        """The current end of the trace, to roll back to."""
        last = next(iter(reversed(self.graph.nodes)), None)
        return last, len(self._reads)

    def _roll_back(self, mark: tuple[fx.Node | None, int]) -> None:
        last, reads = mark
        del self._reads[reads:]
        for node in list(reversed(self.graph.nodes)):
            if node is last:
                break
            self.graph.erase_node(node)
            self.values.pop(node, None)
        proxies = self._state_proxies.items()
        self._state_proxies = {n: p for n, p in proxies if p.node in self.values}

    def _watched(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Call a forward, and raise if it had an effect that is not in the graph."""
        buffers, state = self._buffers(module), self._state(module)
        result = module._call_impl(*args, **kwargs)
        self._refuse_custom_function(result)
        self._refuse_foreign_rng()
        for name, new in self._buffers(module).items():
            if new is not buffers.get(name):
                raise UntracedEffect(f"the forward pass assigns to the buffer {name!r}", module)
        changed = _changed(state, self._state(module)) - self.written
        if changed:
            self.written |= changed
            self._note_leaked(module)
            # A cached value changes in the first call only, a counter in the second call too.
            mark, state = self._mark(), self._state(module)
            held = {(p, n): vars(self.root.get_submodule(p)).get(n) for p, n in sorted(changed)}
            fields = {key: getattr(value, "__dict__", {}).values() for key, value in held.items()}
            nodes = {key: _nodes_in((value, *fields[key])) for key, value in held.items()}
            users = {key: _users(found) for key, found in nodes.items()}
            contents = Contents(module)
            module._call_impl(*args, **kwargs)
            now = self._state(module)
            changed = _changed(state, now)
            # a tensor that is only stored for the user differs after every call as well
            stored = {key for key in users if users[key] == _users(nodes[key]) is not None}
            # len() of a container reads no node, and a set of sizes grows at another size
            kept = held.keys() & now.keys()
            grown = {key for key in kept if _length(state[key]) != _length(now[key])}
            grown |= {key for key in kept if _has_size(held[key])}
            self._roll_back(mark)
            contents.restore(module)  # the outer modules may read what the first call has stored
            for path, name in sorted((changed - stored) | grown):
                where = "its attribute" if path == self._path else "the attribute"
                of = "" if path == self._path else f" of {path}"
                raise PythonState(f"the forward pass counts in {where} {name!r}{of}", module)
            # with a table that grows, results may depend on the sizes of earlier calls
            numbers = (int, float, NumberProxy)
            sizes = [k for k in held if k not in stored and type(held[k]) in numbers]
            has_table = any(isinstance(value, torch.Tensor) for value in held.values())
            if sizes and has_table and self._path and not any(module.children()):
                reason = f"the forward pass keeps a size in its attribute {sizes[0][1]!r}"
                raise UntracedEffect(reason, module)
        return result

    def _state(self, module: nn.Module) -> dict[tuple[str, str], Any]:
        """Attributes of a module and those inside it, by path and name."""
        return {
            (path, name): _content(value)
            for path, inner in module.named_modules(prefix=self._path)
            for name, value in attributes_of(inner).items()
        }

    def _buffers(self, module: nn.Module) -> dict[str, Any]:
        """The values of the buffers of a module and of those inside it, by path."""
        return {
            child_path(path, name): value.known.first if isinstance(value, ShapedProxy) else value
            for path, inner in module.named_modules(prefix=self._path)
            for name, value in inner._buffers.items()
        }

    def _note_leaked(self, module: nn.Module) -> None:
        """Note attributes that hold tensors computed from the inputs or from parameters."""

        def tensors(nodes: Iterable[fx.Node]) -> list[fx.Node]:
            return [node for node in nodes if tensors_in(self.values[node].first)]

        for name, value in attributes_of(module).items():
            entries = value.items() if type(value) is dict else [(None, value)]
            for key, held in entries:
                sources = reached(tensors(_nodes_in(held)), lambda n: tensors(n.all_input_nodes))
                parameters = (isinstance(self.values[n].first, nn.Parameter) for n in sources)
                if any(n.op == "placeholder" for n in sources) or any(parameters):
                    self.leaked.add((self._path, name, key))

    def _note_stored(self) -> None:
        """Note attributes with gradients that no other module reads: a loss outside may do so."""
        for path, name, _ in self.leaked:
            nodes = _nodes_in(vars(self.root.get_submodule(path)).get(name))
            tensors = tensors_in([self.values[node].first for node in nodes])
            within = f"{path}." if path else ""
            users = [user for node in nodes for user in node.users]
            is_read = any(
                user.op == "output" or not f"{user.meta[PATH]}.".startswith(within)
                for user in users
            )
            if any(tensor.requires_grad for tensor in tensors) and not is_read:
                self.stored.add((path, name))

    def _refuse_foreign_rng(self) -> None:
        if foreign_rng_state() != self._foreign_rng:
            raise DrawsElsewhere(
                "the forward pass draws from the random module of Python or NumPy, which a graph "
                "would freeze; draw from torch instead, in a submodule of its own (if it does not "
                "draw, another thread does: let that use a generator of its own)",
                self.root.get_submodule(self._path),
            )

    # -- nodes --------------------------------------------------------------------------------

    def attribute(self, value: Any) -> Any:
        """What a read of a parameter or buffer returns."""
        name = None if self.evaluating else self._names.get(id(value))
        if name is None:
            return value
        if name not in self._state_proxies:
            self._state_proxies[name] = self.create_proxy("get_attr", name, (), {})
        return self._state_proxies[name]

    def create_node(self, kind: str, *args: Any, **kwargs: Any) -> fx.Node:
        if kind.startswith("call") and autocast_state() != self._autocast:
            raise TraceError(AUTOCAST)
        if kind == "call_function" and args[0] in _DIFFERENTIATING:
            raise TraceError(
                "torch.autograd.grad inside the forward pass, which no graph can hold; put it into "
                "a submodule of its own, under torch.enable_grad(), which becomes a leaf module"
            )
        node = super().create_node(kind, *args, **kwargs)
        node.meta.update({PATH: self._path, SOURCE: user_line(), TYPE: None, VALUE: None})
        node.meta[NO_GRAD] = not torch.is_grad_enabled()
        if kind not in ("placeholder", "output"):
            try:
                layer = called_module(node, self.root)
                with watch_memory(node, self.values):
                    first, second = (self._evaluate(node, layer, which) for which in (0, 1))
                    self._learn(node, first, second)
                refuse_hidden_tensors(self.values[node].first)
                self._refuse_write(node)
            except Exception:
                self.graph.erase_node(node)
                raise
            self._guard_parts(node)
        self.failure = None
        return node

    def _guard_parts(self, node: fx.Node) -> None:
        """Guard the sizes for which a slice of a `torch.cat` consists of whole tensors."""
        _, decisive, dim = uncut_parts(node)
        for part in decisive:
            shape = self.create_node("call_function", getattr, (part, "shape"), {})
            size = self.create_node("call_function", operator.getitem, (shape, dim), {})
            self.guard(size, self.values[size].first, ReadKind.VALUE)

    def _refuse_write(self, node: fx.Node) -> None:
        """Refuse writes into tensors that outlive the call, which need a leaf module.

        Refuse `no_grad` writes into a value with a gradient, too, which would ignore the write.
        """
        for source in node.all_input_nodes if node.meta[NO_GRAD] else ():
            hidden = source.meta[STORAGES] & node.meta[WRITES] and source.op != "get_attr"
            if hidden and not source.meta[NO_GRAD]:
                raise TraceError("an in-place operation under no_grad on a value made outside")
        for storage in node.meta[WRITES] & self._kept.keys():
            if node.target is not functional.batch_norm:
                what, effect = self._kept[storage]
                owner = self.root.get_submodule(self._path)
                raise effect(f"the forward pass writes into {what}", owner)

    def _learn(self, node: fx.Node, first: Any, second: Any) -> None:
        self.values[node] = Values(first, second)
        node.meta[TYPE] = type_of_values(first, second, self._example.batch)
        node.meta[VALUE] = size_of_values(first, second, self._example.batch)
        sources = node.all_input_nodes
        is_data = node.op in _DATA or node.target in RANDOM or not self._data.isdisjoint(sources)
        if is_data and tensors_in(first):
            self._data.add(node)

    def _evaluate(self, node: fx.Node, layer: nn.Module | None, which: int) -> Any:
        """The value of a node, or of its layer, at the first or the second batch size."""

        args, kwargs = fx.node.map_arg(
            (node.args, node.kwargs), lambda source: self.values[source][which]
        )
        target: Any = node.target
        watch: AbstractContextManager[Any] = nullcontext()
        if layer is not None and not which and not is_leaf(layer):
            watch = DecisionWatch()
        self.evaluating = True
        try:
            with self._mode, watch:
                if node.op == "get_attr":
                    held = self._held.get(target)
                    return attribute(self.root, target) if held is None else held
                if layer is not None and not _keeps_attributes(layer):
                    with preserve_attributes(layer):  # changes by the forward around it stay
                        with watch_state(layer) as moved:
                            result = layer(*args, **kwargs)
                        node.meta[MOVES] = frozenset(child_path(target, name) for name in moved)
                        if stored := _stored(layer, target):
                            node.meta[STORES] = stored
                        return result
                return layer(*args, **kwargs) if layer is not None else called(node, args, kwargs)
        except NEEDS_DATA:
            if layer is None:
                raise
            original = self._model.get_submodule(target)
            if not isinstance(layer, _BatchNorm):  # one without momentum reads its counter
                node.meta[DECIDES] = "control flow on its contents"
            result, moved = run_on_data(original, layer, self._mode, args, kwargs)
            node.meta[MOVES] = frozenset(child_path(target, name) for name in moved)
            return result
        finally:
            self.evaluating = False
            if isinstance(watch, DecisionWatch):
                node.meta.setdefault(DECIDES, watch.operation)


_Key = tuple[str, str]


def _changed(before: Mapping[_Key, Any], now: Mapping[_Key, Any]) -> set[_Key]:
    """Attributes that differ, or are new."""
    missing = object()
    return {key for key in now if before.get(key, missing) != now[key]}


def _keeps_attributes(layer: nn.Module) -> bool:
    """Whether a call cannot change attributes. Hooks can, for example weight normalization."""
    return type(layer).__module__.startswith("torch.nn.") and not layer._forward_pre_hooks


def _stored(layer: nn.Module, path: str) -> tuple[tuple[str, str], ...]:
    """Attributes in which a call has left tensors with an autograd graph: path, and name."""
    return tuple(
        (inner, name)
        for inner, module in layer.named_modules(prefix=path)
        for name, value in attributes_of(module).items()
        if any(tensor.grad_fn is not None for tensor in tensors_in(value))
    )


def _nodes_in(value: Any) -> list[fx.Node]:
    """The nodes of the proxies in a value."""
    return [leaf.node for leaf in pytree.tree_leaves(value) if isinstance(leaf, ShapedProxy)]


def _users(nodes: list[fx.Node]) -> int | None:
    """How many nodes read the nodes that an attribute holds; None if it holds none."""
    return sum(len(node.users) for node in nodes) if nodes else None


def _length(content: Any) -> int:
    """How many items a container has; the argument is its `_content`."""
    return len(content[1]) if isinstance(content[1], list) else 0


def _has_size(value: Any) -> bool:
    """Whether it is a set that contains a traced size."""
    return isinstance(value, Set) and any(isinstance(item, ShapedProxy) for item in value)


def _content(value: Any) -> Any:
    """A form to compare: plain values and containers by value, others by identity and fields."""
    if issubclass(type(value), PLAIN):
        return type(value), value
    same: Any = type(value)
    if isinstance(value, dict):
        items = (*value, *value.values())
    elif isinstance(value, (tuple, list, set, frozenset, deque)):
        items = (*value,)
    else:
        same, is_layer = (id(value), value), isinstance(value, (nn.Module, torch.Tensor, fx.Proxy))
        attributes = None if is_layer or callable(value) else getattr(value, "__dict__", None)
        items = (*attributes.values(),) if isinstance(attributes, dict) else ()
    return same, [_content(i) if issubclass(type(i), _COMPARED) else None for i in items]
