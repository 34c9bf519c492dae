"""Guards: conditions under which a captured graph equals the model, checked at every call.

While a model is traced, sizes, attributes and flags decide its Python control flow. Each such value
becomes a guard: the graph is valid only while the value is the same.

    x.shape[1] > 8         a size: computed again from the inputs of the call
    blocks.0.alpha         a plain attribute of a module, see `plain_attributes.py`
    block.training         the mode of a module, where the graph does not read it
    is_grad_enabled()      a flag of torch: compared with its value at capture
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor, fx, nn

from revcompile.ir.plain_attributes import Names
from revcompile.ir.stored_graphs import StoresGraphs
from revcompile.kernels.autocast import is_autocasting


def input_types(tensors: Iterable[Tensor]) -> tuple[Any, ...]:
    """The properties of inputs on which shapes and types inside the network depend.

    The last one is the type that autocast computes in, or None.
    """
    types, device = [], None
    for t in tensors:
        types.append((t.shape, t.stride(), t.dtype, t.requires_grad))
        device = device or t.device
    is_cast = device is not None and is_autocasting(device)
    return *types, torch.get_autocast_dtype(device.type) if device and is_cast else None


DEVICE_ATTRIBUTES: Final = frozenset(
    ("device", "get_device", "is_cuda", "is_cpu", "is_mps", "is_xpu", "is_meta")
)
"""Attributes that depend on a tensor's device alone; guards read them from the first input."""


@dataclass(frozen=True)
class SizeGuard:
    """A value computed from the shapes, types and device of inputs, and the types of parameters."""

    expression: str
    value: Any
    source: str
    grown: Any = None
    """For a size that is computed from the batch size: its value for one more sample."""


@dataclass(frozen=True)
class SizeGuards(StoresGraphs):
    """Guards, and a graph that computes their values, in this order, from the model's inputs.

    `contents` are the positions of tensors computed from sizes: their elements are compared.
    """

    guards: tuple[SizeGuard, ...] = ()
    graph: fx.Graph | None = None
    contents: frozenset[int] = frozenset()


FLAGS: Final = frozenset(
    (
        *("is_grad_enabled", "is_inference_mode_enabled", "get_default_dtype"),
        *("is_autocast_enabled", "is_autocast_cpu_enabled", "get_autocast_dtype"),
        *("get_autocast_cpu_dtype", "get_autocast_gpu_dtype"),
    )
)
"""Functions of torch that return flags."""


def autocast_state() -> tuple[Any, ...]:
    """For the CPU and for CUDA: whether autocast is on, and its dtype."""
    devices = ("cpu", "cuda")
    return tuple((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices)


def flag(name: str) -> Any:
    """The current value of a flag; for any flag of autocast, the whole `autocast_state`."""
    return autocast_state() if "autocast" in name else getattr(torch, name)()


@dataclass(frozen=True)
class ModeGuards:
    """Guards of one mode, training or evaluation.

    `sizes` has the guards from capture, and guards for sizes that rewiring has replaced by
    functions of the batch size. They are computed without data, once per combination of input
    shapes and types.
    """

    sizes: tuple[SizeGuards, ...] = ()
    modes: Mapping[str, bool] = field(default_factory=dict)
    """`training` of each module whose mode Python has read but the graph does not, by path."""


@dataclass(frozen=True)
class Guards:
    """What a captured graph depends on besides the elements of its inputs.

    `skeleton` is the captured model on the meta device, to compute sizes on. `seen` are
    combinations of input shapes and types for which the guards of sizes are known to hold.
    """

    train: ModeGuards = ModeGuards()
    evaluation: ModeGuards = ModeGuards()
    skeleton: nn.Module | None = None
    seen: frozenset[Any] = frozenset()
    flags: Mapping[str, Any] = field(default_factory=dict)
    """Flags of torch that the forward pass reads, by name."""
    plain: Names = field(default_factory=dict)
    """Plain attributes that traced forwards may read; attributes that they set are left out."""
    asked: Names = field(default_factory=dict)
    """Names whose presence alone is compared: members, and attributes absent at capture."""
    fields: Names = field(default_factory=dict)
    """Names that forwards have read, by the label of a module, or of an object that an attribute
    holds (`blocks.0.config`). What has no label here may be read in ways that were not seen."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Guards:
        return self  # immutable, and graphs know parameters by their names

    def without_inputs(self) -> Guards:
        """Only the guards that do not depend on a call's inputs."""
        return replace(self, train=ModeGuards(), evaluation=ModeGuards())

    def of(self, training: bool) -> ModeGuards:
        return self.train if training else self.evaluation


NO_GUARDS: Final = Guards()
"""The guards of a graph that depends on its inputs alone."""


@contextmanager
def attempts_unlogged() -> Iterator[None]:
    """Suppress torch's log of errors in this thread: attempts to evaluate an operation may fail."""
    logger, thread = logging.getLogger("torch._subclasses.fake_tensor"), threading.get_ident()

    def is_of_others(record: logging.LogRecord) -> bool:
        return record.thread != thread

    logger.addFilter(is_of_others)
    try:
        yield
    finally:
        logger.removeFilter(is_of_others)
