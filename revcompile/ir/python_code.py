"""Graphs as Python text and functions, whatever the modules are called: `{"in": ..., "it's": ...}`.

A compiled graph is a function of `(root, *inputs)`.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import keyword
import linecache
import re
from collections.abc import Callable
from typing import Any, Final

from torch import fx
from torch.fx.graph import PythonCode

__all__ = ["compile_graph", "path_expression", "python_code", "source_of"]

_STAND_IN: Final = "revcompile_path_"
_counter = itertools.count()


def path_expression(path: str, of: str = "self") -> str:
    """An expression that reads what is at a dotted path, written as FX does where FX can.

    >>> path_expression("layers.0.weight"), path_expression("layers.in")
    ('getattr(self.layers, "0").weight', 'getattr(self.layers, "in")')
    """
    for name in path.split("."):
        if name.isidentifier() and not keyword.iskeyword(name):
            of = f"{of}.{name}"
        else:
            quoted = repr(name) if _needs_escapes(name) else f'"{name}"'
            of = f"getattr({of}, {quoted})"
    return of


def _needs_escapes(name: str) -> bool:
    return '"' in name or repr(name) != f"'{name}'"


def python_code(graph: fx.Graph) -> PythonCode:
    """The code of a graph as a function `forward(self, ...)`.

    FX prints names that are keywords, or contain quotes, as they are: paths with such names are
    printed as stand-ins first.
    """
    reads = [str(n.target) for n in graph.nodes if n.op in ("call_module", "get_attr")]
    odd = [path for path in dict.fromkeys(reads) if any(map(_is_misprinted, path.split(".")))]
    if not odd:
        return graph.python_code("self")
    stand_ins = {path: f"{_STAND_IN}{index}" for index, path in enumerate(odd)}
    printed = copy.deepcopy(graph)
    for node in printed.nodes:
        if node.op in ("call_module", "get_attr"):
            node.target = stand_ins.get(str(node.target), node.target)
    code = printed.python_code("self")
    expressions = [path_expression(path) for path in odd]
    pattern = rf"\bself\.{_STAND_IN}(\d+)\b"
    return dataclasses.replace(
        code, src=re.sub(pattern, lambda found: expressions[int(found[1])], code.src)
    )


def _is_misprinted(name: str) -> bool:
    return keyword.iskeyword(name) or _needs_escapes(name)


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
