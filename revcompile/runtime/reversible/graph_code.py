"""Segment graphs as Python functions of `(root, *inputs)`."""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch import fx, nn

from revcompile.ir.python_code import python_code

__all__ = ["compile_graph", "compile_with_modules", "source_of"]

_counter = itertools.count()


def source_of(graph: fx.Graph) -> str:
    """The generated code of a graph, with the original module names."""
    return python_code(graph).src.strip()


def compile_graph(graph: fx.Graph, name: str) -> Callable[..., Any]:
    """A function from a graph; tracebacks show the generated lines under the segment's name."""
    code = python_code(graph)
    filename = f"<revcompile {name} {next(_counter)}>"
    linecache.cache[filename] = (len(code.src), None, code.src.splitlines(True), filename)
    namespace = dict(code.globals)
    exec(compile(code.src, filename, "exec"), namespace)
    function: Callable[..., Any] = namespace["forward"]
    return function


def compile_with_modules(graph: fx.Graph, root: nn.Module, name: str) -> Callable[..., Any]:
    """As `compile_graph`, but modules are looked up in `root` once, parameters at every call.

    A module's members are found by a slow search (`nn.Module.__getattr__`), and a layer of a deep
    net has many modules around it. Whoever calls the function has to notice replaced modules.
    """
    flat, modules = fx.Graph(), SimpleNamespace()
    flat.output(flat.graph_copy(graph, {}))
    for node in flat.nodes:
        path = str(node.target)
        if node.op not in ("call_module", "get_attr"):
            continue
        owner, _, member = path.rpartition(".")
        if member in root.get_submodule(owner)._modules:
            node.target = _add(modules, root, path)
        else:
            node.target = f"{_add(modules, root, owner)}.{member}"
    function = compile_graph(flat, name)

    def run(_: nn.Module, *inputs: Any) -> Any:
        return function(modules, *inputs)

    return run


def _add(modules: SimpleNamespace, root: nn.Module, path: str) -> str:
    """Let a module be an attribute of its own; returns its name."""
    module, name = root.get_submodule(path), path.replace(".", "_") or "root"
    while vars(modules).setdefault(name, module) is not module:
        name += "_"
    return name
