"""Building one segment's graph out of nodes of the captured graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from revcompile.compiler.dataflow import Flow
from revcompile.ir.types import PATH, SOURCE, TYPE

ORIGIN = "revcompile_origin"
"""`node.meta` key: the captured node a segment's node was copied from."""


class Region:
    """A graph under construction.

    Args:
        flow: The captured graph.
        outside: How this region reads a captured value that it does not compute.
    """

    def __init__(self, flow: Flow, outside: Callable[[Region, fx.Node], fx.Node]) -> None:
        self.flow, self._outside = flow, outside
        self.graph = fx.Graph()
        self.inputs: dict[str, fx.Node] = {}
        self.defined: dict[str, fx.Node] = {}
        self.keep: fx.Node | None = None
        self._copies: dict[fx.Node, fx.Node] = {}

    def bind(self, original: fx.Node, node: fx.Node) -> None:
        """Use `node` for a captured value inside this region."""
        self._copies[original] = node

    def input(self, name: str, like: fx.Node) -> fx.Node:
        """The region's placeholder for a live value."""
        if name in self.defined:
            return self.defined[name]
        if name not in self.inputs:
            last = next(reversed(self.inputs.values()), None)
            with self.graph.inserting_after(last if last is not None else self.graph._root):
                node = self.inputs[name] = self.graph.placeholder(name)
            # The generated function's parameter must not share its name with a variable.
            node.target = node.name
            describe(node, like)
        return self.inputs[name]

    def has(self, original: fx.Node) -> bool:
        """Whether the captured value is computed or bound here."""
        return original in self._copies

    def value(self, original: fx.Node) -> fx.Node:
        """A captured value inside this region.

        Parameters and values computed from them alone are computed again in each region.
        """
        if original not in self._copies and original in self.flow.constant:
            return self.copy(original)
        if original not in self._copies:
            self._copies[original] = self._outside(self, original)
        return self._copies[original]

    def copy(self, original: fx.Node) -> fx.Node:
        """Compute a captured node here."""
        for source in original.all_input_nodes:
            self.value(source)
        return self.copy_size(original, self._copies.__getitem__)

    def copy_size(self, original: fx.Node, sized: Callable[[fx.Node], fx.Node]) -> fx.Node:
        """Compute a captured node here from other inputs, e.g. a size from values of that shape."""
        new = self.graph.node_copy(original, sized)
        new.meta.setdefault(ORIGIN, original.name)
        self._copies[original] = new
        return new

    def call(self, function: Callable[..., Any], *args: Any, like: fx.Node) -> fx.Node:
        """Append a call that the captured graph did not have."""
        node = self.graph.call_function(function, args)
        describe(node, like)
        return node

    def finish(self, outputs: tuple[fx.Node, ...] | fx.Node) -> fx.Graph:
        """Close the graph, and erase nodes that nothing needs."""
        self.graph.output(outputs)
        kept = ("call_module", "output")
        self.graph.eliminate_dead_code(lambda node: node.op in kept or node is self.keep)
        placeholders = {*self.graph.find_nodes(op="placeholder")}
        self.inputs = {name: node for name, node in self.inputs.items() if node in placeholders}
        self.graph.lint()
        return self.graph


def describe(node: fx.Node, like: fx.Node) -> None:
    """Copy type, module path and source line from another node."""
    for key in (TYPE, PATH, SOURCE):
        node.meta[key] = like.meta.get(key)
