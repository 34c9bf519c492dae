"""Placing what is not part of a block: regions before, between and after the blocks.

    region 0 | block 1 | region 1 | block 2 | ... | region n

Every value outside the blocks is computed in the first region in which its inputs exist. A captured
value is one live value or, as the output of a block, a pair of streams; readers that are no blocks
read the pair fused into one value.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from revcompile.compiler.dataflow import Flow, tensor_type
from revcompile.compiler.rewire.rearrange import build_rearrange, rearranged_source
from revcompile.compiler.rewire.region import Region
from revcompile.compiler.rewire.sizes import WrittenSizes
from revcompile.ir.ops import fuse_mean, op_name, read_buffer, shape
from revcompile.ir.types import TYPE, VALUE, Live, Rearrange, Residual

Pair = tuple[str, str]
"""The two streams of one captured value, as names of live values."""


class Placement:
    """Which captured values are pairs, which block computes what, and the regions so far."""

    def __init__(self, flow: Flow, blocks: list[Residual], averaged: bool = False) -> None:
        self.flow, self.blocks = flow, blocks
        self.by_out = {flow.by_name[b.out]: b for b in blocks}
        self.extras = {flow.by_name[n] for b in blocks for n in b.extras}
        self.starts = {flow.by_name[b.x] for b in blocks}
        self.owner = self._owners()
        self.written: list[fx.Node] = []
        self.pairs: dict[fx.Node, Pair] = {}
        self.levels: dict[fx.Node, int] = {}
        self.regions = [Region(flow) for _ in range(len(blocks) + 1)]
        self.types: dict[str, object] = {}
        self.concatenated: Mapping[fx.Node, int] = {}
        self.averaged = averaged
        """Whether couplings are averaged: their second stream is the captured value."""
        self.rearrangements: dict[fx.Node, tuple[fx.Node, Rearrange]] = {}
        self._find_rearrangements()

    # -- what belongs to which block ----------------------------------------------------------

    def _owners(self) -> dict[fx.Node, Residual]:
        """Nodes that are computed inside a block (sizes may be computed outside as well)."""
        owner: dict[fx.Node, Residual] = {}
        for block in self.blocks:
            for name in (*block.branch, *block.shortcut, *block.adds, *block.post):
                node = self.flow.by_name[name]
                if node not in self.flow.constant:
                    owner[node] = block
        shared = self.flow.plain | self.flow.derived
        sizes = [n for n in reversed(self.flow.nodes) if n in owner and n in shared]
        for node in sizes:  # users first: a size read outside needs its own inputs outside
            inside = owner[node]
            if any(u not in owner or owner[u] is not inside for u in node.users):
                del owner[node]
        return owner

    def _find_rearrangements(self) -> None:
        """Blocks that start from another arrangement of an earlier block's output."""
        for block in self.blocks:
            x = node = self.flow.by_name[block.x]
            while node not in self.by_out:
                source = rearranged_source(self.flow, node)
                if source is None or node in self.owner:
                    break
                node = source
            if node in self.by_out and node is not x:
                rearrange = build_rearrange(self.flow, node, x)
                if rearrange is not None:
                    self.rearrangements[x] = (node, rearrange)

    def rearranges_only(self, node: fx.Node) -> bool:
        """Is a rearranged value read by blocks alone (no need to compute it outside)?"""
        return all(self.reads_pair(u, node) for u in node.users)

    def block_only(self, node: fx.Node) -> bool:
        """Is the value computed again in every block and region that reads it?"""
        if node in self.flow.constant:
            return True
        is_derived = node in self.flow.derived and node not in self.starts
        return is_derived and all(user in self.owner for user in node.users)

    def reads_pair(self, user: fx.Node, node: fx.Node) -> bool:
        """Is the user part of a block that starts from the value?"""
        block = self.owner.get(user)
        return block is not None and block.x == node.name

    def entries(self) -> list[fx.Node]:
        """Values at which two streams begin."""
        xs = dict.fromkeys(self.flow.by_name[b.x] for b in self.blocks)
        return [x for x in xs if x not in self.by_out and x not in self.rearrangements]

    # -- placing a value outside the blocks ----------------------------------------------------

    def place(self, node: fx.Node) -> None:
        """Compute a node outside the blocks, as early as its inputs allow."""
        if not node.users and node.op != "call_module" and node not in self.flow.effects:
            return
        if node in self.flow.plain:
            self._place_size(node)
            return
        level = max((self.level(i) for i in self._needed_with(node)), default=0)
        self.levels[node] = level
        region = self.regions[level]
        copy = region.copy(node, lambda n: self.outside(region, n))
        region.defined[node.name] = copy
        self.types[node.name] = node.meta.get(TYPE)

    def _needed_with(self, node: fx.Node) -> list[fx.Node]:
        """What must be computed before a value is.

        A buffer is read where its contents are combined with other values, so that the stage that
        writes its new contents is, where possible, the stage that reads it.
        """
        if node.target is not read_buffer:
            return node.all_input_nodes
        meeting, others = self.flow.read_with(node)
        block = self.owner.get(meeting)
        if block is not None:
            return [self.flow.by_name[block.x]]
        return [other for other in others if other in self.levels]

    def _place_size(self, node: fx.Node) -> None:
        """Compute a size without reading a stream, or a value inside a block, for it."""
        sources = [self._same_shape(i) for i in node.all_input_nodes]
        streams = self.by_out.keys() | self.rearrangements.keys()
        free = all(
            (s in self.levels and s not in streams) or self.flow.recomputable(s) for s in sources
        )
        values = node.meta.get(VALUE)
        if not free and values is not None:
            level = 0
            copy = self._known_size(values, like=node)
            self.written.append(node)
        else:
            level = max((self.level(s) for s in sources), default=0)
            region = self.regions[level]
            copy = region.copy_size(node, lambda n: self._sized(region, n))
        self.levels[node] = level
        self.regions[level].bind(node, copy)
        self.regions[level].defined[node.name] = copy
        self.types[node.name] = None

    def _known_size(self, values: tuple[Any, Any], like: fx.Node) -> fx.Node:
        """A size from the batch size alone: `k * batch + r`, as seen at two batch sizes."""
        region = self.regions[0]
        if isinstance(values[0], tuple):
            dims = [self._known_size(pair, like) for pair in zip(*values, strict=True)]
            return region.call(shape, *dims, like=like)
        slope = values[1] - values[0]
        if not slope:
            return region.call(int, values[0], like=like)
        source = self._batched_input()
        kind = tensor_type(source)
        assert kind is not None
        batched = region.input(source.name, like=source)
        size = region.call(torch.Tensor.size, batched, kind.batch_dim, like=like)
        scaled = region.call(operator.mul, size, slope, like=like)
        return region.call(operator.add, scaled, values[0] - slope * kind.batch, like=like)

    def _batched_input(self) -> fx.Node:
        """An input that grows with the batch."""
        for node in self.flow.nodes:
            kind = tensor_type(node)
            if node.op == "placeholder" and kind is not None and kind.batch_dim is not None:
                return node
        raise AssertionError("a size depends on the batch, but no input does")

    def written_sizes(self) -> WrittenSizes:
        """Sizes that were replaced by functions of the batch size."""
        depends = any(n.meta[VALUE][0] != n.meta[VALUE][1] for n in self.written)
        return self.written, self._batched_input() if depends else None

    def level(self, node: fx.Node) -> int:
        """The first region in which the value exists."""
        if node in self.flow.constant:
            return 0
        return (
            self.levels[node] if node in self.levels else self.levels[self.rearrangements[node][0]]
        )

    def _same_shape(self, node: fx.Node) -> fx.Node:
        """An earlier value of the same shape: reading a size must not interrupt a chain."""
        while node in self.by_out and not self.by_out[node].is_projected:
            x = self.flow.by_name[self.by_out[node].x]
            if x in self.rearrangements and self.rearranges_only(x):
                like = _viewed_like(x)
                if like is None:
                    break
                x = like
            node = x
        return node

    def _sized(self, region: Region, node: fx.Node) -> fx.Node:
        """A value of which only the size is read: one of two streams is enough."""
        node = self._same_shape(node)
        if node in self.pairs:
            return region.input(self.pairs[node][1], like=node)
        return region.value(node, lambda n: self.outside(region, n))

    # -- reading values of other regions ------------------------------------------------------

    def outside(self, region: Region, node: fx.Node) -> fx.Node:
        """A value of another region, as this region reads it: two streams are fused."""
        pair = self.pairs.get(node)
        if pair is None:
            return region.input(node.name, like=node)
        if self.averaged:
            return region.input(pair[1], like=node)
        a, b = (region.input(name, like=node) for name in pair)
        if node in self.concatenated:
            fused = region.call(torch.cat, (a, b), self.concatenated[node], like=node)
        else:
            fused = region.call(fuse_mean, a, b, like=node)
        if region is self.regions[self.level(node)]:  # a live value is defined in one region
            region.defined[f"{node.name}_fused"] = fused
        return fused

    def side_reader(self, region: Region) -> Callable[[fx.Node], fx.Node]:
        """Side values of a block; pairs are fused in the region before it."""

        def value(node: fx.Node) -> fx.Node:
            if node not in self.pairs:
                return region.input(node.name, like=node)
            return region.input(self._fused(node), like=node)

        return value

    def result(self, leaf: object) -> object:
        """Where one of the model's flat outputs is found."""
        if not isinstance(leaf, fx.Node):
            return leaf
        if leaf not in self.pairs and leaf not in self.flow.constant:
            return Live(leaf.name)
        return Live(self._fused(leaf))

    def _fused(self, node: fx.Node) -> str:
        """The live value of a fused pair, computed in the region of the pair."""
        if self.averaged and node in self.pairs:
            return self.pairs[node][1]
        region = self.regions[self.level(node)]
        fused = region.value(node, lambda n: self.outside(region, n))
        name = next((k for k, v in region.defined.items() if v is fused), f"{node.name}_fused")
        region.defined[name] = fused
        self.types[name] = node.meta.get(TYPE)
        return name


def _viewed_like(node: fx.Node) -> fx.Node | None:
    """The `y` of `x.view(y.shape)`, which has the same shape."""
    given = node.args[1] if op_name(node) in ("view", "reshape") and len(node.args) == 2 else None
    if not isinstance(given, fx.Node):
        return None
    is_shape = given.target is getattr and given.args[1] == "shape"
    is_size = given.target == "size" and len(given.args) == 1 and not given.kwargs
    like = given.args[0] if is_shape or is_size else None
    return like if isinstance(like, fx.Node) else None
