"""From what steered Python while tracing to guards: graphs from inputs to the deciding values."""

from __future__ import annotations

import enum
import operator
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import fx, nn

from revcompile.compiler.capture.copies import copy_model, empty_like_on
from revcompile.compiler.capture.example import Example
from revcompile.compiler.capture.memory import tensors_in
from revcompile.compiler.capture.modes import flags_selected
from revcompile.ir.guards import Guards, ModeGuards, SizeGuard, SizeGuards, input_types
from revcompile.ir.types import PATH

__all__ = [
    "Reading",
    "Record",
    "Words",
    "is_torch_code",
    "make_guards",
    "meta_copy",
    "needed_for",
    "size_guards",
]


class Reading(enum.Enum):
    """What Python was told of a value."""

    VALUE = "value"
    LENGTH = "length"
    CONTENTS = "contents"
    """The numbers in a tensor that is made from sizes alone."""


@dataclass(frozen=True)
class Record:
    """A value of the graph that was given to Python as a plain value."""

    node: fx.Node
    value: Any
    reading: Reading
    source: str
    by_torch: bool
    """Was it torch's own code that asked?"""


_PLACES: Final = frozenset(("device", "is_cuda", "is_cpu", "is_mps", "is_xpu", "is_meta"))
"""Attributes that tell where a tensor is."""

_CHOOSES_KERNELS: Final = _PLACES | {"requires_grad", "is_nested", "is_sparse", "layout"}
"""What torch's own layers look at to choose between kernels of one meaning."""

_INFIX: Final[dict[Any, str]] = {
    operator.add: "+",
    operator.sub: "-",
    operator.mul: "*",
    operator.truediv: "/",
    operator.floordiv: "//",
    operator.mod: "%",
    operator.pow: "**",
    operator.and_: "&",
    operator.or_: "|",
    operator.lt: "<",
    operator.le: "<=",
    operator.gt: ">",
    operator.ge: ">=",
    operator.eq: "==",
    operator.ne: "!=",
}

_ARITIES: Final = frozenset(
    ("chunk", "split", "split_with_sizes", "tensor_split", "unbind", "hsplit", "vsplit", "dsplit")
)
"""Functions that give as many tensors as a size says."""


def size_guards(
    records: Iterable[Record], values: Mapping[fx.Node, Any], labels: Mapping[str, str]
) -> tuple[SizeGuards, SizeGuards]:
    """Guards that need the inputs alone, and guards that need shapes inside the network.

    `values` are the nodes' values at the first batch size, `labels` the arguments' names as a
    user writes them.
    """
    words, facts = Words(labels), dict[fx.Node, _Facts]()
    for node in values:
        facts[node] = _facts(node, values, facts)
    wanted: dict[tuple[str, str], tuple[Record, str]] = {}
    for record in records:
        if _is_needed(record, values[record.node], facts[record.node]):
            text = words.of(record.node)
            text = f"len({text})" if record.reading is Reading.LENGTH else text
            wanted.setdefault((text, repr(record.value)), (record, text))
    groups: tuple[list[tuple[Record, str]], ...] = ([], [])
    for record, text in wanted.values():
        groups[facts[record.node].looks_inside].append((record, text))
    direct, derived = (_with_graph(group) for group in groups)
    return direct, derived


@dataclass(frozen=True)
class _Facts:
    """What a node is computed from: inputs, tensors inside the network, attributes of tensors."""

    from_input: bool
    looks_inside: bool
    attributes: frozenset[str]


def _facts(node: fx.Node, values: Mapping[fx.Node, Any], known: Mapping[fx.Node, _Facts]) -> _Facts:
    is_given = node.op in ("placeholder", "get_attr")
    name = _attribute_read(node)
    below = [known[source] for source in _sources(node)]
    return _Facts(
        from_input=node.op == "placeholder" or any(f.from_input for f in below),
        looks_inside=any(f.looks_inside for f in below)
        or (not is_given and bool(tensors_in(values[node]))),
        attributes=frozenset({name} if name else ()).union(*(f.attributes for f in below)),
    )


def _is_needed(record: Record, value: Any, facts: _Facts) -> bool:
    """Can the value be another one in another call of the same network?"""
    if not facts.from_input or (record.by_torch and _CHOOSES_KERNELS & facts.attributes):
        return False
    if record.reading is not Reading.LENGTH or isinstance(value, torch.Tensor):
        return True
    name = str(getattr(record.node.target, "__name__", record.node.target))
    return not tensors_in(value) or name in _ARITIES


def needed_for(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Nodes and everything they are computed from."""
    open_ends = list(nodes)
    needed = set(open_ends)
    while open_ends:
        for source in _sources(open_ends.pop()):
            if source not in needed:
                needed.add(source)
                open_ends.append(source)
    return needed


def _sources(node: fx.Node) -> list[fx.Node]:
    """What a node reads. Where a tensor is can be asked of any input of the model."""
    if _attribute_read(node) in _PLACES:
        return [next(iter(node.graph.find_nodes(op="placeholder")))]
    return node.all_input_nodes


def _attribute_read(node: fx.Node) -> str | None:
    is_read = node.op == "call_function" and node.target is getattr
    return str(node.args[1]) if is_read else None


def _with_graph(group: list[tuple[Record, str]]) -> SizeGuards:
    if not group:
        return SizeGuards()
    origin = group[0][0].node.graph
    needed = needed_for(record.node for record, _ in group)
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in origin.nodes:
        if node.op == "placeholder":
            copies[node] = graph.placeholder(node.name)
        elif node in needed:
            if _attribute_read(node) in _PLACES:
                source = copies[_sources(node)[0]]
                copies[node] = graph.call_function(getattr, (source, node.args[1]))
                copies[node].meta = dict(node.meta)
            else:
                copies[node] = graph.node_copy(node, copies.__getitem__)
    outputs = []
    for record, _ in group:
        output = copies[record.node]
        if record.reading is Reading.LENGTH:
            output = graph.call_function(len, (output,))
        outputs.append(output)
    graph.output(tuple(outputs))
    return SizeGuards(
        tuple(SizeGuard(text, record.value, record.source) for record, text in group),
        graph,
        frozenset(i for i, (r, _) in enumerate(group) if r.reading is Reading.CONTENTS),
    )


class Words:
    """Nodes as a user would write them."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = labels

    def of(self, value: Any, inner: bool = False) -> str:
        """The expression of a node or a constant; `inner` ones get parentheses."""
        if isinstance(value, slice):
            bounds = [value.start, value.stop] + ([value.step] if value.step is not None else [])
            return ":".join("" if b is None else self.of(b) for b in bounds)
        if isinstance(value, tuple):
            return ", ".join(map(self.of, value))
        if not isinstance(value, fx.Node):
            return repr(value)
        if value.op == "placeholder":
            return self._labels.get(value.name, value.name)
        if value.op == "get_attr":
            return str(value.target)
        if value.op == "call_module":
            return f"{value.target}(...)"
        if value.op == "call_method":
            arguments = ", ".join(map(self.of, value.args[1:]))
            return f"{self._operand(value.args[0])}.{value.target}({arguments})"
        return self._call(value, inner)

    def _call(self, node: fx.Node, inner: bool) -> str:
        args: Any = node.args
        if node.target is getattr:
            return f"{self._operand(args[0])}.{args[1]}"
        if node.target is operator.getitem:
            return f"{self._operand(args[0])}[{self.of(args[1])}]"
        if node.target in _INFIX:
            text = f"{self.of(args[0], True)} {_INFIX[node.target]} {self.of(args[1], True)}"
            return f"({text})" if inner else text
        name = getattr(node.target, "__name__", str(node.target))
        return f"{name}({', '.join(self.of(a, False) for a in args)})"

    def _operand(self, value: Any) -> str:
        """What stands before a dot; a value deep in the network goes by its module's name."""
        is_call = isinstance(value, fx.Node) and value.op in ("call_function", "call_method")
        if is_call and value.target not in (getattr, operator.getitem) and value.meta.get(PATH):
            name = getattr(value.target, "__name__", str(value.target))
            return f"{name}(...) [in {value.meta[PATH]}]"
        return self.of(value, inner=True)


def make_guards(
    train: ModeGuards,
    evaluation: ModeGuards,
    merged: fx.Graph | None,
    root: nn.Module,
    example: Example,
) -> Guards:
    """The guards of a capture from those of its two traces.

    Where one graph serves both modes (`merged`), it asks modules for their mode as it runs, and
    those flags are free; the mode of the whole model chooses between the graphs, or is free too.
    """
    free = {""} | (flags_selected(merged) if merged is not None else set())

    def kept(mode: ModeGuards) -> ModeGuards:
        return replace(
            mode,
            attributes=tuple(
                g for g in mode.attributes if g.name != "training" or g.path not in free
            ),
        )

    needs_skeleton = any(g.direct.graph or g.derived.graph for g in (train, evaluation))
    return Guards(
        kept(train),
        kept(evaluation),
        skeleton=meta_copy(root) if needs_skeleton else None,
        seen=frozenset(input_types(example.tensors(which)) for which in (0, 1)),
    )


_HOME: Final = (str(Path(__file__).parent), str(Path(torch.__path__[0], "fx")))
_TORCH: Final = torch.__path__[0]


def is_torch_code() -> bool:
    """Is it torch's own code, not a user's, that runs now (tracers aside)?"""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HOME):
        frame = frame.f_back
    return frame.f_code.co_filename.startswith(_TORCH)


def meta_copy(model: nn.Module) -> nn.Module:
    """The model on the meta device: its structure and attributes, without any memory.

    Tensors that are plain attributes are not copied, and stay what they are.
    """
    plain = (v for m in model.modules() for v in vars(m).values() if isinstance(v, torch.Tensor))
    memo: dict[int, Any] = {id(tensor): tensor for tensor in plain}
    for tensor in (*model.parameters(), *model.buffers()):
        memo[id(tensor)] = empty_like_on(tensor, tensor.dtype, "meta")
    return copy_model(model, memo)
