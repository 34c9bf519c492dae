"""Nets that the fuzzer found, made small: what was once wrong, or refused without need.

Each is a description of `tests.fuzz`; `print(source(net))` shows it as Python.
"""

from __future__ import annotations

from typing import Any, Final

import tests.fuzz.parts  # noqa: F401 - fills the catalogue
from tests.fuzz.net import CATALOGUE, Net, Part

__all__ = ["FOUND", "plain"]


def plain(kind: str, home: str = "inline", **options: Any) -> Part:
    """A part with the simplest options but for those given."""
    simplest = {name: values[0] for name, values in CATALOGUE[kind].options.items()}
    return Part(kind, simplest | options, home)


BLOCK: Final = plain("residual")

FOUND: Final[dict[str, Net]] = {
    # a custom function's own backward was lost where torch.export had to capture the model
    "custom function": Net("rows", (plain("custom", how="function"), BLOCK)),
    # gradients through values that are no tensors
    "chunk": Net("rows", (plain("modulated"), BLOCK), stages=3),
    "dict of an opaque module": Net(
        "rows", (plain("modulated", structure="dict", opaque=True),), stages=3
    ),
    "results of a recurrent layer": Net("rows", (plain("recurrent", read="both"),), stages=3),
    "keys and values": Net("words", (plain("cross"),)),
    "named result": Net("rows", (plain("reduced", whole=True),), stages=3),
    "complex": Net("rows", (plain("spectrum"),), stages=4),
    # in place
    "in place behind an identity": Net(
        "rows", (plain("inplace_layer", behind="nn.Identity()({})"),)
    ),
    "in place behind its own type": Net(
        "rows", (BLOCK, plain("inplace_layer", behind="{}.to({}.dtype)")), precision="bfloat16"
    ),
    "written through a view": Net("rows", (plain("written", what="v = h[:, 1:]; v.tanh_()"),)),
    "written through a transpose": Net(
        "rows", (plain("written", what="h.transpose(0, 1)[0] *= 2"),)
    ),
    # buffers and modes
    "average of a submodule": Net("rows", (plain("average", "module"),)),
    "average within a loop": Net("rows", (plain("average", "list", place="inside"), BLOCK)),
    "average by data": Net(
        "rows", (plain("average", update="{b}.data = 0.9 * {b}.data + {v}"), BLOCK)
    ),
    "lerp": Net("rows", (plain("average", "list", update="{b}.lerp_({v}, 0.1)"),)),
    "largest of a submodule": Net("tokens", (plain("recorded", "module", what="statistic"), BLOCK)),
    "average read behind its update": Net("tokens", (plain("average", read="after"), BLOCK)),
    "counter that is assigned": Net("images", (plain("counter", "twice", change="{b} = {b} + 1"),)),
    "frozen batch norm": Net("rows", (plain("frozen_norm"), BLOCK)),
    # streams that read each other
    "two streams": Net("rows", (plain("streams", how="both"),)),
    # what steers
    "batch": Net("rows", (plain("by_size"), BLOCK)),
    "length": Net("tokens", (plain("by_size", condition="h.shape[{length}] > 6"), BLOCK)),
    "odd": Net("tokens", (plain("padded"), BLOCK)),
    "loop over time": Net("tokens", (plain("over_length"), BLOCK)),
    "loop over every second step": Net("images", (plain("over_length", how="while"), BLOCK)),
    "attribute": Net("rows", (plain("attribute", how="alpha"), BLOCK)),
    "step": Net("rows", (plain("attribute", how="step", change=True), BLOCK)),
    # ties
    "ties of a running maximum": Net(
        "tokens", (plain("rectified", "shared", how="max pool"), BLOCK), stages=3
    ),
    "rounded": Net(
        "rows",
        (
            plain("rectified", "list", how="round", read="max"),
            plain("viewed", "module", how="expand"),
        ),
    ),
    # a number that decides nothing is not drawn, so that those drawn later are others
    "layer drop, off and on": Net(
        "rows",
        tuple(
            plain("dropped", home, how="layer drop", p=p, place="stream")
            for home, p in (("module", 0.0), ("twice", 0.3))
        ),
    ),
}
