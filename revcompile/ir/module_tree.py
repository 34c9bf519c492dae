"""What graphs read from the module tree they run on.

A `torch.fx` graph reaches into its root module by two kinds of nodes: `call_module` runs a layer,
`get_attr` reads a parameter, a buffer, a flag or (in stage programs) a layer to be called later.

    TreeReads(graphs, root)   all of it: modules called, tensors read, the modules that own them
    called_module(node, root), parameters_of(node, root)   the same for a single node
"""

from __future__ import annotations

import copy
import operator
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.conv import _ConvNd

from revcompile.ir.ops import attribute, op_name
from revcompile.ir.reached import reached
from revcompile.kernels.repeatable import Repeated

NORMS: Final = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
"""torch's normalization layers; `_NormBase` is the base of batch and instance norms."""

_CASTING: Final = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Layers whose input, weight and bias autocast casts to low precision."""
_CASTING_FUNCTIONS: Final[frozenset[Any]] = frozenset(
    (
        *(F.linear, F.conv1d, F.conv2d, F.conv3d, F.scaled_dot_product_attention),
        *(torch.addmm, torch.baddbmm, torch.bmm, torch.matmul, torch.mm, operator.matmul),
    )
)
"""Functions whose tensor arguments autocast casts to low precision, all of them."""
_CASTING_METHODS: Final = frozenset(("addmm", "baddbmm", "bmm", "matmul", "mm"))
_CONVOLUTIONS: Final = frozenset(
    (
        *("conv1d", "conv2d", "conv3d", "convolution", "conv_tbc"),
        *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    )
)


def child_path(path: str, name: str) -> str:
    """The dotted path of a member of the module at `path`.

    >>> child_path("", "fc"), child_path("head", "fc")
    ('fc', 'head.fc')
    """
    return f"{path}.{name}" if path else name


def called_module(node: fx.Node, root: nn.Module) -> nn.Module | None:
    """The module that a `call_module` node calls; None for any other node."""
    return root.get_submodule(str(node.target)) if node.op == "call_module" else None


def parameters_of(node: fx.Node, root: nn.Module) -> list[nn.Parameter]:
    """The parameters of the module that a node calls, or the parameter that it reads."""
    module = called_module(node, root)
    if module is not None:
        return list(module.parameters())
    value = attribute(root, str(node.target)) if node.op == "get_attr" else None
    return [value] if isinstance(value, nn.Parameter) else []


class TreeReads:
    """What graphs read from their root, by path and in the order in which they read it."""

    def __init__(self, graphs: fx.Graph | Iterable[fx.Graph], root: nn.Module) -> None:
        self._root = root
        self.targets: dict[str, Any] = {}
        """Every path that a node names, and the module, tensor or plain value at it."""
        for graph in (graphs,) if isinstance(graphs, fx.Graph) else graphs:
            for node in graph.nodes:
                if node.op in ("call_module", "get_attr"):
                    self.targets[str(node.target)] = attribute(root, str(node.target))

    @property
    def called(self) -> dict[str, nn.Module]:
        return {path: m for path, m in self.targets.items() if isinstance(m, nn.Module)}

    @property
    def modules(self) -> list[nn.Module]:
        """Modules that the graphs call, and all modules inside them, each once."""
        called = self.called.values()
        return list(dict.fromkeys(inner for module in called for inner in module.modules()))

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and values of the parameters and buffers that the graphs compute with."""
        for path, value in self.targets.items():
            if isinstance(value, nn.Module):
                for name, tensor in (*value.named_parameters(), *value.named_buffers()):
                    yield child_path(path, name), tensor
            elif isinstance(value, torch.Tensor):
                yield path, value

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """The parameters that the graphs compute with, each once."""
        tensors = (tensor for _, tensor in self.tensors())
        return tuple(dict.fromkeys(t for t in tensors if isinstance(t, nn.Parameter)))

    @property
    def owners(self) -> list[nn.Module]:
        """All `modules`, and the modules whose attributes are read, each once."""
        found: dict[nn.Module, None] = {}
        for path, value in self.targets.items():
            owner = [self._root.get_submodule(path.rpartition(".")[0])]
            found |= dict.fromkeys(value.modules() if isinstance(value, nn.Module) else owner)
        return list(found)

    @property
    def buffers(self) -> list[tuple[nn.Module, str]]:
        """The buffers that the graphs compute with, each as a module and a name in it."""
        found: dict[tuple[nn.Module, str], None] = {}
        for path, value in self.targets.items():
            outer, _, name = path.rpartition(".")
            if isinstance(value, nn.Module):
                members = ((m, n) for m in value.modules() for n in m._buffers)
                found |= dict.fromkeys((m, n) for m, n in members if m._buffers[n] is not None)
            elif name in (owner := self._root.get_submodule(outer))._buffers:
                found[owner, name] = None
        return list(found)

    @property
    def constants(self) -> list[tuple[nn.Module, str]]:
        """Tensors among the attributes that the graphs read, each as a module and a name in it."""
        paths = [path.rpartition(".") for path, t in self.targets.items() if torch.is_tensor(t)]
        places = ((self._root.get_submodule(owner), name) for owner, _, name in paths)
        return [(owner, name) for owner, name in places if name in vars(owner)]


def parameters_read(graph: fx.Graph, root: nn.Module) -> tuple[nn.Parameter, ...]:
    """The parameters that a graph computes with, each once."""
    return TreeReads(graph, root).parameters


def parameter_names(graph: fx.Graph, root: nn.Module) -> tuple[str, ...]:
    """Names of the parameters that a graph computes with; a shared one has its first name."""
    names = {id(parameter): name for name, parameter in root.named_parameters()}
    return tuple(names[id(parameter)] for parameter in parameters_read(graph, root))


def convolves(graph: fx.Graph, root: nn.Module) -> bool:
    """Whether a graph contains convolutions (which may run in TF32)."""
    by_module = any(isinstance(module, _ConvNd) for module in TreeReads(graph, root).modules)
    return by_module or any(op_name(node) in _CONVOLUTIONS for node in graph.nodes)


def repeated_layers(graph: fx.Graph, root: nn.Module) -> Repeated:
    """Which kinds of layers of a branch may choose another kernel when they run again."""
    calls = graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention)
    masks = [node.kwargs.get("attn_mask", (*node.args, *[None] * 4)[3]) for node in calls]
    masks = [mask for mask in masks if isinstance(mask, fx.Node)]
    sources = reached(masks, lambda node: node.all_input_nodes)
    return Repeated(convolves(graph, root), any(parameters_of(node, root) for node in sources))


def has_batch_norm(module: nn.Module) -> bool:
    """Whether a module is or contains a batch norm."""
    return any(isinstance(inner, _BatchNorm) for inner in module.modules())


def casts_input(user: fx.Node, value: fx.Node, root: nn.Module) -> bool:
    """Whether `user`, which reads `value`, is a layer or product for which autocast casts it."""
    layer = called_module(user, root)
    if layer is not None:
        is_only_argument = user.args == (value,) and not user.kwargs
        return is_only_argument and is_cast(layer)
    calls = {"call_function": _CASTING_FUNCTIONS, "call_method": _CASTING_METHODS}
    is_read_once = [*user.args, *user.kwargs.values()].count(value) == 1
    return is_read_once and user.target in calls.get(user.op, ())


def is_cast(layer: nn.Module) -> bool:
    """Whether autocast casts a layer's input and weights, and no hook sees them before that."""
    return type(layer) in _CASTING and not (layer._forward_pre_hooks or layer._forward_hooks)


def copy_module(model: nn.Module, memo: dict[int, Any] | None = None) -> Any:
    """A deep copy. `memo` maps ids of tensors to the tensors that replace them in the copy.

    `torch.nn.utils.weight_norm` leaves a computed weight in the module, which deepcopy refuses.
    """
    memo = {} if memo is None else memo
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, torch.Tensor) and not value.is_leaf:
                memo.setdefault(id(value), value.detach().clone())
    return copy.deepcopy(model, memo)


_CONTAINERS: Final = (OrderedDict, dict, list, set, deque)


class Contents:
    """A shallow copy of all attributes of all modules of a model.

    Containers among the attributes are copied, too, and the fields of plain objects (a config).
    """

    def __init__(self, model: nn.Module) -> None:
        self._held = {module: list(_tables(module)) for module in model.modules()}

    def restore(self, part: nn.Module) -> None:
        """Undo all changes in a module and in the modules inside it."""
        for table, held in self._held[part]:
            table.clear()
            table.extend(held) if isinstance(table, (list, deque)) else table.update(held)
        for child in part.children():  # the restored children
            self.restore(child)


def _tables(module: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Each dict, list or set that `restore` clears and fills again, with its current contents."""
    yield vars(module), dict(vars(module))
    for value in vars(module).values():
        if isinstance(value, (dict, list, set, deque)):
            yield value, value.copy() if type(value) in _CONTAINERS else copy.copy(value)
        elif not isinstance(value, (nn.Module, torch.Tensor, type)):
            own = None if callable(value) else getattr(value, "__dict__", None)
            if isinstance(own, dict):
                yield own, dict(own)


def device_of_model(root: nn.Module) -> torch.device:
    """The device of a model's tensors; the CPU for a model without any.

    On several ranks, the tensors of other ranks are on the meta device and do not count.
    """
    devices = {tensor.device: None for tensor in (*root.parameters(), *root.buffers())}
    found = [device for device in devices if device.type != "meta"] or [*devices]
    return found[0] if found else torch.device("cpu")


def looks_trained(model: nn.Module) -> bool:
    """Whether the elements of a norm's weight differ.

    New models have norms with equal elements: ones, zeros or another constant.

    >>> looks_trained(nn.LayerNorm(3))
    False
    """
    for module in model.modules():
        if "Norm" not in type(module).__name__:
            continue
        weight = getattr(module, "weight", None)
        if not isinstance(weight, torch.Tensor) or weight.dim() != 1 or weight.is_meta:
            continue
        if bool((weight != weight[:1]).any()):
            return True
    return False
