"""Guards: conditions under which a captured graph is the model, checked at every call.

While a model is traced, sizes, attributes and flags decide its Python control flow. Each such value
becomes a guard: the graph is valid only while the value is the same.

    x.shape[1] > 8         a size: computed again from the inputs of the call
    blocks.0.alpha         an attribute of a module: compared with its value then
    config.use_bias        a field of an object that a module holds: likewise
    is_grad_enabled()      a flag of torch: compared with its value then
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

from torch import Tensor, fx, nn

__all__ = [
    "NO_GUARDS",
    "AttributeGuard",
    "FlagGuard",
    "Guards",
    "ModeGuards",
    "SizeGuard",
    "SizeGuards",
    "frozen",
    "input_types",
]


def input_types(tensors: Iterable[Tensor]) -> tuple[Any, ...]:
    """The properties of inputs on which shapes inside the network depend."""
    return tuple((t.shape, t.stride(), t.dtype, t.requires_grad) for t in tensors)


def frozen(value: Any) -> Any:
    """A copy of nested containers that does not change with the original."""
    if type(value) is dict:
        return {k: frozen(v) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(frozen, value))
    return set(value) if type(value) is set else value


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


@dataclass(frozen=True)
class AttributeGuard:
    """An attribute of the module at `path` that the forward pass has read.

    With `fields` the attribute is an object (a configuration), and one of its fields was read.
    """

    path: str
    name: str
    value: Any
    source: str
    fields: tuple[str, ...] = ()

    @property
    def expression(self) -> str:
        """How a user would write it."""
        return ".".join((*filter(None, (self.path,)), self.name, *self.fields))

    def current(self, module: nn.Module) -> Any:
        """The value now, of the module at `path`; that of the capture if it cannot be read."""
        value = vars(module).get(self.name, self)
        for field in self.fields if value is not self else ():
            value = getattr(value, field, self)
        return self.value if value is self else value


@dataclass(frozen=True)
class FlagGuard:
    """A flag of torch, by the name of the function of `torch` that returns it."""

    name: str
    args: tuple[Any, ...]
    value: Any
    source: str

    @property
    def expression(self) -> str:
        return f"torch.{self.name}({', '.join(map(repr, self.args))})"


@dataclass(frozen=True)
class ModeGuards:
    """All guards of one mode, training or evaluation.

    `direct` needs only the inputs themselves, and is computed at every call. `derived` needs the
    shapes of values inside the network, and is computed on the meta device, once for each new
    combination of input shapes; so is `written`: sizes that rewiring has replaced by functions of
    the batch size.
    """

    direct: SizeGuards = SizeGuards()
    derived: SizeGuards = SizeGuards()
    written: SizeGuards = SizeGuards()
    attributes: tuple[AttributeGuard, ...] = ()
    flags: tuple[FlagGuard, ...] = ()


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

    def of(self, training: bool) -> ModeGuards:
        return self.train if training else self.evaluation

    def of_attributes(self) -> Guards:
        """Only the guards that do not depend on a call's inputs."""
        train, evaluation = (
            ModeGuards(attributes=mode.attributes, flags=mode.flags)
            for mode in (self.train, self.evaluation)
        )
        return Guards(train, evaluation)

    def rebased(self, root: nn.Module) -> Guards:
        """The same guards for a root whose attributes rewiring has changed."""

        def current(guard: AttributeGuard) -> AttributeGuard:
            if guard.name == "training":
                return guard
            return replace(guard, value=frozen(guard.current(root.get_submodule(guard.path))))

        def rebase(mode: ModeGuards) -> ModeGuards:
            return replace(mode, attributes=tuple(map(current, mode.attributes)))

        return replace(self, train=rebase(self.train), evaluation=rebase(self.evaluation))


NO_GUARDS: Final = Guards()
"""For a graph that depends on its inputs alone."""
