"""rewire: a captured graph and its residual blocks -> two streams, as a list of segments.

Each block becomes a segment (`segments`). Everything else is computed in opaque regions between
them (`placement`). How streams begin and end (`stream_ends`) is the policy's choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from torch import fx, nn

from revcompile.compiler.capture.fake_values import meta_copy
from revcompile.compiler.capture.functional import forbid_inplace
from revcompile.compiler.capture.guards import PythonRead, ReadKind, guarded
from revcompile.compiler.dataflow import Flow
from revcompile.compiler.find.residual import Found, find
from revcompile.compiler.rewire.module_editor import ModuleEditor, own_copy
from revcompile.compiler.rewire.placement import Blocks, Placement
from revcompile.compiler.rewire.region import ORIGIN, Region
from revcompile.compiler.rewire.segments import coupling, transition
from revcompile.compiler.rewire.stream_ends import enter_widened, leave_concatenated
from revcompile.ir.guards import Guards
from revcompile.ir.policy import Policy
from revcompile.ir.types import (
    PATH,
    SOURCE,
    VALUE,
    Body,
    Captured,
    Live,
    Opaque,
    Refusal,
    Residual,
    ResidualKind,
    Rewired,
    Segment,
)

_INEXPRESSIBLE: Final = {
    ResidualKind.POST_ACTIVATION: (
        "an activation follows the sum, so that an averaged coupling would be another function"
    ),
    ResidualKind.PROJECTED: (
        "the shortcut is projected, so that an averaged coupling would be another function"
    ),
}
"""Blocks that an averaged coupling cannot express, and why."""


def rewire(captured: Captured, found: Found, policy: Policy) -> Rewired:
    """Turn every residual block into a segment over two streams. Changes no argument.

    Args:
        captured: the model's graph.
        found: its residual blocks.
        policy: how streams begin, meet and end.
    """
    found = _applicable(found, policy)
    if captured.eval_graph is not None and policy.widens:
        plain = rewire(captured, found, Policy.SAME_PARAMETERS)
        note = "layers keep their widths, which would not fit both graphs: train and eval mode"
        return replace(plain, policy=policy, notes=(*plain.notes, note))
    editor = ModuleEditor(own_copy(captured.root))
    rewiring = _Rewiring(Flow(captured.graph, captured.root), found, policy, editor)
    body = rewiring.run()
    eval_body, sizes = None, rewiring.place.written_sizes
    eval_sizes = sizes
    if captured.eval_graph is not None:
        found_eval = _applicable(find(captured, captured.eval_graph), policy)
        flow = Flow(captured.eval_graph, captured.root)
        evaluated = _Rewiring(flow, found_eval, policy, editor)
        eval_body = evaluated.run()
        eval_sizes = evaluated.place.written_sizes
    for segment in (*body.segments, *(eval_body.segments if eval_body else ())):
        # the input of a layer may now be a stream, which has other readers
        forbid_inplace(segment.graph, editor.root)
    return Rewired(
        name=captured.name,
        root=editor.root,
        body=body,
        eval_body=eval_body,
        signature=captured.signature,
        policy=policy,
        residuals=found.residuals,
        refusals=found.refusals,
        weight_expansions=dict(editor.weight_expansions),
        notes=(*captured.notes, *rewiring.notes),
        guards=_guards_with(captured, sizes, eval_sizes),
        stateful=captured.stateful,
    )


def _applicable(found: Found, policy: Policy) -> Found:
    """Keep the blocks that the policy's coupling can express, and refuse the others."""
    if not policy.averaged:
        return found
    refused = [r for r in found.residuals if r.kind in _INEXPRESSIBLE]
    refusals = [Refusal(r.path, r.total, _INEXPRESSIBLE[r.kind]) for r in refused]
    residuals = tuple(r for r in found.residuals if r.kind not in _INEXPRESSIBLE)
    return Found(residuals, (*found.refusals, *refusals))


class _Rewiring:
    """One walk over a captured graph."""

    def __init__(self, flow: Flow, found: Found, policy: Policy, editor: ModuleEditor) -> None:
        self.flow, self.policy, self.editor = flow, policy, editor
        self.inexpressible = [r for r in found.refusals if r.reason in _INEXPRESSIBLE.values()]
        self.blocks = Blocks(flow, found.residuals)
        self.names = _block_names(flow, self.blocks.ordered)
        split = self._widened()
        inside = self.blocks.owner.keys() | self.blocks.rearranged.keys()
        concatenated: dict[fx.Node, int] = {}
        if policy.widens:
            concatenated = leave_concatenated(flow, editor, self.blocks.ordered, inside)
        self.place = Placement(self.blocks, split, concatenated, policy.averaged)
        self.notes: list[str] = []
        for end in self.blocks.ordered[-1:] if policy.widens else ():
            if flow.by_name[end.out] not in concatenated:
                self.notes.append(f"{end.path or end.out}: the streams end as their mean")
        for x in () if policy.averaged else self.blocks.entries():
            if x not in split:
                self.notes.append(f"{x.meta.get(PATH) or x.name}: the streams start as two copies")

    def run(self) -> Body:
        """Turn blocks into segments, and place every other node in the regions between them."""
        place, segments = self.place, list[Segment]()
        result: tuple[object, ...] = ()
        for node in self.blocks.nodes:
            if node.op == "output":
                leaves = node.args[0]
                assert isinstance(leaves, tuple)
                result = tuple(place.result(leaf) for leaf in leaves)
            elif node in self.blocks.by_out:
                segments.append(self._segment(self.blocks.by_out[node]))
            else:
                place.place(node)
        return self._assemble(segments, result)

    def _widened(self) -> dict[fx.Node, int]:
        """Where streams begin as halves of a wider layer: value -> dimension to split."""
        if not self.policy.widens:
            return {}
        split: dict[fx.Node, int] = {}
        for x in self.blocks.entries():
            begins = not any(self.flow.depends(x, out) for out in self.blocks.by_out)
            if begins and self.blocks.is_read_as_pair(x):
                dimension = enter_widened(self.flow, self.editor, x)
                if dimension is not None:
                    split[x] = dimension
        return split

    def _segment(self, block: Residual) -> Segment:
        build = transition if block.is_projected else coupling
        streams = self.place.streams(block)
        segment = build(self.names[block.total], block, streams, self.place, self.editor)
        self.place.close(block, streams)
        return segment

    def _assemble(self, blocks: list[Segment], result: tuple[object, ...]) -> Body:
        """Close the regions from the last to the first, each with the outputs still needed."""
        needed = {leaf.name for leaf in result if isinstance(leaf, Live)}
        segments: list[Segment] = []
        for index in reversed(range(len(self.place.regions))):
            if index < len(blocks):
                segments.append(blocks[index])
                needed |= set(blocks[index].inputs)
            region = self.place.regions[index]
            outputs = tuple(name for name in region.defined if name in needed)
            graph = region.finish(tuple(region.defined[name] for name in outputs))
            if not outputs and not graph.find_nodes(op="call_module"):
                continue
            name = self._region_name(index, region)
            inputs = tuple(region.inputs)
            segments.append(Opaque(name, inputs, outputs, graph, self._reason(region)))
            needed |= set(inputs)
        return Body(tuple(reversed(segments)), result, dict(self.place.types))

    def _reason(self, region: Region) -> str:
        """Why a region is not reversible: a block in it that the policy cannot express, if any."""
        origins = {node.meta.get(ORIGIN) for node in region.graph.nodes}
        reasons = [refusal.reason for refusal in self.inexpressible if refusal.node in origins]
        return reasons[0] if reasons else "no additive shortcut"

    def _region_name(self, index: int, region: Region) -> str:
        if index == 0:
            return "stem"
        if index == len(self.place.regions) - 1:
            return "head"
        for node in region.graph.nodes:
            if node.op == "call_module":
                return str(node.meta.get(PATH) or node.target)
        before = self.names[self.blocks.ordered[index - 1].total]
        return f"between {before} and the next block"


def _block_names(flow: Flow, blocks: list[Residual]) -> dict[str, str]:
    """A name per block: its module's path or, if a module holds several blocks, a submodule's."""
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
    """The path of the submodule that has most of the branch's parameters."""
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


# -- guards ---------------------------------------------------------------------------------------


def _guards_with(
    captured: Captured, train: Sequence[fx.Node], evaluation: Sequence[fx.Node]
) -> Guards:
    """The guards of a capture, and guards for sizes that are computed from the batch size.

    The size of a value inside a chain cannot be read, because the chain's values are not kept. It
    is extrapolated from its values at two batch sizes. That is right only for inputs whose other
    sizes are those of the example.
    """
    guards = captured.guards
    if not train and not evaluation:
        return guards
    written = [guarded(map(_written, nodes), captured.signature) for nodes in (train, evaluation)]
    return replace(
        guards,
        train=replace(guards.train, sizes=(*guards.train.sizes, written[0])),
        evaluation=replace(guards.evaluation, sizes=(*guards.evaluation.sizes, written[1])),
        skeleton=guards.skeleton or meta_copy(captured.root),
    )


def _written(node: fx.Node) -> PythonRead:
    """The condition under which a size equals the function of the batch size that replaced it."""
    size, grown = node.meta[VALUE]
    return PythonRead(node, size, ReadKind.VALUE, str(node.meta.get(SOURCE, "?")), grown=grown)
