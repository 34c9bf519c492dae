"""revcompile draw: pictures of a model's stages and schedule."""

from __future__ import annotations

import argparse

from revcompile.cli import Answer
from revcompile.cli.models import load, staged
from revcompile.errors import InputError


def run(args: argparse.Namespace) -> Answer:
    """Write the files; the answer is their names."""
    if args.out is None and args.schedule is None:
        raise InputError("nothing to draw; give --out net.svg (or .html) or --schedule t.svg")
    loaded = load(args)
    net = staged(loaded, args)
    names = []
    if args.out is not None:
        names.append(str(net.draw(args.out, name=loaded.name)))
    if args.schedule is not None:
        names.append(str(net.draw_schedule(args.schedule)))
    return Answer("\n".join(names), {"written": names})
