"""Compiled functions of couplings and other pieces: one for each structure, shared by its blocks.

    step(modules, stream, x, sign, grid, *sides) -> stream + sign * on_grid(F(x)), and F's extras

Forward is `y = step(a, b, +1)`, the rebuild is `a = step(y, b, -1)`, and backward differentiates
that second call. `sign` is a tensor, so that both directions are one artifact: the same kernels
round F(b) to the same bits. That needs autograd on in both runs; forward drops its graph.

The text of a step names its modules by position, so identical blocks have identical text, and
parameters are read at each call. The settings of layers are guards of `torch.compile`. Stochastic
depth, whose rate differs from block to block, is drawn outside and passed as a mask.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch.utils._python_dispatch import _get_current_dispatch_mode

from revcompile.errors import InputError, RevcompileWarning
from revcompile.ir.module_tree import called_module
from revcompile.ir.python_code import Function, function_of
from revcompile.kernels.exact_sum import rounded

DROP_PATHS: Final = ("DropPath", "StochasticDepth")
"""Classes whose layers multiply each sample by a random number. Those of DropBlock do not."""


def stepped(stream: Tensor, addend: Tensor, sign: Tensor, grid: Tensor | None) -> Tensor:
    """`stream ± addend`, the addend on the grid; its derivative by the addend is +1 either way."""
    on_grid = rounded(addend, grid)
    return stream + (sign * on_grid).detach() + (on_grid - on_grid.detach())


def masked(x: Tensor, mask: Tensor) -> Tensor:
    """What a layer of stochastic depth returns for `x`, from what it returns for ones."""
    return x * mask.to(x.dtype)


@dataclass(frozen=True)
class Step:
    """A branch as a compilable function, and the layers that draw the masks it is given."""

    function: Function
    mask_layers: tuple[nn.Module, ...] = ()

    def masks(self, stream: Tensor) -> list[Tensor]:
        """The masks of one run: one number for each sample."""
        if not self.mask_layers:
            return []
        ones = stream.new_ones((stream.shape[0], *[1] * (stream.ndim - 1)), requires_grad=False)
        return [layer(ones) for layer in self.mask_layers]


def step_of(
    branch: fx.Graph, root: nn.Module, name: str, *, adds: bool, has_extras: bool, by_sample: bool
) -> Step:
    """The step of a coupling's branch `F(x, *sides)`.

    Args:
        branch: F.
        root: The module that has F's modules.
        name: The coupling's name, for tracebacks.
        adds: Whether the step adds F to the stream. If not, it is `F(x, *sides)` alone.
        has_extras: Whether F returns a tuple.
        by_sample: Whether the first dimension of the stream and of F counts samples.
    """
    graph = numbered(branch)
    inputs = graph.find_nodes(op="placeholder")
    layers: list[nn.Module] = []
    for node in list(graph.nodes) if by_sample else ():
        layer = called_module(node, root)
        if type(layer).__name__ not in DROP_PATHS or not _is_last(node):
            continue
        assert layer is not None
        layers.append(layer)
        with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
            mask = graph.placeholder(f"mask_{len(layers)}")
        with graph.inserting_before(node):
            node.replace_all_uses_with(graph.call_function(masked, (node.args[0], mask)))
        graph.erase_node(node)
    if adds:
        (output,) = graph.find_nodes(op="output")
        with graph.inserting_before(inputs[0]):
            stream = graph.placeholder("stream_")
        with graph.inserting_after(inputs[0]):
            sign = graph.placeholder("sign_")
        with graph.inserting_after(sign):
            grid = graph.placeholder("grid_")
        (result,) = output.args
        assert isinstance(result, (tuple, list, fx.Node))
        with graph.inserting_before(output):
            addend = result if isinstance(result, fx.Node) else result[0]
            total = graph.call_function(stepped, (stream, addend, sign, grid))
        output.args = ((total, *result[1:]) if has_extras else total,)  # type: ignore[index]
    return Step(function_of(graph, root, name), tuple(layers))


def numbered(graph: fx.Graph) -> fx.Graph:
    """A copy of a graph whose values are named by position, as in all graphs of its structure."""
    copy, values = fx.Graph(), dict[fx.Node, fx.Node]()
    for index, node in enumerate(graph.nodes):
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        name = f"v{index}"
        target = name if node.op == "placeholder" else node.target
        values[node] = copy.create_node(node.op, target, args, kwargs, name)
    return copy


def _is_last(node: fx.Node) -> bool:
    """Whether the graph returns what a call of a layer with one argument returns."""
    if len(node.args) != 1 or node.kwargs or len(node.users) != 1:
        return False
    (user,) = node.users
    if user.op != "output":
        return False
    (result,) = user.args
    return result is node or (isinstance(result, (tuple, list)) and result[0] is node)


# -- torch.compile --------------------------------------------------------------------------------


def refuse_options(options: Mapping[str, Any]) -> None:
    """Raise for options of `torch.compile` that cannot hold for a reversible module."""
    if options.get("fullgraph"):
        raise InputError(
            "compile: fullgraph=True asks for one graph, but a chain of couplings is a Python loop "
            "that runs one compiled function per coupling; leave fullgraph out"
        )
    mode, given = options.get("mode"), options.get("options") or {}
    uses_graphs = mode in ("reduce-overhead", "max-autotune") or given.get("triton.cudagraphs")
    if uses_graphs or options.get("backend") == "cudagraphs":
        raise InputError(
            f"compile: {f'mode={mode!r}' if mode else 'this mode or backend'} captures CUDA graphs "
            "inside a coupling, which runs forward twice for each backward pass. Capture the whole "
            'step with torch.cuda.make_graphed_callables, or use mode="max-autotune-no-cudagraphs"'
        )


@dataclass
class Compiler:
    """`torch.compile` with these options, for functions that blocks of one structure share.

    A piece is compiled for the sizes of its first call, and once more for all other sizes.
    """

    options: dict[str, Any] = field(default_factory=dict)
    artifacts: dict[Any, Callable[..., Any]] = field(default_factory=dict)
    """Compiled functions by text and sizes."""
    failures: dict[str, str] = field(default_factory=dict)
    """Why a piece runs eagerly, by its name."""
    _failed: set[Any] = field(default_factory=set)
    _first_sizes: WeakKeyDictionary[Function, Any] = field(default_factory=WeakKeyDictionary)

    def __post_init__(self) -> None:
        refuse_options(self.options)

    @property
    def backend(self) -> str:
        """The name of the backend."""
        found = _unwrapped(self.options.get("backend", "inductor"))
        names = (getattr(found, name, None) for name in ("compiler_name", "__name__"))
        return found if isinstance(found, str) else next(filter(None, names), type(found).__name__)

    def compiled(
        self, function: Function, inputs: Sequence[Any], *, whole: bool = True
    ) -> Callable[..., Any] | None:
        """`function.run` in compiled form for inputs of these sizes; None if that has failed.

        Args:
            function: A function of `(modules, *inputs)`.
            inputs: What it will be called with.
            whole: Whether it must be one graph. If not, parts that dynamo cannot trace run eagerly.
        """
        if function.key in self._failed:
            return None
        sizes = tuple([value.shape for value in inputs if isinstance(value, Tensor)])
        dynamic = self.options.get("dynamic")
        if dynamic is None:
            dynamic = self._first_sizes.setdefault(function, sizes) != sizes
        key = function.key, function.parameter_sizes if dynamic else sizes
        compiled = self.artifacts.get(key)
        if compiled is None:
            # Each call of a compiled function with `dynamic=False` sets and restores options.
            given = {**self.options, "fullgraph": whole, "dynamic": dynamic or None}
            compiled = self.artifacts[key] = torch.compile(function.fresh(), **given)
        return compiled

    def __deepcopy__(self, memo: Any) -> Compiler:
        return Compiler(self.options)

    def failed(self, function: Function, error: Exception) -> None:
        """Note that a function cannot be compiled; it runs eagerly from now on."""
        self._failed.add(function.key)
        first, *others = (str(error).strip() or "no message").splitlines()
        cause = " ".join([first, *others[: first.endswith(":")]])  # "backend='...' raised:"
        reason = f"{type(error).__name__}: {cause}"
        if isinstance(error, FailOnRecompileLimitHit):
            reason = (
                "torch._dynamo's recompile_limit is reached; TORCH_LOGS=recompiles says by what"
            )
        is_known = reason in self.failures.values()
        self.failures[function.name] = reason
        if is_known:
            return
        is_missing = "InvalidCxxCompiler" in reason
        hint = "; install a C++ compiler, which the variable CXX may name" if is_missing else ""
        warnings.warn(
            f"{function.name} and pieces like it run eagerly: torch.compile has failed ({reason})"
            f"{hint}",
            RevcompileWarning,
            stacklevel=2,
        )


_of_traces: Final = dict[Any, Compiler]()
"""Compilers by the backend and the options of a call of `torch.compile`."""


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def number_of_trace() -> int:
    """While dynamo traces a caller: a number for the options of that call of `torch.compile`."""
    backend: Any = torch._dynamo.symbolic_convert.InstructionTranslator.current_tx().output
    backend = backend.compiler_fn
    # Under DistributedDataParallel, dynamo has a backend that splits graphs by buckets.
    backend = getattr(getattr(backend, "__self__", None), "backend_compile_fn", backend)
    settings = torch._dynamo.config
    dynamic = None
    if not settings.assume_static_by_default:
        dynamic = True
    elif not settings.automatic_dynamic_shapes:
        dynamic = False
    key = backend, dynamic
    if key not in _of_traces:
        options = {"backend": backend} | ({} if dynamic is None else {"dynamic": dynamic})
        _of_traces[key] = Compiler(options)
    return list(_of_traces).index(key)


def compiler_of_trace(number: int) -> Compiler:
    """The compiler for a number of `number_of_trace`."""
    compiler = list(_of_traces.values())[number]
    options = getattr(_unwrapped(compiler.options["backend"]), "config", {})
    refuse_options({"backend": compiler.backend, "options": options})
    return compiler


def _unwrapped(backend: Any) -> Any:
    while (inner := getattr(backend, "_torchdynamo_orig_backend", None)) is not None:
        backend = inner
    return backend


def compiling(compiler: Compiler | None) -> AbstractContextManager[Any]:
    """A context for a forward pass: what cannot be compiled fails here, and not in backward."""
    if compiler is None:
        return nullcontext()
    patch: Any = torch._functorch.config.patch
    return patch("force_non_lazy_backward_lowering", True)  # type: ignore[no-any-return]


CANNOT_COMPILE: Final = (TorchDynamoException, FailOnRecompileLimitHit)
"""What compiled functions raise if they cannot be compiled."""


def may_compile() -> bool:
    """Whether compiled functions would run compiled here and now."""
    stance = torch._dynamo.eval_frame._stance.stance  # others may run forward and rebuild unlike
    return stance == "default" and _get_current_dispatch_mode() is None
