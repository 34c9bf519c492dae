"""Stage programs with compiled fusion regions: one kernel for operations around a convolution.

Forward and backward run the same compiled function of a region, both under autograd: a branch that
backward recomputes must be bit-identical to forward.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, fx, nn

from revcompile.compiler.lower.fusion_regions import (
    FusedAdd,
    FusionRegion,
    find_regions,
    fuse_residual_adds,
)
from revcompile.ir import coupling_ops
from revcompile.ir.module_tree import called_module
from revcompile.ir.ops import attribute, matching, widened
from revcompile.ir.python_code import copied
from revcompile.kernels.autocast import in_dtype, is_autocasting, wide_dtype, with_copy
from revcompile.kernels.exact_sum import is_imprecise, make_grid, rounded
from revcompile.kernels.layout import alike, like, usual_strides, with_strides

_CAST: Final = (nn.Conv1d, nn.Conv2d, nn.Linear)
"""Layers whose inputs autocast casts."""


class Fusion:
    """Compiles the fusion regions of stages' programs, and how streams enter a chain.

    Args:
        compile: Compiles a function; None for `torch.compile`.
    """

    def __init__(self, compile: Callable[[Any], Callable[..., Any]] | None = None) -> None:
        self._compile = compile or partial(torch.compile, dynamic=False, fullgraph=True)
        self._functions: dict[Any, Callable[..., Any]] = {}
        self._numbers: dict[tuple[float, torch.device], Tensor] = {}
        self._round_to_grid = self._compile(_round_to_grid)

    def fuse(
        self,
        forward: fx.Graph,
        backward: fx.Graph,
        root: nn.Module,
        is_stored_as_read: bool = False,
    ) -> tuple[fx.Graph, fx.Graph]:
        """Copies of a stage's two programs with their fusion regions compiled.

        Args:
            is_stored_as_read: Whether values are stored and sent in the dtype in which layers read
                them under autocast. They then need not be widened and rounded again.
        """
        programs = [copied(forward), copied(backward)]
        regions = [find_regions(graph, root) for graph in programs]
        for region in regions[1]:
            for node in region.inputs:
                if node.target in (coupling_ops.leaf, coupling_ops.stream_leaf):
                    is_cast = _is_cast(region, node, root)
                    node.target = cast_leaf if is_cast else coupling_ops.leaf
                    if is_cast:
                        _return_as_read(programs[1], node)
                    if is_cast and is_stored_as_read:
                        node.args = tuple(map(_as_stored, node.args))
        fuse_residual_adds(*regions)
        for region in regions[0]:
            if region.fused_add is not None and region.fused_add.rounds:
                entered: Any = region.fused_add.inputs[0].args[0]
                entered.kwargs = {**entered.kwargs, "rounds_both": False}
        # Forward treats its inputs as backward does, or the recomputed branch might differ.
        leaf_ops = {tuple(region.reads): _leaf_ops(region) for region in regions[1]}
        for graph, in_graph in zip(programs, regions, strict=True):
            replaced: dict[fx.Node, fx.Node] = {}
            for number, region in enumerate(in_graph):
                ops = leaf_ops.get(tuple(region.reads), _leaf_ops(region))
                _replace(graph, region, _caller(region, root, self, ops, number), replaced)
            for node in graph.find_nodes(op="call_function", target=coupling_ops.enter_chain):
                node.target = self.enter_chain
            graph.eliminate_dead_code(
                lambda node: node.op != "get_attr" and node.target is not widened
            )
            graph.lint()
        return programs[0], programs[1]

    def function(
        self, region: FusionRegion, root: nn.Module, add: FusedAdd | None = None
    ) -> Callable[..., Any]:
        """The function of a region; regions of one signature and one set of shapes share it.

        Args:
            add: If given, the function ends with this add.
        """
        shapes = (attribute(root, path).shape for path in region.reads)
        key = region.signature, None if add is None else add.output, *shapes
        if key not in self._functions:
            modules = {f"m{index}": module for index, module in enumerate(region.modules)}
            graph = region.graph if add is None else add.graph
            self._functions[key] = self._compile(fx.GraphModule(nn.ModuleDict(modules), graph))
        return self._functions[key]

    def number(self, value: float, device: torch.device) -> Tensor:
        """A number as a tensor: plus and minus share one compiled function, and its rounding."""
        if (value, device) not in self._numbers:
            self._numbers[value, device] = torch.full(
                (1,), value, dtype=torch.float32, device=device
            )
        return self._numbers[value, device]

    def enter_chain(
        self,
        a: Tensor,
        b: Tensor,
        cast: torch.dtype | None,
        convolves: bool,
        rounds_both: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Like `coupling_ops.enter_chain`, with one pass over each stream once the grid is known.

        Args:
            rounds_both: False if the first stream is rounded where it is read.
        """
        if torch.is_grad_enabled():  # a graph is kept, and these ops are part of it
            return coupling_ops.enter_chain(a, b, cast, convolves)
        if not is_imprecise(coupling_ops.wide(a.new_empty(0)), cast, convolves):
            return *alike(coupling_ops.wide(a), coupling_ops.wide(b)), None
        grid = make_grid(a, b)
        dtype = torch.get_autocast_dtype(b.device.type) if is_autocasting(b.device) else None
        b, copy = self._round_to_grid(b, grid, dtype)
        strides = usual_strides(b)
        b = with_strides(b, strides)
        if copy is not None:
            with_copy(b, with_strides(copy, strides))
        if rounds_both:
            a = self._round_to_grid(a, grid, None)[0]
        elif usual_strides(a) == strides:  # the sum that rounds it will have them
            return a, b, grid
        return with_strides(a, strides), b, grid


def _round_to_grid(
    x: Tensor, grid: Tensor, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor | None]:
    """`x` rounded to the grid, and a copy of that in the dtype in which a branch reads it."""
    x = (x.float() + grid) - grid
    return x, None if dtype is None else x.to(dtype)


LeafOp = Callable[[Any], Any]
"""Makes an input of a region a leaf of an autograd graph."""


def _leaf_ops(region: FusionRegion) -> tuple[LeafOp, ...]:
    """For each input the op that makes it a leaf in backward, or one that does nothing."""
    ops: tuple[Any, ...] = (coupling_ops.leaf, cast_leaf)
    targets = [node.target for node in region.inputs]
    return tuple(t if t in ops else _identity for t in targets)  # type: ignore[misc]


def _as_stored(node: Any) -> Any:
    return node.args[0] if node.target is widened else node


def _identity(x: Any) -> Any:
    return x


def _is_cast(region: FusionRegion, node: fx.Node, root: nn.Module) -> bool:
    """Whether a region reads an input only in layers for which autocast casts it."""
    users = [user for user in node.users if user in region.nodes]
    layers = [called_module(user, root) for user in users]
    return bool(users) and all(isinstance(layer, _CAST) for layer in layers)


def cast_leaf(x: Any) -> Any:
    """A leaf in the precision in which it is read.

    Its gradient then comes in low precision, and is cast up while it is added to others.
    """
    if isinstance(x, Tensor) and x.dtype == torch.float32 and is_autocasting(x.device):
        x = in_dtype(x, torch.get_autocast_dtype(x.device.type))
    return coupling_ops.leaf(x)


def _return_as_read(graph: fx.Graph, leaf: fx.Node) -> None:
    """Let a program return the gradient of a cast leaf in the dtype of the leaf's input."""
    (read,) = leaf.args
    output = graph.output_node()
    for vjp in (user for user in leaf.users if user.target is coupling_ops.vjp):
        leaves: Any = vjp.args[2]
        for gradient in [g for g in vjp.users if g.args[1] == leaves.index(leaf)]:
            if output in gradient.users:
                is_read = _as_stored(read) is read
                with graph.inserting_after(gradient):
                    op, args = (matching, (gradient, read)) if is_read else (widened, (gradient,))
                    output.replace_input_with(gradient, graph.call_function(op, args))


def _replace(
    graph: fx.Graph,
    region: FusionRegion,
    function: Callable[..., Any],
    replaced: dict[fx.Node, fx.Node],
) -> None:
    """Call a function in place of a region; the result of a fused add is its first output.

    Args:
        replaced: The nodes that replace outputs of earlier regions; this region's are added.
    """
    add = region.fused_add
    inputs = [
        *(replaced.get(x, x) for x in region.inputs),
        *(map(_as_stored, add.inputs) if add else ()),
    ]
    outputs = [*([add.node] if add else []), *region.outputs]
    with graph.inserting_after(region.nodes[-1]):
        call = graph.call_function(function, tuple(inputs))
    last = call
    for index, node in enumerate(outputs):
        with graph.inserting_after(last):
            last = graph.call_function(operator.getitem, (call, index))
        node.replace_all_uses_with(last)
        replaced[node] = last
    for node in (*([add.node] if add else []), *reversed(region.nodes)):
        graph.erase_node(node)


def _caller(
    region: FusionRegion, root: nn.Module, fused: Fusion, leaf_ops: Sequence[LeafOp], number: int
) -> Callable[..., Any]:
    """A function that calls a compiled region as the program would have computed it.

    While the program records, the region becomes a part of its graph and moves running statistics.
    Otherwise autograd also runs: the kernels are then those of a recording program. But the graph
    is dropped, and running statistics move in scratch memory.
    """
    reads, add = region.reads, region.fused_add
    scratch: dict[str, Tensor] = {}

    def scratch_statistics(path: str) -> Tensor:
        """Scratch memory for running statistics, whose values do not matter."""
        if path not in scratch:
            scratch[path] = torch.zeros_like(attribute(root, path))
        return scratch[path]

    def call(*inputs: Any, add: FusedAdd | None = None, add_inputs: Sequence[Tensor] = ()) -> Any:
        function = fused.function(region, root, add)
        if torch.is_grad_enabled():
            if region.counters:
                torch._foreach_add_([attribute(root, path) for path in region.counters], 1)
            tensors = [attribute(root, path) for path in reads]
            return _without_warnings(function, *inputs, *add_inputs, *tensors)
        leaves = [leaf_op(x) for x, leaf_op in zip(inputs, leaf_ops, strict=True)]
        tensors = [
            scratch_statistics(path) if path in region.statistics else attribute(root, path)
            for path in reads
        ]
        with torch.enable_grad():
            results = _without_warnings(function, *leaves, *add_inputs, *tensors)
        return tuple(map(coupling_ops.detached, results))

    def call_with_add(*inputs: Any) -> Any:
        assert add is not None
        *own, stream, grid = inputs
        if grid is None or (torch.is_grad_enabled() and not add.is_minus):
            # The add is exact without a grid; or the kept graph continues through the stream.
            results = call(*own)
            plain = coupling_ops.minus if add.is_minus else coupling_ops.plus
            stream = rounded(coupling_ops.wide(stream), grid if add.rounds else None)
            return plain(stream, results[add.output], grid), *results
        sign = fused.number(-1.0 if add.is_minus else 1.0, stream.device)
        entry = grid if add.rounds else fused.number(0.0, stream.device)
        total = torch.empty_like(stream, dtype=wide_dtype(stream.dtype), requires_grad=False)
        results = call(*own, add=add, add_inputs=(stream.detach(), entry, grid, sign, total))
        copy = like(total, results[add.output].detach())
        if copy.dtype == total.dtype:
            return copy, *results
        return with_copy(total, copy), *results

    if add is not None:
        call_with_add.__name__ = call_with_add.__qualname__ = f"compiled_{number}_and_sum"
        return call_with_add
    call.__name__ = call.__qualname__ = f"compiled_{number}"
    return call


def _without_warnings(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function without torch's warnings that compiling reads `.grad` of its inputs."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")
        return function(*args)
