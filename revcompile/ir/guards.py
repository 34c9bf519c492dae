"""Guards: conditions under which a captured graph is the model, checked at every call.

While a model is traced, sizes, attributes and flags decide its Python control flow. Each such value
becomes a guard: the graph is valid only while the value is the same.

    x.shape[1] > 8         a size: computed again from the inputs of the call
    blocks.0.alpha         an attribute of a module: compared with its value then
    config.use_bias        a field of an object that a module holds: likewise
    is_grad_enabled()      a flag of torch: compared with its value then
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, fx, nn

from revcompile.ir.conditions import ABSENT, Condition, Item, SameObject, frozen, holds, look_up
from revcompile.ir.uncomputed import as_captured
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


@dataclass(frozen=True)
class SizeGuard:
    """A value computed from the shapes (types, devices) of the inputs."""

    expression: str
    value: Any
    source: str


@dataclass(frozen=True)
class SizeGuards:
    """Guards and the graph that computes their values from the model's inputs, in order.

    `contents` are positions whose value is a tensor computed from sizes: its elements are compared.
    """

    guards: tuple[SizeGuard, ...] = ()
    graph: fx.Graph | None = None
    contents: frozenset[int] = frozenset()

    def __deepcopy__(self, memo: dict[int, Any]) -> SizeGuards:
        return self  # immutable, and the graph knows parameters by their names

    def of_state(self, root: nn.Module) -> SizeGuards:
        """Guards on parameters and buffers, with the values of this root; none if it lacks any."""
        if self.graph is None:
            return self
        inputs = len(self.graph.find_nodes(op="placeholder"))
        try:
            values = fx.GraphModule(root, self.graph)(*[None] * inputs)
        except Exception:
            return SizeGuards()
        pairs = zip(self.guards, values, strict=True)
        return replace(self, guards=tuple(replace(g, value=value) for g, value in pairs))


@dataclass(frozen=True)
class AttributeGuard:
    """An attribute of the module at `path` that the forward pass has read.

    With `fields` the attribute is an object (a configuration) or a container, and one of its fields
    or items was read. Without a name it is the module itself.
    """

    path: str
    name: str
    value: Any
    """A plain value, ABSENT, or a `Condition`."""
    source: str
    fields: tuple[str | Item, ...] = ()

    @property
    def expression(self) -> str:
        """How a user would write it."""
        text = ".".join(filter(None, (self.path, self.name))) or "the model"
        for step in self.fields:
            text += f"[{step.key!r}]" if isinstance(step, Item) else f".{step}"
        return text

    def current(self, module: nn.Module) -> Any:
        """The value now, of the module at `path`; as captured, where the forward pass sets it."""
        value = look_up(module, self.name) if self.name else module
        for step in self.fields:
            value = ABSENT if value is ABSENT else look_up(value, step)
        return as_captured(value, self.value)

    def rebased(self, module: nn.Module) -> AttributeGuard:
        """The same guard for a module whose attributes rewiring has changed."""
        now = self.current(module)
        if now is ABSENT:
            return self
        is_condition = isinstance(self.value, Condition)
        return replace(self, value=self.value.rebased(now) if is_condition else frozen(now))


FLAGS: Final = (
    *("is_grad_enabled", "is_inference_mode_enabled", "get_default_dtype", "is_autocast_enabled"),
    *("is_autocast_cpu_enabled", "get_autocast_dtype", "get_autocast_cpu_dtype"),
    "get_autocast_gpu_dtype",
)
"""Functions of torch that return flags."""


@dataclass(frozen=True)
class FlagGuard:
    """A flag of torch that the forward pass reads."""

    name: str
    value: Any

    @staticmethod
    def of(name: str) -> FlagGuard:
        """The flag as it is now; autocast is read for all devices."""
        if "autocast" not in name:
            return FlagGuard(name, getattr(torch, name)())
        now = ((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda"))
        return FlagGuard(name, tuple(now))

    @property
    def expression(self) -> str:
        return f"torch.{self.name}()"


@dataclass(frozen=True)
class ModeGuards:
    """All guards of one mode, training or evaluation.

    `direct` needs only the inputs themselves, and is computed at every call. `derived` needs the
    shapes of values inside the network, and is computed on the meta device, once for each new
    combination of input shapes; so is `written`: sizes that rewiring has replaced by functions of
    the batch size. `state` needs parameters and buffers (`weight.requires_grad`), as they are now.
    """

    direct: SizeGuards = SizeGuards()
    derived: SizeGuards = SizeGuards()
    written: SizeGuards = SizeGuards()
    state: SizeGuards = SizeGuards()
    attributes: tuple[AttributeGuard, ...] = ()


@dataclass(frozen=True)
class Guards:
    """What a captured graph depends on besides the elements of its inputs.

    `skeleton` is the captured model on the meta device, to compute `derived` sizes on. `seen` are
    combinations of input shapes and types for which the derived guards are known to hold.
    """

    train: ModeGuards = ModeGuards()
    evaluation: ModeGuards = ModeGuards()
    skeleton: nn.Module | None = None
    seen: frozenset[Any] = frozenset()
    flags: tuple[FlagGuard, ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Guards:
        """Objects that guards know are those of the copied model; the skeleton has no contents."""
        train, evaluation = copy.deepcopy((self.train, self.evaluation), memo)
        return replace(self, train=train, evaluation=evaluation)

    def of(self, training: bool) -> ModeGuards:
        return self.train if training else self.evaluation

    def of_attributes(self) -> Guards:
        """Only the guards that do not depend on a call's inputs."""
        train, evaluation = (
            ModeGuards(attributes=mode.attributes) for mode in (self.train, self.evaluation)
        )
        return Guards(train, evaluation, flags=self.flags)

    def rebased(self, root: nn.Module) -> Guards:
        """The same guards for a root whose attributes rewiring has changed."""

        def rebase(guard: AttributeGuard) -> AttributeGuard:
            is_mode = guard.name == "training"
            return guard if is_mode else guard.rebased(root.get_submodule(guard.path))

        return self._with_attributes(lambda guards: map(rebase, guards), root)

    def for_copy(self, root: nn.Module) -> Guards:
        """The same guards for another copy of the root: objects are those of that copy."""

        def rebase(guard: AttributeGuard) -> AttributeGuard:
            is_identity = isinstance(guard.value, SameObject)
            return guard.rebased(root.get_submodule(guard.path)) if is_identity else guard

        return self._with_attributes(lambda guards: map(rebase, guards))

    def held_by(self, root: nn.Module) -> Guards:
        """The guards that hold for a root which has a part of the attributes and modules only."""
        modules = dict(root.named_modules(remove_duplicate=False))

        def is_held(guard: AttributeGuard) -> bool:
            module = modules.get(guard.path)
            return module is not None and holds(guard.value, guard.current(module))

        return self._with_attributes(lambda guards: filter(is_held, guards), root)

    def _with_attributes(
        self,
        change: Callable[[Iterable[AttributeGuard]], Iterable[AttributeGuard]],
        state_of: nn.Module | None = None,
    ) -> Guards:
        train, evaluation = (
            replace(
                mode,
                attributes=tuple(change(mode.attributes)),
                state=mode.state if state_of is None else mode.state.of_state(state_of),
            )
            for mode in (self.train, self.evaluation)
        )
        return replace(self, train=train, evaluation=evaluation)


NO_GUARDS: Final = Guards()
"""For a graph that depends on its inputs alone."""
