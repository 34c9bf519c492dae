"""What of a stage's program can be compiled: the stretches between its steps, as functions.

A stretch becomes a function of its inputs and of every tensor it reads, so that blocks of one shape
share one. Where it is a branch F, the sum that follows can be a part of it: F's result
is then never written to memory. Forward and backward have to do the same there, or what is rebuilt
would not be what there was.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from revcompile.ir import stage_ops

__all__ = ["End", "FusionRegion", "fuse_residual_adds", "stretches"]

_STATELESS: Final = (
    nn.AdaptiveAvgPool2d,
    nn.AvgPool2d,
    nn.Flatten,
    nn.GELU,
    nn.Identity,
    nn.MaxPool2d,
    nn.ReLU,
    nn.SiLU,
    nn.Tanh,
)
_FUNCTIONS: Final = frozenset(
    [
        operator.add,
        operator.getitem,
        operator.mul,
        torch.add,
        torch.cat,
        torch.chunk,
        torch.flatten,
        torch.mul,
        torch.permute,
        torch.relu,
        torch.reshape,
        torch.transpose,
        F.gelu,
        F.relu,
        F.scaled_dot_product_attention,
        F.silu,
        F.softmax,
    ]
)
_METHODS: Final = frozenset(
    ["chunk", "flatten", "permute", "reshape", "transpose", "unbind", "view"]
)


@dataclass
class End:
    """A sum that ends a stretch: of a stream and the branch's result, on a grid."""

    node: fx.Node
    place: int
    """Of the branch's result, among the stretch's outputs."""
    graph: fx.Graph
    """The stretch with its sum: after its own inputs it takes the stream, the grid and a sign."""

    @property
    def inputs(self) -> tuple[fx.Node, fx.Node]:
        """Stream and grid."""
        stream, _, grid = self.node.args
        return stream, grid  # type: ignore[return-value]

    @property
    def is_minus(self) -> bool:
        """Is a stream rebuilt?"""
        return self.node.target is stage_ops.minus


@dataclass
class FusionRegion:
    """Nodes of a program in a row, as a function of their inputs and the tensors they read."""

    nodes: list[fx.Node]
    graph: fx.Graph = field(default_factory=fx.Graph)
    inputs: list[fx.Node] = field(default_factory=list)
    reads: list[str] = field(default_factory=list)
    moved: set[str] = field(default_factory=set)
    """Those of the reads that are running statistics."""
    products: set[str] = field(default_factory=set)
    """Those of the reads that autocast turns to low precision, with what they are applied to."""
    counters: list[str] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)
    outputs: list[fx.Node] = field(default_factory=list)
    end: End | None = None

    @property
    def shape(self) -> str:
        """Equal for stretches that compute the same function of their arguments."""
        modules = " ".join(map(repr, self.modules))
        return f"{self.graph.python_code('self').src} {modules} {len(self.inputs)}"


# -- finding stretches -----------------------------------------------------------------------------


def stretches(graph: fx.Graph, root: nn.Module) -> list[FusionRegion]:
    """What of a program is worth compiling."""
    found: list[list[fx.Node]] = []
    run: list[fx.Node] = []
    for node in graph.nodes:
        if _is_pure(node, root):
            run.append(node)
        else:
            found += _worthwhile(run)
            run = []
    return [_built(FusionRegion(nodes), root) for nodes in found]


def _worthwhile(run: list[fx.Node]) -> Iterator[list[fx.Node]]:
    if any(node.op == "call_module" or node.target is stage_ops.call_norm for node in run):
        yield run


def _is_pure(node: fx.Node, root: nn.Module) -> bool:
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        return type(module) in (*_LIFTED, *_STATELESS)
    if node.op == "get_attr":  # of a layer that is normalised, which comes next
        return all(user.target is stage_ops.call_norm for user in node.users)
    if node.op == "call_method":
        return node.target in _METHODS
    if node.target is stage_ops.call_norm:
        layer = root.get_submodule(str(node.args[0].target))  # type: ignore[union-attr]
        return _is_plain_norm(layer) and len(node.args) == 2 and not node.kwargs
    if node.target is operator.getitem:  # of several results of one step: not worth a kernel
        return _is_pure(node.all_input_nodes[0], root)
    return node.op == "call_function" and node.target in _FUNCTIONS


def _is_plain_norm(layer: nn.Module) -> bool:
    if not isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
        return False
    is_own = type(layer) in (nn.BatchNorm1d, nn.BatchNorm2d)
    return is_own and layer.affine and layer.track_running_stats and layer.momentum is not None


# -- building their functions ----------------------------------------------------------------------


def _conv(function: Callable[..., Tensor]) -> Callable[..., tuple[Any, ...]]:
    def lifted(layer: Any) -> tuple[Any, ...]:
        fixed = layer.stride, layer.padding, layer.dilation, layer.groups
        return function, ("weight", "bias"), fixed

    return lifted


_LIFTED: Final[dict[type[nn.Module], Callable[..., tuple[Any, ...]]]] = {
    nn.Conv1d: _conv(F.conv1d),
    nn.Conv2d: _conv(F.conv2d),
    nn.LayerNorm: lambda m: (_layer_norm, ("weight", "bias"), (m.normalized_shape, m.eps)),
    nn.Linear: lambda m: (F.linear, ("weight", "bias"), ()),
}
"""How layers are called with their tensors as arguments: function, tensors, settings."""


def _layer_norm(x: Tensor, weight: Any, bias: Any, shape: Any, eps: float) -> Tensor:
    return F.layer_norm(x, shape, weight, bias, eps)


def _built(stretch: FusionRegion, root: nn.Module) -> FusionRegion:
    """Write the function: inputs, then tensors, in the order in which they are first read."""
    graph, inside = stretch.graph, set(stretch.nodes)
    copies: dict[fx.Node, fx.Node] = {}
    lifted: dict[str, fx.Node] = {}
    computed = [node for node in stretch.nodes if node.op != "get_attr"]
    for node in computed:
        for source in node.all_input_nodes:
            if source not in inside and source not in copies:
                copies[source] = graph.placeholder(f"x{len(stretch.inputs)}")
                stretch.inputs.append(source)
    for node in computed:
        for path in _tensors(node, root):
            if path not in lifted:
                lifted[path] = graph.placeholder(f"t{len(lifted)}")
    stretch.reads = list(lifted)
    for index, node in enumerate(computed):
        copies[node] = _written(stretch, node, root, copies, lifted)
        copies[node]._rename(f"v{index}")
        if any(user not in inside for user in node.users):
            stretch.outputs.append(node)
    graph.output(tuple(copies[node] for node in stretch.outputs))
    return stretch


def _tensors(node: fx.Node, root: nn.Module) -> list[str]:
    """The paths of the tensors that a node reads of its layer."""
    if node.target is stage_ops.call_norm:
        path = str(node.args[0].target)  # type: ignore[union-attr]
        return [f"{path}.{n}" for n in ("running_mean", "running_var", "weight", "bias")]
    if node.op != "call_module":
        return []
    path, layer = str(node.target), root.get_submodule(str(node.target))
    if type(layer) not in _LIFTED:
        return []
    return [f"{path}.{n}" for n in ("weight", "bias") if getattr(layer, n) is not None]


def _written(
    stretch: FusionRegion,
    node: fx.Node,
    root: nn.Module,
    copies: dict[fx.Node, fx.Node],
    lifted: dict[str, fx.Node],
) -> fx.Node:
    graph = stretch.graph
    if node.target is stage_ops.call_norm:
        path = str(node.args[0].target)  # type: ignore[union-attr]
        norm: Any = root.get_submodule(path)
        stretch.moved |= {f"{path}.running_mean", f"{path}.running_var"}
        stretch.counters.append(f"{path}.num_batches_tracked")
        tensors = [lifted[name] for name in _tensors(node, root)]
        x = copies[node.args[1]]  # type: ignore[index]
        return graph.call_function(F.batch_norm, (x, *tensors, True, norm.momentum, norm.eps))
    if node.op == "call_module":
        layer = root.get_submodule(str(node.target))
        args = fx.map_arg(node.args, copies.__getitem__)
        if type(layer) in _LIFTED:
            function, names, fixed = _LIFTED[type(layer)](layer)
            if not isinstance(layer, nn.LayerNorm):
                stretch.products.add(f"{node.target}.weight")
            found = [lifted.get(f"{node.target}.{name}") for name in names]
            return graph.call_function(function, (*args, *found, *fixed))
        stretch.modules.append(layer)
        return graph.call_module(f"m{len(stretch.modules) - 1}", args)
    return graph.node_copy(node, copies.__getitem__)


# -- sums ------------------------------------------------------------------------------------------


def fuse_residual_adds(forward: Sequence[FusionRegion], backward: Sequence[FusionRegion]) -> None:
    """Let stretches end with the sums of their results, where both programs can."""
    for stretch in forward:
        if sum(other.reads == stretch.reads for other in forward) > 1:
            continue
        again = [other for other in backward if other.reads == stretch.reads and _sums(other)]
        ends = [(one, _end(one)) for one in (stretch, *again)]
        if all(end is not None for _, end in ends):
            for one, end in ends:
                one.end = end


def _sums(stretch: FusionRegion) -> list[tuple[int, fx.Node]]:
    """Sums that a stretch's results go into."""
    return [
        (place, user)
        for place, node in enumerate(stretch.outputs)
        for user in node.users
        if user.target in (stage_ops.plus, stage_ops.minus) and user.args[1] is node
    ]


def _end(stretch: FusionRegion) -> End | None:
    """The sum that can be a part of a stretch: nothing else but a gradient reads the result."""
    sums = _sums(stretch)
    if len(sums) != 1:
        return None
    place, node = sums[0]
    others = [user for user in stretch.outputs[place].users if user is not node]
    inside = set(stretch.nodes)
    if any(user.target is not stage_ops.vjp and user not in inside for user in others):
        return None
    last = stretch.nodes[-1]
    if not all(isinstance(x, fx.Node) and x < last for x in (node.args[0], node.args[2])):
        return None
    return End(node, place, _with_sum(stretch, place))


def _with_sum(stretch: FusionRegion, place: int) -> fx.Graph:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    output = graph.graph_copy(stretch.graph, copies)
    assert isinstance(output, tuple)
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    with graph.inserting_after(placeholders[len(stretch.inputs) - 1]):
        sign = graph.placeholder("sign")
        grid = graph.placeholder("grid")
        stream = graph.placeholder("stream")
    found = list(output)
    found[place] = graph.call_function(_sum_on_grid, (found[place], stream, grid, sign))
    graph.output(tuple(found))
    return graph


def _sum_on_grid(addend: Tensor, stream: Tensor, grid: Tensor, sign: Tensor) -> Tensor:
    """The stream plus or minus the addend; its gradient is the addend's own, with no sign."""
    value = addend.detach()
    return (addend - value) + (stream + sign * ((value.float() + grid) - grid))
