"""What may be cut: couplings and residual blocks stay whole, other opaque segments may be split."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from revcompile.compiler.capture.memory import works_in_place
from revcompile.compiler.dataflow import Flow, is_plain, tensor_type
from revcompile.compiler.find.residual import Found
from revcompile.compiler.rewire.region import ORIGIN, Region
from revcompile.compiler.rewire.rewire import rewire
from revcompile.ir.module_tree import called_module
from revcompile.ir.policy import Policy
from revcompile.ir.types import TYPE, Body, Captured, Coupling, Opaque, Rewired, Segment


def whole_pieces(body: Body) -> tuple[Segment, ...]:
    """Every segment as one piece; couplings of one chain share a grid."""
    grids: dict[tuple[str, str], str] = {}
    taken = set(body.types)
    pieces: list[Segment] = []
    continued = {s.streams_in for s in body.segments if isinstance(s, Coupling)}
    for segment in body.segments:
        if not isinstance(segment, Coupling):
            pieces.append(segment)
            continue
        opens = segment.streams_in not in grids
        is_alone = opens and segment.streams_out not in continued
        if segment.averaged and is_alone and segment.rearrange is None:
            pieces.append(_block_alone(segment))
            continue
        grid = f"{segment.streams_in[0]}_grid" if opens else grids[segment.streams_in]
        while opens and grid in taken:  # by an argument, or by a chain of the same streams
            grid = f"{grid}_"
        taken.add(grid)
        grids[segment.streams_out] = grid
        pieces.append(replace(segment, grid=grid, opens=opens))
    return tuple(pieces)


def _block_alone(coupling: Coupling) -> Opaque:
    """An averaged coupling without others to average with, as an opaque `b + F(b)`."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    results = graph.graph_copy(coupling.branch, copies)
    values = results if isinstance(results, tuple | list) else (results,)
    stream = copies[next(iter(coupling.branch.nodes))]
    with graph.inserting_before(next(iter(graph.nodes))):
        graph.placeholder(coupling.streams_in[0])  # equal to the other stream
    total = graph.call_function(torch.add, (stream, values[0]))
    total.meta = dict(stream.meta)
    graph.output((stream, total, *values[1:]))
    inputs = (*coupling.streams_in, *coupling.sides)
    reason = "a block alone: there is no other whose input it could be averaged with"
    return Opaque(coupling.name, inputs, (*coupling.streams_out, *coupling.extras), graph, reason)


def one_stream(captured: Captured, found: Found) -> Rewired:
    """The model cut into segments without rewiring: each block is one segment."""
    plain = rewire(captured, Found((), ()), Policy.SAME_PARAMETERS)
    ends = {name for block in found.residuals for name in (block.x, block.out)}
    names = plain.signature.placeholders
    segments, types = list[Segment](), dict(plain.body.types)
    for whole in plain.body.segments:
        assert isinstance(whole, Opaque)
        split = _Split(whole, plain.root, {*names, *types}, ends)
        segments += split.parts()
        types |= split.types
    body = replace(plain.body, segments=tuple(segments), types=types)
    return replace(plain, body=body, residuals=found.residuals)


def split_pieces(
    rewired: Rewired, pieces: Sequence[Segment]
) -> tuple[tuple[tuple[Segment, ...], ...], Mapping[str, Any]]:
    """The parts of each piece, and the types of the values that cross between them.

    Opaque pieces are split before each of their weighted layers. Couplings, and blocks with a
    shortcut that rewiring understood (transitions), stay whole.
    """
    blocks = {name for block in rewired.residuals for name in block.branch}
    made = (name for piece in pieces for name in piece.outputs)
    used_names = {*made, *rewired.signature.placeholders}
    types: dict[str, Any] = {}
    result: list[tuple[Segment, ...]] = []
    for piece in pieces:
        origins = {node.meta.get(ORIGIN) for node in piece.graph.nodes if not is_plain(node)}
        if isinstance(piece, Opaque) and blocks.isdisjoint(origins):
            split = _Split(piece, rewired.root, used_names)
            result.append(tuple(split.parts()))
            types |= split.types
            used_names |= set(split.types)
        else:
            result.append((piece,))
    return tuple(result), types


class _Split:
    """One opaque segment, split into several."""

    def __init__(
        self,
        segment: Opaque,
        root: nn.Module,
        used_names: Iterable[str],
        ends: Collection[str] = (),
    ) -> None:
        self.segment, self.root, self.ends = segment, root, ends
        self.flow = Flow(segment.graph, root)
        self.used_names = set(used_names)
        self.types: dict[str, Any] = {}
        """Types of the values that cross between the parts, by their new names."""
        nodes = self.flow.nodes
        placeholders = [n for n in nodes if n.op == "placeholder"]
        self.live: dict[fx.Node, str] = dict(zip(placeholders, segment.inputs, strict=True))
        inner = [n for n in nodes if n.op not in ("placeholder", "output")]
        self.computed = [n for n in inner if n not in self.flow.constant]
        self.outputs: dict[str, fx.Node] = {}
        (output,) = segment.graph.find_nodes(op="output")
        for name, node in zip(segment.outputs, output.args[0], strict=True):
            assert isinstance(node, fx.Node)
            self.outputs[name] = node

    def parts(self) -> list[Opaque]:
        """The segment's parts in order."""
        groups = self._groups()
        if len(groups) < 2:
            return [self.segment]
        group_of = {node: i for i, group in enumerate(groups) for node in group}
        parts = []
        for index, group in enumerate(groups):
            outputs = {}
            for node in group:
                if any(group_of.get(user, index) > index for user in node.users):
                    outputs[self._name(node)] = node
            last = index == len(groups) - 1
            for name, node in self.outputs.items():
                if group_of.get(node, len(groups) - 1) == index or (last and node not in group_of):
                    outputs[name] = node
            parts.append(self._part(index, group, outputs))
        return parts

    def _groups(self) -> list[list[fx.Node]]:
        """The nodes between cuts. Each cut is before a layer with a weight matrix or kernel.

        If there are `ends`, cuts are right after these nodes of the captured graph instead.
        """
        groups: list[list[fx.Node]] = [[]]
        weighted, uncuttable = False, self._uncuttable()
        for index, node in enumerate(self.computed):
            begins, before = self.flow.is_weighted(node), self.computed[index - 1]
            if self.ends:
                begins = weighted = before.meta.get(ORIGIN) in self.ends
            if begins and weighted and groups[-1] and index not in uncuttable:
                groups.append([])
                weighted = False
            groups[-1].append(node)
            weighted = weighted or begins
        return groups

    def _uncuttable(self) -> set[int]:
        """Positions where a cut is illegal, because a value that cannot be sent would cross it.

        Only tensors and plain values are sent, no tuples of tensors. A value that a layer with
        `inplace=True` overwrites later cannot be sent either: it has to be sent back.
        """
        position = {node: i for i, node in enumerate(self.computed)}
        positions: set[int] = set()
        for node, index in position.items():
            is_sent = tensor_type(node) is not None or is_plain(node)
            readers = [user for user in node.users if not is_sent or self._overwrites(user)]
            last = max((position.get(reader, index) for reader in readers), default=index)
            positions |= set(range(index + 1, last + 1))
        return positions

    def _overwrites(self, node: fx.Node) -> bool:
        module = called_module(node, self.root)
        return module is not None and works_in_place(module)

    def _name(self, node: fx.Node) -> str:
        """The live name under which a value crosses a cut."""
        if node not in self.live:
            own = [name for name, output in self.outputs.items() if output is node]
            name = own[0] if own else node.name
            while not own and (name in self.used_names or name in self.types):
                name = f"{name}_"
            self.live[node] = name
            self.types[name] = node.meta.get(TYPE)
        return self.live[node]

    def _part(self, index: int, group: list[fx.Node], outputs: dict[str, fx.Node]) -> Opaque:
        region = Region(self.flow, lambda own, node: own.input(self._name(node), like=node))
        for node in group:
            region.copy(node)
        graph = region.finish(tuple(map(region.value, outputs.values())))
        name, inputs = self._part_name(index, group), tuple(region.inputs)
        return Opaque(name, inputs, tuple(outputs), graph, self.segment.reason)

    def _part_name(self, index: int, group: list[fx.Node]) -> str:
        layer = next((str(n.target) for n in group if n.op == "call_module"), "")
        return f"{self.segment.name}: {layer}" if layer else f"{self.segment.name} ({index})"
