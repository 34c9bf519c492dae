"""Widens or copies layers of the private root; new weights are made from the old ones.

Every change is recorded as a `WeightExpansion`: a state dict of the original still loads.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from revcompile.ir.module_tree import child_path, copy_module
from revcompile.ir.weight_expansion import WeightExpansion, grow

Change = Literal["widen", "widen_norm", "double_inputs"]
"""How a layer is widened: twice the outputs; statistics and affine parameters for twice the
channels; or twice the inputs."""
_CHANGES: Final[Mapping[Change, tuple[tuple[str, ...], tuple[str, ...], WeightExpansion]]] = {
    "widen": (("out_features", "out_channels"), ("weight", "bias"), WeightExpansion.TILE),
    "widen_norm": (
        ("num_features",),
        ("weight", "bias", "running_mean", "running_var"),
        WeightExpansion.TILE,
    ),
    "double_inputs": (("in_features", "in_channels"), ("weight",), WeightExpansion.HALVE),
}
"""The settings that become twice as large, the tensors that grow, and how."""
_TENSORS: Final = frozenset(
    ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
)
"""Tensors of layers that can be made wider."""


def own_copy(root: nn.Module) -> nn.Module:
    """A copy of the module tree that shares its tensors with the original."""
    plain = (v for m in root.modules() for v in vars(m).values() if isinstance(v, torch.Tensor))
    shared = {id(t): t for t in (*root.parameters(), *root.buffers(), *plain)}
    twin: nn.Module = copy_module(root, dict[int, Any](shared))
    return twin


def _computes_the_same(module: nn.Module, change: Change, shape: Sequence[int]) -> bool:
    """Whether the widened layer computes for two streams what the layer computes for one.

    A subclass may have other tensors or another forward than torch's layer, so a copy is run. It
    has random weights: the answer is then the same for a model on the meta device.
    """
    tensors = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    if type(module).__module__.startswith("torch.nn.modules.") and tensors <= _TENSORS:
        return True
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=()), torch.no_grad(), suppress(Exception):
        twin = copy_module(module).to_empty(device="cpu").double().train()
        for tensor in (*twin.parameters(), *twin.buffers()):
            tensor.copy_(torch.rand(tensor.shape, generator=generator, device="cpu"))
        a, b = torch.randn((2, *shape), generator=generator, dtype=torch.float64, device="cpu")
        trial = ModuleEditor(nn.Sequential(twin))
        trial.change("0", change)
        b = b if change == "widen_norm" else a
        wide = a if change == "widen" else torch.cat([a, b], 1)
        expected = twin(a) if change == "double_inputs" else torch.cat([twin(a), twin(b)], 1)
        return torch.allclose(trial.root(wide), expected, rtol=1e-4, atol=1e-5)
    return False


class ModuleEditor:
    """Replaces layers of one root, and keeps a list of the changes."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.weight_expansions: dict[str, tuple[str, WeightExpansion]] = {}
        self._done: set[tuple[str, str]] = set()

    def allows(self, path: str, change: Change, shape: Sequence[int]) -> bool:
        """Whether the change can be made to this layer, called on an input of this shape."""
        if (path, change) in self._done:
            return True
        module = self.root.get_submodule(path)
        if change == "widen_norm":
            fits = isinstance(module, _BatchNorm)
        elif isinstance(module, _ConvNd):
            is_batch = len(shape) == len(module.kernel_size) + 2
            fits = is_batch and module.groups == 1 and not module.transposed
        else:
            fits = type(module) is nn.Linear
        return fits and _computes_the_same(module, change, shape)

    def change(self, path: str, change: Change) -> None:
        """Make a layer wider."""
        if not self._first(path, change):
            return
        module: Any = self._replace(path)
        settings, tensors, how = _CHANGES[change]
        for name in settings:
            if hasattr(module, name):
                setattr(module, name, 2 * getattr(module, name))
        for name in tensors:
            self._grow(path, module, name, how)

    def revive_zero_init(self, path: str) -> None:
        """Let a norm whose weight and bias are all 0 start with weight 1."""
        module = self.root.get_submodule(path)
        affine = [getattr(module, name, None) for name in ("weight", "bias")]
        tensors = [tensor for tensor in affine if tensor is not None]
        if affine[0] is None or any(t.is_meta or bool(t.any()) for t in tensors):
            return
        if self._first(path, "revive_zero_init"):
            self._grow(path, self._replace(path), "weight", WeightExpansion.REVIVE_ZERO_INIT)

    def duplicate(self, path: str) -> str:
        """Add a copy of a module beside it; returns the path of the copy."""
        parent_path, _, name = path.rpartition(".")
        twin = child_path(parent_path, f"{name}_copy")
        if not self._first(path, "copy"):
            return twin
        module = copy.deepcopy(self.root.get_submodule(path))
        self.root.get_submodule(parent_path).add_module(f"{name}_copy", module)
        for inner, _ in (*module.named_parameters(), *module.named_buffers()):
            self.weight_expansions[f"{twin}.{inner}"] = (f"{path}.{inner}", WeightExpansion.COPY)
        return twin

    def _first(self, path: str, what: str) -> bool:
        """Whether the change is made for the first time (train and eval graphs share the root)."""
        fresh = (path, what) not in self._done
        self._done.add((path, what))
        return fresh

    def _replace(self, path: str) -> nn.Module:
        """Replace a layer in the tree by a shallow copy; the original layer stays unchanged."""
        parent_path, _, name = path.rpartition(".")
        old = self.root.get_submodule(path)
        new = copy.copy(old)
        new._parameters = dict(old._parameters)
        new._buffers = dict(old._buffers)
        setattr(self.root.get_submodule(parent_path), name, new)
        return new

    def _grow(self, path: str, module: nn.Module, name: str, how: WeightExpansion) -> None:
        old = getattr(module, name, None)
        if old is None:
            return
        with torch.no_grad():
            value = grow(old.detach(), how)
        if isinstance(old, nn.Parameter):
            value = nn.Parameter(value, requires_grad=old.requires_grad)
        setattr(module, name, value)
        self.weight_expansions[f"{path}.{name}"] = (f"{path}.{name}", how)
