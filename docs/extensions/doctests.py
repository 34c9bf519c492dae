"""A griffe extension for `make docs`: doctests in docstrings are shown as code.

Griffe's Google style knows doctests only in sections named "Examples"; here they stand at the end
of a docstring without a heading, and Markdown would make quotations of them.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_DOCTEST = re.compile(r"^>>> .*?(?=\n\s*\n(?!>>> )|\Z)", re.MULTILINE | re.DOTALL)
"""From a prompt to the next paragraph that does not begin with one."""


class Doctests(griffe.Extension):
    """Puts a fence around the doctests of every docstring."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = _DOCTEST.sub(
                lambda found: f"```pycon\n{found.group()}\n```", obj.docstring.value
            )
