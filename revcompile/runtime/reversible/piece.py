"""Pieces that autograd differentiates: opaque segments, and the branches of short chains. Backward
may compute a piece again.

A segment between two chains reads streams that the first chain keeps anyway. Its own graph would be
kept until backward gets there; those of a ResNet's stem and transitions would be most of its
memory. So large ones keep their inputs only, as checkpointing does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from typing import Any, Final

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.module import _has_any_global_hook
from torch.utils.checkpoint import checkpoint

from revcompile.ir.compiled import CANNOT_COMPILE, DROP_PATHS, Compiler, may_compile, numbered
from revcompile.ir.module_tree import called_module
from revcompile.ir.precision_rewrites import match_dtypes
from revcompile.ir.python_code import Function, function_of
from revcompile.ir.types import TYPE, Body, Coupling, Opaque, Segment, types_in
from revcompile.runtime.reversible.bindings import Bindings, Bound
from revcompile.runtime.reversible.replay import (
    Replay,
    ReplayContext,
    Surroundings,
    without_autocast_cache,
)
from revcompile.runtime.reversible.transforms import is_transformed


class Piece:
    """A segment's graph as ordinary operations, eager or compiled.

    Args:
        segment: An opaque segment, or a coupling: the piece is then its branch.
        root: The module that has its modules.
        bindings: What it reads from `root`.
        context: What it touches besides its inputs.
        recomputes: Whether backward computes it again, from its inputs.
    """

    def __init__(
        self,
        segment: Segment,
        root: nn.Module,
        bindings: Bindings,
        context: ReplayContext,
        recomputes: bool,
    ) -> None:
        graph = match_dtypes(segment.graph)
        self.name, self._bindings, self._recomputes = segment.name, bindings, recomputes
        self._eager = function_of(graph, root, segment.name)
        self._computes = any(node.op not in ("placeholder", "output") for node in graph.nodes)
        self._shared = partial(_shared, graph, root, segment.name)
        self._context, self.stateful = context, context.stateful
        """Its buffers, which decide whether it can be compiled."""

    @cached_property
    def _compilable(self) -> Function:
        """The graph with the text of all pieces of its structure."""
        return self._shared()

    def __call__(
        self, inputs: Sequence[Any], compiler: Compiler | None, stores_nothing: bool
    ) -> Any:
        """The piece's outputs.

        Args:
            inputs: Its inputs.
            compiler: What compiles it, if it does not run eagerly.
            stores_nothing: Whether its graph need not be kept.
        """
        # Hooks of its layers would see both runs.
        transformed = is_transformed()
        is_observed = bool(self._bindings.hooks) or _has_any_global_hook() or transformed
        again = stores_nothing and self._recomputes and not is_observed
        run, stateful = self._run_twice if again else _run_once, self.stateful
        if compiler is not None and not stateful.are_known and not again:
            with stateful.recorded():
                return self._eager(*inputs)
        may_run = stateful.may_compile and self._computes and may_compile()
        if compiler is not None and may_run and not transformed:
            function = self._compilable
            compiled = compiler.compiled(function, inputs, whole=False)
            if compiled is not None:
                try:
                    return run(partial(compiled, function.modules), inputs)
                except CANNOT_COMPILE as error:
                    compiler.failed(function, error)
        return run(self._eager, inputs)

    def _run_twice(self, function: Callable[..., Any], inputs: Sequence[Any]) -> Any:
        device = next((x.device for x in inputs if isinstance(x, Tensor)), torch.device("cpu"))
        replay = Replay(self._context, Surroundings(device), has_hooks=False)
        second = _Second(self.name, replay, Bound(self._bindings))
        return checkpoint(
            *(function, *inputs),
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=lambda: (_first(replay), second),
        )


def _run_once(function: Callable[..., Any], inputs: Sequence[Any]) -> Any:
    return function(*inputs)


def _shared(graph: fx.Graph, root: nn.Module, name: str) -> Function:
    return function_of(numbered(graph), root, name)


@contextmanager
def _first(replay: Replay) -> Iterator[None]:
    # A compiled piece is the same artifact in both runs only if autocast's cache is off in both.
    with without_autocast_cache(), replay.record():
        yield


class _Second:
    """A context for the runs in backward: more than one if the graph is retained."""

    def __init__(self, name: str, replay: Replay, bound: Bound) -> None:
        self._name, self._replay, self._bound = name, replay, bound

    def __enter__(self) -> None:
        self._bound.check(self._name)
        self._stack = ExitStack()
        self._stack.enter_context(self._bound.restored({}))
        # Not in the eager way: norms without statistics save fewer tensors than in forward.
        self._stack.enter_context(self._replay.again(is_compiled=True))

    def __exit__(self, *given: Any) -> bool | None:
        return self._stack.__exit__(*given)


def recomputes(segment: Opaque, body: Body, bindings: Bindings, context: ReplayContext) -> bool:
    """Whether backward computes a segment again.

    Not if its graph takes less than one stream of a chain does; not after the last chain, where
    backward begins; and not if it has layers or functions from elsewhere than torch, which may do
    more than compute.
    """
    chains = [each for each in body.segments if isinstance(each, Coupling)]
    if bindings.sharded or not chains:
        return False
    kinds = (kind for each in chains for kind in types_in(body.types.get(each.streams_out[1])))
    stream = max((kind.nbytes() for kind in kinds), default=0)
    position = body.segments.index
    if position(segment) > position(chains[-1]) or _saved_bytes(segment.graph) <= stream:
        return False
    return not context.random.is_unknown


_LOW: Final = (_BatchNorm, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.SiLU, nn.GELU, nn.Identity)
"""Layers whose result under autocast has the dtype of their input."""


def ends_low(branch: fx.Graph, root: nn.Module) -> bool:
    """Whether a branch has results in low precision under autocast: it ends with a convolution or a
    linear layer, and layers that keep the dtype."""
    (output,) = branch.find_nodes(op="output")
    node = output.args[0]
    while isinstance(node, fx.Node) and node.op == "call_module":
        layer = called_module(node, root)
        if isinstance(layer, (_ConvNd, nn.Linear)):
            return True
        if not (isinstance(layer, _LOW) or type(layer).__name__ in DROP_PATHS):
            return False
        node = node.args[0]
    return False


def _saved_bytes(graph: fx.Graph) -> int:
    """About what autograd saves: the values that layers read, without the graph's inputs."""
    calls = graph.find_nodes(op="call_module")
    read = {node for call in calls for node in call.all_input_nodes if node.op != "placeholder"}
    return sum(kind.nbytes() for node in read for kind in types_in(node.meta.get(TYPE)))
