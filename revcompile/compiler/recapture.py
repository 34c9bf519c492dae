"""Capturing a model again, for a call whose sizes or attributes its guards do not allow.

The original model is kept on the meta device, without memory. It is traced there as if it were on
the device of the call, with the attributes and modes that its modules have now.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from revcompile.compiler.capture.capture import capture_once
from revcompile.compiler.capture.example import make_example
from revcompile.compiler.capture.fake_values import empty_like_on, meta_copy
from revcompile.compiler.capture.isolation import (
    as_defined,
    copy_model,
    register_constant,
)
from revcompile.compiler.capture.leaf_modules import is_leaf
from revcompile.compiler.find import find
from revcompile.compiler.rewire import rewire
from revcompile.compiler.verify import verify_rewired
from revcompile.errors import InputError
from revcompile.ir.guards import flag
from revcompile.ir.module_tree import child_path, device_of_model
from revcompile.ir.plain_attributes import CONSTANT_PREFIX, PLAIN, attributes_of
from revcompile.ir.policy import Policy
from revcompile.ir.types import Captured, Rewired


class Recompiler:
    """Captures and rewires a model again for a new call, with the parameters it already has."""

    def __init__(self, model: nn.Module, captured: Captured, policy: Policy) -> None:
        self._skeleton = meta_copy(model)
        self._policy = policy
        self._leaves = frozenset(captured.leaf_modules)
        self._flags = tuple(captured.guards.flags)
        nodes = captured.graph.find_nodes(op="call_module")
        self._called = {str(node.target) for node in nodes}
        self._guarded = captured.guards.plain
        self._computed: dict[str, set[str]] = {}
        for path, name in captured.computed:
            self._computed.setdefault(path, set()).add(name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Recompiler:
        return self  # immutable

    def __call__(
        self,
        net: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        fixed_batch: bool = False,
        autocast: bool = False,
    ) -> Rewired:
        """The rewired model for a call.

        Args:
            net: the running model; its attributes, modes, types and device count.
            args: positional arguments of the call.
            kwargs: keyword arguments of the call.
            fixed_batch: capture for the batch size of this call alone. Otherwise a batch of one is
                captured as a batch of two, but Python may compare it with a size that is always 1.
            autocast: capture under the caller's autocast, if that is on.

        Raises:
            InputError: rewired for these arguments, the model has parameters of other shapes.
        """
        device, model = device_of_model(net), self._with_state_of(net)
        with as_defined(autocast):
            example = make_example(model, args, kwargs, fixed_batch)
            captured, _ = capture_once(model, example, self._leaves, device)
            guards = replace(captured.guards, flags={name: flag(name) for name in self._flags})
        captured = replace(captured, guards=guards)
        rewired = rewire(captured, find(captured), self._policy)
        verify_rewired(captured, rewired)
        _adopt_constants(net, rewired.root, device)
        _refuse_other_parameters(net, rewired.root, self._policy)
        return rewired

    def original(self, net: nn.Module) -> nn.Module:
        """The original architecture with copies of a running model's parameters and buffers.

        Raises:
            InputError: the running model has other parameters.
        """
        state, own = _tensors(net), _named_parameters(self._skeleton)
        for name in (*own, *_named_parameters(net)):
            if name not in own or name not in state or state[name].shape != own[name].shape:
                raise InputError(
                    f"original: {name} is not the same parameter as in the original model; take "
                    "adapters (LoRA) and parametrizations back first, by merging them"
                )

        def copied(own: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
            twin = now.detach().clone()
            is_parameter = isinstance(own, nn.Parameter)
            return nn.Parameter(twin, now.requires_grad) if is_parameter else twin

        model, _ = self._twin(net, copied)
        for path, module in model.named_modules():
            for name, value in vars(module).items():
                held = state.get(child_path(path, name))
                if isinstance(value, torch.Tensor) and held is not None:
                    vars(module)[name] = held.detach().clone()
        return model

    def _twin(
        self, net: nn.Module, make: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> tuple[nn.Module, dict[str, nn.Module]]:
        """A copy of the original model in the modes of `net`, and the modules of `net` by path.

        `make` computes each tensor of the copy from the skeleton's tensor and that of `net`.
        """
        state, memo = _tensors(net), dict[int, Any]()
        for name, tensor in _tensors(self._skeleton).items():
            if id(tensor) not in memo:
                memo[id(tensor)] = make(tensor, state.get(name, tensor))
        model = copy_model(self._skeleton, memo)
        modules = dict(net.named_modules(remove_duplicate=False))
        for path, module in model.named_modules():
            module.training = modules[path].training if path in modules else net.training
        return model, modules

    def _with_state_of(self, net: nn.Module) -> nn.Module:
        """The original with the tensor types, modes and attributes that `net` has now."""

        def empty(own: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
            return empty_like_on(own, now.dtype, "meta").requires_grad_(now.requires_grad)

        model, modules = self._twin(net, empty)
        for path, module in model.named_modules():
            if path and type(modules.get(path)) is not type(module):  # e.g. an adapter replaced it
                modules.pop(path, None)
        memo = {id(modules[path]): own for path, own in model.named_modules() if path in modules}
        for path, module in model.named_modules():
            if path not in modules:
                continue
            kept = self._computed.get(path, set()) | getattr(modules[path], "_own_names", set())
            switches = [getattr(each, "inplace", None) for each in (modules[path], module)]
            if switches == [False, True]:  # capture switches it off where graphs have the writes
                kept = {*kept, "inplace"}
            if is_leaf(module) and path in self._called:
                if _shapes(module) != _shapes(modules[path]):  # rewiring has widened it
                    continue
                own = vars(modules[path])
                others = {n for n in attributes_of(module) if not _is_plain(own.get(n))}
                kept |= others - self._guarded.get(path, frozenset())
            _copy_attributes(modules[path], module, kept, memo)
        return model


def _copy_attributes(
    module: nn.Module, twin: nn.Module, kept: Collection[str], memo: dict[int, Any]
) -> None:
    """Copy plain attributes of a module to its twin; objects that modules share stay shared.

    For the names in `kept` the twin keeps its own attributes.
    """
    own, copies = attributes_of(module), attributes_of(twin)
    for name in {**own, **copies}:
        if name in kept:
            continue
        value = own.get(name)
        if isinstance(value, torch.Tensor):
            memo[id(value)] = value.detach().clone()
        if name not in own:
            del vars(twin)[name]
        else:
            vars(twin)[name] = copy.deepcopy(value, memo)


def _is_plain(value: Any) -> bool:
    return isinstance(value, PLAIN) or (isinstance(value, tuple) and all(map(_is_plain, value)))


def _shapes(module: nn.Module) -> list[torch.Size]:
    return [parameter.shape for parameter in module.parameters()]


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**_named_parameters(module), **dict(module.named_buffers(remove_duplicate=False))}


def _named_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return dict(module.named_parameters(remove_duplicate=False))


def _adopt_constants(net: nn.Module, root: nn.Module, device: torch.device) -> None:
    """Register constants that only the new graph reads."""
    for name, value in vars(root).items():
        if name.startswith(CONSTANT_PREFIX) and name not in vars(net):
            register_constant(net, name, value.to(device))


def _refuse_other_parameters(net: nn.Module, root: nn.Module, policy: Policy) -> None:
    modules = dict(net.named_modules()), dict(root.named_modules())
    # A module that replaced a layer (an adapter) is called in its place, with its own parameters.
    replaced = tuple(
        f"{path}."
        for path, module in modules[1].items()
        if path and type(module) is not type(modules[0].get(path))
    )

    def shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
        named = module.named_parameters()
        return {name: tuple(p.shape) for name, p in named if not name.startswith(replaced)}

    have, need = shapes(net), shapes(root)
    for name in (*need, *have):
        if have.get(name) != need.get(name):
            before, now = (
                f"has the shape {held[name]}" if name in held else "does not exist"
                for held in (have, need)
            )
            raise InputError(
                f"{name} {before}, but rewired for this case it {now}; to add, remove or resize "
                "layers, change the original model and compile that"
                + (", or use policy='same_parameters', which widens none" if policy.widens else "")
            )
