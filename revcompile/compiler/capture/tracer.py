"""An FX tracer that knows shapes while it traces.

Every node is evaluated on fake tensors as it is made, at two batch sizes (see `proxy.py`), so that
many modules can be traced that are leaf modules for plain FX. A module that cannot be traced all
the same becomes a leaf module, and tracing goes on behind it.

What FX would drop silently is caught here: `no_grad` regions become `detach`; autocast regions,
custom autograd functions, reassigned buffers and counters make their module a leaf module; random
numbers from outside torch are refused. Values that decided Python's control flow become guards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.proxy import TraceError
from torch.utils import _pytree as pytree

from revcompile.compiler.capture.attributes import AttributeLog, state_of
from revcompile.compiler.capture.decisions import DECIDES, DecisionWatch
from revcompile.compiler.capture.example import Example
from revcompile.compiler.capture.fake_values import (
    NEEDS_DATA,
    Values,
    fold,
    run_on_data,
    size_of_values,
    type_of_values,
)
from revcompile.compiler.capture.guards import PythonRead, ReadKind, size_guards
from revcompile.compiler.capture.isolation import (
    foreign_rng_state,
)
from revcompile.compiler.capture.leaf_modules import is_leaf
from revcompile.compiler.capture.memory import (
    NO_GRAD,
    STORAGES,
    WRITES,
    tensors_in,
    watch_memory,
)
from revcompile.compiler.capture.object_reads import TensorReads
from revcompile.compiler.capture.patches import AUTOCAST, autocast_state, is_grad_enabled
from revcompile.compiler.capture.proxy import ShapedProxy, ShapedTracer
from revcompile.compiler.capture.structures import (
    STRUCTURE,
    expanded,
    refuse_hidden_tensors,
    structure_of,
)
from revcompile.compiler.capture.trace_errors import (
    PythonState,
    Rejected,
    Untraceable,
    UntracedEffect,
    describe_failure,
    is_torch_code,
    is_users_code,
    user_line,
)
from revcompile.ir.conditions import IsInstance
from revcompile.ir.guards import FlagGuard, ModeGuards
from revcompile.ir.module_tree import called_module, child_path
from revcompile.ir.ops import attribute, store_buffer
from revcompile.ir.types import PATH, SOURCE, TYPE, VALUE

CONSTANT_PREFIX: Final = "revcompile_constant_"
"""How the names of constants begin that tracing registers as buffers."""

_DIFFERENTIATING = (torch.autograd.grad, torch.autograd.backward)


class Tracer(ShapedTracer):
    """Traces one model in the mode that it is in, see `fx_frontend.trace`."""

    proxy_buffer_attributes = True

    def __init__(
        self,
        model: nn.Module,
        example: Example,
        mode: FakeTensorMode,
        leaf_paths: frozenset[str],
        constants: dict[str, torch.Tensor],
    ) -> None:
        super().__init__(autowrap_modules=(math,))
        self.values = {}
        self.evaluating = False
        self.failure: Untraceable | None = None
        self.untraceable: dict[str, str] = {}
        self.stateful: set[str] = set()
        self.out_spec: pytree.TreeSpec | None = None
        self.restore: Callable[[nn.Module], None] = lambda module: None
        self.log = AttributeLog(paused=lambda: self.evaluating)
        self.tensor_reads = TensorReads(self.log)
        self.draws: set[str] = set()
        self.leaked: set[tuple[str, str, Any]] = set()
        self._reads: list[PythonRead] = []
        self._flags: list[FlagGuard] = []
        self._model, self._example, self._mode = model, example, mode
        self._leaf_paths, self._constants = leaf_paths, constants
        self._path = ""
        self._autocast = autocast_state()
        self._foreign_rng = foreign_rng_state()
        self._attribute_proxies: dict[str, fx.Proxy] = {}
        self._buffers: dict[str, torch.Tensor] = {}
        self._stored: set[str] = set()

    # -- what decides Python's control flow ---------------------------------------------------

    def guard(self, node: fx.Node, value: Any, reading: ReadKind) -> None:
        if not self.evaluating:
            self._reads.append(PythonRead(node, value, reading, user_line(), is_torch_code()))

    def leave_out(self, draw: fx.Node) -> None:
        self.draws.add(draw.meta[SOURCE])

    def flag(self, name: str, args: tuple[Any, ...], value: Any) -> None:
        """Note that Python has read a flag of torch; a submodule that does becomes a leaf."""
        if self.evaluating or is_torch_code():
            return
        guard = FlagGuard(name, args, value, user_line())
        if self._path:
            raise TraceError(f"what is computed depends on {guard.expression}")
        self._flags.append(guard)

    def note_class(self, module: nn.Module, classes: Any, result: bool) -> None:
        if not self.log.is_paused and is_users_code():
            kinds = classes if type(classes) is tuple else (classes,)
            if all(type(kind) is type for kind in kinds):
                self.log.note(module, "", True, IsInstance(kinds, result), is_own=False)

    def guards(self) -> ModeGuards:
        """All values that Python has read, as conditions on later calls."""
        firsts = {node: values.first for node, values in self.values.items()}
        labels = dict(zip(self._example.names, self._example.labels, strict=True))
        direct, derived, state = size_guards(self._reads, firsts, labels)
        paths = {module: path for path, module in self.root.named_modules()}
        return ModeGuards(
            direct,
            derived,
            state=state,
            attributes=self.log.guards(paths, self._used()),
            flags=tuple(dict.fromkeys(self._flags)),
        )

    def _used(self) -> set[str]:
        """Paths of the modules that the graph calls, reads from or runs through.

        Not of `nn.Identity`, which the graph will not call.
        """
        used = {""}
        for node in self.graph.nodes:
            paths = [str(node.meta.get(PATH) or "")]
            if node.op == "get_attr":
                paths.append(str(node.target).rpartition(".")[0])
            elif type(called_module(node, self.root)) is nn.Identity:
                paths = [str(node.target).rpartition(".")[0]]
            for path in paths:
                while path not in used:
                    used.add(path)
                    path = path.rpartition(".")[0]
        return used

    # -- arguments and results ----------------------------------------------------------------

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        example, flat = self._example, list(self._example.leaves)
        self._buffers = dict(self.root.named_buffers(remove_duplicate=False))
        places = [i for i, leaf in enumerate(flat) if isinstance(leaf, torch.Tensor)]
        for place, name in zip(places, example.names, strict=True):
            proxy = self.create_proxy("placeholder", name, (), {})
            first, second = (
                self._mode.from_tensor(leaves[place].detach())
                for leaves in (example.leaves, example.grown)
            )
            with watch_memory(proxy.node, self.values):
                self._learn(proxy.node, first, second)
            flat[place] = proxy

        def flat_forward(*inputs: Any) -> Any:
            args, kwargs = pytree.tree_unflatten(list(inputs), example.in_spec)
            result = self._watched(self.root, self.root, args, kwargs)
            self._store_others_buffers()
            outputs, self.out_spec = pytree.tree_flatten(expanded(result))
            return tuple(outputs)

        return flat_forward, flat

    def proxy(self, node: fx.Node) -> ShapedProxy:
        return ShapedProxy(node, self)

    def create_arg(self, a: Any) -> Any:
        if type(a) is ShapedProxy:
            return a.node
        if isinstance(a, torch.Size):
            return tuple(self.create_arg(n) for n in a)
        if isinstance(a, torch.Tensor) and not isinstance(a, nn.Parameter):
            known = a in self.tensor_attrs or any(a is b for b in self.root.buffers())
            if not known:
                self.tensor_attrs[a] = self._constant(a)
        try:
            with self.log.pause() if isinstance(a, torch.Tensor) else nullcontext():
                return super().create_arg(a)
        except NotImplementedError:
            raise TraceError(
                f"a {type(a).__name__} is an argument, which no graph can hold"
            ) from None

    def _constant(self, tensor: torch.Tensor) -> str:
        """The name of a constant that the model has made: equal tensors share it."""
        if isinstance(tensor, FakeTensor):
            raise TraceError("a tensor made outside the graph")
        same = (n for n, c in self._constants.items() if c.dtype == tensor.dtype)
        name = next((n for n in same if torch.equal(self._constants[n], tensor)), None)
        if name is None:
            name = f"{CONSTANT_PREFIX}{len(self._constants)}"
            self._constants[name] = tensor
        self.tensor_reads.note(tensor)
        setattr(self.root, name, tensor)
        return name

    # -- modules ------------------------------------------------------------------------------

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        path = None if self.evaluating else (self.submodule_paths or {}).get(m)
        if not path:  # the model itself, or a module that is not registered
            return forward(*args, **kwargs)
        self._refuse_foreign_rng()
        outer, self._path = self._path, path
        try:
            if self._path in self._leaf_paths or is_leaf(m):
                return self.create_proxy("call_module", self._path, args, kwargs)
            return self._descend(m, forward, args, kwargs)
        except Exception as error:
            self.failure = self.failure or describe_failure(self._path, error)
            raise
        finally:
            self._path = outer

    def _descend(
        self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Trace into a module; if that fails, undo the attempt and make it a leaf module."""
        path, mark = self._path, self._mark()
        generator = torch.get_rng_state()
        try:
            return self._watched(module, forward, args, kwargs)
        except Rejected:
            raise
        except Exception as error:
            failure = self.failure = self.failure or describe_failure(path, error)
            self._roll_back(mark)
            self.restore(module)
            torch.set_rng_state(generator)
            proxy = self.create_proxy("call_module", path, args, kwargs)
            inside = f"{path}."
            self.untraceable = {
                p: cause for p, cause in self.untraceable.items() if not p.startswith(inside)
            }
            self.untraceable[path] = failure.cause
            if failure.has_state:
                self.stateful.add(path)
            return proxy

    def _mark(self) -> tuple[fx.Node, int, int, int]:
        """The current end of the trace, to roll back to."""
        last = next(iter(reversed(self.graph.nodes)))
        return last, len(self._reads), len(self.log.events), len(self._flags)

    def _roll_back(self, mark: tuple[fx.Node, int, int, int]) -> None:
        last, reads, events, flags = mark
        del self._reads[reads:], self.log.events[events:], self._flags[flags:]
        for node in list(reversed(self.graph.nodes)):
            if node is last:
                break
            self.graph.erase_node(node)
            self.values.pop(node, None)
        alive = {n: p for n, p in self._attribute_proxies.items() if p.node in self.values}
        self._attribute_proxies.clear()
        self._attribute_proxies.update(alive)

    def _watched(
        self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Call a forward, and raise if it had an effect that is not in the graph."""
        buffers, state, generator = dict(module._buffers), state_of(module), torch.get_rng_state()
        start = len(self.log.events)
        result = forward(*args, **kwargs)
        self._refuse_foreign_rng()
        if not torch.equal(generator, torch.get_rng_state()):
            raise UntracedEffect("random numbers drawn outside the graph", module)
        for name, old in buffers.items():
            new = module._buffers.get(name)
            if new is not old and _fake_value(new) is not _fake_value(old):
                self._store_buffer(module, name, new)
        elsewhere = [(m, n) for m, n in self.log.overwritten(start) if m is not module]
        if elsewhere or state_of(module) != state:
            self._note_leaked(module)
            # A cached value changes in the first call only, a counter in the second call too.
            mark, state = self._mark(), state_of(module)
            others = {m: state_of(m) for m, _ in elsewhere}
            forward(*args, **kwargs)
            counted = [f"its attribute {n!r}" for n in self._counted(module, state, mark[2])]
            counted += self._counted_elsewhere(elsewhere, others)
            self._roll_back(mark)
            for what in counted:
                raise PythonState(f"the forward pass counts in {what}", module)
        return result

    def _note_leaked(self, module: nn.Module) -> None:
        """Note attributes that hold tensors computed from the inputs or from parameters."""
        for name, value in vars(module).items():
            entries = value.items() if type(value) is dict else [(None, value)]
            for key, held in entries:
                if type(held) is ShapedProxy and self._is_computed(held.node):
                    self.leaked.add((self._path, name, key))

    def _is_computed(self, node: fx.Node) -> bool:
        """Is a value computed from inputs or parameters, not from sizes alone?"""
        open_ends, seen = [node], set[fx.Node]()
        while open_ends:
            source = open_ends.pop()
            value = self.values[source].first
            if source in seen or not tensors_in(value):
                continue
            seen.add(source)
            if source.op == "placeholder" or isinstance(value, nn.Parameter):
                return True
            open_ends += source.all_input_nodes
        return False

    def _counted(self, module: nn.Module, state: dict[str, Any], since: int) -> list[str]:
        """Attributes that differ after every call, and that the next call reads.

        A tensor that is only stored for the user differs after every call as well.
        """
        now = state_of(module)
        changed = [name for name in now if name in state and now[name] != state[name]]
        return [
            name
            for name in changed
            if isinstance(now[name], tuple) or self.log.read_first(module, name, since)
        ]

    def _counted_elsewhere(
        self,
        written: Iterable[tuple[nn.Module, str]],
        states: dict[nn.Module, dict[str, Any]],
    ) -> list[str]:
        """Plain attributes of other modules that differ after every call, in words."""
        paths = self.submodule_paths or {}
        return [
            f"the attribute {name!r} of {paths.get(module) or type(module).__name__}"
            for module, name in written
            if isinstance(state_of(module).get(name), tuple)
            and state_of(module)[name] != states[module].get(name)
        ]

    def _store_buffer(self, module: nn.Module, name: str, value: Any) -> None:
        """Trace the assignment to a buffer; a childless module that makes it becomes a leaf."""
        path = child_path(self._path, name)
        self._stored.add(path)
        can_be_leaf = self._path and not any(module.children())
        if can_be_leaf or type(value) is not ShapedProxy:
            raise UntracedEffect(f"the forward pass assigns to its buffer {name!r}", module)
        buffer = self.create_proxy("get_attr", path, (), {})
        if value.node.meta[TYPE] != buffer.node.meta[TYPE]:
            raise UntracedEffect(f"its buffer {name!r} changes its shape or type", module)
        self.create_proxy("call_function", store_buffer, (buffer, value), {})

    def _store_others_buffers(self) -> None:
        """Trace assignments to buffers of modules other than the one whose forward made them."""
        for path, module in self.root.named_modules():
            for name, value in module._buffers.items():
                if type(value) is ShapedProxy and child_path(path, name) not in self._stored:
                    self._path = path
                    self._store_buffer(module, name, value)
        self._path = ""

    def _refuse_foreign_rng(self) -> None:
        if foreign_rng_state() != self._foreign_rng:
            raise Rejected(
                "the forward pass draws from the random module of Python or NumPy, which a graph "
                "would freeze; draw from torch instead, in a submodule of its own",
                self.root.get_submodule(self._path),
            )

    # -- nodes --------------------------------------------------------------------------------

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if self.evaluating or type(attr_val) is ShapedProxy:
            return attr_val
        self._attribute_proxies = parameter_proxy_cache
        with self.log.pause():
            return super().getattr(attr, attr_val, parameter_proxy_cache)

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
        node.meta[NO_GRAD] = not is_grad_enabled()
        if kind not in ("placeholder", "output"):
            try:
                with self.log.pause():
                    layer = called_module(node, self.root)
                with watch_memory(node, self.values):
                    first, second = (self._evaluate(node, layer, which) for which in (0, 1))
                    self._learn(node, first, second)
                self._refuse_hidden_write(node)
                refuse_hidden_tensors(node, self.values[node].first)
                self._keep_buffer_writer(node)
            except Exception:
                self.graph.erase_node(node)
                raise
        self.failure = None
        return node

    def _refuse_hidden_write(self, node: fx.Node) -> None:
        """Under `no_grad`, writing into a value with a gradient leaves its gradient as it was."""
        for source in node.all_input_nodes if node.meta[NO_GRAD] else ():
            hidden = source.meta[STORAGES] & node.meta[WRITES] and source.op != "get_attr"
            if hidden and not source.meta[NO_GRAD]:
                raise TraceError("an in-place operation under no_grad on a value made outside")

    def _keep_buffer_writer(self, node: fx.Node) -> None:
        """A childless module that writes to a buffer becomes a leaf module."""
        for source in node.all_input_nodes if self._path else ():
            if source.op != "get_attr" or not source.meta[STORAGES] & node.meta[WRITES]:
                continue
            module = self.root.get_submodule(self._path)
            if not any(module.children()):
                name = str(source.target).rpartition(".")[2]
                raise UntracedEffect(f"the forward pass writes into its buffer {name!r}", module)

    def _learn(self, node: fx.Node, first: Any, second: Any) -> None:
        self.values[node] = Values(first, second)
        node.meta[TYPE] = type_of_values(first, second, self._example.batch)
        node.meta[VALUE] = size_of_values(first, second, self._example.batch)
        node.meta[STRUCTURE] = structure_of(first)

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
                    if target in self._buffers:
                        return self._buffers[target]
                    return attribute(self.root, target)
                if node.op == "call_method":
                    return getattr(args[0], target)(*args[1:], **kwargs)
                return (target if layer is None else layer)(*args, **kwargs)
        except NEEDS_DATA:
            if layer is None:
                raise
            original = self._model.get_submodule(target)
            node.meta[DECIDES] = "control flow on its contents"
            return run_on_data(original, layer, self._mode, args, kwargs)
        finally:
            self.evaluating = False
            if isinstance(watch, DecisionWatch):
                node.meta.setdefault(DECIDES, watch.operation)

    def fold(self, node: fx.Node, which: int) -> Any:
        """The real value of a node that is computed from sizes alone."""
        self.evaluating = True
        try:
            return fold(node, {n: v[which] for n, v in self.values.items()})
        finally:
            self.evaluating = False


def _fake_value(value: Any) -> Any:
    return value.known.first if type(value) is ShapedProxy else value
