"""How far matrices may move during the delay of gradients: `max_drift` of `DelayAwareMuon`."""

from __future__ import annotations

import argparse
from typing import Final

MAX_DRIFT: Final = 0.0075
"""Its default, which names of trainings leave out."""


def drift_name(max_drift: float | None) -> str:
    """For the name of a training; nothing for the default."""
    if max_drift == MAX_DRIFT:
        return ""
    return "-unlimited" if max_drift is None else f"-drift{max_drift:g}"


def add_drift_option(parser: argparse.ArgumentParser) -> None:
    """`--max-drift 0.0075 0.015 none`."""
    parser.add_argument(
        "--max-drift",
        nargs="+",
        type=lambda given: None if given == "none" else float(given),
        default=[MAX_DRIFT],
        help="train rows of DelayAwareMuon with each of these; none: any distance",
    )
