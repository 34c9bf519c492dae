"""The second front end: `torch.export`, for models FX cannot follow.

An exported graph is a record of one mode on one device. Here it learns to behave like a module:
train and eval exports are merged, batch norms count and freeze their statistics as modules do,
devices are asked for at run time, and assertions that break autocast are erased.
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
from torch.utils import _pytree as pytree

from revcompile.compiler.capture.attributes import AttributeLog, attributes_logged, state_of
from revcompile.compiler.capture.copies import (
    attributes_kept,
    copy_model,
    fake_copy,
    keep_constant,
    set_mode,
)
from revcompile.compiler.capture.example import Example, signature_of
from revcompile.compiler.capture.export_guards import exported_guards, free_dimensions
from revcompile.compiler.capture.functional import Entangled, forbid_inplace, written_inputs
from revcompile.compiler.capture.guards import make_guards
from revcompile.compiler.capture.memory import mark_state, watched_memory
from revcompile.compiler.capture.modes import merge_modes
from revcompile.compiler.capture.patches import unseen_refused
from revcompile.compiler.capture.proxy import Values
from revcompile.compiler.capture.random_draws import draws_decided
from revcompile.compiler.capture.rng import rng_kept
from revcompile.compiler.capture.simplify import simplify
from revcompile.compiler.capture.structures import STRUCTURE, structure_of
from revcompile.compiler.capture.trace_errors import PythonState, Unseen, blame
from revcompile.compiler.capture.tracer import Untraceable, size_of_values, type_of_values
from revcompile.ir.guards import AttributeGuard, ModeGuards
from revcompile.ir.ops import attribute, batch_norm, device_of
from revcompile.ir.types import PATH, SOURCE, TYPE, VALUE, Captured, Frontend

__all__ = ["export_capture"]

_MODE_DEPENDENT = ("scaled_dot_product_attention", "dropout", "rrelu")
"""Operators whose arguments differ between the modes: written out in full, so they line up."""

_ASSERTIONS = ("_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range")


def export_capture(model: nn.Module, example: Example, leaf_paths: frozenset[str]) -> Captured:
    """Export both modes and turn the result into a graph over the original's parameters."""
    if leaf_paths:
        raise Untraceable("", "leaf_modules cannot be kept whole by torch.export", "?")
    try:
        return _captured(model, example, lengths_free=True)
    except Untraceable as error:
        if error.is_final or free_dimensions(example, True) == free_dimensions(example, False):
            raise
        return _captured(model, example, lengths_free=False)


def _captured(model: nn.Module, example: Example, lengths_free: bool) -> Captured:
    shadow, root = copy_model(model), copy_model(model)
    graphs: list[fx.Graph] = []
    guards: list[ModeGuards] = []
    draws: set[str] = set()
    out_spec = None
    for training in (True, False):
        set_mode(shadow, model, training)
        with draws_decided() as lines, _attributes_guarded(shadow, example) as attributes:
            module, program = _export(shadow, example, lengths_free)
        for node in module.graph.find_nodes(op="get_attr"):
            if not _has(root, str(node.target)):
                keep_constant(root, str(node.target), attribute(module, str(node.target)))
        sizes = exported_guards(module.graph, example)
        guards.append(ModeGuards(direct=sizes, attributes=tuple(attributes)))
        graph = _normalize(module.graph, example, root)
        _infer_types(graph, root, example)
        graphs.append(graph)
        draws |= lines
        out_spec = program.call_spec.out_spec
    notes = written_inputs(graphs[0])
    try:
        train, evaluation = (simplify(graph, root) for graph in graphs)
    except Entangled as error:
        node = error.nodes[0]
        where = str(node.meta.get(PATH, "")), str(node.meta.get(SOURCE, "?"))
        raise Untraceable(where[0], str(error), where[1]) from error
    for graph in (train, evaluation):
        forbid_inplace(graph, root)
    readers = {g.path for mode in guards for g in mode.attributes if g.name == "training"}
    merged = merge_modes(train, evaluation, readers)
    assert out_spec is not None
    return Captured(
        name=type(model).__name__,
        root=root,
        graph=merged if merged is not None else train,
        eval_graph=None if merged is not None else evaluation,
        signature=signature_of(example, out_spec),
        frontend=Frontend.EXPORT,
        guards=make_guards(guards[0], guards[1], merged, root, example),
        draws=frozenset(draws),
        notes=notes,
    )


@contextmanager
def _attributes_guarded(model: nn.Module, example: Example) -> Iterator[list[AttributeGuard]]:
    """Gather what a trace of the model reads of its attributes; stop if it counts in one."""
    log, found = AttributeLog(paused=lambda: False), list[AttributeGuard]()
    with attributes_kept(model):
        with attributes_logged(log):
            yield found
        paths = {module: path for path, module in model.named_modules()}
        for module, name in log.overwritten():
            if module in paths and not _is_remembered(model, paths[module], name, example):
                error = PythonState(f"the forward pass counts in its attribute {name!r}", module)
                raise blame(paths[module], error)
        found += log.guards(paths)


def _is_remembered(model: nn.Module, path: str, name: str, example: Example) -> bool:
    """Is an attribute that a call changes left alone by the next one: a size, a table?"""
    if any(t.is_meta for t in (*model.parameters(), *example.tensors(0))):
        return False
    twin, (args, kwargs) = copy_model(model), example.call(0)
    module, states = twin.get_submodule(path), list[Any]()
    with rng_kept(), torch.no_grad():
        for _ in range(2):
            twin(*args, **kwargs)
            states.append(state_of(module).get(name))
    return bool(states[0] == states[1])


def _export(model: nn.Module, example: Example, lengths_free: bool) -> tuple[fx.GraphModule, Any]:
    args, kwargs = example.call(0)
    free = iter(free_dimensions(example, lengths_free))
    bound = example.forward.bind(*args, **kwargs)
    order = pytree.tree_unflatten([_Free(next(free)) for _ in example.leaves], example.in_spec)
    named = example.forward.bind(*order[0], **order[1])
    assert named.arguments.keys() == bound.arguments.keys()
    shapes = pytree.tree_map_only(_Free, lambda f: f.dimensions, dict(named.arguments))
    try:
        with warnings.catch_warnings(), unseen_refused():
            warnings.simplefilter("ignore")
            program = torch.export.export(model, args, kwargs, dynamic_shapes=shapes, strict=False)
            module = program.module(check_guards=False)
    except Untraceable:
        raise
    except Unseen as error:
        raise blame(_last_module(error, model), error) from error
    except Exception as error:
        text = next((line for line in str(error).splitlines() if line.strip()), "")
        raise Untraceable("", f"{type(error).__name__}: {text}", _last_user_line(error)) from error
    assert isinstance(module, fx.GraphModule)
    return module, program


@dataclass(frozen=True)
class _Free:
    """Stands for a leaf of the arguments: its dimensions that stay free."""

    dimensions: dict[int, Any] | None


def _last_module(error: BaseException, model: nn.Module) -> str:
    """The path of the innermost module whose forward pass failed."""
    paths = {id(module): path for path, module in model.named_modules()}
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    found = [paths[id(one)] for f in frames if id(one := f.f_locals.get("self")) in paths]
    return found[-1] if found else ""


def _last_user_line(error: BaseException) -> str:
    home = torch.__path__[0]
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if not f.filename.startswith((home, "<")) and "revcompile" not in f.filename
    ]
    return f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else "?"


# -- from a record to a graph like FX's ----------------------------------------------------------


def _normalize(recorded: fx.Graph, example: Example, root: nn.Module) -> fx.Graph:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    slots = iter(range(len(example.leaves)))
    names = iter(example.names)
    counters = _batch_counters(recorded)
    for node in recorded.nodes:
        if node.op == "placeholder":
            leaf = example.leaves[next(slots)]
            if isinstance(leaf, torch.Tensor):
                copies[node] = graph.placeholder(next(names))
            elif node.users:
                raise Untraceable("", f"the fixed argument {node.name} is used as a value", "?")
            continue
        if node.op == "call_module" or _name(node) in _ASSERTIONS or node in counters.values():
            continue
        if node.op == "output":
            flat = pytree.tree_leaves(fx.node.map_arg(node.args, lambda n: copies[n]))
            graph.output(tuple(flat))
            continue
        if any(source in counters.values() for source in node.all_input_nodes):
            path = _module_path(node.meta.get("nn_module_stack") or {})
            reason = "a count of batches is read, which here only batch norms keep"
            raise Untraceable(path, reason, _source(node))
        copies[node] = graph.node_copy(node, copies.__getitem__)
        new = copies[node]
        stack = node.meta.get("nn_module_stack") or {}
        new.meta = {PATH: _module_path(stack), SOURCE: _source(node)}
        _as_module_would(graph, new, copies, counters.get(node))
    _ask_for_devices(graph, root)
    graph.lint()
    return graph


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target)).split(".")[0]


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


def _batch_counters(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Each batch norm's `num_batches_tracked += 1`, which becomes part of the norm."""
    counts: dict[str, fx.Node] = {}
    for node in graph.nodes:
        if _name(node) == "add_" and isinstance(node.args[0], fx.Node):
            target = str(node.args[0].target)
            if node.args[0].op == "get_attr" and target.endswith("num_batches_tracked"):
                counts[target.rpartition(".")[0]] = node
    found = {}
    for node in graph.nodes:
        if _name(node) == "batch_norm" and isinstance(node.args[3], fx.Node):
            owner = str(node.args[3].target).rpartition(".")[0]
            if owner in counts:
                found[node] = counts[owner]
    return found


def _as_module_would(
    graph: fx.Graph, node: fx.Node, copies: dict[fx.Node, fx.Node], counter: fx.Node | None
) -> None:
    """Batch norms keep their books; in-place operators become methods like FX records."""
    if _name(node) == "batch_norm" and getattr(node.target, "namespace", "") == "aten":
        count = None
        owner = node.args[3]
        if isinstance(owner, fx.Node):
            with graph.inserting_before(node):
                target = str(owner.target).rpartition(".")[0] + ".num_batches_tracked"
                count = graph.create_node("get_attr", target)
                count.meta = dict(node.meta)
        node.target = batch_norm
        node.args = (*node.args[:8], count)
    schema = getattr(node.target, "_schema", None)
    name = _name(node)
    if schema is not None and name in _MODE_DEPENDENT:
        given = len(node.args)
        rest = [a for a in schema.arguments[given:] if not a.kwarg_only]
        node.args = (*node.args, *(node.kwargs.get(a.name, a.default_value) for a in rest))
        node.kwargs = {k: v for k, v in node.kwargs.items() if k not in {a.name for a in rest}}
    if schema is not None and schema.is_mutable and hasattr(torch.Tensor, name):
        node.op, node.target = "call_method", name


def _ask_for_devices(graph: fx.Graph, root: nn.Module) -> None:
    """Replace devices written down by the export with the device of the parameters."""
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
        node.meta[VALUE] = size_of_values(pair[0], pair[1])
        node.meta[STRUCTURE] = structure_of(pair[0]) if node.op != "output" else None
    mark_state(graph, fake)


class _Recorder(fx.Interpreter):
    """An interpreter that remembers every value.

    Given the values of a run at another batch size, it notes where in memory each value lies.
    """

    def __init__(
        self, root: nn.Module, graph: fx.Graph, others: Sequence[Mapping[fx.Node, Any]]
    ) -> None:
        super().__init__(root, graph=graph, garbage_collect_values=False)
        self.values: dict[fx.Node, Any] = {}
        self._pairs: dict[fx.Node, Values] = {}
        self._other = others[0] if others else None

    def run_node(self, n: fx.Node) -> Any:
        """Run one node."""
        if self._other is None:
            self.values[n] = super().run_node(n)
            return self.values[n]
        with watched_memory(n, self._pairs):
            self.values[n] = super().run_node(n)
            self._pairs[n] = Values(self.values[n], self._other[n])
        return self.values[n]


def _has(root: nn.Module, path: str) -> bool:
    try:
        attribute(root, path)
    except AttributeError:
        return False
    return True
