"""Train a compiled model: runs examples/train_compiled.py of the checkout.

All options behind `train` are the example's: `revcompile train --help-example` lists them. With
--json the result is one JSON object; the example's own progress goes to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

from revcompile.cli.checkout import folder
from revcompile.cli.output import say_json

__all__ = ["add", "run"]


def add(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    parser.add_argument("--help-example", action="store_true", help="the example's own help")


def run(args: argparse.Namespace) -> int:
    """Call the example's main."""
    main = _main(folder("examples") / "train_compiled.py")
    options = ["--help"] if args.help_example else args.options
    with contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext():
        accuracy = main(options)
    if args.json:
        say_json({"accuracy": accuracy})
    return 0


def _main(file: Path) -> Callable[[list[str]], float]:
    """The example, loaded as it would be if run: its neighbours can be imported."""
    sys.path.insert(0, str(file.parent))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    main: Callable[[list[str]], float] = module.main
    return main
