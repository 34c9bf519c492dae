"""Imports point one way: errors, ir, schedule <- compiler | runtime | inspect <- api <- cli.

Parts of one layer do not import each other, no modules import each other in a circle, and
revcompile imports nothing of the repository outside itself. Imports inside functions and under
TYPE_CHECKING count.
"""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import networkx
import pytest
from paths import ROOT

import revcompile
from tests.conftest import NIGHTLY

RUNTIME = tuple(
    f"runtime/{folder}"
    for folder in ("reversible", "stage", "executor", "checkpoint", "distributed", "trainer")
)
"""The folders of runtime/: each may import those before it."""
LAYERS = (
    {"errors"},
    {"arguments", "units", "kernels", "schedule", "optim"},
    {"ir", "losses"},
    {"compiler", "inspect", "runtime/__init__", *RUNTIME},
    {"interop", "plan"},
    {"staged"},
    {"gradcheck"},
    {"api"},
    {"__init__"},
    {"cli"},
    {"__main__"},
)
"""What a part may import: the parts of earlier layers, and its own modules."""
LAYER = {part: level for level, parts in enumerate(LAYERS) for part in parts}
OUTSIDE = {"models", "examples", "benchmarks", "tests"}

Module = tuple[str, ...]


def violations(package: Path) -> list[str]:
    """Every import in `package` that breaks the rule, as `file:line: what is wrong`."""
    found = []
    for file in sorted(package.rglob("*.py")):
        where = file.relative_to(package.parent).as_posix()
        source = part_of(file.relative_to(package).with_suffix("").parts)
        if source not in LAYER:
            found.append(f"{where}:1: {source} is in no layer; give it one in test_layers.py")
            continue
        for line, target in imports(file, package):
            if problem := why_illegal(source, target, package.name):
                found.append(f"{where}:{line}: {problem}")
    return found


def why_illegal(source: str, target: Module, package: str) -> str | None:
    """What is wrong with part `source` of the package importing `target`; None if nothing is."""
    if target[0] in OUTSIDE:
        return f"{package} never imports {target[0]}"
    if source == "schedule" and target[0] == "torch":
        return "schedule is pure and never imports torch"
    if target[0] != package:
        return None
    part = part_of(target[1:])
    legal = part == source or (part in LAYER and LAYER[part] < LAYER[source])
    legal |= {part, source} <= {*RUNTIME} and RUNTIME.index(part) < RUNTIME.index(source)
    return None if legal else f"{source} may not import {'.'.join(target)}"


def circles(package: Path) -> list[list[str]]:
    """Groups of modules that import each other, directly or through others."""
    graph = networkx.DiGraph()
    for file in sorted(package.rglob("*.py")):
        parts = file.relative_to(package.parent).with_suffix("").parts
        module = parts[:-1] if parts[-1] == "__init__" else parts
        targets = {target for _, target in imports(file, package) if target[0] == package.name}
        graph.add_edges_from((module, target) for target in targets - {module})
    groups = networkx.strongly_connected_components(graph)
    return sorted(sorted(".".join(m) for m in group) for group in groups if len(group) > 1)


@functools.cache
def parsed(file: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(file.read_text(encoding="utf-8"), str(file))))


def imports(file: Path, package: Path) -> Iterator[tuple[int, Module]]:
    """Line and absolute name of everything `file` imports, wherever in the file it does."""
    for node in parsed(file):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, tuple(alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            base: Module = tuple(node.module.split(".")) if node.module else ()
            if node.level:  # one dot is the folder of the file itself
                folder = file.parents[node.level - 1].relative_to(package.parent)
                base = (*folder.parts, *base)
            for alias in node.names:
                yield node.lineno, module_of(base, alias.name, package)


def module_of(base: Module, name: str, package: Path) -> Module:
    """`from base import name` imports the module `base.name` if there is one, else `base`."""
    path = package.parent.joinpath(*base, name)
    return (*base, name) if path.is_dir() or path.with_suffix(".py").is_file() else base


def part_of(inner: Module) -> str:
    """The part of the package that a name within it belongs to: a folder, or one of runtime/."""
    return "/".join(inner[: 2 if inner[0] == "runtime" else 1]) if inner else "__init__"


def test_revcompile_imports_point_one_way() -> None:
    found = violations(Path(revcompile.__file__).parent)
    assert not found, "\n".join(["", *found])


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circles(Path(revcompile.__file__).parent) == []


def test_tests_import_no_benchmark() -> None:
    """Benchmarks share the tests' helpers; the other way round neither could be changed alone."""
    files = sorted((ROOT / "tests").rglob("*.py"))
    found = [f for f in files for _, target in imports(f, ROOT / "tests") if "benchmarks" in target]
    assert files and not found


@pytest.mark.parametrize("name", NIGHTLY)
def test_what_the_core_leaves_out_exists(name: str) -> None:
    file, _, test = name.partition("::")
    text = (ROOT / "tests" / file).read_text(encoding="utf-8")
    tests = [test] if test else [n.split("[")[0] for n in NIGHTLY[name] if n[:5] == "test_"]
    is_case = file == "compiler/test_families.py"  # its cases are called like tests
    assert is_case or all(f"def {one}(" in text for one in tests)
