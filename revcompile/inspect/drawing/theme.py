"""Sizes of type, and the style sheet of the drawings: colours in light and dark.

The hues are Okabe and Ito's, which colour-blind people tell apart, and every colour comes with a
shape (opaque blocks are hatched, skips dashed, tied weights dotted). Drawings have their own
background, so that they can stand on any page; no rule touches what is not inside a drawing.
Colours are written out in every rule, because not every SVG viewer supports CSS variables.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Final

TITLE: Final = 17.0
LABEL: Final = 12.0
SMALL: Final = 10.5
TINY: Final = 9.0


def asset(name: str) -> str:
    """A file beside this one as text."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8").strip()
