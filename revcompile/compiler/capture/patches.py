"""What must be different in torch and Python while a model is being traced."""

from __future__ import annotations

import builtins
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.fx.proxy import TraceError
from torch.nn.modules import transformer
from torch.utils import checkpoint

from revcompile.compiler.capture.guards import is_torch_code
from revcompile.compiler.capture.proxy import ASSIGNED, ShapedProxy, ShapedTracer, contains_proxy
from revcompile.compiler.capture.trace_errors import Unseen

__all__ = ["AUTOCAST", "autocast_state", "is_grad_enabled", "patched", "unseen_refused"]

is_grad_enabled, _is_autocast_enabled = torch.is_grad_enabled, torch.is_autocast_enabled
"""torch's own; while a model is traced, `torch.is_grad_enabled` reports who asks."""

AUTOCAST: Final = "an autocast region, which a graph cannot hold"

_ALWAYS: Final = ("empty", "rand", "randint", "randn", "randperm")
"""Factories whose result may be random: never a constant."""

_FACTORIES: Final = (
    *_ALWAYS,
    *("arange", "as_tensor", "eye", "finfo", "full", "iinfo", "linspace", "logspace"),
    *("ones", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros"),
)
"""Functions of plain values: they never reach a proxy's `__torch_function__` by themselves."""


_FLAGS: Final = ("is_grad_enabled", "is_inference_mode_enabled", "is_autocast_enabled")
"""Switches of torch that a forward pass may ask for."""

_GENERATOR: Final = "_checkpoint_without_reentrant_generator"
"""What `torch.utils.checkpoint` runs before and after the function; its name has variants."""


@contextmanager
def patched(tracer: ShapedTracer) -> Iterator[None]:
    """Let proxies pass where plain tensors and numbers would, and stop what FX would lose."""
    replaced = [
        (builtins, "isinstance", _seen_instance(builtins.isinstance)),
        (torch.autograd.Function, "apply", _stop_at_custom_function(tracer)),
        (torch.autocast, "__init__", _stop_at_autocast(torch.autocast.__init__)),
        (transformer, "_detect_is_causal_mask", _never_causal),
        *((checkpoint, name, _no_checkpoint) for name in vars(checkpoint) if _GENERATOR in name),
        *((torch, name, _recorder(tracer, name)) for name in _FACTORIES),
        *((torch, name, _flag_reader(tracer, name)) for name in _FLAGS),
    ]
    originals = [(owner, name, vars(owner)[name]) for owner, name, _ in replaced]
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    try:
        logger.setLevel(logging.CRITICAL)  # a failed attempt is no news
        for owner, name, replacement in replaced:
            setattr(owner, name, replacement)
        yield
    finally:
        logger.setLevel(level)
        for owner, name, original in originals:
            setattr(owner, name, original)


def _seen_instance(is_instance: Callable[..., bool]) -> Callable[..., bool]:
    """`isinstance` that takes a proxy for what it stands for."""

    def seen(value: Any, classes: Any) -> bool:
        if is_instance(value, classes):
            return True
        return type(value) is ShapedProxy and issubclass(value.seen_type(), classes)

    return seen


def _recorder(tracer: ShapedTracer, name: str) -> Callable[..., Any]:
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
def unseen_refused() -> Iterator[None]:
    """Stop where `torch.export` would follow a model into what its record does not show."""
    original = vars(torch.autograd.Function)["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is checkpoint.CheckpointFunction:
            function, _, *inputs = args
            return function(*inputs)
        if cls.__module__.startswith("torch._"):  # how torch differentiates operators of its own
            return original.__get__(None, cls)(*args, **kwargs)
        raise Unseen(
            f"the custom autograd function {cls.__name__}, whose backward pass torch.export loses; "
            "call it in a submodule of its own, which is kept as one piece"
        )

    def assign(tensor: torch.Tensor, value: torch.Tensor) -> None:
        if not is_torch_code():
            raise Unseen(ASSIGNED.format("data"))
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
    """Whether a mask is causal is a hint for speed, for which torch reads the mask's contents."""
    return is_causal is True


def _no_checkpoint(*args: Any, **kwargs: Any) -> Iterator[None]:
    """A checkpoint saves memory and changes no value: the function inside is traced."""
    yield


def autocast_state() -> tuple[Any, ...]:
    """Is autocast on, and to which type, on the devices that have it?"""
    return tuple(
        (_is_autocast_enabled(device), torch.get_autocast_dtype(device))
        for device in ("cpu", "cuda")
    )
