"""A stage's code as Python text that can be executed: its functions, and the programs that run."""

from __future__ import annotations

import ast
import keyword
import operator
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import fx, nn
from torch.nn import functional as F

from revcompile.inspect.formatting import common_start
from revcompile.ir import coupling_ops, ops
from revcompile.ir.coupling_ops import HELPERS
from revcompile.ir.program import GraphFunction, Partition, StageProgram, commented, legal
from revcompile.ir.python_code import path_expression, python_code
from revcompile.ir.types import PATH, TYPE, Coupling, TensorType

_NN_FUNCTION: Final = re.compile(r"\btorch\._C\._nn\.(\w+)")
_WORD: Final = re.compile(r"(?<![\w.\"'])[A-Za-z_]\w*")
_GRID: Final = "unit of the fixed-point grid of a and b, or None"
_INLINED: Final = "revcompile_inlined_"


def code_text(partition: Partition, program: StageProgram) -> str:
    """A stage's generated programs as Python."""
    root, code = partition.rewired.root, program.code
    listing = Listing(root)
    functions = [listing.function(function) for function in code.functions]
    for helper in sorted(HELPERS):
        if any(re.search(rf"\b{helper}\(", text) for text in code.programs):
            listing.imports[helper] = (coupling_ops.__name__, helper)
    if any("torch." in text for text in code.programs):
        listing.imports["torch"] = ("", "torch")
    parts = [*listing.import_text(), *functions, *code.programs]
    return "\n\n".join([_head(partition, program, code.variables), *parts])


def _head(partition: Partition, program: StageProgram, variables: Mapping[str, str]) -> str:
    lines = [f"# stage {program.index} of {program.stages}, {program.method.name}"]
    pieces = [piece for part in partition.parts for piece in part.pieces]
    grids = {piece.grid for piece in pieces if isinstance(piece, Coupling)}
    for word, ports in (("takes", program.inputs), ("gives", program.outputs)):
        for port in ports:
            variable = variables.get(port.name, port.name)
            renamed = "" if variable == port.name else f"{variable} = "
            text = f"{port.name}: {_GRID}" if port.name in grids else str(port)
            lines.append(f"#   {word}  {renamed}{text}")
    return "\n".join([*lines, f"#   keeps  {', '.join(program.kept) or 'nothing'}"])


# -- paths of modules ------------------------------------------------------------------------------


def module_path(root: nn.Module, path: str) -> str:
    """A dotted path as a Python expression.

    >>> net = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.ModuleDict({"0": nn.ReLU()}))
    >>> module_path(net, "0.0.weight"), module_path(net, "1.0")
    ('self[0][0].weight', "self[1]['0']")
    """
    module: Any = root
    of = "self"
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
    """The public name of a function: `torch.nn.functional.gelu` for `torch._C._nn.gelu`."""
    known = getattr(F, name[1], None)
    return f"torch.nn.functional.{name[1]}" if known is getattr(torch._C._nn, name[1]) else name[0]


# -- functions of graphs ---------------------------------------------------------------------------


class Listing:
    """Prints graphs as functions and collects their imports."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.imports: dict[str, tuple[str, str]] = {}

    def function(self, function: GraphFunction) -> str:
        """The text of a function."""
        graph, names = _readable(function.graph, function.arguments), dict[str, str]()
        code = python_code(graph, partial(module_path, self.root))
        text = _NN_FUNCTION.sub(_functional, code.src.strip())
        used = set(_WORD.findall(text))
        for alias, value in code.globals.items():
            if alias in used:
                names[alias] = self._imported(alias, value)
        (definition,) = ast.parse(text).body
        assert isinstance(definition, ast.FunctionDef)
        owners = {node.name: _owner(node) for node in graph.nodes}
        head = f"def {function.name}({ast.unparse(definition.args)}):"
        lines = [ast.unparse(one) for one in _Tidy(names).body(definition.body)]
        body = (f"    {line}" for line in _with_paths(lines, owners))
        return "\n".join([commented(head, self._comment(function)), *body])

    def _comment(self, function: GraphFunction) -> str:
        segment, role = function.segment, function.role
        if role in ("arrange", "restore"):
            way = "back from" if role == "restore" else "in"
            return f"a stream {way} the arrangement of {segment.name}"
        # the class of the module that a segment is named after, if it runs only that module
        called = segment.graph.find_nodes(op="call_module")
        inside = all(f"{node.target}.".startswith(f"{segment.name}.") for node in called)
        modules = dict(self.root.named_modules()) if inside else {}
        kind = type(modules[segment.name]).__name__ if segment.name in modules else ""
        if isinstance(segment, Coupling):
            return f"F of {segment.name}" + (f", {kind}" if kind else "")
        return kind or f"not reversible: {segment.reason}"

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
            return alias  # not importable: whoever executes the text has to provide it
        # Variables never take the short names of our own functions; FX avoids all other aliases.
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
            lines.append(f"from {module} import {', '.join(names)}")
        return ["\n".join(lines)] if lines else []


def _readable(graph: fx.Graph, arguments: Sequence[str]) -> fx.Graph:
    """A copy with the names to print; nodes to be inlined get temporary names."""
    new = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    prefix, names = _common_parent(graph), list(arguments)
    for place, node in enumerate(graph.nodes):
        if node.op == "output":
            result = _as_tuples(fx.map_arg(node.args[0], copies.__getitem__))
            is_single = isinstance(result, tuple) and len(result) == 1
            new.output(result[0] if is_single else result)
            continue
        copy = copies[node] = new.node_copy(node, copies.__getitem__)
        copy.type = None
        name = copy.name.removeprefix(prefix)
        if node.op == "placeholder" and names:
            name = names.pop(0)
        elif _is_inlined(node):
            name = f"{_INLINED}{place}"
        if name != copy.name and name.isidentifier() and not keyword.iskeyword(name):
            copy._rename(name)
        if copy.name in HELPERS:
            copy._rename(f"{copy.name}_value")
        if node.op == "placeholder":
            copy.target = copy.name
    return new


def _is_inlined(node: fx.Node) -> bool:
    """Whether a node is a plain read, to be inlined; a part of a tensor only if it has one user."""
    if node.op == "get_attr" or node.target is getattr:
        return True
    if node.target is not operator.getitem or not isinstance(node.args[0], fx.Node):
        return False
    source = node.args[0].meta
    return len(node.users) == 1 or (TYPE in source and not isinstance(source[TYPE], TensorType))


class _Tidy(ast.NodeTransformer):
    """Replaces names by expressions, and writes `x[:, 0]` for `x[(slice(None), 0)]`."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = {name: ast.parse(text, mode="eval").body for name, text in names.items()}

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.names.get(node.id, node)

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.slice, ast.Tuple):
            node.slice.elts = [*map(_slice, node.slice.elts)]
        node.slice = _slice(node.slice)
        return node

    def body(self, statements: Iterable[ast.stmt]) -> list[ast.stmt]:
        """The statements, without those that free values (`x = None`) or are inlined."""
        kept = []
        for statement in statements:
            tidied = self.visit(statement)
            if isinstance(tidied, ast.Assign):
                (target,) = tidied.targets[:1]
                if isinstance(tidied.value, ast.Constant) and tidied.value.value is None:
                    continue
                if isinstance(target, ast.Name) and target.id.startswith(_INLINED):
                    self.names[target.id] = tidied.value
                    continue
            kept.append(tidied)
        return kept


def _slice(index: ast.expr) -> ast.expr:
    match index:
        case ast.Call(func=ast.Name(id="slice"), args=[*args]) if len(args) == 3:
            given = [None if isinstance(a, ast.Constant) and a.value is None else a for a in args]
            return ast.Slice(*given)
    return index


def _common_parent(graph: fx.Graph) -> str:
    """The prefix of node names if all layers are in one module: `layer1_0_`."""
    called = [str(node.target).split(".")[:-1] for node in graph.find_nodes(op="call_module")]
    shared = common_start(called)
    return f"{legal('.'.join(shared))}_" if shared else ""


def _as_tuples(result: Any) -> Any:
    return tuple(map(_as_tuples, result)) if isinstance(result, list | tuple) else result


def _owner(node: fx.Node) -> str:
    """Path of the module whose `forward` made a node."""
    path = str(node.meta.get(PATH, ""))
    is_layer = node.op == "call_module" or node.target is coupling_ops.call_norm
    return path.rpartition(".")[0] if is_layer else path


def _with_paths(lines: Sequence[str], owners: Mapping[str, str]) -> list[str]:
    """The lines, with a comment where another module's code begins, if there are several."""
    named = [owners.get(line.split(" ")[0], "") for line in lines]
    several = len(set(filter(None, named))) > 1
    result, current = [], ""
    for line, owner in zip(lines, named, strict=True):
        if several and owner and owner != current:
            current = owner
            result.append(f"# {current}")
        result.append(line)
    return result
