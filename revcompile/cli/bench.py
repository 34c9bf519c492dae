"""List the benchmarks of the checkout, or run one: `revcompile bench pipeline resnet18:64:16`.

What follows the name are the benchmark's own options (most take --json FILE).
"""

from __future__ import annotations

import argparse
import ast
import difflib
import subprocess
import sys
from pathlib import Path

from revcompile.cli.checkout import folder
from revcompile.cli.output import say, say_json
from revcompile.errors import InputError

__all__ = ["add", "run"]


def add(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    parser.add_argument("name", nargs="?", help="which one; without it they are listed")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="options of the benchmark")


def run(args: argparse.Namespace) -> int:
    """List, or run in a process of its own; its exit code is ours."""
    place = folder("benchmarks")
    known = _benchmarks(place)
    if args.name is None:
        width = max(map(len, known))
        lines = [f"{name:{width}}  {what}" for name, what in known.items()]
        say_json(known) if args.json else say("\n".join(lines))
        return 0
    if args.name not in known:
        near = difflib.get_close_matches(args.name, known, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
        raise InputError(f"no benchmark {args.name!r}; {hint}")
    command = [sys.executable, "-m", f"benchmarks.{args.name}", *args.options]
    return subprocess.run(command, cwd=place.parent, check=False).returncode


def _benchmarks(place: Path) -> dict[str, str]:
    """Every file and folder that can be run, and what it says it does."""
    found = {}
    for file in (*place.glob("*.py"), *place.glob("*/__main__.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        if "__main__" in ast.unparse(tree):
            name = file.parent.name if file.stem == "__main__" else file.stem
            found[name] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return dict(sorted(found.items()))
