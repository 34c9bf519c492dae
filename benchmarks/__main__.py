"""List the benchmarks, or run one.

    python -m benchmarks
    python -m benchmarks run peers --model transformer-12x128 --json out/peers.json
    python -m benchmarks run peers --sweep depth 4 8 16 --sweep batch 1 2 4 8
    python -m benchmarks run engine --help

Every benchmark prints tables, and with --json FILE writes its rows with the machine, the versions
and the commit they belong to. Sweeps run a benchmark once for each value and print how time and
memory grow: an exponent of 1 is in proportion, 0 not at all.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.registry import Benchmark, Entry, Row, entries, entry
from revcompile.errors import InputError


class _Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """The docstring as it is, and every option's default."""


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="the list as JSON")
    commands = parser.add_subparsers(dest="command")
    running = commands.add_parser("run", help="run one", add_help=False)
    running.add_argument("name", nargs="?", default="")
    running.add_argument("options", nargs=argparse.REMAINDER)
    args = parser.parse_args(argv)
    try:
        if args.command == "run":
            return run(args.name, args.options)
        sys.stdout.write(listing(entries().values(), args.json) + "\n")
        return 0
    except InputError as error:
        sys.stderr.write(f"benchmarks: {error}\n")
        return 2


def listing(known: Iterable[Entry], as_json: bool) -> str:
    """Every benchmark with what it says of itself, by folder."""
    known = list(known)
    if as_json:
        return json.dumps({e.name: e.says for e in known}, indent=1)
    width = max(len(e.name) for e in known)
    lines: list[str] = []
    for folder in dict.fromkeys(e.folder for e in known):
        lines += ["", folder]
        lines += [f"  {e.name:{width}}  {e.says}" for e in known if e.folder == folder]
    return "\n".join(lines[1:])


def run(name: str, options: Sequence[str]) -> int:
    """Run one benchmark; rows are written as they come."""
    chosen = entry(name)
    benchmark = chosen.load()
    args = options_of(chosen, benchmark, options)
    rows: list[Row] = []
    for row in rows_of(benchmark, args):
        rows.append(row)
        _write(name, args, rows)
    _write(name, args, rows)
    return int(any(row.get("failed") for row in rows))


def rows_of(benchmark: Benchmark, args: argparse.Namespace) -> Iterable[Row]:
    """The rows of a run, or of a run for each value of every sweep."""
    from benchmarks.sweep import swept

    if not getattr(args, "sweep", None):
        return benchmark.run(args)
    return swept(benchmark, args)


def options_of(chosen: Entry, benchmark: Benchmark, options: Sequence[str]) -> argparse.Namespace:
    """A benchmark's own options, and those that all have."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks run {chosen.name}",
        description=chosen.description,
        formatter_class=_Help,
    )
    benchmark.arguments(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here")
    if benchmark.sweeps:
        parser.add_argument(
            "--sweep",
            nargs="+",
            action="append",
            metavar=("OPTION", "VALUE"),
            help=f"run for each value of {' or '.join(benchmark.sweeps)}; may be repeated",
        )
    return parser.parse_args(options)


def _write(name: str, args: Any, rows: Sequence[Row]) -> None:
    if args.json is not None:
        from benchmarks.record import describe, write

        write(args.json, describe(name, args, rows))


if __name__ == "__main__":
    raise SystemExit(main())
