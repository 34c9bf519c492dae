"""The same model compiles to the same names, cuts and programs in every process."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence

import pytest
from fingerprint import SMALL, compiled, fingerprint
from paths import ROOT

from tests.compiler.test_families import MODELS


def assert_equal_everywhere(names: Sequence[str]) -> None:
    """This process, whatever it did before, compiles as a new one with another hash seed."""
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    other = subprocess.run(
        [sys.executable, "-m", "tests.support.fingerprint", *names],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"},
    )
    found = json.loads(other.stdout)
    for name in names:
        assert fingerprint(compiled(name, 3)).splitlines() == found[name].splitlines(), name


def test_processes_of_different_hash_seeds_compile_the_same_programs() -> None:
    assert_equal_everywhere(SMALL)


@pytest.mark.slow
def test_all_families_compile_the_same_in_processes_of_different_hash_seeds() -> None:
    assert_equal_everywhere(MODELS)


# -- sets are for membership ----------------------------------------------------------------------

ORDERLESS = {"sorted", "any", "all", "len", "sum", "min", "max", "set", "frozenset"}
"""What may go through a set, for the result does not depend on the order."""


def iterations_over_sets(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of every `for` over a value that is a set, as far as a file's text tells."""
    tree = ast.parse(source)
    for scope in ast.walk(tree):
        if isinstance(scope, (ast.FunctionDef, ast.Module)):
            yield from _in_scope(scope)


def _in_scope(scope: ast.FunctionDef | ast.Module) -> Iterator[tuple[int, str]]:
    nodes = list(_own_nodes(scope))
    known = {name for node in (scope, *nodes) for name in _named_sets(node)}
    harmless = {
        id(argument)
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if node.func.id in ORDERLESS
        for argument in node.args
    }
    for node in nodes:
        if isinstance(node, (ast.SetComp, ast.DictComp)) or id(node) in harmless:
            continue  # what is made from a set is a set, or a table that is looked up by name
        loops = [node] if isinstance(node, ast.For) else getattr(node, "generators", [])
        for loop in loops:
            if _is_set(loop.iter, known):
                yield loop.iter.lineno, ast.unparse(loop.iter)
        if isinstance(node, ast.Call) and _lists_a_set(node, known):
            yield node.lineno, ast.unparse(node)


def _lists_a_set(call: ast.Call, known: set[str]) -> bool:
    is_list = isinstance(call.func, ast.Name) and call.func.id in ("list", "tuple", "iter", "next")
    return is_list and bool(call.args) and _is_set(call.args[0], known)


def _own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(scope):
        if not isinstance(child, ast.FunctionDef):
            yield child
            yield from _own_nodes(child)


def _named_sets(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef):
        for argument in (*node.args.args, *node.args.kwonlyargs):
            if argument.annotation is not None and _says_set(argument.annotation):
                yield argument.arg
    elif isinstance(node, ast.AnnAssign) and _says_set(node.annotation):
        yield ast.unparse(node.target)
    elif isinstance(node, ast.Assign) and _is_set(node.value, set()):
        yield from (ast.unparse(target) for target in node.targets)


def _says_set(annotation: ast.AST) -> bool:
    return ast.unparse(annotation).startswith(("set[", "frozenset["))


def _is_set(node: ast.AST, known: set[str]) -> bool:
    if isinstance(node, (ast.Set, ast.SetComp)):
        return True
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in ("set", "frozenset")
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.BitOr, ast.BitAnd, ast.Sub)):
        return _is_set(node.left, known) or _is_set(node.right, known)
    return isinstance(node, (ast.Name, ast.Attribute)) and ast.unparse(node) in known


def test_the_compiler_goes_through_no_set() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{line}: goes through the set `{text}`"
        for file in sorted((ROOT / "revcompile" / "compiler").rglob("*.py"))
        for line, text in iterations_over_sets(file.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(["the order of a set differs between processes", *found])


@pytest.mark.parametrize(
    "source",
    [
        "for x in {1, 2}: pass",
        "def f(names: frozenset[str]):\n    return [n for n in names]",
        "def f():\n    found: set[int] = set()\n    for x in found: pass",
        "a = {b for b in c}\nd = list(a)",
        "x = [y for y in set(a) | b]",
    ],
)
def test_going_through_a_set_is_found(source: str) -> None:
    assert list(iterations_over_sets(source))


@pytest.mark.parametrize(
    "source",
    ["for x in sorted({1, 2}): pass", "a = {1}\nb = sum(x for x in a)", "for x in [1]: pass"],
)
def test_other_uses_of_sets_are_not(source: str) -> None:
    assert not list(iterations_over_sets(source))
