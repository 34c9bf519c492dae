"""Graphs as Python text and functions, for modules of any name: `{"in": ..., "it's": ...}`.

A compiled graph is a function of `(root, *inputs)`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import keyword
import linecache
import re
from collections.abc import Callable
from types import CodeType, SimpleNamespace
from typing import Any, Final, cast

from torch import fx, nn
from torch.fx.graph import PythonCode

_STAND_IN: Final = "revcompile_path_"
_counter = itertools.count()


def path_expression(path: str, of: str = "self") -> str:
    """An expression that reads a dotted path, in FX's spelling where that is valid Python.

    >>> path_expression("layers.0.weight"), path_expression("layers.in")
    ('getattr(self.layers, "0").weight', 'getattr(self.layers, "in")')
    """
    for name in path.split("."):
        if name.isidentifier() and not keyword.iskeyword(name):
            of = f"{of}.{name}"
        else:
            is_plain = '"' not in name and repr(name) == f"'{name}'"
            quoted = f'"{name}"' if is_plain else repr(name)
            of = f"getattr({of}, {quoted})"
    return of


def python_code(graph: fx.Graph, expression: Callable[[str], str] = path_expression) -> PythonCode:
    """The code of a graph as a function `forward(self, ...)`; `expression` prints paths.

    FX does not escape names that are keywords or contain quotes, so all paths are printed as
    stand-ins first.
    """
    printed, paths = copied(graph), list[str]()
    for node in printed.nodes:
        if node.op in ("call_module", "get_attr"):
            paths.append(str(node.target))
            node.target = f"{_STAND_IN}{len(paths) - 1}"
    code = printed.python_code("self")
    pattern = rf"\bself\.{_STAND_IN}(\d+)\b"
    return dataclasses.replace(
        code, src=re.sub(pattern, lambda found: expression(paths[int(found[1])]), code.src)
    )


def source_of(graph: fx.Graph) -> str:
    """The generated code of a graph, with the original module names."""
    return python_code(graph).src.strip()


def copied(graph: fx.Graph) -> fx.Graph:
    """A copy of a graph, to be rewritten."""
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    return copy


def compile_graph(graph: fx.Graph, name: str) -> Callable[..., Any]:
    """A function from a graph; tracebacks show the generated lines under the segment's name."""
    code = python_code(graph)
    namespace = dict(code.globals)
    exec(_byte_code(code.src, name), namespace)
    function: Any = namespace["forward"]
    # torch.compile gives up after a few compilations of one code object: each function has its own
    function.__code__ = function.__code__.replace()
    return cast(Callable[..., Any], function)


@functools.lru_cache(maxsize=1024)  # stages are made for checks and again for each trainer
def _byte_code(source: str, name: str) -> CodeType:
    filename = f"<revcompile {name} {next(_counter)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    return compile(source, filename, "exec")


def compile_with_modules(graph: fx.Graph, root: nn.Module, name: str) -> Callable[..., Any]:
    """A function of a graph's inputs: modules are looked up in `root` once, parameters every time.

    Looking up a module's members is slow (`nn.Module.__getattr__`), and the layers of a deep net
    are nested in many modules. The caller of the function has to notice replaced modules.
    """
    flat, modules = copied(graph), SimpleNamespace()
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

    def run(*inputs: Any) -> Any:
        return function(modules, *inputs)

    return run


def _add(modules: SimpleNamespace, root: nn.Module, path: str) -> str:
    """Make a module an attribute of `modules`; returns its name."""
    module, name = root.get_submodule(path), path.replace(".", "_") or "root"
    while vars(modules).setdefault(name, module) is not module:
        name += "_"
    return name
