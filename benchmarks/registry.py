"""What a benchmark is, and which there are.

A benchmark is a module in these folders with `BENCHMARK = Benchmark("name", ...)`; the
first line of its docstring says what it measures. The list is read from the files' text: nothing is
imported until one is run.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from revcompile.errors import InputError

__all__ = ["Benchmark", "Entry", "Row", "entries", "entry"]

Row = Mapping[str, Any]
"""One line of a result: figures by name, as they go to JSON."""

HERE: Final = Path(__file__).parent


@dataclass(frozen=True)
class Benchmark:
    """How a benchmark is run: `arguments` adds its options, `run` measures, prints, gives rows.

    Whatever `run` prints, its rows are what is kept. `sweeps` are options that `--sweep` may vary;
    rows of such a benchmark have a `variant`, `seconds` of each round, and `bytes`.
    """

    name: str
    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], Iterable[Row]]
    smallest: tuple[str, ...] | None = ()
    """Options of its smallest form on a CPU; None if there is none, and `needs` says why."""
    needs: str = ""
    sweeps: tuple[str, ...] = ()


@dataclass(frozen=True)
class Entry:
    """A line of the list: where a benchmark is, and what it says of itself."""

    name: str
    folder: str
    """The first line of the folder's own docstring."""
    module: str
    description: str

    @property
    def says(self) -> str:
        """In one line."""
        return self.description.partition("\n")[0]

    def load(self) -> Benchmark:
        """Import the module."""
        benchmark: Benchmark = importlib.import_module(self.module).BENCHMARK
        return benchmark


def entries(place: Path = HERE) -> dict[str, Entry]:
    """All benchmarks by name, folder by folder."""
    by_name: dict[str, Entry] = {}
    for file in sorted(place.rglob("*.py")):
        tree = _parsed(file)
        for name in _registered(tree):
            if name in by_name:
                other = by_name[name].module
                raise InputError(f"{file}: {name!r} is the name of {other} too; choose another")
            folder = ast.get_docstring(_parsed(file.with_name("__init__.py"))) or ""
            module = ".".join(file.relative_to(place.parent).with_suffix("").parts)
            text = ast.get_docstring(tree) or ""
            by_name[name] = Entry(name, folder.partition("\n")[0], module, text)
    return by_name


def entry(name: str) -> Entry:
    """One of them."""
    known = entries()
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
    raise InputError(f"no benchmark {name!r}; {hint}")


def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _registered(tree: ast.Module) -> Iterator[str]:
    """The name in `BENCHMARK = Benchmark("name", ...)`."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "BENCHMARK":
            assert isinstance(node.value, ast.Call)
            yield ast.literal_eval(node.value.args[0])
