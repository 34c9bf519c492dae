"""SVG as text: elements, escaping, and estimates of how wide text is.

The hues of the style sheet are Okabe and Ito's, which colour-blind people tell apart, and every
colour comes with a shape (opaque blocks are hatched, skips dashed, tied weights dotted). Drawings
have their own background and can stand on any page; style rules apply only inside a drawing.
Colours are written out in every rule, because not every SVG viewer supports CSS variables.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from importlib.resources import files
from typing import Final

TITLE: Final = 17.0
LABEL: Final = 12.0
SMALL: Final = 10.5
TINY: Final = 9.0
"""Font sizes."""

_UNPRINTABLE: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")

# Estimated widths exceed those of common sans-serif fonts: no text overflows its frame.
_NARROW: Final = frozenset("iIjl.,:;|!'()[]tfr ·")
_WIDE: Final = frozenset("mwMW%—…")
_LINE: Final = 0.9
"""Real width of a long line, relative to the estimate: wide and narrow letters average out."""


def asset(name: str) -> str:
    """The text of a file in this folder."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8").strip()


def escape(value: object) -> str:
    """Escape a value for markup; characters that XML does not allow are replaced.

    >>> escape('<layer "1">')
    '&lt;layer &quot;1&quot;&gt;'
    """
    return html.escape(_UNPRINTABLE.sub("\ufffd", str(value)))


def element(tag: str, *children: str, **attributes: object) -> str:
    """An element around its children. `class_` becomes `class`, `stroke_width` `stroke-width`.

    >>> element("g", element("rect", x=1.50, width=3), class_="box", id=None)
    '<g class="box"><rect x="1.5" width="3"/></g>'
    """
    given = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(_number(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    inside = "".join(children)
    return f"<{tag}{given}>{inside}</{tag}>" if inside else f"<{tag}{given}/>"


def text(content: object, x: float, y: float, class_: str, **attributes: object) -> str:
    """A line of text, its baseline at `y`."""
    return element("text", escape(content), x=x, y=y, class_=class_, **attributes)


def path(*commands: object, class_: str, **attributes: object) -> str:
    """A path of `commands`: the letters and numbers of SVG's attribute `d`."""
    drawn = " ".join(str(_number(command)) for command in commands)
    return element("path", d=drawn, class_=class_, **attributes)


def tooltip(lines: Iterable[str]) -> str:
    """The text shown while the pointer rests on an element."""
    return element("title", escape("\n".join(lines)))


def document(
    title: str, subtitle: str, *content: str, width: float, height: float, margin: float
) -> str:
    """A complete SVG: background, title, subtitle, content."""
    above = _shortened(title, width - 2 * margin, TITLE)
    below = _shortened(subtitle, width - 2 * margin, SMALL)
    ground = element(
        "rect", x=0.5, y=0.5, width=width - 1, height=height - 1, rx=10, class_="rv-ground"
    )
    return element(
        "svg",
        tooltip([title] if below == subtitle else [title, subtitle]),
        element("style", asset("drawing.css")),
        ground,
        text(above, margin, 30, "rv-title"),
        text(below, margin, 49, "rv-small"),
        *content,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width:g} {height:g}",
        width=width,
        height=height,
        class_="rv-drawing",
        role="img",
    )


def width_of(content: str, size: float) -> float:
    """Estimated width of a text at a font size; errs on the large side."""
    return size * sum(0.38 if c in _NARROW else 0.95 if c in _WIDE else 0.62 for c in content)


def fitted(content: str, width: float, size: float) -> str:
    """The text if it fits the width, else a path's last names (at least two), else nothing.

    >>> fitted("layers.2.blocks.3.attn", 60, 10), fitted("layers.0", 20, 10)
    ('…3.attn', '')
    """
    names = content.split(".")
    shorter = ("…" + ".".join(names[start:]) for start in range(1, len(names) - 1))
    fitting = (text for text in (content, *shorter) if width_of(text, size) <= width)
    return next(fitting, "")


def _shortened(line: str, width: float, size: float) -> str:
    """A line cut to a width; the drawing's tooltip has the whole line."""
    most = int(len(line) * width / max(_LINE * width_of(line, size), width))
    return line if most == len(line) else line[: most - 1].rstrip() + "…"


def _number(value: object) -> object:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else value
