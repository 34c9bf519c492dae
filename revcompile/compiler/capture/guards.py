"""Guards from what Python code has read while tracing.

Each value that decided control flow becomes an output of a small graph, which computes it again
from the inputs of a call. See `ir/guards.py` for the guards themselves.
"""

from __future__ import annotations

import enum
import functools
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import torch
from torch import fx, nn
from torch.fx.graph import magic_methods

from revcompile.compiler.capture.attribute_reads import AttributeReads
from revcompile.compiler.capture.bytecode import (
    is_of_torch,
    methods_of_forward,
    reads_of_members,
)
from revcompile.compiler.capture.example import Example
from revcompile.compiler.capture.fake_values import meta_copy
from revcompile.compiler.capture.memory import tensors_in
from revcompile.compiler.capture.modes import flags_selected
from revcompile.ir.guards import (
    DEVICE_ATTRIBUTES,
    Guards,
    ModeGuards,
    SizeGuard,
    SizeGuards,
    input_types,
)
from revcompile.ir.module_tree import called_module, child_path
from revcompile.ir.ops import op_name
from revcompile.ir.plain_attributes import Names, attributes_of
from revcompile.ir.signature import Signature
from revcompile.ir.snapshot import MOST_ELEMENTS
from revcompile.ir.types import PATH, TYPE, types_in


class ReadKind(enum.Enum):
    """What Python code has read of a value."""

    VALUE = "value"
    LENGTH = "length"
    CONTENTS = "contents"
    """The contents of a tensor that is computed from sizes alone."""


@dataclass(frozen=True)
class PythonRead:
    """A value of the graph that Python code has read as a plain value."""

    node: fx.Node
    value: Any
    kind: ReadKind
    source: str
    by_torch: bool = False
    """Whether torch's own code has read it."""
    grown: Any = None
    """The value for one sample more, if it is computed from the batch size."""


_CHOOSES_KERNELS: Final = DEVICE_ATTRIBUTES | {"requires_grad", "is_nested", "is_sparse", "layout"}
"""Attributes that torch's own layers read to choose between kernels that compute the same."""

_ARITIES: Final = frozenset(
    (
        *("chunk", "split", "split_with_sizes", "tensor_split", "unbind", "hsplit", "vsplit"),
        *("dsplit", "unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes"),
    )
)
"""Functions whose number of results depends on a size."""


def size_guards(
    reads: Iterable[PythonRead],
    values: Mapping[fx.Node, Any],
    signature: Signature,
    root: nn.Module,
) -> SizeGuards:
    """Guards on what Python has read of inputs, of values inside the network, and of parameters.

    `values` are the nodes' values at the first batch size, `root` has the modules that they call.
    """
    facts: dict[fx.Node, _Facts] = {}
    for node in values:
        facts[node] = _facts(node, values, facts)
    needed = [read for read in reads if _is_needed(read, values[read.node], facts[read.node], root)]
    # inputs first: a size inside is wrong, or cannot be computed, because of one of the inputs
    return guarded(sorted(needed, key=lambda read: facts[read.node].looks_inside), signature)


@dataclass(frozen=True)
class _Facts:
    """What a node is computed from: inputs, tensors inside the network, attributes of tensors."""

    from_input: bool
    looks_inside: bool
    attributes: frozenset[str]


def _facts(node: fx.Node, values: Mapping[fx.Node, Any], known: Mapping[fx.Node, _Facts]) -> _Facts:
    is_given = node.op in ("placeholder", "get_attr")
    name = _attribute_read(node)
    is_device = name in DEVICE_ATTRIBUTES  # guards read it from an input
    below = [known[source] for source in (() if is_device else node.all_input_nodes)]
    return _Facts(
        from_input=is_device or node.op == "placeholder" or any(f.from_input for f in below),
        looks_inside=any(f.looks_inside for f in below)
        or (not is_given and bool(tensors_in(values[node]))),
        attributes=frozenset({name} if name else ()).union(*(f.attributes for f in below)),
    )


def _is_needed(read: PythonRead, value: Any, facts: _Facts, root: nn.Module) -> bool:
    """Whether the value can differ in another call of the same network."""
    if read.by_torch and _CHOOSES_KERNELS & facts.attributes:
        return False
    if not facts.from_input:  # of a parameter or a buffer
        return bool(facts.attributes) and not facts.looks_inside and not read.by_torch
    if read.kind is not ReadKind.LENGTH or isinstance(value, torch.Tensor):
        return True
    if (module := called_module(read.node, root)) is not None:
        return isinstance(value, list) and not is_of_torch(type(module).forward)
    return not tensors_in(value) or op_name(read.node) in _ARITIES


def _attribute_read(node: fx.Node) -> str | None:
    if node.op == "call_method" and node.target == "get_device":
        return "get_device"
    is_read = node.op == "call_function" and node.target is getattr
    return str(node.args[1]) if is_read else None


def guarded(reads: Iterable[PythonRead], signature: Signature) -> SizeGuards:
    """Guards on values of one graph, with a graph that computes them.

    Equal reads become one guard. Different reads may have the same text, which abbreviates values
    inside the network.
    """
    firsts: dict[Any, fx.Node] = {}

    @functools.cache  # sizes may share their operands
    def same(node: fx.Node) -> fx.Node:
        """The first node with the same expression over the same tensors."""
        if types_in(node.meta.get(TYPE)) or not node.all_input_nodes:
            return node
        operands = fx.map_arg((node.args, node.kwargs), same)
        return firsts.setdefault((node.op, node.target, repr(operands)), node)

    printer = ExpressionPrinter(dict(zip(signature.placeholders, signature.labels, strict=True)))
    guards: dict[Any, tuple[PythonRead, SizeGuard]] = {}
    for read in reads:
        text = printer.show(read.node)
        text = f"len({text})" if read.kind is ReadKind.LENGTH else text
        guard = SizeGuard(text, read.value, read.source, read.grown)
        guards.setdefault((same(read.node), read.kind, repr(read.value)), (read, guard))
    if not guards:
        return SizeGuards()
    used = [read for read, _ in guards.values()]
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.graph_copy(used[0].node.graph, copies)
    first = next(iter(graph.find_nodes(op="placeholder")))
    for node in graph.nodes:
        if _attribute_read(node) in DEVICE_ATTRIBUTES:  # all inputs have the same device
            node.args = (first, *node.args[1:])
    outputs = [copies[read.node] for read in used]
    for place, read in enumerate(used):
        if read.kind is ReadKind.LENGTH:
            outputs[place] = graph.call_function(len, (outputs[place],))
    graph.output(tuple(outputs))
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
    contents = (place for place, read in enumerate(used) if read.kind is ReadKind.CONTENTS)
    return SizeGuards(tuple(guard for _, guard in guards.values()), graph, frozenset(contents))


class Traced(Protocol):
    """The part of a mode's trace that guards need, see `tracer.Tracer`."""

    guards: ModeGuards
    asked: set[tuple[str, str]]
    read_outside: set[str]
    written: set[tuple[str, str]]
    attribute_reads: AttributeReads


class ExpressionPrinter:
    """Prints nodes as the user would write them."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = labels

    def show(self, value: Any, inner: bool = False) -> str:
        """The expression of a node or a constant; an operator that is `inner` gets parentheses."""
        if isinstance(value, slice):
            bounds = [value.start, value.stop] + ([value.step] if value.step is not None else [])
            return ":".join("" if b is None else self.show(b) for b in bounds)
        if isinstance(value, tuple):
            return ", ".join(map(self.show, value))
        if not isinstance(value, fx.Node):
            return repr(value)
        if value.op == "placeholder":
            return self._labels.get(value.name, value.name)
        if value.op == "get_attr":
            return str(value.target)
        if value.op == "call_module":
            return f"{value.target}(...)"
        if value.op == "call_method":
            arguments = self._arguments(value.args[1:], value.kwargs)
            return f"{self._operand(value.args[0])}.{value.target}({arguments})"
        return self._call(value, inner)

    def _call(self, node: fx.Node, inner: bool) -> str:
        args: Any = node.args
        if node.target is getattr:
            return f"{self._operand(args[0])}.{args[1]}"
        if node.target is operator.getitem:
            return f"{self._operand(args[0])}[{self.show(args[1])}]"
        name = op_name(node)
        if name in magic_methods and getattr(operator, name) is node.target:
            text = magic_methods[name].format(*(self.show(a, True) for a in args))
            return f"({text})" if inner else text
        return f"{name}({self._arguments(args, node.kwargs)})"

    def _arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        named = (f"{name}={self.show(value)}" for name, value in kwargs.items())
        return ", ".join((*map(self.show, args), *named))

    def _operand(self, value: Any) -> str:
        """The text before a dot; a value inside the network is shown with its module's path."""
        is_call = isinstance(value, fx.Node) and value.op in ("call_function", "call_method")
        if is_call and value.target not in (getattr, operator.getitem) and value.meta.get(PATH):
            return f"{op_name(value)}(...) [in {value.meta[PATH]}]"
        return self.show(value, inner=True)


def make_guards(
    model: nn.Module,
    root: nn.Module,
    example: Example,
    traced: Sequence[Traced],
    graphs: Sequence[fx.Graph],
    merged: fx.Graph | None,
) -> Guards:
    """The guards of a capture, except flags, from its two traces and the graphs made of them.

    A graph that serves both modes (`merged`) reads `training` flags of modules as it runs; these
    need no guard if only the module itself has read its flag. Nor does the flag of the whole model,
    which chooses between the graphs.
    """
    selected = flags_selected(merged) if merged is not None else set()
    unguarded = {""} | selected.difference(*(mode.read_outside for mode in traced))
    modes = [mode.guards for mode in traced]
    train, evaluation = (
        replace(mode, modes={p: flag for p, flag in mode.modes.items() if p not in unguarded})
        for mode in modes
    )
    has_sizes = any(sizes.guards for mode in modes for sizes in mode.sizes)
    plain, asked, fields = _attributes(model, traced, graphs)
    return Guards(
        train,
        evaluation,
        skeleton=meta_copy(root) if has_sizes else None,
        seen=frozenset(  # traced without gradients of inputs
            input_types(t.detach() for t in example.tensors(which)) for which in (0, 1)
        ),
        plain=plain,
        asked=asked,
        fields=fields,
    )


def _attributes(
    model: nn.Module, traced: Sequence[Traced], graphs: Iterable[fx.Graph]
) -> tuple[Names, Names, Names]:
    """Plain attributes of modules that the graphs do not call, and names looked up on modules.

    The third result is `Guards.fields`.

    Modules that the graphs call read their own attributes when they run. Only attributes that the
    code of other modules reads (`self.drop.p`) are guarded in them.
    """
    written = {pair for mode in traced for pair in mode.written}
    nodes = [node for graph in graphs for node in graph.nodes]
    called = {str(node.target) for node in nodes if node.op == "call_module"}
    within = tuple(f"{path}." for path in sorted(called))
    around = (
        type(module)
        for path, module in model.named_modules()
        if path not in called and not path.startswith(within)
    )
    read = frozenset(pair for kind in dict.fromkeys(around) for pair in reads_of_members(kind))

    def is_watched(path: str, name: str) -> bool:
        if (path, name) in written or name == "training":
            return False
        if path in called:
            member = path.rpartition(".")[2]
            return any(name == n and (member == m or member.isdigit()) for m, n in read)
        return not path.startswith(within) and child_path(path, name) not in called

    by_name = {str(node.target) for node in nodes if node.op == "get_attr"}

    def is_followed(path: str, name: str, value: Any) -> bool:
        """Whether it is a large tensor that the graph reads anew in each call."""
        is_large = isinstance(value, torch.Tensor) and value.numel() > MOST_ELEMENTS
        return is_large and child_path(path, name) in by_name

    fields = _merged([mode.attribute_reads.by_label() for mode in traced])
    plain: dict[str, frozenset[str]] = {}
    for path, module in model.named_modules():
        held = attributes_of(module)
        names = frozenset(held)
        if path in fields and path not in called:
            names &= fields[path]
        plain[path] = frozenset(
            n for n in names if is_watched(path, n) and not is_followed(path, n, held[n])
        )
    others: dict[str, frozenset[str]] = {}
    for path, name in sorted({pair for mode in traced for pair in mode.asked}):
        if is_watched(path, name) and name not in plain[path]:
            others[path] = others.get(path, frozenset()) | {name}
    for path, module in model.named_modules():
        # An instance may override methods and defaults of its class.
        of_class = methods_of_forward(type(module))
        if path in fields:
            of_class = frozenset(n for n in fields[path] if hasattr(type(module), n))
        unseen = of_class - plain[path] - set(dir(nn.Module))
        if names := frozenset(name for name in unseen if is_watched(path, name)):
            others[path] = others.get(path, frozenset()) | names
    return {path: names for path, names in plain.items() if names}, others, fields


def _merged(reads: Sequence[Names]) -> Names:
    """Names that any of the traces has read, by labels that all of them have."""
    first, *others = reads
    labels = first.keys() & set.intersection(*(set(each) for each in reads))
    return {label: first[label].union(*(each[label] for each in others)) for label in labels}
