"""Fusion regions: the parts of a stage's program that are compiled, each as one function.

    a' = b                      a region is a run of nodes without side effects: here the branch F
    b' = a + F(b)               the residual add can be fused into it: F(b) is never in memory

The function of a region takes its inputs and every tensor of its layers that it reads (weights,
running statistics) as arguments. Blocks of one shape thus share a compiled function. If backward
undoes an add, the add is fused in both programs or in neither: computed differently, the
reconstructed input would not be the one that forward had.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from revcompile.ir import coupling_ops
from revcompile.ir.precision_rewrites import called_layer, calls_layer
from revcompile.ir.python_code import copied, source_of

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
class FusedAdd:
    """The residual add at the end of a region: a stream plus or minus the branch, on a grid."""

    node: fx.Node
    """The add in the stage's program."""
    output: int
    """Which of the region's outputs is the branch's result."""
    graph: fx.Graph
    """The region with the add. After its own inputs come the stream, a grid to round the stream to
    (or 0), the chain's grid, a sign, and a tensor that the sum is written to."""
    rounds: bool = False
    """Whether it also rounds the stream to the grid; the stream is then read only here."""

    @property
    def inputs(self) -> tuple[fx.Node, fx.Node]:
        """Stream and grid."""
        stream, _, grid = self.node.args
        return stream, grid  # type: ignore[return-value]

    @property
    def is_minus(self) -> bool:
        """Whether it reconstructs a stream in backward."""
        return self.node.target is coupling_ops.minus


@dataclass
class FusionRegion:
    """Consecutive nodes of a program, as a function of their inputs and the tensors they read."""

    nodes: list[fx.Node]
    graph: fx.Graph = field(default_factory=fx.Graph)
    """The function."""
    inputs: list[fx.Node] = field(default_factory=list)
    outputs: list[fx.Node] = field(default_factory=list)
    reads: list[str] = field(default_factory=list)
    """Paths of the layers' tensors that it reads."""
    statistics: set[str] = field(default_factory=set)
    """The paths in `reads` that are running statistics."""
    counters: list[str] = field(default_factory=list)
    """Paths of `num_batches_tracked`, which the function does not write."""
    modules: list[nn.Module] = field(default_factory=list)
    """Layers without tensors that the function calls."""
    fused_add: FusedAdd | None = None

    @property
    def signature(self) -> str:
        """Equal for regions that compute the same function of their arguments."""
        modules = " ".join(map(repr, self.modules))
        return f"{source_of(self.graph)} {modules} {len(self.inputs)}"


# -- finding regions -------------------------------------------------------------------------------


def find_regions(graph: fx.Graph, root: nn.Module) -> list[FusionRegion]:
    """The regions of a stage's program: its longest runs of pure nodes with at least one layer."""
    runs = itertools.groupby(graph.nodes, lambda node: _is_pure(node, root))
    pure = [list(nodes) for is_pure, nodes in runs if is_pure]
    return [_build(FusionRegion(nodes), root) for nodes in pure if any(map(calls_layer, nodes))]


def _is_pure(node: fx.Node, root: nn.Module) -> bool:
    if calls_layer(node):
        _, layer, args = called_layer(node, root)
        is_known = type(layer) in (*_LIFTED, *_STATELESS) and _has_fixed_momentum(layer)
        return is_known and len(args) == 1 and not node.kwargs
    if node.op == "get_attr":  # the layer argument of `call_norm`
        return all(user.target is coupling_ops.call_norm for user in node.users)
    if node.op == "call_method":
        return node.target in _METHODS
    if node.target is operator.getitem:  # alone it is not worth a kernel
        return _is_pure(node.all_input_nodes[0], root)
    return node.op == "call_function" and node.target in _FUNCTIONS


_NORMS: Final = (nn.BatchNorm1d, nn.BatchNorm2d)


def _has_fixed_momentum(layer: Any) -> bool:
    """Whether the layer is no batch norm, or one with all its tensors and a fixed momentum."""
    if type(layer) not in _NORMS:
        return True
    return layer.affine and layer.track_running_stats and layer.momentum is not None


# -- building their functions ----------------------------------------------------------------------


def _conv2d(
    x: Tensor, weight: Tensor, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int
) -> Tensor:
    (height, width), (step, other) = x.shape[2:], stride
    is_square = step == other and weight.shape[2] == weight.shape[3]
    is_plain = not isinstance(padding, str) and padding[0] == padding[1] and dilation == (1, 1)
    is_narrow = groups == 1 and x.shape[1] <= _NARROW and step > 1
    fits = height % step == 0 and width % step == 0
    if x.is_cuda and is_narrow and is_square and is_plain and fits:
        return folded_conv2d(x, weight, bias, step, padding[0])
    return F.conv2d(x, weight, bias, stride, padding, dilation, groups)


_NARROW: Final = 4
"""The most input channels (as in a stem) that leave most of a tensor core idle."""
_ALIGNED: Final = 8
"""Channels that a tensor core reads at once."""


def folded_conv2d(x: Tensor, weight: Tensor, bias: Any, step: int, padding: int) -> Tensor:
    """A convolution of stride `step` as one of stride 1 with squares of pixels as channels."""
    outputs, channels, kernel, _ = weight.shape
    before = -(-padding // step)
    left = before * step - padding
    taps = -(-(kernel + left) // step)
    right = taps * step - kernel - left
    weight = F.pad(weight, (left, right, left, right))
    weight = weight.reshape(outputs, channels, taps, step, taps, step).permute(0, 1, 3, 5, 2, 4)
    weight = weight.reshape(outputs, channels * step * step, taps, taps)
    behind = [
        (size + 2 * padding - kernel) // step + taps - before - size // step
        for size in (x.shape[3], x.shape[2])
    ]
    missing = -channels * step * step % _ALIGNED
    x = F.pad(F.pixel_unshuffle(x, step), (before, behind[0], before, behind[1], 0, missing))
    return F.conv2d(x, F.pad(weight, (0, 0, 0, 0, 0, missing)), bias)


def _layer_norm(x: Tensor, weight: Any, bias: Any, shape: Any, eps: float) -> Tensor:
    return F.layer_norm(x, shape, weight, bias, eps)


_OF_NORMS: Final = ("training", "momentum", "eps")
_OF_CONVS: Final = ("stride", "padding", "dilation", "groups")
_AFFINE: Final = ("weight", "bias")
_LIFTED: Final[dict[type, tuple[Callable[..., Tensor], tuple[str, ...], tuple[str, ...]]]] = {
    **dict.fromkeys(_NORMS, (F.batch_norm, ("running_mean", "running_var", *_AFFINE), _OF_NORMS)),
    nn.Conv1d: (F.conv1d, _AFFINE, _OF_CONVS),
    nn.Conv2d: (_conv2d, _AFFINE, _OF_CONVS),
    nn.LayerNorm: (_layer_norm, _AFFINE, ("normalized_shape", "eps")),
    nn.Linear: (F.linear, _AFFINE, ()),
}
"""For layers with tensors: a function of the input, and of these tensors and settings of it."""


def _build(region: FusionRegion, root: nn.Module) -> FusionRegion:
    """Fill in a region: its function takes inputs, then tensors, in the order of first use."""
    graph, inside = region.graph, set(region.nodes)
    copies: dict[fx.Node, fx.Node] = {}
    lifted: dict[str, fx.Node] = {}
    computed = [node for node in region.nodes if node.op != "get_attr"]
    for node in computed:
        for source in node.all_input_nodes:
            if source not in inside and source not in copies:
                copies[source] = graph.placeholder(f"x{len(region.inputs)}")
                region.inputs.append(source)
    for node in computed:
        for path in _tensors(node, root):
            if path not in lifted:
                lifted[path] = graph.placeholder(f"t{len(lifted)}")
    region.reads = list(lifted)
    for index, node in enumerate(computed):
        copies[node] = _emit(region, node, root, copies, lifted)
        copies[node]._rename(f"v{index}")
        if any(user not in inside for user in node.users):
            region.outputs.append(node)
    results = (
        graph.call_function(_in_own_memory, (copies[node],))
        if node.target is operator.getitem
        else copies[node]
        for node in region.outputs
    )
    graph.output(tuple(results))
    return region


def _in_own_memory(part: Any) -> Any:
    """A part of an image's channels as a tensor of its own.

    The last kernel then writes it that way. Otherwise each layer that reads the part would copy it
    first, and autograd would bring its gradient into the strides of the view.
    """
    if not isinstance(part, Tensor) or part.dim() != 4:
        return part
    is_last = part.stride(1) == 1
    return part.contiguous(
        memory_format=torch.channels_last if is_last else torch.contiguous_format
    )


def _tensors(node: fx.Node, root: nn.Module) -> list[str]:
    """The paths of the tensors that a node reads of its layer."""
    if not calls_layer(node):
        return []
    path, layer, _ = called_layer(node, root)
    _, names, _ = _LIFTED.get(type(layer), (None, (), ()))
    return [f"{path}.{name}" for name in names if getattr(layer, name) is not None]


def _emit(
    region: FusionRegion,
    node: fx.Node,
    root: nn.Module,
    copies: dict[fx.Node, fx.Node],
    lifted: dict[str, fx.Node],
) -> fx.Node:
    graph = region.graph
    if not calls_layer(node):
        return graph.node_copy(node, copies.__getitem__)
    path, layer, args = called_layer(node, root)
    args = fx.map_arg(args, copies.__getitem__)
    if type(layer) not in _LIFTED:
        region.modules.append(layer)
        return graph.call_module(f"m{len(region.modules) - 1}", args)
    if type(layer) in _NORMS and layer.training:
        region.statistics |= {f"{path}.running_mean", f"{path}.running_var"}
        region.counters.append(f"{path}.num_batches_tracked")
    function, names, settings = _LIFTED[type(layer)]
    tensors = [lifted.get(f"{path}.{name}") for name in names]
    values = [getattr(layer, name) for name in settings]
    return graph.call_function(function, (*args, *tensors, *values))


# -- residual adds ---------------------------------------------------------------------------------


def fuse_residual_adds(forward: Sequence[FusionRegion], backward: Sequence[FusionRegion]) -> None:
    """Let regions end with the residual add of their result, where both programs can."""
    for region in forward:
        if sum(other.reads == region.reads for other in forward) > 1:
            continue
        recomputed = [r for r in backward if r.reads == region.reads and _residual_adds(r)]
        same = region, *recomputed
        adds = [_fused_add(each, may_round=not recomputed) for each in same]
        if all(add is not None for add in adds):
            for each, add in zip(same, adds, strict=True):
                each.fused_add = add


def _residual_adds(region: FusionRegion) -> list[tuple[int, fx.Node]]:
    """The residual adds of a region's outputs."""
    return [
        (index, user)
        for index, node in enumerate(region.outputs)
        for user in node.users
        if user.target in (coupling_ops.plus, coupling_ops.minus) and user.args[1] is node
    ]


def _fused_add(region: FusionRegion, may_round: bool) -> FusedAdd | None:
    """The add that can be part of a region: only the add and VJPs read the branch's result.

    Args:
        may_round: Whether the add may also round a stream that enters its chain here. False where
            backward undoes the add: the two functions would differ.
    """
    adds = _residual_adds(region)
    if len(adds) != 1:
        return None
    output, node = adds[0]
    others = [user for user in region.outputs[output].users if user is not node]
    inside = set(region.nodes)
    vjps = (coupling_ops.vjp, coupling_ops.branch_vjp)
    if any(user.target not in vjps and user not in inside for user in others):
        return None
    last = region.nodes[-1]
    if not all(isinstance(x, fx.Node) and x < last for x in (node.args[0], node.args[2])):
        return None
    rounds = may_round and _is_entering(node.args[0])
    return FusedAdd(node, output, _graph_with_add(region, output), rounds)


def _is_entering(stream: Any) -> bool:
    """Whether it is the first stream of a chain that begins here, and is read only once."""
    if stream.target is not operator.getitem or len(stream.users) > 1:
        return False
    entered, place = stream.args
    return place == 0 and entered.target is coupling_ops.enter_chain


def _graph_with_add(region: FusionRegion, output: int) -> fx.Graph:
    graph = copied(region.graph)
    placeholders, end = graph.find_nodes(op="placeholder"), graph.output_node()
    with graph.inserting_after(placeholders[len(region.inputs) - 1]):  # in reverse
        total = graph.placeholder("total")
        sign = graph.placeholder("sign")
        grid = graph.placeholder("grid")
        entry = graph.placeholder("entry")
        stream = graph.placeholder("stream")
    results: Any = list(end.args[0])  # type: ignore[arg-type]
    given = results[output], stream, entry, grid, sign, total
    with graph.inserting_before(end):
        results[output] = graph.call_function(_add_on_grid, given)
    end.args = (tuple(results),)
    return graph


def _add_on_grid(
    addend: Tensor, stream: Tensor, entry: Tensor, grid: Tensor, sign: Tensor, total: Tensor
) -> Tensor:
    """The stream plus or minus the addend, in the addend's dtype.

    If that dtype has fewer bits, the sum itself is written to `total`. The gradient of the result
    is the addend's own, without the sign.
    """
    value = addend.detach()
    result = ((stream.float() + entry) - entry) + sign * ((value.float() + grid) - grid)
    if value.dtype != result.dtype:
        total.copy_(result)
    return result.to(value.dtype) + (addend - value)  # the first operand decides the strides
