"""Rewrites of graphs for mixed precision.

    cast_down       a layer norm writes the dtype that autocast would cast its result to anyway
    fuse_bn_relu    a batch norm and the ReLU that alone reads it become one call
    match_dtypes    operations that demand two tensors of one dtype get them
    cast_streams    of stage programs: sums are written in both dtypes they are read in
    taking_stored   of stage programs: backward may be given inputs in low precision

None of them changes its argument. The first three return it where there is nothing to rewrite.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container
from typing import Any, Final

import torch
from torch import fx, nn
from torch.nn import functional as F

from revcompile.ir import coupling_ops
from revcompile.ir.coupling_ops import call_bn_relu, call_norm
from revcompile.ir.module_tree import called_module, casts_input, is_cast
from revcompile.ir.ops import as_read, matching, op_name, widened
from revcompile.ir.program import StageProgram
from revcompile.ir.python_code import copied
from revcompile.ir.types import TYPE, TensorType
from revcompile.kernels.batch_norm import bn_relu
from revcompile.kernels.layer_norm import call_layer_norm, is_layer_norm, layer_norm


def for_stages(
    graph: fx.Graph, root: nn.Module, autocast: torch.dtype, graphs_outlive_updates: bool
) -> fx.Graph:
    """A stage's program as it runs under autocast to this dtype."""
    graph = cast_down(match_dtypes(cast_streams(graph, root, autocast)), root)
    # In backward, the fused kernel recomputes the ReLU's mask from weights that updates may change.
    return graph if graphs_outlive_updates else fuse_bn_relu(graph, root)


# -- cast_down ------------------------------------------------------------------------------------

_MOVING: Final = frozenset(
    ("contiguous", "flatten", "permute", "reshape", "roll", "transpose", "view")
)
_METADATA: Final = ("shape", "ndim", "device")


def cast_down(graph: fx.Graph, root: nn.Module) -> fx.Graph:
    """A copy of a graph whose layer norms return low precision if all readers cast to that.

    Autocast lets norms return float32 and casts the result for each linear layer. If operations in
    between only move elements (windows, rolls, padding), casting before them halves the bytes that
    they and their gradients move. Moving elements commutes with rounding.
    """

    def cast(node: fx.Node) -> None:
        if any(map(_only_moves_elements, node.users)):
            _cast_result(node)
        _use_cast_down_kernel(node, root)

    def is_cast_down(node: fx.Node) -> bool:
        return _is_layer_norm(node, root) and _is_only_read_cast(node, root)

    return _rewritten(graph, is_cast_down, cast)


def _rewritten(
    graph: fx.Graph, matches: Callable[[fx.Node], Any], rewrite: Callable[[fx.Node], None]
) -> fx.Graph:
    """A copy of a graph with some nodes rewritten; the graph itself if there are none."""
    if not any(map(matches, graph.nodes)):
        return graph
    copy = copied(graph)
    for node in list(copy.nodes):
        if matches(node):
            rewrite(node)
    return copy


def _is_layer_norm(node: fx.Node, root: nn.Module) -> bool:
    return node.target is F.layer_norm or isinstance(called_module(node, root), nn.LayerNorm)


def _cast_result(node: fx.Node) -> None:
    with node.graph.inserting_after(node):
        cast = node.graph.call_function(as_read, (node,))
    node.replace_all_uses_with(cast, lambda user: user is not cast)


def _use_cast_down_kernel(node: fx.Node, root: nn.Module) -> None:
    """Call our layer norm, which writes low precision itself where there is a kernel for that."""
    if node.op == "call_function":
        node.target = layer_norm
    elif len(node.args) == 1 and is_layer_norm(root.get_submodule(str(node.target))):
        with node.graph.inserting_before(node):
            layer = node.graph.create_node("get_attr", node.target)
            norm = node.graph.call_function(call_layer_norm, (layer, node.args[0]))
        node.replace_all_uses_with(norm)
        node.graph.erase_node(node)


def _is_only_read_cast(node: fx.Node, root: nn.Module) -> bool:
    """Whether autocast casts a value for all readers, directly or after its elements are moved."""
    readers = [user for user in node.users if not _reads_metadata(user)]
    return bool(readers) and all(
        casts_input(user, node, root)
        or (_only_moves_elements(user) and node in user.args[:1] and _is_only_read_cast(user, root))
        for user in readers
    )


def _reads_metadata(user: fx.Node) -> bool:
    if user.op == "call_method":
        return user.target in ("size", "dim")
    return user.op == "call_function" and user.target is getattr and user.args[1] in _METADATA


def _only_moves_elements(user: fx.Node) -> bool:
    if user.target is F.pad:
        settings: dict[str, Any] = dict(zip(("mode", "value"), user.args[2:], strict=False))
        settings |= user.kwargs
        return settings.get("mode", "constant") == "constant" and settings.get("value") in (None, 0)
    return user.op in ("call_function", "call_method") and op_name(user) in _MOVING


# -- fuse_bn_relu ---------------------------------------------------------------------------------

_RELU_FUNCTIONS: Final = (F.relu, torch.relu)


def fuse_bn_relu(graph: fx.Graph, root: nn.Module) -> fx.Graph:
    """A copy of a graph that fuses each batch norm with the ReLU that is its only reader."""
    return _rewritten(graph, lambda node: _is_joined(node, root), _join)


def _is_joined(node: fx.Node, root: nn.Module) -> bool:
    """Whether a node calls a batch norm whose only reader is a ReLU."""
    is_read_once = len(node.users) == 1 and _is_relu(next(iter(node.users)), root)
    return is_read_once and _is_batch_norm(node, root)


def calls_layer(node: fx.Node) -> bool:
    """Whether a node calls a layer: as a module, or a batch norm in a stage's program."""
    return node.op == "call_module" or node.target is call_norm


def called_layer(node: fx.Node, root: nn.Module) -> tuple[str, nn.Module, tuple[Any, ...]]:
    """The path of the layer that a node calls, the layer, and its arguments."""
    called, args = node, node.args
    if node.target is call_norm:  # its first argument is the layer
        called, args = node.all_input_nodes[0], node.args[1:]
    return str(called.target), root.get_submodule(str(called.target)), args


def _is_batch_norm(node: fx.Node, root: nn.Module) -> bool:
    if not calls_layer(node):
        return False
    _, layer, args = called_layer(node, root)
    is_plain = type(layer) is nn.BatchNorm2d and "forward" not in vars(layer)
    return is_plain and len(args) == 1 and not node.kwargs


def _is_relu(node: fx.Node, root: nn.Module) -> bool:
    layer = called_module(node, root)
    is_plain = type(layer) is nn.ReLU and "forward" not in vars(layer)
    return is_plain or node.target in _RELU_FUNCTIONS


def _join(norm: fx.Node) -> None:
    graph, is_program = norm.graph, norm.target is call_norm
    (relu,) = norm.users
    with graph.inserting_before(relu):
        layer = norm.args[0] if is_program else graph.create_node("get_attr", norm.target)
        is_module = relu.op == "call_module"
        activation = graph.create_node("get_attr", relu.target) if is_module else None
        function = call_bn_relu if is_program else bn_relu
        both = graph.call_function(function, (layer, activation, norm.args[-1]))
    relu.replace_all_uses_with(both)
    graph.erase_node(relu)
    graph.erase_node(norm)


# -- match_dtypes ---------------------------------------------------------------------------------

_SOURCE_ARGUMENT: Final = {
    "index_add": (3, "source"),
    "index_copy": (3, "source"),
    "index_put": (2, "values"),
    "index_reduce": (3, "source"),
    "masked_scatter": (2, "source"),
    "scatter": (3, "src"),
    "scatter_add": (3, "src"),
    "scatter_reduce": (3, "src"),
}
"""Position and keyword of the argument that must have the dtype of the first one."""


def match_dtypes(graph: fx.Graph) -> fx.Graph:
    """A copy of a graph whose scatters get tensors of one dtype under autocast.

    Residual streams are float32 even where the original model's are in low precision. Most
    operations accept mixed dtypes; these raise.
    """
    return _rewritten(graph, lambda node: _operation(node) in _SOURCE_ARGUMENT, _match_source)


def _operation(node: fx.Node) -> str:
    return op_name(node).removesuffix("_") if node.op in ("call_function", "call_method") else ""


def _match_source(node: fx.Node) -> None:
    position, keyword = _SOURCE_ARGUMENT[_operation(node)]
    arguments: list[Any] = list(node.args)
    first = arguments[0] if arguments else node.kwargs.get("input")
    source = arguments[position] if len(arguments) > position else node.kwargs.get(keyword)
    if not isinstance(first, fx.Node) or not isinstance(source, fx.Node):
        return
    with node.graph.inserting_before(node):
        matched = node.graph.call_function(matching, (source, first))
    if len(arguments) > position:
        arguments[position] = matched
        node.args = tuple(arguments)
    else:
        node.kwargs = {**node.kwargs, keyword: matched}


_KEEPS_DTYPE: Final[tuple[Any, ...]] = (nn.Dropout, nn.GELU, nn.Identity, nn.ReLU, nn.SiLU)
_KEEPING_DTYPE: Final[frozenset[Any]] = frozenset((F.dropout, F.gelu, F.relu, F.silu, torch.relu))


def cast_streams(graph: fx.Graph, root: nn.Module, dtype: torch.dtype) -> fx.Graph:
    """A copy of a stage's program that computes the same with fewer casts, for autocast to `dtype`.

    Streams and their gradients are added in float32. Layers that autocast casts for read them in
    low precision. The kernel that adds them writes this copy, too, which saves a pass over memory:

        y = plus(a, f, grid)               y, copy = plus_and_cast(a, f, grid)
        h = self.conv(y)           ->      h = self.conv(read_stream(y, self.conv, copy))

    Backward is rewritten in the same way: the previous branch reads the rebuilt stream, and is
    differentiated with the sum of that stream's gradients. Chains do the same when they run
    (`coupling`).
    """
    copy = copied(graph)
    for node in copy.find_nodes(op="call_function", target=coupling_ops.stream_leaf):
        _read_leaf(node, root)
    for node in copy.find_nodes(op="call_function", target=coupling_ops.plus):
        _cast_sum(node, root)
    for node in copy.find_nodes(op="call_function", target=coupling_ops.minus):
        _cast_rebuilt(node)
    for node in copy.find_nodes(op="call_function", target=coupling_ops.branch_vjp):
        _cast_gradient(node, root, dtype)
    copy.lint()
    return copy


def _layer_of(reader: fx.Node) -> fx.Node | bool:
    """The argument `reader` of `read_stream` and `stream_leaf`."""
    return reader.graph.get_attr(str(reader.target)) if reader.op == "call_module" else True


def _read_leaf(leaf: fx.Node, root: nn.Module) -> None:
    """Give the leaf of a branch the dtype in which its only reader reads it."""
    readers = [user for user in leaf.users if user.target is not coupling_ops.branch_vjp]
    vjps = [user for user in leaf.users if user.target is coupling_ops.branch_vjp]
    is_returned = any(leaf in vjp.args[2] for vjp in vjps)  # type: ignore[operator]
    if not is_returned and len(readers) == 1 and casts_input(readers[0], leaf, root):
        with leaf.graph.inserting_before(leaf):
            leaf.args = (leaf.args[0], _layer_of(readers[0]))


def _two_results(node: fx.Node, function: Any) -> tuple[fx.Node, fx.Node]:
    node.target = function
    with node.graph.inserting_after(node):
        second = node.graph.call_function(operator.getitem, (node, 1))
        first = node.graph.call_function(operator.getitem, (node, 0))
    node.replace_all_uses_with(first, lambda user: user not in (first, second))
    first.meta, node.meta = node.meta, {}
    return first, second


def _cast_sum(node: fx.Node, root: nn.Module) -> None:
    """In forward: also write a sum in low precision for its reader, if that is a single layer."""
    plus = coupling_ops.plus
    readers = [
        user
        for user in node.users
        if user.op != "output" and not (user.target is plus and user.args[1] is not node)
    ]
    if len(readers) != 1 or not casts_input(readers[0], node, root):
        return
    total, copy = _two_results(node, coupling_ops.plus_and_cast)
    with node.graph.inserting_before(readers[0]):
        given = total, _layer_of(readers[0]), copy
        read = node.graph.call_function(coupling_ops.read_stream, given)
    readers[0].replace_input_with(total, read)


def _cast_rebuilt(node: fx.Node) -> None:
    """In backward: also write a rebuilt stream in low precision, if the reading branch casts it."""
    leaves = [user for user in node.users if user.target is coupling_ops.stream_leaf]
    if len(leaves) == 1 and len(leaves[0].args) == 2:
        total, copy = _two_results(node, coupling_ops.minus_and_cast)
        leaves[0].args = (total, leaves[0].args[1], copy)


def _cast_gradient(vjp: fx.Node, root: nn.Module, dtype: torch.dtype) -> None:
    """In backward: also write a gradient in `dtype`, if the previous branch ends in that dtype."""
    gradients = [user for user in vjp.users if user.args[1] == 0]
    for gradient in gradients:
        for reader in [user for user in gradient.users if user.target is coupling_ops.branch_vjp]:
            outputs, given = reader.args[2], reader.args[3]
            assert isinstance(outputs, tuple | list) and isinstance(given, tuple | list)
            if gradient in given and _is_low(end := outputs[given.index(gradient)], root):
                vjp.args = (*vjp.args[:6], dtype)
                with vjp.graph.inserting_after(vjp):
                    copy = vjp.graph.call_function(operator.getitem, (vjp, 1))
                with vjp.graph.inserting_before(reader):
                    arguments = gradient, copy, end
                    cast = vjp.graph.call_function(coupling_ops.cast_gradient, arguments)
                seeds = tuple(cast if each is gradient else each for each in given)
                reader.args = (*reader.args[:3], seeds, *reader.args[4:])


def _is_low(node: Any, root: nn.Module) -> bool:
    """Whether a value probably has autocast's dtype; `cast_gradient` checks when it runs."""
    if not isinstance(node, fx.Node) or not node.args:
        return False
    if node.target is coupling_ops.call_norm:
        return _is_low(node.args[1], root)
    layer = called_module(node, root)
    if layer is not None and is_cast(layer):
        return True
    keeps = type(layer) in _KEEPS_DTYPE or node.target in _KEEPING_DTYPE
    return keeps and _is_low(node.args[0], root)


# -- taking_stored --------------------------------------------------------------------------------


def taking_stored(program: StageProgram, stored: Container[str]) -> fx.Graph:
    """A copy of a stage's backward program that accepts inputs in the dtype they are stored in.

    It sends them back unchanged; the program of the previous stage accepts them, too.
    """
    graph = copied(program.backward)
    names, wide = (*program.kept, *program.needs_back), declared_wide(program)
    _, *given = graph.find_nodes(op="placeholder")
    for name, node in zip(names, given, strict=False):
        computing = [user for user in node.users if user.op != "output"]
        if computing and name in wide and (name in program.needs_back or name in stored):
            with graph.inserting_before(given[-1].next):
                value = graph.call_function(widened, (node,))
            for user in computing:
                user.replace_input_with(node, value)
    return graph


def declared_wide(program: StageProgram) -> frozenset[str]:
    """Names of kept and returned values that the program declares as float32, and not bfloat16."""
    _, *given = program.backward.find_nodes(op="placeholder")
    names = zip((*program.kept, *program.needs_back), given, strict=False)
    types = ((name, node.meta.get(TYPE)) for name, node in names)
    return frozenset(
        name for name, t in types if isinstance(t, TensorType) and t.dtype == torch.float32
    )
