"""Stage programs with their stretches compiled: what surrounds a convolution in one kernel.

Forward and backward run the same compiled function of a stretch, recorded by autograd in both: a
branch that is rebuilt must come out as it did the first time, to the bit.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, fx, nn

from revcompile.ir import stage_ops
from revcompile.ir.ops import as_read, attribute
from revcompile.kernels.exact_sum import is_imprecise, make_grid
from revcompile.runtime.executor.captured.fusion_regions import (
    End,
    FusionRegion,
    fuse_residual_adds,
    stretches,
)

__all__ = ["Fused", "fuse", "narrow_leaf"]


class Fused:
    """Compiled functions, one for each shape of a stretch."""

    def __init__(self, compile: Callable[[Any], Callable[..., Any]] | None = None) -> None:
        self._compile = compile or _compiled
        self._functions: dict[Any, Callable[..., Any]] = {}
        self._signs: dict[tuple[torch.device, bool], Tensor] = {}
        self.plus = self._on_grid(self._compile(_plus), stage_ops.plus)
        self.minus = self._on_grid(self._compile(_minus), stage_ops.minus)
        self._rounded = self._compile(_rounded)
        self._sum = self._compile(_summed)

    def function(
        self, stretch: FusionRegion, root: nn.Module, end: End | None = None
    ) -> Callable[..., Any]:
        """The function of a stretch: of its inputs (and its end's), then of what it reads."""
        shapes = (attribute(root, path).shape for path in stretch.reads)
        key = stretch.shape, None if end is None else end.place, *shapes
        if key not in self._functions:
            modules = {f"m{index}": module for index, module in enumerate(stretch.modules)}
            graph = stretch.graph if end is None else end.graph
            self._functions[key] = self._compile(fx.GraphModule(nn.ModuleDict(modules), graph))
        return self._functions[key]

    def sign(self, device: torch.device, is_minus: bool) -> Tensor:
        """Given as a tensor, so that both directions are one function: to the bit the same."""
        if (device, is_minus) not in self._signs:
            self._signs[device, is_minus] = torch.tensor(-1.0 if is_minus else 1.0, device=device)
        return self._signs[device, is_minus]

    def enter_chain(
        self, a: Tensor, b: Tensor, cast: torch.dtype | None, convolves: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """As `stage_ops.enter_chain`, with one pass over each stream after the grid is known."""
        if torch.is_grad_enabled():  # where a graph is kept these steps are a part of it
            return stage_ops.enter_chain(a, b, cast, convolves)
        if not is_imprecise(stage_ops.wide(a.new_empty(0)), cast, convolves):
            return stage_ops.wide(a), stage_ops.wide(b), None
        grid = make_grid(stage_ops.largest(a).float(), stage_ops.largest(b).float())
        return self._rounded(a, grid), self._rounded(b, grid), grid

    def total(self, *gradients: Tensor | None) -> Tensor | None:
        """As `stage_ops.total`, also of gradients in several precisions."""
        there = [g for g in gradients if g is not None]
        if len(there) == 2 and there[0].dtype != there[1].dtype:
            summed: Tensor = self._sum(there[0], there[1])
            return summed
        return stage_ops.total(*there)

    def _on_grid(self, sum_up: Callable[..., Tensor], plain: Callable[..., Tensor]) -> Any:
        def on_grid(stream: Tensor, addend: Tensor, grid: Tensor | None) -> Tensor:
            if grid is None or torch.is_grad_enabled():
                return plain(stream, addend, grid)
            return sum_up(stream.detach(), addend.detach(), grid)

        on_grid.__name__ = on_grid.__qualname__ = f"{plain.__name__}_on_grid"
        return on_grid


def _plus(stream: Tensor, addend: Tensor, grid: Tensor) -> Tensor:
    return stream + ((addend.float() + grid) - grid)


def _minus(stream: Tensor, addend: Tensor, grid: Tensor) -> Tensor:
    return stream - ((addend.float() + grid) - grid)


def _rounded(x: Tensor, grid: Tensor) -> Tensor:
    return (x.float() + grid) - grid


def _summed(a: Tensor, b: Tensor) -> Tensor:
    return a + b


def _compiled(function: Any) -> Callable[..., Any]:
    found: Callable[..., Any] = torch.compile(function, dynamic=False, fullgraph=True)
    return found


_STEPS: Final[dict[Any, str]] = {
    stage_ops.enter_chain: "enter_chain",
    stage_ops.minus: "minus",
    stage_ops.plus: "plus",
    stage_ops.total: "total",
}
"""Steps that are compiled too."""


def fuse(
    forward: fx.Graph, backward: fx.Graph, root: nn.Module, fused: Fused
) -> tuple[fx.Graph, fx.Graph]:
    """The two programs of a stage with their stretches compiled."""
    programs = [fx.Graph(), fx.Graph()]
    for new, old in zip(programs, (forward, backward), strict=True):
        new.output(new.graph_copy(old, {}))
    found = [stretches(graph, root) for graph in programs]
    for stretch in found[1]:
        for node in stretch.inputs:
            if node.target is stage_ops.leaf and _is_cast(stretch, node):
                node.target = narrow_leaf
    fuse_residual_adds(*found)
    leaves = {tuple(s.reads): _graded(s) for s in found[1]}
    for graph, here in zip(programs, found, strict=True):
        now: dict[fx.Node, fx.Node] = {}
        for number, stretch in enumerate(here):
            graded = leaves.get(tuple(stretch.reads), _graded(stretch))
            _replace(graph, stretch, _runner(stretch, root, fused, graded, number), now)
        for node in graph.nodes:
            if node.target in _STEPS:
                node.target = getattr(fused, _STEPS[node.target])
        graph.eliminate_dead_code(lambda node: node.op != "get_attr")
        graph.lint()
    return programs[0], programs[1]


Begin = Callable[[Any], Any]
"""How an input begins a graph."""


def _graded(stretch: FusionRegion) -> tuple[Begin, ...]:
    """How each input begins a graph in backward, if it does."""
    begins: tuple[Any, ...] = (stage_ops.leaf, narrow_leaf)
    targets = [node.target for node in stretch.inputs]
    return tuple(t if t in begins else _as_it_is for t in targets)  # type: ignore[misc]


def _as_it_is(x: Any) -> Any:
    return x


def _is_cast(stretch: FusionRegion, node: fx.Node) -> bool:
    """Is an input read once, by a layer that autocast gives it to in low precision?"""
    users = [user for user in node.users if user in stretch.nodes]
    return len(users) == 1 and users[0].op == "call_module" and _tensor_core(users[0], stretch)


def _tensor_core(user: fx.Node, stretch: FusionRegion) -> bool:
    return f"{user.target}.weight" in stretch.products


def narrow_leaf(x: Any) -> Any:
    """The beginning of a graph in the precision in which it is read.

    Its gradient is then not widened first and added to others afterwards, but in one go.
    """
    return stage_ops.leaf(as_read(x) if isinstance(x, Tensor) else x)


def _replace(
    graph: fx.Graph, stretch: FusionRegion, run: Callable[..., Any], now: dict[fx.Node, fx.Node]
) -> None:
    """One call for a stretch; the sum that it ends with is the last of its results.

    `now`: what stands for values of stretches before.
    """
    end = () if stretch.end is None else stretch.end.inputs
    ended = [] if stretch.end is None else [stretch.end.node]
    with graph.inserting_after(stretch.nodes[-1]):
        called = graph.call_function(run, (*(now.get(x, x) for x in stretch.inputs), *end))
    last = called
    for index, node in enumerate([*stretch.outputs, *ended]):
        with graph.inserting_after(last):
            last = graph.call_function(operator.getitem, (called, index))
        node.replace_all_uses_with(last)
        now[node] = last
    for node in (*ended, *reversed(stretch.nodes)):
        graph.erase_node(node)


def _runner(
    stretch: FusionRegion, root: nn.Module, fused: Fused, graded: Sequence[Begin], number: int
) -> Callable[..., Any]:
    """Calls a compiled stretch as the program does: recorded, or not to be seen by autograd."""
    reads, counters, end = stretch.reads, stretch.counters, stretch.end
    scratch: dict[str, Tensor] = {}

    def still(path: str) -> Tensor:
        """Statistics that may move in vain."""
        if path not in scratch:
            scratch[path] = torch.zeros_like(attribute(root, path))
        return scratch[path]

    def run(*inputs: Any, end: End | None = None, summed: Sequence[Tensor] = ()) -> Any:
        function = fused.function(stretch, root, end)
        if torch.is_grad_enabled():
            for path in counters:
                attribute(root, path).add_(1)
            return _quietly(function, *inputs, *summed, *(attribute(root, path) for path in reads))
        pairs = zip(inputs, graded, strict=True)
        leaves = [begin(x) for x, begin in pairs]
        tensors = (still(p) if p in stretch.moved else attribute(root, p) for p in reads)
        with torch.enable_grad():
            found = _quietly(function, *leaves, *summed, *tensors)
        return tuple(stage_ops.detached(value) for value in found)

    def run_to_the_end(*inputs: Any) -> Any:
        assert end is not None
        *own, stream, grid = inputs
        if grid is None or (torch.is_grad_enabled() and not end.is_minus):
            found = run(*own)  # exact without a grid; or a graph goes on through the stream
            plain = stage_ops.minus if end.is_minus else stage_ops.plus
            return *found, plain(stream, found[end.place], grid)
        sign = fused.sign(stream.device, end.is_minus)
        found = run(*own, end=end, summed=(stream.detach(), grid, sign))
        return *found, stage_ops.detached(found[end.place])

    if end is not None:
        run_to_the_end.__name__ = run_to_the_end.__qualname__ = f"compiled_{number}_and_sum"
        return run_to_the_end
    run.__name__ = run.__qualname__ = f"compiled_{number}"
    return run


def _quietly(function: Callable[..., Any], *args: Any) -> Any:
    """Compiling looks at the gradients of whatever it is given, which torch then warns of."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")
        return function(*args)
