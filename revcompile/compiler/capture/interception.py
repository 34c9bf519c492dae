"""How the tracer sees what a forward pass does, in its own thread and on its own copy of the model.

Nothing that other threads could see is replaced:

    calls of modules            `_compiled_call_impl` of each module of the copy
    parameters and buffers      the dicts of the copy's modules give proxies
    names that are looked up    `nn.Module.__getattr__` searches those dicts
    modes of modules            `training` is removed, so `nn.Module.__getattr__` is called for it
    functions of torch          a `TorchFunctionMode`, which belongs to one thread
    autograd functions          the proxies themselves, see `proxy.custom_function`
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, is_tensor_method_or_property
from torch.utils import checkpoint

from revcompile.compiler.capture.leaf_modules import is_leaf
from revcompile.compiler.capture.proxy import ShapedTracer, contains_proxy
from revcompile.compiler.capture.random_draws import NoDraws

RANDOM: Final = (torch.empty, torch.rand, torch.randint, torch.randn, torch.randperm)
"""Factories whose result may be random: never a constant."""

_GETATTR: Final = nn.Module.__getattr__.__code__
_CHECKPOINTED: Final = checkpoint.CheckpointFunction.forward.__code__


class TracedFunctions(TorchFunctionMode):
    """Records calls of torch's functions that have proxies among their arguments."""

    def __init__(self, tracer: ShapedTracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._tracer.evaluating:
            return func(*args, **kwargs)
        if func is torch._C._set_grad_enabled and _enters_checkpoint():
            return func(True)
        if func not in RANDOM and not contains_proxy((args, kwargs)):
            with NoDraws("random numbers drawn outside the graph"):
                result = func(*args, **kwargs)
            self._tracer.note_made(result, (args, kwargs))
            return result
        create = self._tracer.create_proxy
        if func.__name__ == "__get__":
            return getattr(args[0], func.__self__.__name__)
        if is_tensor_method_or_property(func):
            return create("call_method", func.__name__, args, kwargs)
        name = self._tracer.graph._target_to_str(func.__name__)
        return create("call_function", func, args, kwargs, name=name)


def _enters_checkpoint() -> bool:
    """Whether a checkpoint (use_reentrant=True) disables gradients for the function inside.

    Checkpointing changes no value: the function is traced as if it were called directly.
    """
    frame: Any = sys._getframe(2)
    for _ in range(3):
        frame = frame.f_back
        if frame is None or frame.f_code is _CHECKPOINTED:
            break
    return frame is not None and frame.f_code is _CHECKPOINTED


class _Members(dict[str, Any]):
    """Parameters or buffers of a module; those that are read by name become proxies."""

    __slots__ = ("_tracer",)

    def __init__(self, members: Mapping[str, Any], tracer: ShapedTracer) -> None:
        super().__init__(members)
        self._tracer = tracer

    def __getitem__(self, name: str) -> Any:
        return self._tracer.attribute(super().__getitem__(name))


class _Parameters(_Members):
    """Parameters and, only for `nn.Module.__getattr__`, the mode of the module."""

    __slots__ = ("_module", "training")

    def __init__(self, module: nn.Module, tracer: ShapedTracer) -> None:
        super().__init__(module._parameters, tracer)
        self._module, self.training = module, module.training

    def __contains__(self, name: object) -> bool:
        if sys._getframe(1).f_code is not _GETATTR:
            return super().__contains__(name)
        self._tracer.note_asked(self._module, str(name))
        return name == "training" or super().__contains__(name)

    def __getitem__(self, name: str) -> Any:
        return self.training if name == "training" else super().__getitem__(name)


@contextmanager
def intercepted(root: nn.Module, tracer: ShapedTracer) -> Iterator[None]:
    """Hand calls of all modules of a model, and reads of parameters and buffers, to a tracer."""
    modules = list(root.modules())

    def calling(module: nn.Module) -> Callable[..., Any]:
        return lambda *args, **kwargs: tracer.called(module, args, kwargs)

    try:
        for module in modules:
            own = vars(module)
            own["_compiled_call_impl"] = calling(module)
            own["_parameters"] = _Parameters(module, tracer)
            own["_buffers"] = _Members(module._buffers, tracer)
            if type(module).__getattr__ is nn.Module.__getattr__:
                own.pop("training", None)
            elif not is_leaf(module):
                tracer.note_asked(module, "training")  # reads of it cannot be seen
        yield
    finally:
        for module in modules:
            own = vars(module)
            own.pop("_compiled_call_impl", None)
            own.setdefault("training", own["_parameters"].training)
            for kind in ("_parameters", "_buffers"):
                own[kind] = dict(own[kind])
