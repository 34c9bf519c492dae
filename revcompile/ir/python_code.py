"""Graphs as Python text and functions, for modules of any name: `{"in": ..., "it's": ...}`.

A graph becomes a function of `(root, *inputs)`, or of `(modules, *inputs)` (`Function`).
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import keyword
import linecache
import re
from collections.abc import Callable
from types import CodeType
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
    result = fx.Graph()
    result.output(result.graph_copy(graph, {}))
    return result


def compile_graph(graph: fx.Graph, name: str) -> Callable[..., Any]:
    """A function from a graph; tracebacks show the generated lines under the segment's name."""
    return _executed(python_code(graph), name)


def _executed(code: PythonCode, name: str) -> Callable[..., Any]:
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


@dataclasses.dataclass(frozen=True, eq=False)
class Function:
    """A graph as a function of `(modules, *inputs)`, whose text names modules by position.

    Modules are looked up once, parameters at every call. Looking up a module's members is slow
    (`nn.Module.__getattr__`), and the layers of a deep net are nested in many modules. The caller
    has to notice replaced modules.
    """

    name: str
    code: PythonCode
    modules: tuple[nn.Module, ...]
    run: Callable[..., Any]

    @functools.cached_property
    def key(self) -> tuple[Any, ...]:
        """Equal for functions with the same text, which call the same functions and layers."""
        used = ((name, id(value)) for name, value in self.code.globals.items())
        return self.code.src, self._settings, *used

    @property
    def _settings(self) -> str:
        """The settings of torch's own layers: a convolution with each of ten dilations is ten."""
        layers = (layer for module in self.modules for layer in module.modules())
        return repr(
            [
                (name, value)
                for layer in layers
                if type(layer).__module__.startswith("torch.nn.")
                for name, value in vars(layer).items()
                if type(value) in (bool, int, float, str, tuple) and name != "training"
            ]
        )

    @functools.cached_property
    def parameter_sizes(self) -> tuple[Any, ...]:
        """The sizes of the parameters that it reads."""
        return tuple(p.shape for module in self.modules for p in module.parameters())

    def fresh(self) -> Callable[..., Any]:
        """The function again, with a code object of its own, which torch.compile counts by name."""
        return _executed(self.code, f"{self.name} {next(_counter)}")

    def __call__(self, *inputs: Any) -> Any:
        return self.run(self.modules, *inputs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Function:  # the text refers to Python modules
        return dataclasses.replace(self, modules=copy.deepcopy(self.modules, memo))


def function_of(graph: fx.Graph, root: nn.Module, name: str) -> Function:
    """The function of a graph that reads modules below `root`."""
    positions: dict[nn.Module, int] = {}

    def expression(path: str) -> str:
        owner, _, member = path.rpartition(".")
        module: Any = root.get_submodule(owner)
        called = module._modules.get(member)
        read = module if called is None else called
        found = f"self[{positions.setdefault(read, len(positions))}]"
        return found if called is not None else path_expression(member, found)

    code = python_code(graph, expression)
    return Function(name, code, tuple(positions), _executed(code, name))
