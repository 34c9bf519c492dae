"""The part of a branch that treats every token by itself, in chunks where sequences are long.

While a chain differentiates a block of a long sequence, the steps of that one block are most of the
memory there is: the hidden layer of an MLP is several times as wide as the stream, and the models
of transformers compute norms step by step in float32, of queries and keys too. Up to the first
operation that mixes tokens, a branch can as well run for some tokens after the others. Of a whole
MLP even the gradients are computed on the way: a chain knows that of F(b) before it runs F again.
Of what comes before attention only the input is kept, and the rest is computed once more to be
differentiated. Gradients of parameters are added up in float32.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor, fx, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from revcompile.ir.coupling_ops import vjp, zeros_if_none
from revcompile.ir.module_tree import called_module
from revcompile.ir.ops import attribute
from revcompile.ir.python_code import compile_with_modules, copied
from revcompile.kernels.autocast import LOW_PRECISION, is_autocasting, wide_dtype
from revcompile.runtime.reversible.bindings import Bindings
from revcompile.runtime.reversible.slots import Slot, filled

LARGE = 2**27
"""Elements of a stream: to compute parts of one that is no larger again is not worth the time."""
CHUNK = 2**25
"""Elements of a chunk. Gradients of the weights are added up for each chunk, which takes time."""
_OF_ELEMENTS: Final[frozenset[Any]] = frozenset(
    (
        *("add", "div", "float", "mul", "pow", "rsqrt", "sqrt", "square", "sub", "to"),
        *(operator.add, operator.mul, operator.neg, operator.pow, operator.sub, operator.truediv),
        *(torch.add, torch.div, torch.mul, torch.pow, torch.rsqrt, torch.sqrt, torch.square),
        *(torch.sub, torch.sigmoid, torch.tanh, F.silu, F.gelu, F.relu),
    )
)
"""Methods by name, and functions."""
_LAYERS: Final = (nn.Linear, nn.SiLU, nn.GELU, nn.ReLU, nn.Identity)
_NORMS: Final = (nn.LayerNorm, nn.RMSNorm)
_LEADING: Final = slice(None, -1)


def is_large(stream: Tensor) -> bool:
    """Are the branches that read this stream to run in chunks?"""
    is_low = stream.dtype in LOW_PRECISION or is_autocasting(stream.device)
    return is_low and stream.ndim > 1 and bool(stream.numel() > LARGE)


class ChunkedBranch:
    """A branch for large streams. It is made when the first one comes."""

    def __init__(
        self, branch: fx.Graph, root: nn.Module, compiled: Callable[[fx.Graph], Callable[..., Any]]
    ) -> None:
        self._branch, self._root, self._compiled = branch, root, compiled

    @functools.cached_property
    def code(self) -> Callable[..., Tensor] | None:
        """`F(b, sides, gradient of F(b) or None)`; None if no part of it can run in chunks.

        If all of it can, given the gradient, the result is differentiated with that one.
        """
        graph, steps = in_chunks(self._branch, self._root)
        if steps is not None:
            return lambda b, _, gradient: steps(b, gradient)[0]
        if graph is None:
            return None
        code, root = self._compiled(graph), self._root
        return lambda b, sides, _: code(root, b, *sides)


def in_chunks(branch: fx.Graph, root: nn.Module) -> tuple[fx.Graph | None, RowSteps | None]:
    """A copy of a branch with its row-wise part as one call, and that call if there is no more.

    None if it has no such part.
    """
    graph = copied(branch)
    part = _RowWisePart(graph, root)
    results = part.results()
    if len(part.steps) < 3 or not results:
        return None, None
    (returned,) = (node.args[0] for node in graph.find_nodes(op="output"))
    steps = RowSteps(part, results, root)
    part.replace(results, steps)
    return graph, steps if results == [returned] else None


# -- which part -----------------------------------------------------------------------------------


class _RowWisePart:
    """The steps of a branch that compute a row from the same row of the branch's input.

    A row is what has the same place in all dimensions but the last, or, if there are views, in the
    first ones, which views keep.
    """

    def __init__(self, graph: fx.Graph, root: nn.Module) -> None:
        self.graph, self._root, self.b = graph, root, next(iter(graph.nodes))
        self._rank: dict[fx.Node, int] = {self.b: 0}
        """Of `b` and of each step: 0 if it is that of `b`, else as a view says."""
        self.row_dims: int | None = None
        """How many dimensions all views keep; None if there is no view."""
        for node in graph.nodes:
            if self.b.op == "placeholder" and self._is_step(node):
                self._rank[node] = self._rank_of(node)
            elif self._reads_leading_sizes(node):
                node.args = self.b, "shape"  # the same, whether of all rows or of a chunk

    @property
    def steps(self) -> list[fx.Node]:
        return list(self._rank)[1:]

    def _is_step(self, node: fx.Node) -> bool:
        sources = [source for source in node.all_input_nodes if source in self._rank]
        if not sources:
            return False
        if node.op == "call_module":
            layer: Any = called_module(node, self._root)
            is_norm = type(layer) in _NORMS and len(layer.normalized_shape) == 1
            is_known = (is_norm or type(layer) in _LAYERS) and "forward" not in vars(layer)
            return is_known and len(node.args) == 1 and not node.kwargs
        if node.op not in ("call_method", "call_function"):
            return False
        if node.target in ("view", "reshape"):
            return self._kept_dims(node) > 0
        if node.target in ("mean", torch.mean):
            settings = (*node.args[1:], *node.kwargs.values())
            return settings in ((-1, True), ((-1,), True), ([-1], True))
        is_same_rank = len({self._rank[source] for source in sources}) == 1
        others = [source for source in node.all_input_nodes if source not in self._rank]
        return node.target in _OF_ELEMENTS and is_same_rank and all(map(self._is_given, others))

    def _is_given(self, node: fx.Node) -> bool:
        """Is it a vector of the module tree, or the dtype of a step?"""
        if node.op == "get_attr":
            value = attribute(self._root, str(node.target))
            return isinstance(value, Tensor) and bool(value.ndim <= 1)
        return (
            node.target is getattr and node.args[0] in self._rank and str(node.args[1]) == "dtype"
        )

    def _rank_of(self, node: fx.Node) -> int:
        if node.target not in ("view", "reshape"):
            return max(self._rank.get(source, 0) for source in node.all_input_nodes)
        kept = self._kept_dims(node)
        self.row_dims = min(kept, self.row_dims or kept)
        return len(_sizes(node))

    def _kept_dims(self, view: fx.Node) -> int:
        """How many leading dimensions are those of `b`, if numbers follow; else 0."""
        sizes = _sizes(view)
        kept = 0
        while kept < len(sizes) and self._is_leading_size(sizes[kept], kept):
            kept += 1
        is_whole = len(sizes) > kept and all(isinstance(size, int) for size in sizes[kept:])
        return kept if is_whole else 0

    def _is_leading_size(self, size: Any, dim: int) -> bool:
        if not isinstance(size, fx.Node) or size.target is not operator.getitem:
            return False
        leading: Any = size.args[0]
        shape = leading.args[0] if _is_leading(leading) else None
        is_of_b = isinstance(shape, fx.Node) and shape.args == (self.b, "shape")
        return is_of_b and isinstance(size.args[1], int) and size.args[1] == dim

    def _reads_leading_sizes(self, node: fx.Node) -> bool:
        if node.target is not getattr or node.args[1] != "shape":
            return False
        source: Any = node.args[0]
        return self._rank.get(source) == 0 and all(map(_is_leading, node.users))

    def results(self) -> list[fx.Node]:
        """Those steps that the rest of the graph reads."""
        return [s for s in self.steps if not all(map(self._is_inside, s.users))]

    def _is_inside(self, node: fx.Node) -> bool:
        is_read = node.target is getattr and all(map(self._is_inside, node.users))
        return node in self._rank or is_read

    def as_graph(self, results: Sequence[fx.Node]) -> fx.Graph:
        """The steps as a graph of their own, a function of `b`."""
        inner = fx.Graph()
        known = {self.b: inner.placeholder("b")}

        def copied(node: fx.Node) -> fx.Node:
            if node not in known:
                known[node] = inner.node_copy(node, copied)
            return known[node]

        inner.output(tuple(map(copied, results)))
        return inner

    def replace(self, results: Sequence[fx.Node], function: Callable[..., Any]) -> None:
        with self.graph.inserting_before(self.steps[0]):
            call = self.graph.call_function(function, (self.b,))
            for i, result in enumerate(results):
                value = self.graph.call_function(operator.getitem, (call, i))
                value.meta = dict(result.meta)
                result.replace_all_uses_with(value)
        for node in reversed(list(self.graph.nodes)):
            is_left = node.op == "get_attr" or node.target is getattr or node in self.steps
            if is_left and not node.users:
                self.graph.erase_node(node)


def _sizes(view: fx.Node) -> Sequence[Any]:
    given = view.args[1:]
    return given[0] if len(given) == 1 and isinstance(given[0], (tuple, list)) else given


def _is_leading(node: Any) -> bool:
    """Is it `shape[:-1]`?"""
    return (
        isinstance(node, fx.Node) and node.target is operator.getitem and node.args[1] == _LEADING
    )


# -- chunks ---------------------------------------------------------------------------------------


class RowSteps:
    """A row-wise part as it runs: `(b, gradient of the first result) -> results`.

    Given that gradient, the results are differentiated with it, whatever autograd says.
    """

    __name__ = "row_steps"

    def __init__(self, part: _RowWisePart, results: Sequence[fx.Node], root: nn.Module) -> None:
        graph = part.as_graph(results)
        self._root, self._run = root, compile_with_modules(graph, root, "row_steps")
        self._slots, self._row_dims = Bindings(graph, root).slots, part.row_dims

    def __call__(self, b: Tensor, gradient: Tensor | None = None) -> tuple[Tensor, ...]:
        held = [(slot, slot[0][slot[1]]) for slot in self._slots]
        parameters = list({id(p): p for _, p in held if p is not None}.values())
        number = {id(p): i for i, p in enumerate(parameters)}
        places = [(slot, number[id(p)]) for slot, p in held if p is not None]
        found: tuple[Tensor, ...] = _InChunks.apply(self, places, gradient, b, *parameters)
        return found

    def chunks(self, b: Tensor) -> Iterator[tuple[int, int, int]]:
        """Arguments of `narrow` for each chunk."""
        dims = range(min(self._row_dims or b.ndim, b.ndim - 1))
        dim = max(dims, key=b.shape.__getitem__)
        rows, size = b.shape[dim], max(1, b.shape[dim] * CHUNK // b.numel())
        for first in range(0, rows, size):
            yield dim, first, min(size, rows - first)

    def run(self, b: Tensor) -> tuple[Tensor, ...]:
        """The results, without a graph."""
        results: list[Tensor] = []
        for chunk in self.chunks(b):
            _store(self._run(self._root, b.narrow(*chunk)), chunk, b, results)
        return tuple(results)

    def differentiate(
        self,
        places: Sequence[tuple[Slot, int]],
        b: Tensor,
        parameters: Sequence[Tensor],
        needs: Sequence[bool],
        gradients: Sequence[Tensor | None],
        results: list[Tensor] | None = None,
    ) -> list[Tensor | None]:
        """Gradients of `b` and the parameters; the results are put into a list, if there is one."""
        # Leaves of their own: hooks of the parameters would be called for every chunk.
        leaves = [
            p.detach().requires_grad_(need) for p, need in zip(parameters, needs, strict=True)
        ]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        sums = [torch.zeros_like(p, dtype=wide_dtype(p.dtype)) for p in wanted]
        of_b = torch.empty_like(b)
        with filled([(slot, leaves[i]) for slot, i in places]), torch.enable_grad():
            for chunk in self.chunks(b):
                part = b.narrow(*chunk).detach().requires_grad_()
                values = self._run(self._root, part)
                if results is not None:
                    _store(values, chunk, b, results)
                seeds = [None if g is None else g.narrow(*chunk) for g in gradients]
                found = vjp(values, seeds, (part,), wanted)
                of_b.narrow(*chunk).copy_(zeros_if_none(found[0], part))
                for total, gradient in zip(sums, found[1:], strict=True):
                    if gradient is not None:
                        total.add_(gradient)
        totals = iter(total.to(p.dtype) for total, p in zip(sums, wanted, strict=True))
        return [of_b, *(next(totals) if need else None for need in needs)]


def _store(
    values: Sequence[Tensor], chunk: tuple[int, int, int], b: Tensor, results: list[Tensor]
) -> None:
    dim = chunk[0]
    for value in values[len(results) :]:
        results.append(value.new_empty((*b.shape[: dim + 1], *value.shape[dim + 1 :])))
    for result, value in zip(results, values, strict=True):
        result.narrow(*chunk).copy_(value.detach())


class _InChunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        steps: RowSteps,
        places: Sequence[tuple[Slot, int]],
        gradient: Tensor | None,
        b: Tensor,
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.steps, ctx.places, ctx.found = steps, places, None
        if gradient is not None:
            results: list[Tensor] = []
            needs = ctx.needs_input_grad[4:]
            ctx.found = steps.differentiate(places, b, parameters, needs, (gradient,), results)
            return tuple(results)
        kind = b.device.type
        ctx.autocast = kind, torch.get_autocast_dtype(kind), is_autocasting(b.device), False
        ctx.save_for_backward(b, *parameters)
        return steps.run(b)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        found, ctx.found = ctx.found, None
        if found is None:
            b, *parameters = ctx.saved_tensors
            given = ctx.places, b, parameters, ctx.needs_input_grad[4:], gradients
            with torch.autocast(*ctx.autocast):
                found = ctx.steps.differentiate(*given)
        return None, None, None, *found
