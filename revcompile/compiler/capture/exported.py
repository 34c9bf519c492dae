"""The second front end: `torch.export`, for models FX cannot follow.

An exported graph is specialised to one mode on one device. Here it is made to behave like a module:
batch norms count batches and freeze their statistics as modules do, devices are looked up at run
time, and assertions that break autocast are erased.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree as pytree

from revcompile.compiler.capture.attributes import AttributeLog, log_attributes, state_of
from revcompile.compiler.capture.example import Example
from revcompile.compiler.capture.fake_values import (
    Values,
    fake_copy,
    size_of_values,
    type_of_values,
)
from revcompile.compiler.capture.functional import NotFunctional
from revcompile.compiler.capture.fx_frontend import Traced, Traces
from revcompile.compiler.capture.guards import exported_guards, free_dimensions
from revcompile.compiler.capture.isolation import (
    copy_model,
    preserve_attributes,
    preserve_rng,
    register_constant,
    set_mode,
)
from revcompile.compiler.capture.memory import ASSERTIONS, mark_state, watch_memory
from revcompile.compiler.capture.patches import refuse_unsupported
from revcompile.compiler.capture.random_draws import draws_decided
from revcompile.compiler.capture.structures import STRUCTURE, structure_of
from revcompile.compiler.capture.trace_errors import (
    PythonState,
    Unsupported,
    Untraceable,
    describe_failure,
)
from revcompile.ir.guards import AttributeGuard, ModeGuards
from revcompile.ir.module_tree import child_path
from revcompile.ir.ops import attribute, batch_norm, device_of, op_name
from revcompile.ir.types import PATH, SOURCE, TYPE, VALUE, Frontend

_MODE_DEPENDENT = ("scaled_dot_product_attention", "dropout", "rrelu")
"""Operators whose arguments differ between the modes: written out in full, so they line up."""

_COUNT = "num_batches_tracked"
"""The buffer in which torch's batch norms count."""


class ExportFrontend:
    """Exports a model once in each mode.

    `lengths_free`: lengths of token inputs stay free, where the model allows it.
    """

    kind = Frontend.EXPORT

    def __init__(
        self, model: nn.Module, example: Example, leaves: frozenset[str], lengths_free: bool
    ) -> None:
        if leaves:
            raise Untraceable("", "torch.export has no leaf modules", "?")
        self.model, self.example = model, example
        self.dimensions = free_dimensions(example, lengths_free)

    def trace(self) -> Traces:
        """Export both modes and turn the results into graphs over the original's parameters."""
        shadow, root = copy_model(self.model), copy_model(self.model)
        train, evaluation = (
            self._traced(set_mode(shadow, self.model, training), root) for training in (True, False)
        )
        return Traces(root, (train, evaluation))

    def add_leaf(self, error: NotFunctional) -> None:
        """An export has no leaf modules: always raises."""
        meta = error.nodes[0].meta
        path, source = str(meta.get(PATH, "")), str(meta.get(SOURCE, "?"))
        raise Untraceable(path, str(error), source) from error

    def _traced(self, shadow: nn.Module, root: nn.Module) -> Traced:
        with draws_decided() as lines, _attributes_guarded(shadow, self.example) as attributes:
            module, program = _export(shadow, self.example, self.dimensions)
        for node in module.graph.find_nodes(op="get_attr"):
            if not _has(root, str(node.target)):
                register_constant(root, str(node.target), attribute(module, str(node.target)))
        sizes = exported_guards(module.graph, self.example)
        graph = _normalize(module.graph, self.example, root)
        _infer_types(graph, root, self.example)
        return Traced(
            graph,
            program.call_spec.out_spec,
            guards=ModeGuards(direct=sizes, attributes=tuple(attributes)),
            draws=frozenset(lines),
        )


@contextmanager
def _attributes_guarded(model: nn.Module, example: Example) -> Iterator[list[AttributeGuard]]:
    """Collect guards on the attributes that an export reads; stop if it counts in one."""
    log, guards = AttributeLog(paused=lambda: False), list[AttributeGuard]()
    with preserve_attributes(model):
        with log_attributes(log):
            yield guards
        paths = {module: path for path, module in model.named_modules()}
        for module, name in log.overwritten():
            if module in paths and not _is_remembered(model, paths[module], name, example):
                error = PythonState(f"the forward pass counts in its attribute {name!r}", module)
                raise describe_failure(paths[module], error)
        guards += log.guards(paths)


def _is_remembered(model: nn.Module, path: str, name: str, example: Example) -> bool:
    """Is an attribute that the first call changes the same after the second: a cached value?"""
    if any(t.is_meta for t in (*model.parameters(), *example.tensors(0))):
        return False
    twin, (args, kwargs) = copy_model(model), example.call(0)
    module, states = twin.get_submodule(path), list[Any]()
    with preserve_rng(), torch.no_grad():
        for _ in range(2):
            twin(*args, **kwargs)
            states.append(state_of(module).get(name))
    return bool(states[0] == states[1])


def _export(
    model: nn.Module, example: Example, dimensions: Sequence[dict[int, Any] | None]
) -> tuple[fx.GraphModule, Any]:
    args, kwargs = example.call(0)
    free = iter(dimensions)
    bound = example.forward.bind(*args, **kwargs)
    order = pytree.tree_unflatten([_Free(next(free)) for _ in example.leaves], example.in_spec)
    named = example.forward.bind(*order[0], **order[1])
    assert named.arguments.keys() == bound.arguments.keys()
    shapes = pytree.tree_map_only(_Free, lambda f: f.dimensions, dict(named.arguments))
    try:
        with warnings.catch_warnings(), refuse_unsupported():
            warnings.simplefilter("ignore")
            program = torch.export.export(model, args, kwargs, dynamic_shapes=shapes, strict=False)
            module = program.module(check_guards=False)
    except Untraceable:
        raise
    except Unsupported as error:
        raise describe_failure(_last_module(error, model), error) from error
    except Exception as error:
        text = next((line for line in str(error).splitlines() if line.strip()), "")
        raise Untraceable("", f"{type(error).__name__}: {text}", _last_user_line(error)) from error
    assert isinstance(module, fx.GraphModule)
    return module, program


@dataclass(frozen=True)
class _Free:
    """In the place of one argument: its dimensions that stay free."""

    dimensions: dict[int, Any] | None


def _last_module(error: BaseException, model: nn.Module) -> str:
    """The path of the innermost module whose forward pass failed."""
    paths = {id(module): path for path, module in model.named_modules()}
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    owners = [id(frame.f_locals.get("self")) for frame in frames]
    running = [paths[owner] for owner in owners if owner in paths]
    return running[-1] if running else ""


def _last_user_line(error: BaseException) -> str:
    home = torch.__path__[0]
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if not f.filename.startswith((home, "<")) and "revcompile" not in f.filename
    ]
    return f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else "?"


# -- from an exported graph to a graph like FX's --------------------------------------------------


def _normalize(exported: fx.Graph, example: Example, root: nn.Module) -> fx.Graph:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    slots = iter(range(len(example.leaves)))
    names = iter(example.names)
    counters = _batch_counters(exported, root)
    for node in exported.nodes:
        if node.op == "placeholder":
            leaf = example.leaves[next(slots)]
            if isinstance(leaf, torch.Tensor):
                copies[node] = graph.placeholder(next(names))
            elif node.users:
                raise Untraceable("", f"the fixed argument {node.name} is used as a value", "?")
            continue
        if node.op == "call_module" or op_name(node) in ASSERTIONS or node in counters.values():
            continue
        if node.op == "output":
            flat = pytree.tree_leaves(fx.node.map_arg(node.args, lambda n: copies[n]))
            graph.output(tuple(flat))
            continue
        if any(source in counters.values() for source in node.all_input_nodes):
            path = _module_path(node.meta.get("nn_module_stack") or {})
            reason = "the number of batches that a batch norm has seen is read outside the norm"
            raise Untraceable(path, reason, _source(node))
        copies[node] = graph.node_copy(node, copies.__getitem__)
        new = copies[node]
        stack = node.meta.get("nn_module_stack") or {}
        new.meta = {PATH: _module_path(stack), SOURCE: _source(node)}
        _as_module_would(graph, new, root)
    _use_parameter_device(graph, root)
    graph.lint()
    return graph


def _module_path(stack: dict[str, Any]) -> str:
    last = list(stack.values())[-1] if stack else ("", "")
    return str(last[0]).removeprefix("L['self'].").removeprefix("L__self___").split("@")[0]


def _source(node: fx.Node) -> str:
    trace = [line for line in (node.meta.get("stack_trace") or "").splitlines() if "File" in line]
    if not trace:
        return "?"
    parts = trace[-1].split('"')
    number = trace[-1].split("line ")[-1].split(",")[0]
    return f"{parts[1]}:{number}" if len(parts) > 1 else "?"


def _batch_counters(graph: fx.Graph, root: nn.Module) -> dict[fx.Node, fx.Node]:
    """Each batch norm's `num_batches_tracked += 1`, which becomes part of the norm."""
    counts: dict[str, fx.Node] = {}
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.add_.Tensor):
        counter = node.args[0]
        if isinstance(counter, fx.Node) and counter.op == "get_attr":
            owner, _, name = str(counter.target).rpartition(".")
            if name == _COUNT and isinstance(attribute(root, owner), _NormBase):
                counts[owner] = node
    norms = {}
    for node in graph.nodes:
        if op_name(node) == "batch_norm" and isinstance(node.args[3], fx.Node):
            owner = str(node.args[3].target).rpartition(".")[0]
            if owner in counts:
                norms[node] = counts[owner]
    return norms


def _as_module_would(graph: fx.Graph, node: fx.Node, root: nn.Module) -> None:
    """Let a batch norm count its batches; turn in-place operators into methods, as FX has them."""
    if op_name(node) == "batch_norm" and getattr(node.target, "namespace", "") == "aten":
        count, statistics = None, node.args[3]
        if isinstance(statistics, fx.Node):
            path = str(statistics.target).rpartition(".")[0]
            norm = attribute(root, path)
            if isinstance(norm, _NormBase) and norm.num_batches_tracked is not None:
                with graph.inserting_before(node):
                    count = graph.create_node("get_attr", child_path(path, _COUNT))
                    count.meta = dict(node.meta)
        node.target = batch_norm
        node.args = (*node.args[:8], count)
    schema = getattr(node.target, "_schema", None)
    name = op_name(node)
    if schema is not None and name in _MODE_DEPENDENT:
        given = len(node.args)
        rest = [a for a in schema.arguments[given:] if not a.kwarg_only]
        node.args = (*node.args, *(node.kwargs.get(a.name, a.default_value) for a in rest))
        node.kwargs = {k: v for k, v in node.kwargs.items() if k not in {a.name for a in rest}}
    if schema is not None and schema.is_mutable and hasattr(torch.Tensor, name):
        node.op, node.target = "call_method", name


def _use_parameter_device(graph: fx.Graph, root: nn.Module) -> None:
    """Replace the devices in an export by the device that the parameters have at run time."""
    anchor = next((name for name, _ in root.named_parameters()), None)
    for node in list(graph.nodes):
        places = [*node.args, *node.kwargs.values()]
        if not any(isinstance(p, torch.device) for p in places) or anchor is None:
            continue
        with graph.inserting_before(node):
            parameter = graph.create_node("get_attr", anchor)
            device = graph.call_function(device_of, (parameter,))
        for made in (parameter, device):
            made.meta = dict(node.meta)
        node.args = tuple(device if isinstance(a, torch.device) else a for a in node.args)
        node.kwargs = {
            k: device if isinstance(v, torch.device) else v for k, v in node.kwargs.items()
        }


def _infer_types(graph: fx.Graph, root: nn.Module, example: Example) -> None:
    """Types of all values from fake runs at both batch sizes."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake = fake_copy(root, mode)
    runs: list[dict[fx.Node, Any]] = []
    for which in (1, 0):
        recorder = _Recorder(fake, graph, runs)
        inputs = [mode.from_tensor(t) for t in example.tensors(which)]
        try:
            with mode:
                recorder.run(*inputs)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            message = f"the exported graph fails at batch {example.batch[which]}: {text}"
            raise Untraceable("", message, "?") from error
        runs.append(recorder.values)
    for node in graph.nodes:
        pair = runs[1].get(node), runs[0].get(node)
        node.meta[TYPE] = type_of_values(pair[0], pair[1], example.batch)
        node.meta[VALUE] = size_of_values(pair[0], pair[1], example.batch)
        node.meta[STRUCTURE] = structure_of(pair[0]) if node.op != "output" else None
    mark_state(graph, fake)


class _Recorder(fx.Interpreter):
    """An interpreter that keeps every value.

    Given the values of a run at another batch size, it notes where in memory each value is.
    """

    def __init__(
        self, root: nn.Module, graph: fx.Graph, others: Sequence[Mapping[fx.Node, Any]]
    ) -> None:
        super().__init__(root, graph=graph, garbage_collect_values=False)
        self.values: dict[fx.Node, Any] = {}
        self._pairs: dict[fx.Node, Values] = {}
        self._other = others[0] if others else None

    def run_node(self, n: fx.Node) -> Any:
        if self._other is None:
            self.values[n] = super().run_node(n)
            return self.values[n]
        with watch_memory(n, self._pairs):
            self.values[n] = super().run_node(n)
            self._pairs[n] = Values(self.values[n], self._other[n])
        return self.values[n]


def _has(root: nn.Module, path: str) -> bool:
    try:
        attribute(root, path)
    except AttributeError:
        return False
    return True
