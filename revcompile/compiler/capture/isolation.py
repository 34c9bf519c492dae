"""Tracing and running a model without changing it: copies, and state that is put back afterwards.

copy_model          a deep copy of the user's model
preserve_rng        random generators (torch, Python, NumPy) are restored
preserve_attributes plain attributes of modules (caches, counters) are restored
preserve_model      generators, buffers, modes and attributes are restored
as_defined          gradients are on; the caller's autocast and inference mode are off
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from revcompile.compiler.capture.memory import storage_of
from revcompile.errors import CaptureError
from revcompile.ir.coupling_ops import seed_torch
from revcompile.ir.module_tree import Contents, copy_module
from revcompile.kernels.autocast import WITH_AUTOCAST


def copy_model(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """A deep copy. `memo` maps ids of tensors to the tensors that replace them in the copy."""
    try:
        twin: nn.Module = copy_module(model, memo)
        return twin
    except Exception as error:
        raise CaptureError(
            f"capture: {type(model).__name__} cannot be copied with copy.deepcopy: "
            f"{type(error).__name__}: {error}; keep what cannot be copied (open files, locks, "
            "process groups, results of an earlier forward pass) outside the model"
        ) from error


def set_mode(twin: nn.Module, model: nn.Module, training: bool) -> nn.Module:
    """Put a copy of `model`, or itself, in a mode; modules the user set to eval mode stay there."""
    modules = model.named_modules() if model.training else ()
    frozen = {path for path, module in modules if not module.training}
    if any(type(module).train is not nn.Module.train for module in twin.modules()):
        twin.train(training)  # some `train` methods empty caches
    for path, module in twin.named_modules():
        module.training = training and path not in frozen
    return twin


def register_constant(root: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Make a tensor that tracing found a plain attribute of the copy, if it is not one already.

    A buffer would be cast with the module, broadcast by DDP, and averaged.
    """
    path, _, leaf = name.rpartition(".")
    own = vars(root.get_submodule(path))
    given = own.get(leaf)
    own[leaf] = (given if isinstance(given, torch.Tensor) else tensor).to(tensor.device)


# -- modes of torch ------------------------------------------------------------------------------


@contextmanager
def as_defined(autocast: bool = False) -> Iterator[None]:
    """Inside, gradients are on, inference mode is off, and so is autocast of all devices.

    Casts would become part of a graph, and no sum of it be one of a shortcut and a branch. Graphs
    run under autocast as the model itself does. With `autocast`, the caller's stays on.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for device in () if autocast else filter(torch.is_autocast_enabled, WITH_AUTOCAST):
            stack.callback(torch.set_autocast_enabled, device, True)
            torch.set_autocast_enabled(device, False)
        yield


# -- random generators ----------------------------------------------------------------------------


def foreign_rng_state() -> tuple[Any, ...]:
    """The state of Python's and NumPy's generators; it changes when numbers are drawn from them."""
    numpy = sys.modules.get("numpy")
    kind, keys, *rest = numpy.random.get_state() if numpy else (None, b"")
    return random.getstate(), kind, bytes(keys), *rest


def rng_state() -> tuple[Any, ...]:
    """The state of all generators that `seed_all` seeds."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return tuple(bytes(s.numpy()) for s in (torch.get_rng_state(), *cuda)) + foreign_rng_state()


def seed_all(seed: int) -> None:
    seed_torch(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


@contextmanager
def preserve_rng() -> Iterator[None]:
    """Restore the generators of torch, Python and NumPy at the end."""
    state = foreign_rng_state()
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        restore_foreign_rng(state)


def restore_foreign_rng(state: tuple[Any, ...]) -> None:
    """Give the generators of Python and NumPy a state that they had (`foreign_rng_state`)."""
    of_python, kind, keys, *rest = state
    random.setstate(of_python)
    if kind is not None:
        numpy = sys.modules["numpy"]
        numpy.random.set_state((kind, numpy.frombuffer(keys, numpy.uint32), *rest))


# -- attributes and buffers -----------------------------------------------------------------------


@contextmanager
def preserve_attributes(model: nn.Module) -> Iterator[Callable[[nn.Module], None]]:
    """Undo what forward passes do to the modules' attributes (caches, counters, buffers).

    Yields a function that undoes them earlier, for one module and those inside it.
    """
    contents = Contents(model)
    try:
        yield contents.restore
    finally:
        contents.restore(model)


@contextmanager
def preserve_model(model: nn.Module) -> Iterator[None]:
    """Restore random generators, and the model's buffers, mode and attributes, at the end.

    Attributes of the root module are not restored: in a reversible module they are our own.
    """
    parts = [(part, Contents(part)) for part in model.children()]
    held, training = dict(model._buffers), model.training
    # The alias holds the memory, which `buffer.data = ...` would take away from the buffer.
    contents = [(b, b.detach(), b.detach().clone()) for b in model.buffers() if not b.is_meta]
    with preserve_rng():
        try:
            yield
        finally:
            for part, before in parts:
                before.restore(part)
            model.training = training
            model._buffers.clear()
            model._buffers.update(held)
            with torch.no_grad():
                for buffer, alias, numbers in contents:
                    if storage_of(buffer) != storage_of(alias) or buffer.shape != alias.shape:
                        buffer.data = alias
                    buffer.copy_(numbers)
