"""Functions of torch and Python that are replaced while a model is traced."""

from __future__ import annotations

import builtins
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import fx, nn
from torch.fx.proxy import TraceError
from torch.nn.modules import transformer
from torch.utils import checkpoint

from revcompile.compiler.capture.proxy import ASSIGNED, ShapedProxy, ShapedTracer, contains_proxy
from revcompile.compiler.capture.trace_errors import Unsupported, is_torch_code
from revcompile.ir.ops import op_name

is_grad_enabled, _is_autocast_enabled = torch.is_grad_enabled, torch.is_autocast_enabled
_get_autocast_dtype = torch.get_autocast_dtype
"""torch's own functions; while a model is traced, those of the module `torch` add guards."""

AUTOCAST: Final = "an autocast region, which no graph can hold"

_ALWAYS: Final = ("empty", "rand", "randint", "randn", "randperm")
"""Factories whose result may be random: never a constant."""

_FACTORIES: Final = (
    *_ALWAYS,
    *("arange", "as_tensor", "eye", "finfo", "full", "iinfo", "linspace", "logspace"),
    *("ones", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros"),
)
"""Functions of plain values: they never reach a proxy's `__torch_function__` by themselves."""


_FLAGS: Final = (
    *("is_grad_enabled", "is_inference_mode_enabled", "is_autocast_enabled"),
    *("is_autocast_cpu_enabled", "get_autocast_dtype", "get_autocast_cpu_dtype"),
    *("get_autocast_gpu_dtype", "get_default_dtype", "are_deterministic_algorithms_enabled"),
)
"""Flags of torch that a forward pass may read."""

_GENERATOR: Final = "_checkpoint_without_reentrant_generator"
"""The generator that `torch.utils.checkpoint` runs around the function; its name has variants."""


@contextmanager
def patched(tracer: ShapedTracer) -> Iterator[None]:
    """Let proxies pass for tensors and numbers, and raise where FX would lose something."""
    # FX asks this of every function it meets. The list behind it takes torch longer to make than
    # a small model to be traced; made now, it has torch's own functions and is kept for good.
    torch.overrides.is_tensor_method_or_property(torch.Tensor.add)
    replaced = [
        (builtins, "isinstance", _seen_instance(builtins.isinstance, tracer)),
        (torch.autograd.Function, "apply", _stop_at_custom_function(tracer)),
        (torch.autocast, "__init__", _stop_at_autocast(torch.autocast.__init__)),
        (transformer, "_detect_is_causal_mask", _never_causal),
        *((checkpoint, name, _no_checkpoint) for name in vars(checkpoint) if _GENERATOR in name),
        *((torch, name, _traced_factory(tracer, name)) for name in _FACTORIES),
        *((torch, name, _flag_reader(tracer, name)) for name in _FLAGS),
        *_of_transformers(),
    ]
    originals = [(owner, name, vars(owner)[name]) for owner, name, _ in replaced]
    caches = [(f, f.cache_info()) for f in vars(torch.overrides).values() if _is_cached(f)]
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    try:
        logger.setLevel(logging.CRITICAL)  # attempts may fail
        for owner, name, replacement in replaced:
            setattr(owner, name, replacement)
        yield
    finally:
        logger.setLevel(level)
        for owner, name, original in originals:
            setattr(owner, name, original)
        for function, before in caches:  # torch's lists of its functions have ours, and the model
            if function.cache_info().currsize != before.currsize:
                function.cache_clear()


def _is_cached(function: Any) -> bool:
    return hasattr(function, "cache_info")


def _seen_instance(is_instance: Callable[..., bool], tracer: ShapedTracer) -> Callable[..., bool]:
    """`isinstance` that takes a proxy for the value it represents, and guards a module's class."""

    def seen(value: Any, classes: Any) -> bool:
        result = is_instance(value, classes)
        if not tracer.evaluating and is_instance(value, nn.Module):
            tracer.note_class(value, classes, result)
        return result or (type(value) is ShapedProxy and issubclass(value.seen_type(), classes))

    return seen


def _traced_factory(tracer: ShapedTracer, name: str) -> Callable[..., Any]:
    function, always = getattr(torch, name), name in _ALWAYS

    def factory(*args: Any, **kwargs: Any) -> Any:
        if not tracer.evaluating and (always or contains_proxy((args, kwargs))):
            return tracer.create_proxy("call_function", function, args, kwargs)
        return function(*args, **kwargs)

    return factory


def _flag_reader(tracer: ShapedTracer, name: str) -> Callable[..., Any]:
    function = getattr(torch, name)

    def read(*args: Any) -> Any:
        value = function(*args)
        tracer.flag(name, args, value)
        return value

    return read


def _stop_at_custom_function(tracer: ShapedTracer) -> Any:
    """A graph would keep a custom function's forward and lose its backward."""
    apply = vars(torch.autograd.Function)["apply"]

    def stop(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if tracer.evaluating or not contains_proxy((args, kwargs)):
            return apply.__get__(None, cls)(*args, **kwargs)
        if cls is checkpoint.CheckpointFunction:
            function, _, *inputs = args
            return function(*inputs)
        raise TraceError(f"the custom autograd function {cls.__name__}")

    return classmethod(stop)


@contextmanager
def refuse_unsupported() -> Iterator[None]:
    """Raise where `torch.export` would trace into something that its graph does not show."""
    original = vars(torch.autograd.Function)["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is checkpoint.CheckpointFunction:
            function, _, *inputs = args
            return function(*inputs)
        if cls.__module__.startswith("torch._"):  # how torch differentiates operators of its own
            return original.__get__(None, cls)(*args, **kwargs)
        raise Unsupported(
            f"the custom autograd function {cls.__name__}, whose backward pass torch.export loses; "
            "call it in a submodule of its own, which becomes a leaf module"
        )

    def assign(tensor: torch.Tensor, value: torch.Tensor) -> None:
        if not is_torch_code():
            raise Unsupported(ASSIGNED.format("data"))
        data.__set__(tensor, value)

    data: Any = torch._C.TensorBase.data
    torch.autograd.Function.apply = classmethod(apply)
    torch.Tensor.data = property(data.__get__, assign)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = original
        del torch.Tensor.data


def _stop_at_autocast(init: Callable[..., None]) -> Callable[..., None]:
    def stop(self: Any, device_type: Any, *args: Any, **kwargs: Any) -> None:
        if contains_proxy(device_type):
            raise TraceError(AUTOCAST)
        init(self, device_type, *args, **kwargs)

    return stop


def _never_causal(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
    """torch reads a mask's contents to see whether it is causal, which only makes it faster."""
    return is_causal is True


def _of_transformers() -> list[tuple[Any, str, Any]]:
    """Its models read the contents of positions to see whether sequences are packed.

    Traced, they would mask as if they were: without flash attention, and with a mask of length x
    length. Positions that the model counts itself are of one sequence.
    """
    masking, name = sys.modules.get("transformers.masking_utils"), "find_packed_sequence_indices"
    find = getattr(masking, name, None)
    if find is None:
        return []

    def find_packed(position_ids: Any) -> Any:
        return None if _is_counted(position_ids) else find(position_ids)

    return [(masking, name, find_packed)]


_COUNTING: Final = frozenset(("add", "arange", "expand", "unsqueeze"))


def _is_counted(positions: Any) -> bool:
    """Are they `arange(n)` with a number added, in one row or several?"""
    if not isinstance(positions, fx.Proxy):
        return False
    node = positions.node
    while op_name(node) in _COUNTING - {"arange"}:
        source, *others = node.args
        is_sum = op_name(node) == "add"
        if not isinstance(source, fx.Node) or (is_sum and not isinstance(others[0], int)):
            return False
        node = source
    return op_name(node) == "arange" and len(node.args) <= 2 and "step" not in node.kwargs


def _no_checkpoint(*args: Any, **kwargs: Any) -> Iterator[None]:
    """Checkpointing changes no value: the function inside is traced."""
    yield


def autocast_state() -> tuple[Any, ...]:
    """Is autocast on, and to which type, on the devices that have it?"""
    return tuple(
        (_is_autocast_enabled(device), _get_autocast_dtype(device)) for device in ("cpu", "cuda")
    )
