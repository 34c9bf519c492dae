"""Calls of a model as CUDA graphs: one for its forward pass, one for its backward pass.

A deep model of small kernels keeps the host busy longer than the GPU, the more so if branches run
a second time in backward. Captured, a step takes the host two calls:

    1st and 2nd call of a kind    run as they are
    3rd                           both passes are captured
    from then on                  inputs are copied to where the graph reads them, it is replayed,
                                  and results are copied out: nobody sees memory of the graphs

Calls are of one kind if nothing differs that the host looks at: shapes, types, autocast, settings
of layers, where parameters and buffers are. All graphs share a pool of memory, in which what one
forward pass saves stays until its backward pass. A call that comes between the two is run as it is,
and so is whatever a graph cannot hold: calls without gradients, on other devices, with hooks on
layers, under `torch.func`, in a capture of the caller's own.
"""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack
from torch.nn.modules.module import _has_any_global_hook

from revcompile.errors import InputError, RevcompileWarning
from revcompile.ir.snapshot import Change, Kind, TreeSnapshot
from revcompile.kernels.autocast import converted
from revcompile.runtime.reversible.bindings import Bindings
from revcompile.runtime.reversible.replay import without_autocast_cache
from revcompile.runtime.reversible.slots import filled
from revcompile.runtime.reversible.transforms import differentiable_once, is_transformed

_log: Final = logging.getLogger("revcompile")
_WARM_UP: Final = 2
"""Calls of a kind that are run as they are: libraries set themselves up."""
_MOST_KINDS: Final = 8
"""Each takes memory for the gradients of all parameters."""
_MOST_SEEN: Final = 64
_GRADIENT_TYPES: Final = (Tensor, nn.Parameter)

NOT_ON_CUDA: Final = "the model is not on a CUDA device"

Run = Callable[[dict[str, Any]], dict[str, Any]]
"""Computes a model's values from those of its inputs."""


def warn_not_captured(backend: str, instead: str, why: str, stacklevel: int) -> None:
    """Say once why nothing is captured, although `backend` says so."""
    warnings.warn(
        f"backend={backend!r}: {instead}, because {why}. Pass backend='eager' to silence this "
        "warning",
        RevcompileWarning,
        stacklevel=stacklevel + 1,
    )


class CudaGraphs:
    """Captures functions as CUDA graphs, all in one pool of memory."""

    def __init__(self) -> None:
        self._pool: Any = None

    def why_not(self, tensors: Mapping[str, Tensor]) -> str | None:
        """Why calls with these inputs are never captured; None if they are."""
        elsewhere = [name for name, tensor in tensors.items() if not tensor.is_cuda]
        if elsewhere and len(elsewhere) < len(tensors):
            return f"its input {elsewhere[0]} is not on a CUDA device; move it there"
        return f"{NOT_ON_CUDA}; move it there" if elsewhere else None

    def is_busy(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def capture(
        self, function: Callable[[], None], generators: Iterable[torch.Generator] = ()
    ) -> Callable[[], None]:
        """What to call instead of the function, which has been run without effect.

        Args:
            generators: Those that it draws from, besides the default one.
        """
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        for each in generators:
            graph.register_generator_state(each)
        generator = torch.cuda.default_generators[stream.device_index]
        random_state = generator.graphsafe_get_state().clone_state()
        context = torch.cuda.graph(graph, self._pool, capture_error_mode="thread_local")
        try:
            with context:
                function()
        except BaseException:
            # A capture that fails leaves its stream current, and generator and pool in use.
            torch.cuda.set_stream(stream)
            generator.graphsafe_set_state(random_state)
            self._pool = None
            raise
        finally:
            # A capture begins with kernels of its own, which write the generators' seeds. A replay
            # writes them again on the current stream, and a failed capture frees their memory.
            assert context.capture_stream is not None
            stream.wait_stream(context.capture_stream)
        return graph.replay


class CapturedCalls:
    """The captured calls of one model.

    Args:
        graphs: What captures functions.
    """

    def __init__(self, graphs: CudaGraphs | None = None) -> None:
        self._graphs = graphs or CudaGraphs()
        self._seen: dict[Hashable, int] = {}
        self._captured: dict[Hashable, _Captured] = {}
        self._latest: weakref.ref[_Call] | None = None
        self._is_on = True
        self._has_warned = False
        self._calls = 0

    def run(
        self,
        run: Run,
        values: dict[str, Any],
        results: Sequence[str],
        bindings: Sequence[Bindings],
        plan: object,
        check_every: int,
    ) -> Mapping[str, Any]:
        """The values that a call results in.

        Args:
            run: Computes them.
            values: Of the inputs.
            results: The names of those that are returned.
            bindings: What `run` reads of the module tree.
            plan: Another object if `run` computes something else.
            check_every: So often `run` is called all the same, which checks reconstructions.
        """
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        if not self._is_on or not self._is_capturable(tensors, bindings):
            return run(values)
        kind = id(plan), _kind(values)
        captured = self._captured.get(kind)
        if captured is not None and captured.reads.change() is not None:
            del self._captured[kind]
            self._seen[kind], captured = 0, None
        if captured is None:
            capture = partial(_Captured, self._graphs, run, values, results)
            captured = self._warmed_up(kind, capture, bindings, plan)
        self._calls += 1
        latest = None if self._latest is None else self._latest()
        is_between = latest is not None and not latest.is_done
        if captured is None or is_between or self._calls % check_every == 0:
            return run(values)
        if latest is not None:
            latest.is_overwritten = True
        call = _Call()
        self._latest = weakref.ref(call)
        captured.load(tensors)
        given = *(tensors[name] for name in captured.differentiated), *captured.reads.parameters
        found = _Replayed.apply(captured, call, *given)
        return captured.others | dict(zip(captured.outputs, found, strict=True))

    def _is_capturable(self, tensors: Mapping[str, Tensor], bindings: Sequence[Bindings]) -> bool:
        is_watched = (
            torch.compiler.is_compiling()
            or is_transformed()
            or _has_any_global_hook()
            or _len_torch_function_stack()
            or _len_torch_dispatch_stack()
            or torch.is_anomaly_enabled()
            or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        )
        if is_watched or not tensors:
            return False
        if (why := self._graphs.why_not(tensors)) is not None:
            # Not when the module is made: it may be moved to a GPU until it is trained.
            if not self._has_warned:
                self._has_warned = True
                self._warn(why)
            return False
        return not self._graphs.is_busy() and not any(each.hooks for each in bindings)

    def _warn(self, why: str) -> None:
        instead = "the model's calls are run as they are"
        warn_not_captured("cudagraphs", instead, why, stacklevel=8)

    def _warmed_up(
        self,
        kind: Hashable,
        capture: Callable[[_Reads], _Captured],
        bindings: Sequence[Bindings],
        plan: object,
    ) -> _Captured | None:
        """The captured call, from the third of its kind on."""
        if len(self._seen) > _MOST_SEEN:
            self._seen.clear()
        self._seen[kind] = self._seen.get(kind, 0) + 1
        if self._seen[kind] <= _WARM_UP or len(self._captured) >= _MOST_KINDS:
            return None
        reads = _Reads(bindings, plan)
        if any(type(p) not in _GRADIENT_TYPES or not p.is_leaf for p in reads.parameters):
            return None  # computed ones, as of `functional_call`, or sharded ones
        try:
            captured = capture(reads)
            if (change := reads.change()) is not None:
                raise InputError(f"{change}: a layer changes it in every call")
        except Exception as error:
            self._is_on = False
            self._warn(f"capturing one has failed: {type(error).__name__}: {error}")
            return None
        self._captured[kind] = captured
        _log.info("backend='cudagraphs': forward and backward are captured (%s)", kind)
        return captured


def _kind(values: Mapping[str, Any]) -> Hashable:
    """Equal for calls of which the host does the same, as far as their arguments go."""
    given = tuple(
        (name, v.shape, v.stride(), v.dtype, v.device, v.requires_grad)
        if isinstance(v, Tensor)
        else (name, type(v), repr(v))
        for name, v in values.items()
    )
    autocast = tuple((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _DEVICES)
    backends = torch.backends
    return (
        *(given, autocast),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        (backends.cudnn.enabled, backends.cudnn.benchmark, backends.cudnn.deterministic),
        backends.cudnn.allow_tf32,
    )


_DEVICES: Final = ("cpu", "cuda")


class _Reads:
    """What a call reads of the module tree, as it is now."""

    def __init__(self, bindings: Sequence[Bindings], plan: object) -> None:
        self._plan = plan  # held, so that no other has its id
        kinds = Kind.PARAMETER, Kind.BUFFER, Kind.SETTING, Kind.MEMORY, Kind.REQUIRES_GRAD
        self._snapshot = TreeSnapshot([w for each in bindings for w in each.watched], kinds)
        self._slots = [slot for each in bindings for slot in each.slots]
        present = [owner[name] for owner, name in self._slots]
        unique = {id(p): p for p in present if p is not None and p.requires_grad}
        self.parameters = list(unique.values())
        """Those that require a gradient, each once."""

    def replaced(self, leaves: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Compute with these instead of the parameters that require a gradient."""
        by_id = {id(p): leaf for p, leaf in zip(self.parameters, leaves, strict=True)}
        entries = [(slot, id(slot[0][slot[1]])) for slot in self._slots]
        return filled([(slot, by_id[which]) for slot, which in entries if which in by_id])

    def change(self) -> Change | None:
        return self._snapshot.first_change()


@dataclass(eq=False)
class _Call:
    """One call: its backward pass finds in the pool what its forward pass has saved there."""

    is_done: bool = False
    """Has it had a backward pass?"""
    is_overwritten: bool = False
    """Has a later call saved something in the same place?"""


class _Captured:
    """Both passes of one kind of call, and the memory through which they are given values."""

    def __init__(
        self,
        graphs: CudaGraphs,
        run: Run,
        values: Mapping[str, Any],
        results: Sequence[str],
        reads: _Reads,
    ) -> None:
        self.reads = reads
        statics = {name: _static(value) for name, value in values.items()}
        self._inputs = {n: value for n, value in statics.items() if isinstance(value, Tensor)}
        self.differentiated = [n for n, value in self._inputs.items() if value.requires_grad]
        """The inputs that get gradients."""
        found: dict[str, Any] = {}
        self._gradients: tuple[Tensor | None, ...] = ()

        def forward() -> None:
            computed = run(dict(statics))
            found.update((name, computed[name]) for name in results)

        def backward() -> None:
            self._gradients = torch.autograd.grad(ends, targets, self._given, allow_unused=True)

        # Leaves of their own: autograd accumulates the gradients of a parameter on the stream of
        # the graph that has read it first, and the user may still hold one of an earlier call.
        leaves = [parameter.detach().requires_grad_() for parameter in reads.parameters]
        targets = [*(self._inputs[name] for name in self.differentiated), *leaves]
        with reads.replaced(leaves):
            # Weights that autocast has converted are those of one step only.
            with without_autocast_cache():
                self.replay_forward = graphs.capture(forward)
            tensors = {name: value for name, value in found.items() if isinstance(value, Tensor)}
            self.outputs = list(tensors)
            self.others = {name: value for name, value in found.items() if name not in tensors}
            """Results that are not tensors."""
            ends = [value for value in tensors.values() if value.requires_grad]
            if not ends:
                raise InputError("no result of the model has a gradient")
            self.has_gradient = [value.requires_grad for value in tensors.values()]
            self._given = [torch.zeros_like(end, requires_grad=False) for end in ends]
            with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
                self.replay_backward = graphs.capture(backward)
        self.results = [value.detach() for value in tensors.values()]

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        for name, static in self._inputs.items():
            static.detach().copy_(tensors[name].detach(), non_blocking=True)

    def differentiate(self, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradients of inputs and parameters, in memory of their own."""
        pairs = zip(gradients, self.has_gradient, strict=True)
        torch._foreach_copy_(self._given, [gradient for gradient, has in pairs if has])
        self.replay_backward()
        found = [gradient for gradient in self._gradients if gradient is not None]
        copies = iter(converted(found, [gradient.dtype for gradient in found]))
        return [None if gradient is None else next(copies) for gradient in self._gradients]


def _static(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


class _Replayed(torch.autograd.Function):
    """A captured call."""

    @staticmethod
    def forward(ctx: Any, captured: _Captured, call: _Call, *given: Tensor) -> Any:
        ctx.captured, ctx.call = captured, call
        # Autograd then refuses a backward pass after weights were written to, or a second one.
        ctx.save_for_backward(*given)
        captured.replay_forward()
        results = converted(captured.results, [result.dtype for result in captured.results])
        pairs = zip(results, captured.has_gradient, strict=True)
        ctx.mark_non_differentiable(*(result for result, has in pairs if not has))
        return tuple(results)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        captured, call, _ = ctx.captured, ctx.call, ctx.saved_tensors
        if call.is_overwritten:
            raise InputError(
                "a second backward pass through a captured call, after another call; "
                "reversify(..., backend='eager') keeps what each call needs"
            )
        found = captured.differentiate(gradients)
        call.is_done = True
        return None, None, *found
