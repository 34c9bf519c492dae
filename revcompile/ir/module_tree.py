"""What a graph reads of the module tree it runs on."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from revcompile.ir.ops import attribute

__all__ = [
    "casts_input",
    "casts_on_read",
    "convolves",
    "copied",
    "device_of_model",
    "has_batch_norm",
    "is_cast",
    "modules_called",
    "parameters_read",
    "tensors_read",
]

_CASTING: Final = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Layers whose input, weight and bias autocast turns to low precision before it uses them."""
_CASTING_FUNCTIONS: Final[frozenset[Any]] = frozenset(
    (
        *(F.linear, F.conv1d, F.conv2d, F.conv3d, F.scaled_dot_product_attention),
        *(torch.addmm, torch.baddbmm, torch.bmm, torch.matmul, torch.mm, operator.matmul),
    )
)
"""Functions that autocast turns all tensors to low precision for."""
_CASTING_METHODS: Final = frozenset(("addmm", "baddbmm", "bmm", "matmul", "mm"))


def modules_called(graph: fx.Graph, root: nn.Module) -> list[nn.Module]:
    """Every module that runs, those inside others included."""
    called = [root.get_submodule(str(n.target)) for n in graph.find_nodes(op="call_module")]
    return list(dict.fromkeys(inner for module in called for inner in module.modules()))


def parameters_read(graph: fx.Graph, root: nn.Module) -> tuple[nn.Parameter, ...]:
    """Parameters of the layers a graph calls and those it reads itself, each once."""
    found: dict[nn.Parameter, None] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            found |= dict.fromkeys(root.get_submodule(str(node.target)).parameters())
        elif node.op == "get_attr":
            value = attribute(root, str(node.target))
            if isinstance(value, nn.Parameter):
                found[value] = None
    return tuple(found)


def tensors_read(graph: fx.Graph, root: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and values of the parameters and buffers a graph computes with."""
    for node in graph.nodes:
        path = str(node.target)
        if node.op == "call_module":
            module = root.get_submodule(path)
            for name, value in (*module.named_parameters(), *module.named_buffers()):
                yield f"{path}.{name}", value
        elif node.op == "get_attr":
            value = attribute(root, path)
            if isinstance(value, torch.Tensor):
                yield path, value


def convolves(graph: fx.Graph, root: nn.Module) -> bool:
    """Does a graph hold convolutions (which may run in TF32)?"""
    functions = (str(getattr(n.target, "__name__", "")) for n in graph.nodes)
    by_module = any(isinstance(module, _ConvNd) for module in modules_called(graph, root))
    return by_module or any(name.startswith("conv") for name in functions)


def has_batch_norm(module: nn.Module) -> bool:
    """Is a module a batch norm, or does it hold one?"""
    return any(isinstance(inner, _BatchNorm) for inner in module.modules())


def casts_on_read(graph: fx.Graph, root: nn.Module) -> bool:
    """Is a graph's first input read once, by a layer that autocast casts it for?"""
    first = next(iter(graph.nodes))
    users = list(first.users)
    return len(users) == 1 and casts_input(users[0], first, root)


def casts_input(user: fx.Node, value: fx.Node, root: nn.Module) -> bool:
    """Is a reader of a value a layer, or a product, that autocast casts it for?"""
    if user.op == "call_module":
        is_given_alone = user.args == (value,) and not user.kwargs
        return is_given_alone and is_cast(root.get_submodule(str(user.target)))
    calls = {"call_function": _CASTING_FUNCTIONS, "call_method": _CASTING_METHODS}
    is_read_once = [*user.args, *user.kwargs.values()].count(value) == 1
    return is_read_once and user.target in calls.get(user.op, ())


def is_cast(layer: nn.Module) -> bool:
    """Does autocast cast what a layer reads, and does nobody look on, or make its weight?"""
    return type(layer) in _CASTING and not (layer._forward_pre_hooks or layer._forward_hooks)


def copied(model: nn.Module, memo: dict[int, Any] | None = None) -> Any:
    """A deep copy. `memo` maps ids of tensors to what stands for them in the copy.

    Old weight norms leave a computed weight behind, which deepcopy alone would refuse.
    """
    memo = {} if memo is None else memo
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, torch.Tensor) and not value.is_leaf:
                memo.setdefault(id(value), value.detach().clone())
    return copy.deepcopy(model, memo)


def device_of_model(root: nn.Module) -> torch.device:
    """Where a model's tensors are; one without any is on the CPU.

    Of a model on several ranks only this one's share is anywhere; the rest is on the meta device.
    """
    devices = {tensor.device: None for tensor in (*root.parameters(), *root.buffers())}
    found = [device for device in devices if device.type != "meta"] or [*devices]
    return found[0] if found else torch.device("cpu")
