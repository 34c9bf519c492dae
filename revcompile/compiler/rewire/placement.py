"""Places the nodes that belong to no block: in regions before, between and after the blocks.

    region 0 | block 1 | region 1 | block 2 | ... | region n

Every value outside the blocks is computed in the first region in which its inputs exist. A captured
value is one live value or, where blocks start and end, a pair of streams. Readers other than blocks
read the pair fused into one value.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import networkx as nx
import torch
from torch import fx

from revcompile.compiler.dataflow import Flow, tensor_type
from revcompile.compiler.find.conflicts import contracted
from revcompile.compiler.rewire.rearrange import build_rearrange, rearranged_source
from revcompile.compiler.rewire.region import Region
from revcompile.ir.ops import fuse_mean, grown_size, op_name, samples_beyond
from revcompile.ir.types import TYPE, VALUE, Live, Rearrange, Residual

Pair = tuple[str, str]
"""The two streams of one captured value, as names of live values."""


@dataclass(frozen=True)
class Streams:
    """A block's two streams before and after it, and how they are rearranged for it."""

    before: Pair
    rearrange: Rearrange | None
    after: Pair


class Blocks:
    """The blocks of a graph, and which of its nodes they compute.

    Attributes:
        nodes: outputs of blocks and nodes outside the blocks, in the order of computation.
        ordered: the blocks, in that order.
        owner: the block of each node that is computed inside that block only.
        starts: the values that blocks start from.
        rearranged: starts of couplings that are rearrangements of an earlier block's output.
    """

    def __init__(self, flow: Flow, residuals: Sequence[Residual]) -> None:
        self.flow = flow
        self.by_out = {flow.by_name[block.out]: block for block in residuals}
        waits = contracted(flow, residuals)
        self.nodes = list(nx.lexicographical_topological_sort(waits, flow.index.__getitem__))
        self.ordered = [self.by_out[node] for node in self.nodes if node in self.by_out]
        self.owner = self._owners()
        self.starts = list(dict.fromkeys(flow.by_name[block.x] for block in self.ordered))
        self.rearranged: dict[fx.Node, tuple[fx.Node, Rearrange]] = {}
        projected = {flow.by_name[block.x] for block in self.ordered if block.is_projected}
        for x in (x for x in self.starts if x not in projected):
            source = self._arranged_before(x)
            rearrange = None if source is None else build_rearrange(flow, source, x)
            if source is not None and rearrange is not None:
                self.rearranged[x] = source, rearrange

    def entries(self) -> list[fx.Node]:
        """Values at which two streams begin."""
        return [x for x in self.starts if x not in self.by_out and x not in self.rearranged]

    def _owners(self) -> dict[fx.Node, Residual]:
        """The block of each node inside one, except sizes and derived values that others read."""
        owner: dict[fx.Node, Residual] = {}
        for block in self.ordered:
            computed = (n for n in self.flow.in_order(block.nodes) if n not in self.flow.constant)
            owner |= dict.fromkeys(computed, block)
        shared = self.flow.plain | self.flow.derived
        sizes = [n for n in reversed(self.flow.nodes) if n in owner and n in shared]
        for node in sizes:  # users first: a size read outside needs its own inputs outside
            inside = owner[node]
            if any(u not in owner or owner[u] is not inside for u in node.users):
                del owner[node]
        return owner

    def _arranged_before(self, x: fx.Node) -> fx.Node | None:
        """The block output that a value is a rearrangement of, if it is one."""
        node: fx.Node | None = x
        while node is not None and node not in self.by_out:
            node = None if node in self.owner else rearranged_source(self.flow, node)
        return None if node is x else node

    def is_read_as_pair(self, node: fx.Node) -> bool:
        """Whether only blocks that start from the value read it."""
        readers = (self.owner.get(user) for user in node.users)
        return all(block is not None and block.x == node.name for block in readers)

    def computes(self, node: fx.Node) -> bool:
        """Whether no region has to compute the value: its readers compute or rearrange it."""
        if node in self.owner or node in self.flow.constant:
            return True
        if node in self.rearranged:
            return self.is_read_as_pair(node)
        is_derived = node in self.flow.derived and node not in self.starts
        return is_derived and all(user in self.owner for user in node.users)

    def same_shape(self, node: fx.Node) -> fx.Node:
        """An earlier value of the same shape: reading a size must not interrupt a chain."""
        while node in self.by_out and not self.by_out[node].is_projected:
            x = self.flow.by_name[self.by_out[node].x]
            if x in self.rearranged and self.is_read_as_pair(x):
                like = _viewed_like(x)
                if like is None:
                    break
                x = like
            node = x
        return node


class Placement:
    """The regions so far, and where the values outside the blocks are found.

    Args:
        blocks: the blocks between the regions.
        split: values whose halves are the first two streams, and the dimension to split.
        concatenated: values whose streams end concatenated, and the dimension.
        averaged: whether couplings are averaged; their second stream is then the captured value.
    """

    def __init__(
        self,
        blocks: Blocks,
        split: Mapping[fx.Node, int],
        concatenated: Mapping[fx.Node, int],
        averaged: bool,
    ) -> None:
        self.flow, self.averaged = blocks.flow, averaged
        self.regions = [Region(self.flow, self._outside) for _ in range(len(blocks.ordered) + 1)]
        self.types: dict[str, object] = {}
        """The types of all live values, by name."""
        self._blocks, self._split, self._concatenated = blocks, split, concatenated
        self._pairs: dict[fx.Node, Pair] = {}
        self._levels: dict[fx.Node, int] = {}
        """The first region in which a value exists."""
        self.written_sizes: list[fx.Node] = []
        """Sizes that were replaced by functions of the batch size."""
        self._closed = 0

    # -- streams -------------------------------------------------------------------------------

    def streams(self, block: Residual) -> Streams:
        """The streams of the next block; they begin here if no block comes before."""
        x, rearrange = self.flow.by_name[block.x], None
        if x not in self._pairs and x in self._blocks.rearranged:
            x, rearrange = self._blocks.rearranged[x]
        if x not in self._pairs:
            self._enter(x)
        return Streams(self._pairs[x], rearrange, self._new_pair(block.out))

    def _new_pair(self, name: str) -> Pair:
        """Names for a value's two streams."""
        return self._new_name(f"{name}_a"), self._new_name(f"{name}_b")

    def _new_name(self, name: str) -> str:
        """The name, extended if a captured value has it."""
        while name in self.flow.by_name:
            name = f"{name}_"
        return name

    def _enter(self, x: fx.Node) -> None:
        """Begin two streams: split a value that is twice as wide, or use `(x, x)`."""
        region = self.regions[self._levels[x]]
        pair = self._new_pair(x.name)
        value = region.value(x)
        if x in self._split:
            halves = region.call(torch.chunk, value, 2, self._split[x], like=x)
            halves.meta[TYPE] = (x.meta.get(TYPE),) * 2
            for index, name in enumerate(pair):
                region.defined[name] = region.call(operator.getitem, halves, index, like=x)
            region.defined.pop(x.name, None)
        else:
            region.defined |= dict.fromkeys(pair, value)
        self._pairs[x] = pair
        self.types |= dict.fromkeys(pair, x.meta.get(TYPE))

    def close(self, block: Residual, streams: Streams) -> None:
        """Note the values that the next block computes."""
        self._closed += 1
        out = self.flow.by_name[block.out]
        self._pairs[out] = streams.after
        self.types |= dict.fromkeys(streams.after, out.meta.get(TYPE))
        for node in (out, *map(self.flow.by_name.__getitem__, block.extras)):
            self._note(node, self._closed)

    def _note(self, node: fx.Node, level: int) -> None:
        self._levels[node] = level
        self.types[node.name] = node.meta.get(TYPE)

    # -- placing a value outside the blocks ----------------------------------------------------

    def place(self, node: fx.Node) -> None:
        """Compute a node as early as its inputs allow, unless blocks compute it."""
        if node.op == "placeholder":
            self._note(node, 0)
        elif self._blocks.computes(node):
            if node in self._blocks.rearranged:
                self._levels[node] = self._level(node)
        elif node.users or node.op == "call_module":
            if node in self.flow.plain:
                self._place_size(node)
            else:
                level = max(map(self._level, node.all_input_nodes), default=0)
                region = self.regions[level]
                region.defined[node.name] = region.copy(node)
                self._note(node, level)

    def _place_size(self, node: fx.Node) -> None:
        """Compute a size without reading a stream or a value inside a block."""
        sources = [self._blocks.same_shape(i) for i in node.all_input_nodes]
        streams = self._blocks.by_out.keys() | self._blocks.rearranged.keys()
        free = all(
            (s in self._levels and s not in streams) or self.flow.recomputable(s) for s in sources
        )
        values = node.meta.get(VALUE)
        if not free and values is not None:
            level = 0
            copy = self._known_size(values, like=node)
            self.written_sizes.append(node)
        else:
            level = max(map(self._level, sources), default=0)
            region = self.regions[level]
            copy = region.copy_size(node, lambda n: self._sized(region, n))
        self._levels[node], self.types[node.name] = level, None
        self.regions[level].bind(node, copy)
        self.regions[level].defined[node.name] = copy

    def _known_size(self, values: tuple[Any, Any], like: fx.Node) -> fx.Node:
        """Compute a size from the batch size alone, from its values at two batch sizes."""
        region, beyond = self.regions[0], None
        if values[0] != values[1]:
            inputs = self.flow.graph.find_nodes(op="placeholder")
            kinds: Any = ((node, tensor_type(node)) for node in inputs)
            source, kind = next((n, t) for n, t in kinds if t and t.batch_dim is not None)
            dim = kind.batch_dim
            seen = dim, kind.shape[dim], kind.per_sample[dim]
            batched = region.input(source.name, like=source)
            beyond = region.call(samples_beyond, batched, *seen, like=like)
        return region.call(grown_size, *values, beyond or 0, like=like)

    def _level(self, node: fx.Node) -> int:
        """The first region in which the value exists."""
        if node in self.flow.constant:
            return 0
        return self._levels[node if node in self._levels else self._blocks.rearranged[node][0]]

    def _sized(self, region: Region, node: fx.Node) -> fx.Node:
        """A value whose size alone is read: one of its two streams is enough."""
        node = self._blocks.same_shape(node)
        if node in self._pairs:
            return region.input(self._pairs[node][1], like=node)
        return region.value(node)

    # -- reading values of other regions ------------------------------------------------------

    def side(self, region: Region, node: fx.Node) -> fx.Node:
        """A side value of a block."""
        return region.input(self._live(node), like=node)

    def result(self, leaf: object) -> object:
        """One of the model's flat outputs: a live value or a constant."""
        return Live(self._live(leaf)) if isinstance(leaf, fx.Node) else leaf

    def _outside(self, region: Region, node: fx.Node) -> fx.Node:
        """A value of another region, as this region reads it."""
        if node in self._pairs and not self.averaged:
            return self._fused(region, node)  # until then two live values are kept, not three
        return self.side(region, node)

    def _live(self, node: fx.Node) -> str:
        """The name of a node's live value; two streams are fused in the first region with them."""
        if node not in self._pairs and node not in self.flow.constant:
            return node.name
        if node in self._pairs and self.averaged:
            return self._pairs[node][1]
        region = self.regions[self._level(node)]
        fused = region.value(node)
        named = (name for name, value in region.defined.items() if value is fused)
        name = next(named, self._new_name(f"{node.name}_fused"))
        region.defined[name] = fused
        self.types[name] = node.meta.get(TYPE)
        return name

    def _fused(self, region: Region, node: fx.Node) -> fx.Node:
        a, b = (region.input(name, like=node) for name in self._pairs[node])
        if node in self._concatenated:
            return region.call(torch.cat, (a, b), self._concatenated[node], like=node)
        return region.call(fuse_mean, a, b, like=node)


def _viewed_like(node: fx.Node) -> fx.Node | None:
    """The `y` of `x.view(y.shape)`, which has the same shape."""
    given = node.args[1] if op_name(node) in ("view", "reshape") and len(node.args) == 2 else None
    if not isinstance(given, fx.Node):
        return None
    is_shape = given.target is getattr and given.args[1] == "shape"
    is_size = given.target == "size" and len(given.args) == 1 and not given.kwargs
    like = given.args[0] if is_shape or is_size else None
    return like if isinstance(like, fx.Node) else None
