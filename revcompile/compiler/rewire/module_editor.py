"""Replaces layers of the private root by wider ones, or copies them; new weights start from old.

Every change is noted as a `WeightExpansion`, so that a state dict of the original still loads.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from revcompile.ir.module_tree import child_path, copy_module
from revcompile.ir.weight_expansion import WeightExpansion, grow


def own_copy(root: nn.Module) -> nn.Module:
    """A copy of the module tree that shares its tensors with the original."""
    shared = {id(t): t for t in (*root.parameters(), *root.buffers())}
    twin: nn.Module = copy_module(root, dict[int, Any](shared))
    return twin


class ModuleEditor:
    """Replaces layers of one root, and keeps a list of the changes."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.weight_expansions: dict[str, tuple[str, WeightExpansion]] = {}
        self.requested: set[tuple[str, str]] = set()
        """Changes requested since this was last cleared: layer and kind."""
        self._done: set[tuple[str, str]] = set()

    def can_widen(self, path: str) -> bool:
        """Is the layer a dense convolution or linear layer of known parameters?"""
        module = self.root.get_submodule(path)
        names = {name for name, _ in module.named_parameters()}
        if isinstance(module, _ConvNd):
            return names <= {"weight", "bias"} and module.groups == 1 and not module.transposed
        return type(module) is nn.Linear

    def widen(self, path: str) -> None:
        """Twice the outputs: `[W, W]`."""
        if not self._first(path, "widen"):
            return
        module = self._replace(path)
        if isinstance(module, nn.Linear):
            module.out_features *= 2
        elif isinstance(module, _ConvNd):
            module.out_channels *= 2
        for name in ("weight", "bias"):
            self._grow(path, module, name, WeightExpansion.TILE)

    def can_widen_norm(self, path: str) -> bool:
        """Is the layer a batch norm, which treats every channel alone?"""
        return isinstance(self.root.get_submodule(path), _BatchNorm)

    def widen_norm(self, path: str) -> None:
        """Statistics and affine parameters for twice the channels."""
        if not self._first(path, "norm"):
            return
        module = self._replace(path)
        assert isinstance(module, _BatchNorm)
        module.num_features *= 2
        for name in ("weight", "bias", "running_mean", "running_var"):
            self._grow(path, module, name, WeightExpansion.TILE)

    def double_inputs(self, path: str) -> None:
        """Twice the inputs: `[W/2, W/2]`, the same result for two equal streams."""
        if not self._first(path, "inputs"):
            return
        module = self._replace(path)
        if isinstance(module, nn.Linear):
            module.in_features *= 2
        elif isinstance(module, _ConvNd):
            module.in_channels *= 2
        self._grow(path, module, "weight", WeightExpansion.HALVE)

    def revive_zero_init(self, path: str) -> None:
        """A norm that was 0 throughout, weight and bias, starts with weight 1."""
        module = self.root.get_submodule(path)
        affine = [getattr(module, name, None) for name in ("weight", "bias")]
        tensors = [tensor for tensor in affine if tensor is not None]
        if affine[0] is None or any(t.is_meta or bool(t.any()) for t in tensors):
            return
        if self._first(path, "revive_zero_init"):
            self._grow(path, self._replace(path), "weight", WeightExpansion.REVIVE_ZERO_INIT)

    def duplicate(self, path: str) -> str:
        """A second, equal module beside the first; returns its path."""
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
        """False if this very change was made before (train and eval graphs share the root)."""
        fresh = (path, what) not in self._done
        self.requested.add((path, what))
        self._done.add((path, what))
        return fresh

    def _replace(self, path: str) -> nn.Module:
        """Put a shallow copy of a layer into the tree, so that the original layer stays."""
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
