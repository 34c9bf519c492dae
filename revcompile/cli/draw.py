"""Draw a model's stages, or its schedule beside others.

--out net.svg is a picture, --out net.html a page in which each stage opens into its blocks, its
graph and its code; --schedule timeline.svg shows who computes when.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from revcompile.cli.models import add_model, add_stages, load, staged
from revcompile.cli.output import say, say_json
from revcompile.errors import InputError


def add(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_stages(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", help="net.svg or net.html")
    parser.add_argument("--schedule", type=Path, metavar="FILE", help="timeline.svg")


def run(args: argparse.Namespace) -> int:
    """Write the files; print their names."""
    if args.out is None and args.schedule is None:
        raise InputError("nothing to draw; give --out net.svg (or .html) or --schedule t.svg")
    loaded = load(args)
    net = staged(loaded, args)
    written = []
    if args.out is not None:
        written.append(net.draw(args.out, microbatch_size=args.microbatch_size, name=loaded.name))
    if args.schedule is not None:
        written.append(net.draw_schedule(args.schedule))
    names = [str(path) for path in written]
    say_json({"written": names}) if args.json else say("\n".join(names))
    return 0
