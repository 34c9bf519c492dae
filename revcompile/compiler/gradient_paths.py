"""Which parameters and inputs have a gradient path to the model's results.

A path goes through every node that computes floating-point or complex numbers from others (through
tuples, dicts and leaf modules too); it ends at `detach`, integers and sizes. The paths of the
captured graph, of the rewired segments and of the stages' programs must be equal: a parameter that
has lost its path would silently never train.

From one segment to the next only live values of a differentiable type carry a path, since only
those have a gradient when the model runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from revcompile.compiler.dataflow import cuts_gradient
from revcompile.ir.module_tree import called_module, has_batch_norm, parameters_of
from revcompile.ir.program import Partition, StageProgram
from revcompile.ir.types import (
    TYPE,
    Body,
    Captured,
    Coupling,
    Live,
    Rewired,
    Segment,
    TensorType,
)
from revcompile.ir.weight_expansion import WeightExpansion


class _Sources:
    """Parameters and inputs; a set of them is an integer with one bit for each."""

    def __init__(
        self, root: nn.Module, inputs: Iterable[str] = (), *, trained: bool = False
    ) -> None:
        parameters = list(root.named_parameters())
        self.root = root
        self.names = [name for name, _ in parameters]
        self.names += [f"input {name}" for name in inputs]
        numbered = enumerate(p for _, p in parameters)
        self._bits = {id(p): 1 << i for i, p in numbered if p.requires_grad or not trained}

    def of_inputs(self, inputs: Sequence[str]) -> list[int]:
        first = len(self.names) - len(inputs)
        return [1 << (first + i) for i in range(len(inputs))]

    def read_by(self, node: fx.Node) -> int:
        """The parameters that a node itself reads."""
        return _union(self._bits.get(id(p), 0) for p in parameters_of(node, self.root))

    def listed(self, mask: int) -> list[str]:
        return [name for i, name in enumerate(self.names) if mask >> i & 1]


def _union(masks: Iterable[int]) -> int:
    union = 0
    for mask in masks:
        union |= mask
    return union


def _propagated(graph: fx.Graph, sources: _Sources, given: Sequence[int]) -> list[int]:
    """The sources of each output of a graph, given the sources of its inputs."""
    masks: dict[fx.Node, int] = {}
    inputs = iter(given)
    for node in graph.nodes:
        if node.op == "placeholder":
            masks[node] = next(inputs)
        elif node.op == "output":
            leaves = node.args[0] if isinstance(node.args[0], (tuple, list)) else (node.args[0],)
            return [masks[leaf] if isinstance(leaf, fx.Node) else 0 for leaf in leaves]
        elif cuts_gradient(node):
            masks[node] = 0
        else:
            inputs_of_node = (masks[source] for source in node.all_input_nodes)
            masks[node] = sources.read_by(node) | _union(inputs_of_node)
    raise AssertionError("a graph without output")


# -- the captured graph and the rewired segments --------------------------------------------------


def lost_in_rewired(captured: Captured, rewired: Rewired) -> list[str]:
    """Parameters and inputs that have a path only in the model, or only in the rewired model."""
    names = rewired.signature.placeholders
    before = _Sources(captured.root, names)
    kinds = [node.meta.get(TYPE) for node in captured.graph.find_nodes(op="placeholder")]
    bits = before.of_inputs(names)
    given = [bit if _differentiable(kind) else 0 for bit, kind in zip(bits, kinds, strict=True)]
    expected = before.listed(_union(_propagated(captured.graph, before, given)))

    after = _Sources(rewired.root, names)
    live = dict(zip(names, after.of_inputs(names), strict=True))
    reached = _results(rewired.body, _walk(rewired.body.segments, rewired.body.types, after, live))
    copies = {
        name: source
        for name, (source, how) in rewired.weight_expansions.items()
        if how is WeightExpansion.COPY
    }
    actual = dict.fromkeys(copies.get(name, name) for name in after.listed(reached))
    lost = [name for name in expected if name not in actual]
    gained = [name for name in actual if name not in expected]
    return [
        *(f"{name} has a gradient in the model but none here" for name in lost),
        *(f"{name} has a gradient here but none in the model" for name in gained),
    ]


def _differentiable(kind: Any) -> bool:
    return isinstance(kind, TensorType) and kind.differentiable


def _walk(
    segments: Iterable[Segment],
    types: Mapping[str, Any],
    sources: _Sources,
    live: Mapping[str, int],
) -> dict[str, int]:
    """The sources of each live value, segment by segment."""
    masks = {name: mask if _differentiable(types.get(name)) else 0 for name, mask in live.items()}
    for segment in segments:
        for name, mask in zip(segment.outputs, _through(segment, sources, masks), strict=True):
            masks[name] = mask if _differentiable(types.get(name)) else 0
    return masks


def _through(segment: Segment, sources: _Sources, masks: Mapping[str, int]) -> list[int]:
    """The sources of a segment's outputs; a rearrangement changes none."""
    if not isinstance(segment, Coupling):
        return _propagated(segment.graph, sources, [masks.get(n, 0) for n in segment.inputs])
    a, b, *sides = (masks.get(name, 0) for name in (*segment.streams_in, *segment.sides))
    addend, *extras = _propagated(segment.branch, sources, [b, *sides])
    return [b, a | addend, *extras]


def _results(body: Body, masks: Mapping[str, int]) -> int:
    return _union(masks.get(leaf.name, 0) for leaf in body.result if isinstance(leaf, Live))


def trained_parameters(rewired: Rewired) -> list[str]:
    """Parameters with `requires_grad` that have a gradient path to the results."""
    sources, body = _Sources(rewired.root, trained=True), rewired.body
    return sources.listed(_results(body, _walk(body.segments, body.types, sources, {})))


# -- the stages' programs -------------------------------------------------------------------------


def frozen_values(partition: Partition) -> frozenset[str]:
    """Live values that no parameter with `requires_grad` is a source of.

    Behind a batch norm there is none: its statistics move in the backward pass.
    """
    sources = _Sources(partition.rewired.root, trained=True)
    masks: dict[str, int] = {}
    for piece in (piece for part in partition.parts for piece in part.pieces):
        outputs = _through(piece, sources, masks)
        called = (called_module(node, sources.root) for node in piece.graph.nodes)
        if any(module is not None and has_batch_norm(module) for module in called):
            outputs = [-1] * len(outputs)
        masks |= dict(zip(_results_of(piece), outputs, strict=True))
    return frozenset(name for name, mask in masks.items() if not mask)


@dataclass(frozen=True)
class _Stage:
    """Paths through one stage: for each output its sources, inputs of the stage included."""

    inputs: Mapping[str, int]
    """The bit of each input."""
    outputs: Mapping[str, int]


def lost_in_programs(partition: Partition, programs: Sequence[StageProgram]) -> list[str]:
    """Parameters whose gradient is never computed, and values sent without their gradient."""
    parts = partition.parts
    sources = _Sources(partition.rewired.root, trained=True)
    stages = [_stage(partition, index, sources) for index in range(len(parts))]
    needed = _needed_gradients(partition, stages)
    problems: list[str] = []
    arriving: Mapping[str, int] = {}
    for index, (stage, program) in enumerate(zip(stages, programs, strict=True)):
        with_grad = {
            port.name for port in (*program.inputs, *program.outputs) if port.requires_grad
        }
        problems += _missing_gradients(stage, program, sources, needed[index + 1])
        passed = _composed(stage, arriving, len(sources.names))
        arriving = {name: mask for name, mask in passed.items() if name in with_grad}
        for name, mask in passed.items():
            if mask and name in needed[index + 1] and name not in with_grad:
                lost = ", ".join(sources.listed(mask)[:3])
                problems.append(f"stage {index} sends {name} without a gradient (for {lost})")
    return problems


def _stage(partition: Partition, index: int, sources: _Sources) -> _Stage:
    part, first = partition.parts[index], len(sources.names)
    inputs = {name: 1 << (first + i) for i, name in enumerate(part.inputs)}
    # Types do not matter here: they are compared with the ports afterwards.
    masks: dict[str, int] = dict(inputs)
    for piece in part.pieces:
        outputs = _through(piece, sources, masks)
        masks |= dict(zip(_results_of(piece), outputs, strict=True))
    return _Stage(inputs, {name: masks.get(name, 0) for name in part.outputs})


def _results_of(piece: Segment) -> tuple[str, ...]:
    return piece.results if isinstance(piece, Coupling) else piece.outputs


def _needed_gradients(partition: Partition, stages: Sequence[_Stage]) -> list[list[str]]:
    """For every cut the values whose gradient the results depend on."""
    results = partition.rewired.body.returned
    needed = [[name for name in results if _differentiable(partition.types.get(name))]]
    for stage in reversed(stages):
        sources = _union(stage.outputs.get(name, 0) for name in needed[0])
        needed.insert(0, [name for name, bit in stage.inputs.items() if bit & sources])
    return needed


def _composed(stage: _Stage, arriving: Mapping[str, int], parameters: int) -> dict[str, int]:
    """The parameters of all stages so far that have a path to each output."""
    own = (1 << parameters) - 1
    return {
        name: (mask & own)
        | _union(arriving.get(n, 0) for n, bit in stage.inputs.items() if bit & mask)
        for name, mask in stage.outputs.items()
    }


def _missing_gradients(
    stage: _Stage, program: StageProgram, sources: _Sources, needed: Sequence[str]
) -> list[str]:
    """Parameters and inputs whose gradient the backward program does not compute."""
    placeholders = program.backward.find_nodes(op="placeholder")
    with_grad = program.outputs_with_grad
    gradients = dict(
        zip(with_grad, placeholders[len(placeholders) - len(with_grad) :], strict=True)
    )
    (output,) = program.backward.find_nodes(op="output")
    (_, of_inputs, of_parameters) = output.args[0]
    places = {name: 1 << i for i, name in enumerate(sources.names)}
    checked = [
        (n, stage.inputs[n], g) for n, g in zip(program.inputs_with_grad, of_inputs, strict=True)
    ]
    checked += [(n, places[n], g) for n, g in zip(program.parameters, of_parameters, strict=True)]
    ancestors = _ancestors(program.backward)
    problems = []
    for name, bit, gradient in checked:
        ends = [gradients[n] for n in with_grad if n in needed and stage.outputs[n] & bit]
        reached = ancestors.get(gradient, 0) if isinstance(gradient, fx.Node) else 0
        if ends and not any(reached & ancestors[end] for end in ends):
            problems.append(f"stage {program.index} computes no gradient of {name}")
    return problems


def _ancestors(graph: fx.Graph) -> dict[fx.Node, int]:
    """The placeholders that each node depends on, itself included, as bits."""
    ancestors: dict[fx.Node, int] = {}
    for index, node in enumerate(graph.nodes):
        own = 1 << index if node.op == "placeholder" else 0
        ancestors[node] = own | _union(ancestors[source] for source in node.all_input_nodes)
    return ancestors
