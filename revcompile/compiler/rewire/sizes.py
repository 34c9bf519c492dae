"""Guards for sizes that rewiring has replaced by functions of the batch size.

The size of a value inside a chain cannot be read where the chain's values are not kept. It is
computed from the batch size instead, as seen at two batch sizes, which is right only for inputs
that have the example's other sizes.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from revcompile.compiler.capture.fake_values import meta_copy
from revcompile.compiler.capture.guards import ExpressionPrinter, copy_needed
from revcompile.ir.guards import Guards, SizeGuard, SizeGuards
from revcompile.ir.types import SOURCE, TYPE, VALUE, Captured, TensorType

WrittenSizes = tuple[Iterable[fx.Node], fx.Node | None]
"""Sizes that became functions of the batch size, and an input that grows with the batch."""


def guards_with(captured: Captured, train: WrittenSizes, evaluation: WrittenSizes) -> Guards:
    """The guards of a capture and those of sizes written down for either mode."""
    guards = captured.guards
    written = [_size_guards(captured, *sizes) for sizes in (train, evaluation)]
    if not any(sizes.guards for sizes in written):
        return guards
    return replace(
        guards,
        train=replace(guards.train, sizes=(*guards.train.sizes, written[0])),
        evaluation=replace(guards.evaluation, sizes=(*guards.evaluation.sizes, written[1])),
        skeleton=guards.skeleton or meta_copy(captured.root),
    )


def _size_guards(
    captured: Captured, nodes: Iterable[fx.Node], batched: fx.Node | None
) -> SizeGuards:
    nodes = list(nodes)
    if not nodes:
        return SizeGuards()
    signature = captured.signature
    printer = ExpressionPrinter(dict(zip(signature.placeholders, signature.labels, strict=True)))
    graph, copies = copy_needed(nodes)
    guards: list[SizeGuard] = []
    outputs: list[fx.Node] = []

    def expect(value: fx.Node, seen: tuple[int, int], text: str, source: str) -> None:
        rest, slope = seen[0], seen[1] - seen[0]
        if slope:
            assert batched is not None
            kind: TensorType = batched.meta[TYPE]
            size = graph.call_function(torch.Tensor.size, (copies[batched], kind.batch_dim))
            scaled = graph.call_function(operator.mul, (size, slope))
            value = graph.call_function(operator.sub, (value, scaled))
            text = f"{text} - {slope} * {printer.show(batched)}.shape[{kind.batch_dim}]"
            rest -= slope * kind.batch
        guards.append(SizeGuard(text, rest, source))
        outputs.append(value)

    for node in nodes:
        seen: Any = node.meta[VALUE]
        text, source = printer.show(node), str(node.meta.get(SOURCE, "?"))
        if isinstance(seen[0], tuple):
            for i, pair in enumerate(zip(*seen, strict=True)):
                item = graph.call_function(operator.getitem, (copies[node], i))
                expect(item, pair, f"{text}[{i}]", source)
        else:
            expect(copies[node], seen, text, source)
    graph.output(tuple(outputs))
    return SizeGuards(tuple(guards), graph)
