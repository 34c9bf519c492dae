"""rewire: a captured graph and its residual blocks -> two streams, as a list of segments.

Blocks are taken in order. Each becomes a unit: a `Coupling` where it is reversible, a
two-stream transition where its shortcut is projected. Everything else goes into the opaque
region before the first unit that needs it. The rules at the borders are functions of their own:
`entering` (one value becomes two streams), `transition`, `leaving` (two streams become one).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from revcompile.compiler.border import enter_widened, leave_concatenated
from revcompile.compiler.flow import Flow, tensor_type
from revcompile.compiler.links import build_link, link_source
from revcompile.compiler.region import Region
from revcompile.compiler.residual import Found, find, ready_times
from revcompile.compiler.surgery import Surgeon, own_copy
from revcompile.ir import (
    TYPE,
    VALUE,
    Body,
    Captured,
    Coupling,
    Enter,
    Fuse,
    Leave,
    Link,
    Live,
    Opaque,
    Policy,
    Residual,
    ResidualKind,
    Rewired,
    Segment,
)
from revcompile.ops import fuse_mean, shape

__all__ = ["rewire"]


def rewire(captured: Captured, found: Found, policy: Policy) -> Rewired:
    """Turn every accepted residual block into a coupling. Changes neither argument."""
    surgeon = Surgeon(own_copy(captured.root))
    rewiring = _Rewiring(Flow(captured.graph, captured.root), found, policy, surgeon)
    body = rewiring.run()
    eval_body = None
    if captured.eval_graph is not None:
        found_eval = find(captured, captured.eval_graph)
        flow = Flow(captured.eval_graph, captured.root)
        eval_body = _Rewiring(flow, found_eval, policy, surgeon).run()
    _forbid_inplace(surgeon, [b for b in (body, eval_body) if b is not None])
    return Rewired(
        name=captured.name,
        root=surgeon.root,
        body=body,
        eval_body=eval_body,
        signature=captured.signature,
        policy=policy,
        residuals=found.residuals,
        refusals=found.refusals,
        growths=dict(surgeon.growths),
        notes=(*captured.notes, *rewiring.notes),
    )


@dataclass(frozen=True)
class Pair:
    """The two live values that stand for one captured value."""

    a: str
    b: str


class _Rewiring:
    """The state of one rewiring: which captured values are pairs, and the regions so far."""

    def __init__(self, flow: Flow, found: Found, policy: Policy, surgeon: Surgeon) -> None:
        self.flow, self.policy, self.surgeon = flow, policy, surgeon
        self.blocks = sorted(found.residuals, key=lambda r: flow.index[flow.by_name[r.out]])
        self.by_out = {flow.by_name[b.out]: b for b in self.blocks}
        self.extras = {flow.by_name[n] for b in self.blocks for n in b.extras}
        self.owner = self._owners()
        self.links: dict[fx.Node, tuple[fx.Node, Link]] = {}
        self.pairs: dict[fx.Node, Pair] = {}
        self.levels: dict[fx.Node, int] = {}
        self.regions = [Region(flow) for _ in range(len(self.blocks) + 1)]
        self.types: dict[str, object] = {}
        self.notes: list[str] = []
        self.names = _block_names(flow, self.blocks)

    def run(self) -> Body:
        """Walk the captured graph once."""
        self._find_links()
        self.widened = {
            x: split
            for x in self._entries()
            if self.policy.enter is Enter.WIDEN
            and not any(self.flow.depends(x, out) for out in self.by_out)
            and all(self._reads_pair(u, x) for u in x.users)
            and (split := enter_widened(self.flow, self.surgeon, x)) is not None
        }
        self.concatenated = leave_concatenated(
            self.flow,
            self.surgeon,
            {self.flow.by_name[b.out] for b in self.blocks},
            set(self.owner) | set(self.links),
            inner=self.policy.fuse is Fuse.CONCAT,
            last=self.policy.leave is Leave.CONCAT,
            blocks=[self.flow.by_name[b.x] for b in self.blocks],
        )
        units: list[Segment] = []
        result: tuple[object, ...] = ()
        ready = ready_times(self.flow, self.blocks)

        def turn(node: fx.Node) -> tuple[int, bool, int]:
            return ready[node], node not in self.by_out, self.flow.index[node]

        for node in sorted(self.flow.nodes, key=turn):
            if node.op == "output":
                result = tuple(self._result(leaf) for leaf in node.args[0])  # type: ignore[union-attr]
            elif node.op == "placeholder":
                self.levels[node] = 0
                self.types[node.name] = node.meta.get(TYPE)
            elif node in self.by_out:
                units.append(self._unit(self.by_out[node], len(units)))
                self.levels[node] = len(units)
            elif node in self.extras:
                continue
            elif node in self.links and self._link_only(node):
                self.levels[node] = self.levels[self.links[node][0]]
            elif node not in self.owner and not self._block_only(node):
                self._place(node)
        return self._assemble(units, result)

    # -- where things go ----------------------------------------------------------------------

    def _owners(self) -> dict[fx.Node, Residual]:
        """Nodes that are computed inside a block (sizes may be computed outside as well)."""
        owner: dict[fx.Node, Residual] = {}
        for block in self.blocks:
            for name in (*block.branch, *block.shortcut, *block.adds, *block.post):
                node = self.flow.by_name[name]
                if node not in self.flow.constant:
                    owner[node] = block
            if block.shortcut_term and block.shortcut_term != block.x:
                node = self.flow.by_name[block.shortcut_term]
                while node.name != block.x and node not in owner:  # nn.Identity on the shortcut
                    owner[node] = block
                    node = node.all_input_nodes[0]
        shared = self.flow.plain | self.flow.derived
        sizes = [n for n in reversed(self.flow.nodes) if n in owner and n in shared]
        for node in sizes:  # users first: a size read outside takes what it is made from along
            inside = owner[node]
            if any(u not in owner or owner[u] is not inside for u in node.users):
                del owner[node]
        return owner

    def _find_links(self) -> None:
        outs = {self.flow.by_name[b.out] for b in self.blocks}
        for block in self.blocks:
            x = node = self.flow.by_name[block.x]
            while node not in outs:
                source = link_source(self.flow, node)
                if source is None or node in self.owner:
                    break
                node = source
            if node in outs and node is not x:
                link = build_link(self.flow, node, x)
                if link is not None:
                    self.links[x] = (node, link)

    def _link_only(self, node: fx.Node) -> bool:
        """Is a linked value read by blocks alone (no need to compute it outside)?"""
        return all(self._reads_pair(u, node) for u in node.users)

    def _block_only(self, node: fx.Node) -> bool:
        """Is the value computed anew wherever it is read?"""
        if node in self.flow.constant:
            return True
        starts = any(node.name == block.x for block in self.blocks)
        return node in self.flow.derived and not starts and all(u in self.owner for u in node.users)

    def _reads_pair(self, user: fx.Node, node: fx.Node) -> bool:
        block = self.owner.get(user)
        return block is not None and block.x == node.name

    def _entries(self) -> list[fx.Node]:
        """Values at which two streams begin."""
        outs = {b.out for b in self.blocks}
        xs = dict.fromkeys(self.flow.by_name[b.x] for b in self.blocks)
        return [x for x in xs if x.name not in outs and x not in self.links]

    def _place(self, node: fx.Node) -> None:
        """Compute a node outside the blocks, as early as its inputs allow."""
        if not node.users and node.op != "call_module" and node not in self.flow.effects:
            return
        if node in self.flow.plain:
            self._place_size(node)
            return
        level = max((self._level(i) for i in node.all_input_nodes), default=0)
        self.levels[node] = level
        region = self.regions[level]
        copy = region.copy(node, lambda n: self._outside(region, level, n))
        region.defined[node.name] = copy
        self.types[node.name] = node.meta.get(TYPE)

    def _place_size(self, node: fx.Node) -> None:
        """Sizes of streams and of values inside blocks are had without touching those."""
        sources = [self._same_shape(i) for i in node.all_input_nodes]
        free = all(
            (s in self.levels and s not in self.by_out) or self.flow.anywhere(s) for s in sources
        )
        values = node.meta.get(VALUE)
        if not free and values is not None:
            level = 0
            copy = self._known_size(values, like=node)
        else:
            level = max((self._level(s) for s in sources), default=0)
            region = self.regions[level]
            copy = region.copy_size(node, lambda n: self._sized(region, level, n))
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
        first = next(n for n in self.flow.nodes if n.op == "placeholder")
        size = region.call(torch.Tensor.size, region.input(first.name, like=first), 0, like=like)
        kind = tensor_type(first)
        assert kind is not None
        scaled = region.call(operator.mul, size, slope, like=like)
        return region.call(operator.add, scaled, values[0] - slope * kind.batch, like=like)

    def _level(self, node: fx.Node) -> int:
        """How many units must have run before the value is there."""
        if node in self.flow.constant:
            return 0
        return self.levels[node] if node in self.levels else self.levels[self.links[node][0]]

    def _same_shape(self, node: fx.Node) -> fx.Node:
        """An earlier value of the same shape: asking for a size must not break a chain."""
        while node in self.by_out and self.by_out[node].kind is not ResidualKind.PROJECTED:
            x = self.flow.by_name[self.by_out[node].x]
            if x in self.links and self._link_only(x):
                break
            node = x
        return node

    def _sized(self, region: Region, level: int, node: fx.Node) -> fx.Node:
        """A value whose size is asked for: one of two streams is enough."""
        node = self._same_shape(node)
        if node in self.pairs:
            return region.input(self.pairs[node].b, like=node)
        return region.value(node, lambda n: self._outside(region, level, n))

    def _outside(self, region: Region, level: int, node: fx.Node) -> fx.Node:
        """A value computed elsewhere, as this region sees it: two streams are fused."""
        pair = self.pairs.get(node)
        if pair is None:
            return region.input(node.name, like=node)
        a, b = region.input(pair.a, like=node), region.input(pair.b, like=node)
        if node in self.concatenated:
            fused = region.call(torch.cat, (a, b), self.concatenated[node], like=node)
        else:
            fused = region.call(fuse_mean, a, b, like=node)
        region.defined[f"{node.name}_fused"] = fused
        return fused

    def _result(self, leaf: object) -> object:
        if not isinstance(leaf, fx.Node):
            return leaf
        if leaf not in self.pairs and leaf not in self.flow.constant:
            return Live(leaf.name)
        level = self._level(leaf)
        region = self.regions[level]
        fused = region.value(leaf, lambda n: self._outside(region, level, n))
        name = next((k for k, v in region.defined.items() if v is fused), leaf.name)
        region.defined[name] = fused
        return Live(name)

    # -- the rules ----------------------------------------------------------------------------

    def _pair(self, x: fx.Node, level: int) -> tuple[Pair, Link | None]:
        """The two streams of a block's input; begins them where there are none."""
        if x in self.pairs:
            return self.pairs[x], None
        if x in self.links:
            source, link = self.links[x]
            return self.pairs[source], link
        return self._enter(x), None

    def _enter(self, x: fx.Node) -> Pair:
        """`widen`: split a value twice as wide; `duplicate`: `(x, x)`."""
        level = self.levels[x]
        region = self.regions[level]
        pair = Pair(f"{x.name}_a", f"{x.name}_b")
        value = region.value(x, lambda n: self._outside(region, level, n))
        if x in self.widened:
            halves = region.call(torch.chunk, value, 2, self.widened[x], like=x)
            for index, name in enumerate((pair.a, pair.b)):
                region.defined[name] = region.call(operator.getitem, halves, index, like=x)
            region.defined.pop(x.name, None)
        else:
            region.defined[pair.a] = region.defined[pair.b] = value
            self.notes.append(f"{self._where(x)}: the streams start as two copies")
        self.types[pair.a] = self.types[pair.b] = x.meta.get(TYPE)
        self.pairs[x] = pair
        return pair

    def _where(self, node: fx.Node) -> str:
        return str(node.meta.get("revcompile_path") or node.name)

    def _unit(self, block: Residual, index: int) -> Segment:
        x = self.flow.by_name[block.x]
        pair, link = self._pair(x, index)
        out = self.flow.by_name[block.out]
        new = Pair(f"{out.name}_a", f"{out.name}_b")
        self.types[new.a] = self.types[new.b] = out.meta.get(TYPE)
        self.pairs[out] = new
        if block.kind is ResidualKind.PROJECTED:
            return self._transition(block, index, pair, link, new)
        branch, sides = self._branch(block, index, x)
        for name in block.extras:
            self.levels[self.flow.by_name[name]] = index + 1
            self.types[name] = self.flow.by_name[name].meta.get(TYPE)
        return Coupling(
            name=self.names[block.total],
            kind=block.kind,
            streams_in=(pair.a, pair.b),
            streams_out=(new.a, new.b),
            sides=sides,
            branch=branch,
            link=link,
            extras=block.extras,
        )

    def _branch(self, block: Residual, index: int, x: fx.Node) -> tuple[fx.Graph, tuple[str, ...]]:
        """F as a graph: `(b, *sides) -> addend`, a post-activation inside."""
        region = Region(self.flow)
        b = region.keep = region.input("b", like=x)
        region.bind(x, b)
        value = self._side_reader(region, index)
        self._copy_all(region, block.branch, value)
        addend = None
        for name in block.terms:
            term = region.value(self.flow.by_name[name], value)
            addend = term if addend is None else region.call(torch.add, addend, term, like=x)
        assert addend is not None
        if not block.shortcut_term:  # a scaled shortcut: s*x + F(x) = x + (s*x + F(x) - x)
            addend = region.call(torch.sub, addend, b, like=x)
        addend = self._post(region, block, addend)
        extras = [region.value(self.flow.by_name[name], value) for name in block.extras]
        graph = region.finish((addend, *extras) if extras else addend)
        return graph, tuple(name for name in region.inputs if name != "b")

    def _side_reader(self, region: Region, index: int) -> Callable[[fx.Node], fx.Node]:
        """Side values of a unit; those that are pairs are fused in the region before it."""

        def value(node: fx.Node) -> fx.Node:
            if node not in self.pairs:
                return region.input(node.name, like=node)
            level = self._level(node)
            outer = self.regions[level]
            fused = outer.value(node, lambda n: self._outside(outer, level, n))
            name = next((k for k, v in outer.defined.items() if v is fused), f"{node.name}_fused")
            outer.defined[name] = fused
            self.types[name] = node.meta.get(TYPE)
            return region.input(name, like=node)

        return value

    def _copy_all(
        self, region: Region, names: frozenset[str], value: Callable[[fx.Node], fx.Node]
    ) -> None:
        for node in sorted((self.flow.by_name[n] for n in names), key=self.flow.index.__getitem__):
            if node not in self.flow.constant and not region.has(node):
                region.copy(node, value)

    def _post(self, region: Region, block: Residual, value: fx.Node) -> fx.Node:
        """Apply the activation that followed the sum."""
        region.bind(self.flow.by_name[block.total], value)
        for name in block.post:
            value = region.copy(self.flow.by_name[name], self._side_reader(region, -1))
        return value

    def _transition(
        self, block: Residual, index: int, pair: Pair, link: Link | None, new: Pair
    ) -> Opaque:
        """Projected shortcut: `(a, b) -> (s(b), P(a) + F(b))`, two streams stay two."""
        x = self.flow.by_name[block.x]
        region = Region(self.flow)
        a, b = region.input(pair.a, like=x), region.input(pair.b, like=x)
        if link is not None:
            a, b = (self._linked(region, link, stream, x) for stream in (a, b))
        value = self._side_reader(region, index)
        region.bind(x, b)
        self._copy_all(region, block.branch, value)
        shaped = self._first_shaped(block)
        if shaped is not None:
            first = region.value(shaped, value)
        else:
            first = self._project(region, block, x, b, value, copied=True)
        projected = self._project(region, block, x, a, value, copied=False)
        total = self.flow.by_name[block.total]
        branch = region.value(self.flow.by_name[block.terms[0]], value)
        second = region.call(torch.add, projected, self._post(region, block, branch), like=total)
        graph = region.finish((first, second))
        return Opaque(
            name=self.names[block.total],
            inputs=tuple(region.inputs),
            outputs=(new.a, new.b),
            graph=graph,
            reason="its shortcut is projected to another shape",
        )

    def _linked(self, region: Region, link: Link, stream: fx.Node, x: fx.Node) -> fx.Node:
        placeholders = [n for n in link.forward.nodes if n.op == "placeholder"]
        copies = {placeholders[0]: stream}
        copies |= {p: region.input(p.name) for p in placeholders[1:]}
        outputs = region.graph.graph_copy(link.forward, copies)
        assert isinstance(outputs, tuple) and isinstance(outputs[0], fx.Node)
        return outputs[0]

    def _project(
        self,
        region: Region,
        block: Residual,
        x: fx.Node,
        stream: fx.Node,
        value: Callable[[fx.Node], fx.Node],
        *,
        copied: bool,
    ) -> fx.Node:
        """P on one stream; its second copy has parameters of its own, equal at the start."""
        local: dict[fx.Node, fx.Node] = {x: stream}

        def source(node: fx.Node) -> fx.Node:
            return local[node] if node in local else region.value(node, value)

        names = (self.flow.by_name[n] for n in block.shortcut)
        for node in sorted(names, key=self.flow.index.__getitem__):
            if node in self.flow.constant:
                continue
            for i in node.all_input_nodes:
                source(i)
            local[node] = region.graph.node_copy(node, source)
            if copied and node.op == "call_module":
                module = self.flow.root.get_submodule(str(node.target))
                if next(module.parameters(), None) is not None:
                    local[node].target = self.surgeon.duplicate(str(node.target))
        return source(self.flow.by_name[block.shortcut_term])

    def _first_shaped(self, block: Residual) -> fx.Node | None:
        """The branch's first layer (with its norm), short of its last, of the output's shape."""
        total = self.flow.by_name[block.total]
        nodes = sorted((self.flow.by_name[n] for n in block.branch), key=self.flow.index.get)  # type: ignore[arg-type]
        layers = [n for n in nodes if self.flow.is_weighted(n)]
        for layer in layers[:-1]:
            unit = layer
            users = self.flow.users(layer)
            if len(users) == 1 and "Norm" in self._module_name(users[0]):
                unit = users[0]
            if tensor_type(unit) == tensor_type(total):
                return unit
        return None

    def _module_name(self, node: fx.Node) -> str:
        if node.op != "call_module":
            return ""
        return type(self.flow.root.get_submodule(str(node.target))).__name__

    # -- putting it together ------------------------------------------------------------------

    def _assemble(self, units: list[Segment], result: tuple[object, ...]) -> Body:
        """Close the regions from the last to the first, each with the outputs still needed."""
        needed = {leaf.name for leaf in result if isinstance(leaf, Live)}
        segments: list[Segment] = []
        for index in reversed(range(len(self.regions))):
            if index < len(units):
                segments.append(units[index])
                needed |= set(units[index].inputs)
            region = self.regions[index]
            outputs = tuple(name for name in region.defined if name in needed)
            graph = region.finish(tuple(region.defined[name] for name in outputs))
            if not outputs and not _has_effect(region):
                continue
            name = self._region_name(index, region)
            inputs = tuple(region.inputs)
            segments.append(Opaque(name, inputs, outputs, graph, "no additive shortcut"))
            needed |= set(inputs)
        return Body(tuple(reversed(segments)), result, dict(self.types))

    def _region_name(self, index: int, region: Region) -> str:
        if index == 0:
            return "stem"
        if index == len(self.blocks):
            return "head"
        for node in region.graph.nodes:
            if node.op == "call_module":
                return str(node.meta.get("revcompile_path") or node.target)
        return f"between {self.names[self.blocks[index - 1].total]} and the next block"


def _has_effect(region: Region) -> bool:
    return any(n.op == "call_module" or n in region.flow.effects for n in region.graph.nodes)


def _block_names(flow: Flow, blocks: list[Residual]) -> dict[str, str]:
    """A name per block: its module's path, and the part of it where one module holds several."""
    paths = [b.path for b in blocks]
    names: dict[str, str] = {}
    taken: set[str] = set()
    for block in blocks:
        name = block.path or "(top level)"
        if paths.count(block.path) > 1:
            name = _finer(flow, block) or name
        base, n = name, 2
        while name in taken:
            name, n = f"{base}#{n}", n + 1
        taken.add(name)
        names[block.total] = name
    return names


def _finer(flow: Flow, block: Residual) -> str | None:
    """The part of the block's module that has most of the branch's parameters."""
    path = block.path
    while True:
        prefix = f"{path}." if path else ""
        weight: dict[str, int] = {}
        for name in block.branch:
            target = str(flow.by_name[name].target)
            size = flow.parameter_count(flow.by_name[name])
            if size and target.startswith(prefix):
                child = prefix + target[len(prefix) :].split(".")[0]
                weight[child] = weight.get(child, 0) + size
        if not weight:
            return path or None
        path = max(weight, key=weight.__getitem__)
        module = dict(flow.root.named_modules()).get(path)
        if not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            return path


def _forbid_inplace(surgeon: Surgeon, bodies: list[Body]) -> None:
    """Layers that would overwrite a stream or a kept value work out of place."""
    for body in bodies:
        for segment in body.segments:
            graph = segment.branch if isinstance(segment, Coupling) else segment.graph
            for node in graph.nodes:
                if node.op != "call_module":
                    continue
                module = surgeon.root.get_submodule(str(node.target))
                for inner in module.modules():
                    if getattr(inner, "inplace", False) is True and not _may_overwrite(node):
                        inner.inplace = False  # type: ignore[assignment]


def _may_overwrite(node: fx.Node) -> bool:
    """Is the layer's input a fresh value that nobody else reads?"""
    source = node.args[0] if node.args else None
    fresh = isinstance(source, fx.Node) and source.op == "call_module"
    return fresh and len(source.users) == 1  # type: ignore[union-attr]
