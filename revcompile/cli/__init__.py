"""The command line: inspect a model, draw it, plan its training on a cluster.

Each subcommand is a module with `run`, imported when needed; `options` has the options of all.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from inspect import getdoc  # `inspect` is a command here
from typing import Any, Final, NoReturn

from revcompile import __version__
from revcompile.cli.options import COMMANDS
from revcompile.errors import InputError, RevcompileError

__all__ = ["Answer", "main"]

_EPILOG: Final = """\
exit codes: 0 done; 1 negative result (nothing reversible, nothing fits) or failed run; 2 invalid
command or input; 130 interrupted. Errors go to stderr, results to stdout.

examples:
  revcompile inspect resnet50 --stages 18
  revcompile inspect resnet50 --explain layer3.0
  revcompile inspect swin_tiny_patch4_window7_224
  revcompile measure resnet50 --device cuda --batch-size 64
  revcompile inspect hf:gpt2 --stages 4
  revcompile inspect hf:folder-with-config-json
  revcompile draw vit_base_patch16_224 --stages 8 --out net.html
  revcompile plan vit_large_patch16_224 --devices 8 --link 100Gbps
  revcompile inspect my_package.models:make_net --stages 4 --input 3,64,64
"""


@dataclass(frozen=True)
class Answer:
    """The result of a command as text and as plain values (for --json), and the exit code."""

    text: object
    facts: dict[str, Any]
    code: int = 0


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line: a command has up to twenty options."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


class _Help(argparse.HelpFormatter):
    """Wraps each paragraph to the terminal's width; those with indented lines stay as written.

    Defaults are shown, unless an option is left out by default.
    """

    def _get_help_string(self, action: argparse.Action) -> str:
        is_shown = action.option_strings and action.default not in (None, False, argparse.SUPPRESS)
        return f"{action.help}{' (default: %(default)s)' if is_shown else ''}"

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        paragraphs = text.strip().split("\n\n")
        return "\n\n".join(p if "\n  " in p else fill(p, width, indent) for p in paragraphs)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code."""
    parser = _parser()
    args = parser.parse_args(argv)

    def warn(message: Warning | str, *_: object) -> None:
        text = _in_options(str(message), vars(args))
        sys.stderr.write(f"revcompile {args.command}: warning: {text}\n")

    try:
        with warnings.catch_warnings(), _spinner(args):
            warnings.showwarning = warn  # type: ignore[assignment]
            command = importlib.import_module(f"revcompile.cli.{args.command}")
            answer: Answer = command.run(args)
        sys.stdout.write(f"{json.dumps(answer.facts, indent=2) if args.json else answer.text}\n")
        sys.stdout.flush()
        return answer.code
    except RevcompileError as error:
        message = _in_options(str(error), vars(args))
        sys.stderr.write(f"revcompile {args.command}: {message}\n")
        return 2 if isinstance(error, InputError) else 1
    except KeyboardInterrupt:
        sys.stderr.write(f"revcompile {args.command}: stopped\n")
        return 130
    except BrokenPipeError:  # the reader of the pipe is gone: `revcompile ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _spinner(args: argparse.Namespace) -> AbstractContextManager[Any]:
    """A spinner while a command runs, if stderr is a terminal; `measure` has a progress bar."""
    if not sys.stderr.isatty() or args.command == "measure":
        return nullcontext()
    from rich.console import Console

    return Console(stderr=True, force_jupyter=False).status(f"{args.command} {args.model}")


_CALLER: Final = re.compile(r"^(?:\w+|net\.\w+|--[\w-]+): ")
"""The Python function, or the command, that a message begins with."""


def _in_options(message: str, options: Mapping[str, object]) -> str:
    """A message of the package with options of the command in place of Python's arguments."""
    for name in options:
        option = f"--{name.replace('_', '-')}"
        python = "num_stages" if name == "stages" else name
        message = re.sub(rf"\b{python}=(['\"])([^'\"]*)\1", rf"{option} \2", message)
        message = re.sub(rf"\b{python}=(?=\w)", f"{option} ", message)
        message = re.sub(rf"\b{python}=|(?<!-)\b{python} (?=[<>])", f"{option} ", message)
    return re.sub(r" +([,;.)]|$)", r"\1", _CALLER.sub("", message))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="revcompile",
        description="Compile residual models into reversible, pipelined ones, and inspect them.",
        epilog=_EPILOG,
        formatter_class=_Help,
    )
    parser.add_argument("--version", action="version", version=f"revcompile {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, add_options in COMMANDS.items():
        text = getdoc(add_options) or ""
        command = commands.add_parser(
            name,
            help=text.partition("\n")[0].rstrip("."),
            description=text,
            formatter_class=_Help,
            allow_abbrev=False,
        )
        command.add_argument("--json", action="store_true", help="print the result as JSON")
        add_options(command)
    return parser
