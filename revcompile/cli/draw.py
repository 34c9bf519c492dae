"""Draw a model's stages, or its schedule beside others.

--out net.svg writes a picture, --out net.html a page with the blocks, graph and code of each stage.
--schedule timeline.svg writes a timeline of what each stage computes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from revcompile.cli.models import add_model, add_stages, load, staged
from revcompile.cli.output import Answer
from revcompile.errors import InputError


def add(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_stages(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", help="net.svg or net.html")
    parser.add_argument("--schedule", type=Path, metavar="FILE", help="timeline.svg")


def run(args: argparse.Namespace) -> Answer:
    """Write the files; the answer is their names."""
    if args.out is None and args.schedule is None:
        raise InputError("nothing to draw; give --out net.svg (or .html) or --schedule t.svg")
    loaded = load(args)
    net = staged(loaded, args)
    names = []
    if args.out is not None:
        size = args.microbatch_size
        names.append(str(net.draw(args.out, microbatch_size=size, name=loaded.name)))
    if args.schedule is not None:
        names.append(str(net.draw_schedule(args.schedule)))
    return Answer("\n".join(names), {"written": names})
