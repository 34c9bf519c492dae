"""FX graphs as JSON.

The code of a graph is generated from its names and targets as they stand, so everything that ends
up in the text is checked to be a name and nothing more.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable
from typing import Any, Final

from torch import fx

from revcompile.errors import InputError
from revcompile.ir import PATH, SOURCE, TYPE, VALUE
from revcompile.runtime.shipping.names import Names, check_member, located, name_of
from revcompile.runtime.shipping.values import decode, encode

__all__ = ["check_path", "read_graph", "write_graph"]

_META: Final = {"type": TYPE, "path": PATH, "source": SOURCE, "value": VALUE}
_IDENTIFIER: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_STEP: Final = re.compile(r"""[^\s."'\\{}\x00-\x1f]+""")


def check_path(path: str) -> None:
    """Whether a dotted path is one: nothing that could end a string, and no special names."""
    for step in path.split("."):
        if not _STEP.fullmatch(step) or step.startswith("__"):
            raise InputError(f"{path!r} is not a path that a stage may read: {step!r}")


def write_graph(graph: fx.Graph) -> list[dict[str, Any]]:
    """The nodes in order.

    >>> graph = fx.Graph()
    >>> _ = graph.output(graph.placeholder("x"))
    >>> for node in write_graph(graph):
    ...     print(node)
    {'name': 'x', 'op': 'placeholder', 'target': 'x'}
    {'name': 'output', 'op': 'output', 'target': 'output', 'args': [{'node': 'x'}]}
    """
    if type(graph._codegen) is not fx.graph.CodeGen:
        raise InputError(f"expected a graph with plain code, got {type(graph._codegen).__name__}")
    nodes = []
    for node in graph.nodes:
        with located(f"node {node.name}"):
            nodes.append(_write_node(node))
    return nodes


def _write_node(node: fx.Node) -> dict[str, Any]:
    target = node.target if isinstance(node.target, str) else name_of(node.target)
    _check_node(node.name, node.op, target, node.target, node.args, node.kwargs)
    found: dict[str, Any] = {"name": node.name, "op": node.op, "target": target}
    try:
        if node.args:
            found["args"] = [encode(arg, _reference) for arg in node.args]
        if node.kwargs:
            found["kwargs"] = {k: encode(arg, _reference) for k, arg in node.kwargs.items()}
    except InputError as error:
        raise InputError(f"its arguments hold {error}, which cannot be written") from error
    return found | ({"meta": meta} if (meta := _write_meta(node)) else {})


def _write_meta(node: fx.Node) -> dict[str, Any]:
    meta = {}
    for label, key in _META.items():
        if key in node.meta:
            try:
                meta[label] = encode(node.meta[key])
            except InputError:  # a note for readers: nothing runs by it
                continue
    return meta


def _reference(value: Any) -> dict[str, Any] | None:
    return {"node": value.name} if isinstance(value, fx.Node) else None


def read_graph(data: list[dict[str, Any]], names: Names) -> fx.Graph:
    """The graph that `write_graph` wrote."""
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}

    def node(name: str) -> fx.Node:
        if name not in nodes:
            raise InputError(f"refers to the node {name!r}, which does not come before it")
        return nodes[name]

    for item in data:
        with located(f"node {item['name']}"):
            nodes[item["name"]] = _read_node(graph, item, names, node)
    if not nodes or graph.find_nodes(op="output") != [list(graph.nodes)[-1]]:
        raise InputError("the graph does not end with its output")
    return graph


def _read_node(
    graph: fx.Graph, item: dict[str, Any], names: Names, node: Callable[[str], fx.Node]
) -> fx.Node:
    name, op, target = item["name"], item["op"], item["target"]
    special = {"node": node}
    args = tuple(decode(arg, names, special) for arg in item.get("args", ()))
    kwargs = {key: decode(arg, names, special) for key, arg in item.get("kwargs", {}).items()}
    called = names.function(target) if op == "call_function" else target
    _check_node(name, op, target, called, args, kwargs)
    made = graph.create_node(op, called, args, kwargs, name=name)
    if made.name != name:
        raise InputError(f"the name {name!r} is taken or reserved; give the node another one")
    for label, value in item.get("meta", {}).items():
        made.meta[_META[label]] = decode(value, names)
    return made


def _check_node(
    name: str, op: str, target: str, called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Whether all that would stand in generated code is a plain name."""
    for label in (name, *kwargs):
        _check_identifier(label)
    match op:
        case "placeholder":
            _check_identifier(target.removeprefix("*").removeprefix("*"))
        case "call_method":
            _check_identifier(target)
            check_member(target)
        case "call_module" | "get_attr":
            check_path(target)
        case "call_function" if called is getattr:
            if kwargs or len(args) < 2 or type(args[1]) is not str:
                raise InputError("getattr needs the attribute's name as a constant")
            check_member(args[1])
        case "call_function" | "output":
            pass
        case _:
            raise InputError(f"{op!r} is no kind of node")


def _check_identifier(name: str) -> None:
    if not _IDENTIFIER.fullmatch(name) or keyword.iskeyword(name):
        raise InputError(f"{name!r} is no name that generated code could use")
