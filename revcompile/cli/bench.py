"""List the benchmarks of the checkout, or run one: `revcompile bench pipeline resnet18:64:16`.

What follows the name are the benchmark's own options; all take --json FILE.
"""

from __future__ import annotations

import argparse
import difflib
import json
import subprocess
import sys

from revcompile.cli.checkout import folder
from revcompile.cli.output import say
from revcompile.errors import InputError

__all__ = ["add", "run"]


def add(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    parser.add_argument("name", nargs="?", help="which one; without it they are listed")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="options of the benchmark")


def run(args: argparse.Namespace) -> int:
    """Hand over to `python -m benchmarks`, in a process of its own; its exit code is ours."""
    place, command = folder("benchmarks").parent, [sys.executable, "-m", "benchmarks"]
    as_json = ["--json"] if args.json or args.name else []
    listed = subprocess.check_output([*command, *as_json], cwd=place, text=True)
    if args.name is None:
        say(listed.rstrip())
        return 0
    known = json.loads(listed)
    if args.name not in known:
        near = difflib.get_close_matches(args.name, known, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
        raise InputError(f"no benchmark {args.name!r}; {hint}")
    command += ["run", args.name, *args.options]
    return subprocess.run(command, cwd=place, check=False).returncode
