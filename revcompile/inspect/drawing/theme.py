"""Colours and type of the drawings, in light and dark.

The hues are Okabe and Ito's, which colour-blind people tell apart, and every colour comes with a
shape (opaque blocks are hatched, skips dashed, tied weights dotted). Drawings have their own
background, so that they can stand on any page. Colours are written out in every rule, because not
every SVG viewer supports CSS variables.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

FONT: Final = 'system-ui,-apple-system,"Segoe UI","Helvetica Neue","DejaVu Sans",Arial,sans-serif'
TITLE: Final = 17.0
LABEL: Final = 12.0
SMALL: Final = 10.5
TINY: Final = 9.0

_INK: Final = ("#1c2733", "#e4ebf2")
_MUTED: Final = ("#55616e", "#9dacba")

_COLOURS: Final[Mapping[str, Mapping[str, tuple[str, str]]]] = {
    ".rv-ground": {"fill": ("#ffffff", "#10161d"), "stroke": ("#d5dce3", "#2b3642")},
    ".rv-title": {"fill": _INK},
    ".rv-label": {"fill": _INK},
    ".rv-strong": {"fill": _INK},
    ".rv-number": {"fill": _INK},
    ".rv-tiny": {"fill": _INK},
    ".rv-small": {"fill": _MUTED},
    ".rv-badge": {"fill": ("#dfe5eb", "#2c3947")},
    ".rv-frame": {"fill": ("#f5f7f9", "#18212b"), "stroke": ("#bfc8d1", "#3d4a58")},
    ".rv-coupling": {"fill": ("#d5efe5", "#0e4033"), "stroke": ("#009e73", "#35c49a")},
    ".rv-opaque": {"fill": ("#e8e4dd", "#3a352e"), "stroke": ("#8b8172", "#b0a594")},
    ".rv-hatch": {"stroke": ("#cbc4b8", "#544d43")},
    ".rv-branch": {"fill": ("#ffffff", "#10161d"), "stroke": ("#00795a", "#35c49a")},
    ".rv-sum": {"fill": ("#ffffff", "#10161d"), "stroke": _INK},
    ".rv-one": {"stroke": ("#0072b2", "#56b4e9")},
    ".rv-two": {"stroke": ("#d55e00", "#ff9a4d")},
    ".rv-single": {"stroke": ("#3f4c59", "#c3ced8")},
    ".rv-tip": {"fill": ("#3f4c59", "#c3ced8")},
    ".rv-skip": {"stroke": ("#a8458c", "#e59bcb")},
    ".rv-skip-end": {"fill": ("#a8458c", "#e59bcb")},
    ".rv-skip-label": {"fill": ("#8a2f71", "#e59bcb")},
    ".rv-tie": {"stroke": ("#9a7200", "#f0c648")},
    ".rv-tie-end": {"fill": ("#9a7200", "#f0c648")},
    ".rv-tie-label": {"fill": ("#7a5a00", "#f0c648")},
    ".rv-forward": {"fill": ("#9fd3f2", "#12618f"), "stroke": ("#0072b2", "#56b4e9")},
    ".rv-backward": {"fill": ("#f8c99b", "#8f4300"), "stroke": ("#d55e00", "#ff9a4d")},
    ".rv-update": {"fill": ("#8a2f71", "#e59bcb")},
    ".rv-idle": {"fill": ("#eef1f4", "#1b242e")},
    ".rv-message": {"stroke": ("#55616e", "#9dacba")},
    ".rv-axis": {"stroke": ("#d5dce3", "#2b3642")},
}

_FIXED: Final = f"""
text{{font-family:{FONT};font-size:{SMALL}px}}
.rv-title{{font-size:{TITLE}px;font-weight:600}}
.rv-label{{font-size:{LABEL}px;font-weight:600}}
.rv-strong{{font-size:{SMALL}px;font-weight:600}}
.rv-number{{font-size:{LABEL}px}}
.rv-tiny{{font-size:{TINY}px}}
.rv-middle{{text-anchor:middle}}
.rv-end{{text-anchor:end}}
.rv-one,.rv-two,.rv-single{{fill:none;stroke-width:2.2}}
.rv-skip,.rv-tie{{fill:none;stroke-width:1.8}}
.rv-skip{{stroke-dasharray:5 3}}
.rv-tie{{stroke-dasharray:1.5 3;stroke-linecap:round;stroke-width:2.4}}
.rv-frame,.rv-ground{{stroke-width:1}}
.rv-coupling,.rv-opaque,.rv-branch,.rv-sum{{stroke-width:1.2}}
.rv-hatch{{fill:none;stroke-width:1.2}}
.rv-forward,.rv-backward{{stroke-width:.7}}
.rv-message{{fill:none;stroke-width:.8;opacity:.75}}
.rv-axis{{fill:none;stroke-width:1}}
"""


def palette(dark: bool, scope: str = ".rv-drawing") -> str:
    """The rules of one of the two palettes."""
    rules = []
    for selector, properties in _COLOURS.items():
        rule = ";".join(f"{name}:{pair[dark]}" for name, pair in properties.items())
        rules.append(f"{scope} {selector}{{{rule}}}")
    return "\n".join(rules)


def styles(scope: str = ".rv-drawing") -> str:
    """The style sheet: nothing in it touches what is not inside a drawing."""
    fixed = "\n".join(
        ",".join(f"{scope} {one}" for one in line.partition("{")[0].split(","))
        + "{"
        + line.partition("{")[2]
        for line in _FIXED.strip().splitlines()
    )
    dark = f"@media (prefers-color-scheme:dark){{\n{palette(True, scope)}\n}}"
    return f"{fixed}\n{palette(False, scope)}\n{dark}"
