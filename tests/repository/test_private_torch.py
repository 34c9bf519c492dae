"""Private names of torch that the package uses are those of the table in docs/contributing.md."""

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from paths import ROOT


def is_private(name: str) -> bool:
    return any(re.match(r"_[^_]", part) for part in name.split("."))


def private_names(file: Path) -> Iterator[str]:
    """Imports of private names, and attributes of torch's modules, each with its whole path."""
    names = {"torch": "torch"}
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names |= {
                alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names
            }
    yield from names.values()
    for node in ast.walk(tree):
        parts: list[str] = []
        at: ast.AST = node
        while isinstance(at, ast.Attribute):
            parts.insert(0, at.attr)
            at = at.value
        if isinstance(at, ast.Name) and at.id in names and not is_private(names[at.id]):
            yield ".".join([names[at.id], *parts])


def test_private_names_of_torch_are_those_of_the_table() -> None:
    page = (ROOT / "docs/contributing.md").read_text(encoding="utf-8")
    section = page.split("## Private torch API")[1].split("\n## ")[0]
    firsts = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    table = [name for first in firsts for name in re.findall(r"`([^`]+)`", first)]
    files = sorted((ROOT / "revcompile").rglob("*.py"))
    used = {name for file in files for name in private_names(file) if is_private(name)}
    used = {name for name in used if not any(other.startswith(f"{name}.") for other in used)}
    assert sorted(name for name in used if not any(fnmatchcase(name, row) for row in table)) == []
    assert [row for row in table if not any(fnmatchcase(name, row) for name in used)] == []
