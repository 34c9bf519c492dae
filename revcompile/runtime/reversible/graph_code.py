"""Segment graphs as Python functions of `(root, *inputs)`."""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Callable
from typing import Any

from torch import fx

from revcompile.ir.python_code import python_code

__all__ = ["compile_graph", "source_of"]

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
