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
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.function import once_differentiable

from revcompile.ir.coupling_ops import vjp, zeros_if_none
from revcompile.ir.python_code import compile_with_modules, copied
from revcompile.ir.row_wise import RowWisePart
from revcompile.kernels.autocast import LOW_PRECISION, is_autocasting, wide_dtype
from revcompile.runtime.reversible.bindings import Bindings
from revcompile.runtime.reversible.slots import Slot, filled

LARGE = 2**27
"""Elements of a stream: to compute parts of one that is no larger again is not worth the time."""
CHUNK = 2**25
"""Elements of a chunk. Gradients of the weights are added up for each chunk, which takes time."""


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
        code = self._compiled(graph)
        return lambda b, sides, _: code(b, *sides)


def in_chunks(branch: fx.Graph, root: nn.Module) -> tuple[fx.Graph | None, RowSteps | None]:
    """A copy of a branch with its row-wise part as one call, and that call if there is no more.

    None if it has no such part.
    """
    graph = copied(branch)
    part = RowWisePart(graph, root)
    results = part.results()
    if len(part.steps) < 3 or not results:
        return None, None
    (returned,) = (node.args[0] for node in graph.find_nodes(op="output"))
    steps = RowSteps(part, results, root)
    part.replace(results, steps)
    return graph, steps if results == [returned] else None


class RowSteps:
    """A row-wise part as it runs: `(b, gradient of the first result) -> results`.

    Given that gradient, the results are differentiated with it, whatever autograd says.
    """

    __name__ = "row_steps"

    def __init__(self, part: RowWisePart, results: Sequence[fx.Node], root: nn.Module) -> None:
        graph = part.as_graph(results)
        self._run = compile_with_modules(graph, root, "row_steps")
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
            _store(self._run(b.narrow(*chunk)), chunk, b, results)
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
                values = self._run(part)
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
