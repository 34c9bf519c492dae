"""Save matplotlib's figures as SVG files that follow the reader's light or dark colour scheme.

revcompile's own drawings have two palettes. A figure has one; dark mode inverts its lightness.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, Final

_DARK: Final = (
    "<style>@media (prefers-color-scheme:dark){svg{filter:invert(.92) hue-rotate(180deg)}}</style>"
)
_SETTINGS: Final[dict[Any, Any]] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "svg.hashsalt": "figure",
}
"""Letters stay text, which is small and searchable; files are the same in every run."""


def save_figure(figure: Any, file: str | Path) -> Path:
    """Write a `matplotlib.figure.Figure` as SVG, legible on light and on dark pages."""
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context(_SETTINGS):
        figure.savefig(text, format="svg", metadata={"Date": None})
    file = Path(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    head, defs, rest = text.getvalue().partition("<defs>")
    file.write_text(f"{head}{_DARK}\n {defs}{rest}", encoding="utf-8")
    return file
