"""Capturing a model once more, for a call its first capture does not cover."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from revcompile.compiler.capture.copies import copy_model, empty_like_on
from revcompile.compiler.capture.from_meta import capture_again
from revcompile.compiler.capture.guards import meta_copy
from revcompile.compiler.find import find
from revcompile.compiler.rewire import rewire
from revcompile.compiler.verify import verify_rewired
from revcompile.errors import InputError
from revcompile.ir.guards import Guards
from revcompile.ir.module_tree import device_of_model
from revcompile.ir.types import Captured, Policy, Rewired

__all__ = ["Recompiler"]


class Recompiler:
    """Makes the rewired model of a new case, with the parameters of the first.

    Keeps the original model without memory: its structure on the meta device.
    """

    def __init__(self, model: nn.Module, captured: Captured, policy: Policy) -> None:
        self._skeleton = meta_copy(model)
        self._frontend, self._leaves, self._policy = captured.frontend, captured.leaves, policy

    def __deepcopy__(self, memo: dict[int, Any]) -> Recompiler:
        return self  # never changed

    def __call__(
        self,
        net: nn.Module,
        guards: tuple[Guards, ...],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Rewired:
        """Capture and rewire the model with the attributes and modes `net` has now."""
        model = self._as_now(net, guards)
        device = device_of_model(net)
        captured = capture_again(
            model, args, kwargs, self._frontend, self._leaves, device, _constants(net)
        )
        rewired = rewire(captured, find(captured), self._policy)
        verify_rewired(captured, rewired)
        _adopt_constants(net, rewired.root, device)
        _refuse_other_parameters(net, rewired.root)
        return rewired

    def _as_now(self, net: nn.Module, guards: Iterable[Guards]) -> nn.Module:
        """The original with the types, modes and attributes that its parts have in `net`."""
        state = {**dict(net.named_parameters()), **dict(net.named_buffers())}
        memo: dict[int, Any] = {}
        for name, tensor in (*self._skeleton.named_parameters(), *self._skeleton.named_buffers()):
            now = state.get(name, tensor)
            twin = empty_like_on(tensor, now.dtype, "meta")
            memo[id(tensor)] = twin.requires_grad_(now.requires_grad)
        model = copy_model(self._skeleton, memo)
        modules = dict(net.named_modules(remove_duplicate=False))
        for path, module in model.named_modules():
            module.training = modules[path].training if path in modules else net.training
        for guard in (
            g for one in guards for m in (one.train, one.evaluation) for g in m.attributes
        ):
            own = vars(modules[guard.path]) if guard.path in modules else {}
            if guard.name in own and guard.name != "training":
                vars(model.get_submodule(guard.path))[guard.name] = copy.deepcopy(own[guard.name])
        return model


def _constants(net: nn.Module) -> dict[str, torch.Tensor]:
    """Tensors that earlier captures found, by name."""
    return {
        name: buffer.detach().cpu()
        for name, buffer in net.named_buffers()
        if name.startswith("revcompile_constant_")
    }


def _adopt_constants(net: nn.Module, root: nn.Module, device: torch.device) -> None:
    own = {name for name, _ in net.named_buffers()}
    for name, tensor in root.named_buffers():
        if name not in own and not tensor.is_meta:
            path, _, leaf = name.rpartition(".")
            net.get_submodule(path).register_buffer(leaf, tensor.to(device), persistent=False)


def _refuse_other_parameters(net: nn.Module, root: nn.Module) -> None:
    def shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
        return {name: tuple(p.shape) for name, p in module.named_parameters()}

    have, need = shapes(net), shapes(root)
    for name in (*need, *have):
        if have.get(name) != need.get(name):
            raise InputError(
                f"rewired for this case, {name} has the shape {need.get(name)}, and had "
                f"{have.get(name)}; policy='pretrained' adds and widens no parameters"
            )
