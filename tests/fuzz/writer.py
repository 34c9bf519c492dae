"""Writes a net as Python source: the parts of the grammar add lines to `__init__` and `forward`.

A part sees the current activation `h` and may read and define other local variables. It is written
either into the net's own forward, or into a class of its own: then what it reads becomes arguments
and what it defines is returned beside `h`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

PRELUDE: Final = """\
import math
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
"""

INPUTS: Final = ("x", "c", "mask", "scale", "e")
"""`x`, a condition, a mask over positions, a scale without batch, a second sequence."""

WIDTH: Final = 6
CONDITION: Final = 4


@dataclass
class Scope:
    """One class being written."""

    init: list[str] = field(default_factory=list)
    forward: list[str] = field(default_factory=list)
    reads: list[str] = field(default_factory=list)
    gives: list[str] = field(default_factory=list)


class Writer:
    """The text of a net so far, and what is known of its activation `h`."""

    def __init__(self, layout: str) -> None:
        self.layout = layout
        self.width = WIDTH
        self.scopes = [Scope()]
        self.helpers: dict[str, str] = {}
        """Classes and functions above the net, by name."""
        self.inputs: list[str] = ["x"]
        self.saved: list[str] = []
        """Variables that later parts may read: skips, tables, second streams."""
        self.last_layer: tuple[str, int, int] | None = None
        self._count = 0

    # -- what h is ----------------------------------------------------------------------------

    @property
    def images(self) -> bool:
        """Is `h` (n, channels, height, width)?"""
        return self.layout == "images"

    @property
    def sequence(self) -> bool:
        """Is `h` (n, length, channels)?"""
        return self.layout in ("tokens", "words")

    @property
    def channel(self) -> int:
        """The dimension of the channels."""
        return 1 if self.images else -1

    @property
    def length(self) -> int:
        """The dimension of another size than batch and channels, or the channels of rows."""
        return 2 if self.images else 1

    # -- lines --------------------------------------------------------------------------------

    @property
    def scope(self) -> Scope:
        """The class that lines go to."""
        return self.scopes[-1]

    def fresh(self, stem: str) -> str:
        """A name nobody has."""
        self._count += 1
        return f"{stem}{self._count}"

    def init(self, line: str) -> None:
        """A line of `__init__`."""
        self.scope.init.append(line)

    def line(self, *lines: str) -> None:
        """Lines of `forward`."""
        self.scope.forward.extend(lines)

    def member(self, stem: str, expression: str) -> str:
        """`self.name = expression`; gives `self.name`."""
        name = f"self.{self.fresh(stem)}"
        self.init(f"{name} = {expression}")
        return name

    def buffer(self, stem: str, expression: str) -> str:
        """A registered buffer; gives `self.name`."""
        name = self.fresh(stem)
        self.init(f'self.register_buffer("{name}", {expression})')
        return f"self.{name}"

    def helper(self, name: str, text: str) -> str:
        """A class or function above the net; gives its name."""
        self.helpers.setdefault(name, text.strip("\n") + "\n")
        return name

    def reads(self, variable: str) -> str:
        """A local variable of the net that is no `h`."""
        if variable in INPUTS and variable not in self.inputs:
            self.inputs.append(variable)
        if len(self.scopes) > 1 and variable not in (*self.scope.reads, *self.scope.gives):
            self.scope.reads.append(variable)
        return variable

    def gives(self, stem: str) -> str:
        """A new local variable that later parts may read."""
        name = self.fresh(stem)
        self.scope.gives.append(name)
        return name

    # -- layers -------------------------------------------------------------------------------

    def layer_text(self, out: int | None = None, stride: int = 1, into: int | None = None) -> str:
        """A weighted layer for `h`: a convolution for images, else a linear layer."""
        into, out = into or self.width, out or self.width
        if self.images:
            rest = f", stride={stride}" if stride > 1 else ""
            return f"nn.Conv2d({into}, {out}, 3{rest}, padding=1)"
        return f"nn.Linear({into}, {out})"

    def layer(self, out: int | None = None, stride: int = 1, into: int | None = None) -> str:
        """A weighted layer as a member."""
        name = self.member("layer", self.layer_text(out, stride, into))
        self.last_layer = (name, into or self.width, out or self.width)
        return name

    def norm_text(self, kind: str, width: int | None = None) -> str:
        """A norm of `h`: "layer" or "batch"."""
        width = width or self.width
        if kind == "batch" and not self.sequence:
            return f"nn.BatchNorm{'2' if self.images else '1'}d({width})"
        return f"nn.GroupNorm(2, {width})" if self.images else f"nn.LayerNorm({width})"

    def norm(self, kind: str = "layer", width: int | None = None) -> str:
        """A norm as a member."""
        return self.member("norm", self.norm_text(kind, width))

    def spread(self, expression: str) -> str:
        """(n, channels) made to broadcast over `h`."""
        if self.images:
            return f"{expression}[:, :, None, None]"
        return f"{expression}[:, None]" if self.sequence else expression

    def pooled(self, expression: str = "h") -> str:
        """`h` averaged to (n, channels)."""
        if self.images:
            return f"{expression}.mean((2, 3))"
        return f"{expression}.mean(1)" if self.sequence else expression

    # -- classes ------------------------------------------------------------------------------

    def open(self) -> None:
        """What follows goes into a class of its own."""
        self.scopes.append(Scope())

    def close(self, name: str) -> Scope:
        """The class is complete."""
        scope = self.scopes.pop()
        arguments = ["h", *scope.reads]
        result = ", ".join(["h", *scope.gives])
        self.helper(name, self.class_text(name, scope, arguments, result))
        return scope

    def class_text(self, name: str, scope: Scope, arguments: Sequence[str], result: str) -> str:
        """A module class."""
        init = ["super().__init__()", *scope.init]
        forward = [*scope.forward, f"return {result}"]
        return "\n".join(
            [
                f"class {name}(nn.Module):",
                "    def __init__(self):",
                *(f"        {line}" for line in init),
                "",
                f"    def forward(self, {', '.join(arguments)}):",
                *(f"        {line}" for line in forward),
                "",
            ]
        )
