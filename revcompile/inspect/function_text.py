"""Segments' graphs as Python functions, and the imports and names that printed code needs."""

from __future__ import annotations

import keyword
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any, Final

import torch
from torch import fx, nn
from torch.nn import functional as F

from revcompile.ir import coupling_ops, ops
from revcompile.ir.program import legal
from revcompile.ir.python_code import path_expression, python_code
from revcompile.ir.stage_code import HELPERS
from revcompile.ir.types import PATH

_COMMENT_COLUMN: Final = 60
_NN_FUNCTION: Final = re.compile(r"\btorch\._C\._nn\.(\w+)")
_FREES: Final = re.compile(r";  (?:\w+ = )+None$", re.MULTILINE)
"""`;  x = None`, with which FX frees values."""
_WORD: Final = re.compile(r"(?<![\w.\"'])[A-Za-z_]\w*")


def commented(line: str, comment: str) -> str:
    """A line of code with a comment at its end."""
    return f"{line:<{_COMMENT_COLUMN}}  # {comment}" if comment else line


def module_path(root: nn.Module, path: str, of: str = "self") -> str:
    """How Python reads a dotted path.

    >>> net = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.ModuleDict({"0": nn.ReLU()}))
    >>> module_path(net, "0.0.weight"), module_path(net, "1.0")
    ('self[0][0].weight', "self[1]['0']")
    """
    module: Any = root
    for name in path.split("."):
        value = getattr(module, name)
        if name.isidentifier() and not keyword.iskeyword(name):
            of += f".{name}"
        elif isinstance(module, nn.ModuleDict | nn.ParameterDict):
            of += f"[{name!r}]"
        elif name.isdigit() and int(name) < _length(module) and module[int(name)] is value:
            of += f"[{name}]"
        else:
            of = path_expression(name, of)
        module = value
    return of


def _length(module: Any) -> int:
    indexed = isinstance(module, nn.Sequential | nn.ModuleList | nn.ParameterList)
    return len(module) if indexed else 0


def _functional(name: re.Match[str]) -> str:
    """`torch._C._nn.gelu` under the name that people know it by."""
    known = getattr(F, name[1], None)
    return f"torch.nn.functional.{name[1]}" if known is getattr(torch._C._nn, name[1]) else name[0]


def _common_parent(graph: fx.Graph) -> str:
    """How the node names of layers begin that are all in one module: `layer1_0_`."""
    called = [str(node.target).split(".")[:-1] for node in graph.find_nodes(op="call_module")]
    together = zip(*called, strict=False)
    shared = [names[0] for names in takewhile(lambda names: len(set(names)) == 1, together)]
    return f"{legal('.'.join(shared))}_" if shared else ""


def python_text(graph: fx.Graph, root: nn.Module) -> tuple[str, dict[str, Any]]:
    """A graph's code with readable module paths, and the globals it uses."""
    code = python_code(graph)
    paths = {str(n.target) for n in graph.nodes if n.op in ("call_module", "get_attr")}
    text = _NN_FUNCTION.sub(_functional, code.src.strip())
    for path in sorted(paths, key=lambda path: (-len(path), path)):
        pattern = re.escape(path_expression(path)) + r"(?![\w.\"])"
        text = re.sub(pattern, module_path(root, path).replace("\\", r"\\"), text)
    used = set(_WORD.findall(text))
    return text, {name: value for name, value in code.globals.items() if name in used}


class Listing:
    """Functions one after the other, and what they import: text that can be executed."""

    def __init__(self, root: nn.Module, taken: Iterable[str]) -> None:
        self.root = root
        self.functions: list[str] = []
        self.imports: dict[str, tuple[str, str]] = {}
        self.taken = {*taken, *HELPERS}
        """Names that no variable of a program may have: it could hide a function."""

    def name(self, wanted: str) -> str:
        """A name for a function that nothing else has."""
        name = legal(wanted)
        while name in self.taken or keyword.iskeyword(name):
            name += "_"
        self.taken.add(name)
        return name

    def use(self, helper: str) -> str:
        """A function of `coupling_ops`, imported."""
        self.imports[helper] = (coupling_ops.__name__, helper)
        return helper

    def add_graph(
        self, name: str, graph: fx.Graph, comment: str, arguments: Sequence[str] = ()
    ) -> str:
        """Print a graph as a function; returns the function's name.

        Args:
            name: What to call it, if that is free.
            graph: What it computes.
            comment: Written behind the first line.
            arguments: What they are called, where not as in the graph.
        """
        name = self.name(name)
        printed = self._copy(graph, arguments)
        text, used = python_text(printed, self.root)
        text = _FREES.sub("", text)
        for node in printed.find_nodes(op="get_attr"):
            if all(user.target is coupling_ops.call_norm for user in node.users):
                layer = module_path(self.root, str(node.target))
                text = text.replace(f"    {node.name} = {layer}\n", "")
                text = text.replace(f"({node.name}, ", f"({layer}, ")
        for alias, value in used.items():
            text = re.sub(rf"(?<![\w.]){alias}\b", self._imported(alias, value), text)
        first, *lines = text.replace("def forward(", f"def {name}(", 1).split("\n")
        paths = {node.name: _owner(node) for node in printed.nodes}
        lines = list(_with_paths(lines, paths))
        self.functions.append("\n".join([commented(first, comment), *lines]))
        return name

    def _copy(self, graph: fx.Graph, arguments: Sequence[str]) -> fx.Graph:
        """A copy with the names that are printed."""
        new = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        prefix, names = _common_parent(graph), list(arguments)
        for node in graph.nodes:
            if node.op == "output":
                result = _as_tuples(fx.map_arg(node.args[0], copies.__getitem__))
                is_single = isinstance(result, tuple) and len(result) == 1
                new.output(result[0] if is_single else result)
                continue
            copy = copies[node] = new.node_copy(node, copies.__getitem__)
            copy.type = None
            is_named = node.op == "placeholder" and names
            self._rename(copy, names.pop(0) if is_named else copy.name.removeprefix(prefix))
            if node.op == "placeholder":
                copy.target = copy.name
        return new

    def _rename(self, node: fx.Node, name: str) -> None:
        if name != node.name and name.isidentifier() and not keyword.iskeyword(name):
            node._rename(name)
        if node.name in HELPERS:
            node._rename(f"{node.name}_value")

    def _imported(self, alias: str, value: Any) -> str:
        """The name under which a global of generated code is imported."""
        if alias == "torch":
            self.imports[alias] = ("", "torch")
            return alias
        method = getattr(value, "__name__", "")
        if getattr(torch.Tensor, method, None) is value:
            self.imports["torch"] = ("", "torch")
            return f"torch.Tensor.{method}"
        if alias in ("device", "inf", "nan"):
            self.imports[alias] = ("torch", alias)
            return alias
        module = getattr(value, "__module__", None) or ""
        name = getattr(value, "__qualname__", "")
        if module == "builtins":
            return alias
        if getattr(sys.modules.get(module), name, None) is not value:
            return alias  # not importable: has to be provided where the text is executed
        # variables avoid the short names of our own functions; FX keeps them off other aliases
        short = name if module in (ops.__name__, coupling_ops.__name__) else alias
        self.imports[short] = (module, name)
        return short

    def import_text(self) -> list[str]:
        """The import statements of all functions, if there are any."""
        lines = [f"import {name}" for module, name in self.imports.values() if not module]
        modules: dict[str, list[str]] = {}
        for alias, (module, name) in sorted(self.imports.items()):
            if module:
                modules.setdefault(module, []).append(
                    name if name == alias else f"{name} as {alias}"
                )
        for module, names in sorted(modules.items()):
            lines += _wrapped(f"from {module} import ", names)
        return ["\n".join(lines)] if lines else []


def _wrapped(start: str, names: Sequence[str]) -> list[str]:
    line = start + ", ".join(names)
    if len(line) <= 100:
        return [line]
    inside = textwrap.wrap(", ".join(names) + ",", 96, break_long_words=False)
    return [f"{start}(", *(f"    {row}" for row in inside), ")"]


def _as_tuples(result: Any) -> Any:
    return tuple(map(_as_tuples, result)) if isinstance(result, list | tuple) else result


def _owner(node: fx.Node) -> str:
    """Path of the module whose `forward` made a node."""
    path = str(node.meta.get(PATH, ""))
    is_layer = node.op == "call_module" or node.target is coupling_ops.call_norm
    return path.rpartition(".")[0] if is_layer else path


def _with_paths(lines: Sequence[str], owners: Mapping[str, str]) -> Iterable[str]:
    """A comment wherever the code of another module begins, if there are several."""
    named = [owners.get(line.strip().split(" ")[0], "") for line in lines]
    several = len(set(filter(None, named))) > 1
    current = ""
    for line, owner in zip(lines, named, strict=True):
        if several and owner and owner != current:
            current = owner
            yield f"    # {current}"
        yield line
