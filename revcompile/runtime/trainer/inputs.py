"""What a trainer is fed: bound to the model's signature, moved to its device, counted."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from revcompile.errors import InputError
from revcompile.ir.program import Partition
from revcompile.ir.types import TensorType
from revcompile.runtime.reversible.call_arguments import bind
from revcompile.runtime.reversible.guards import GuardChecker
from revcompile.runtime.stage.loss_head import described

__all__ = ["InputBinder", "Planned", "batch_pair", "called_with", "check_planned"]


class Planned(Protocol):
    """What the memory of a run was planned for."""

    @property
    def batch_size(self) -> int:
        """Samples a micro-batch."""
        ...


def check_planned(plan: Planned, samples: int) -> None:
    """Say that a micro-batch is larger than memory was planned for."""
    if samples > plan.batch_size:
        warnings.warn(
            f"memory_budget=: planned for micro-batches of {plan.batch_size} samples, but one has "
            f"{samples} and takes more memory; give batch_size={samples} beside memory_budget=",
            stacklevel=4,
        )


class InputBinder:
    """Micro-batches for the model of a partition, on one device."""

    def __init__(self, partition: Partition, device: torch.device) -> None:
        self._partition, self.device = partition, device
        self._guards = GuardChecker(partition.rewired.guards)

    def bound(self, inputs: Any, where: str = "trainer.step") -> dict[str, Any]:
        """Inputs by the names of the model's arguments, where they are."""
        args, kwargs = called_with(inputs)
        rewired = self._partition.rewired
        try:
            values = bind(rewired.signature, rewired.name, args, kwargs)
        except InputError as error:
            raise InputError(
                f"{where}: {error}\n  inputs: {described(inputs)}\n{_how_to_call(where, inputs)}"
            ) from error
        if self.samples(values) == 0:
            raise InputError(
                f"{where}: the batch has no samples ({described(inputs)}); leave it out"
            )
        return values

    def taken(self, inputs: Any, where: str = "trainer.step") -> dict[str, Any]:
        """Inputs by the names of the model's arguments, on its device, if the stages fit them."""
        return self.checked(self.bound(self.moved(inputs, where), where), where)

    def checked(self, values: dict[str, Any], where: str = "trainer.step") -> dict[str, Any]:
        """The inputs as they are, if every guard holds for them; stages have one graph only."""
        rewired = self._partition.rewired
        problem = self._guards.failing(rewired.root, values)
        if problem is not None:
            raise problem.error(
                f"{where}: {rewired.name}",
                "Stages are compiled for one case: feed inputs of the captured form (pad them to "
                "the sizes of the example), undo the change, or call petrafy with an example of "
                "this case.",
            )
        return values

    def moved(self, tree: Any, where: str = "trainer.step") -> Any:
        """Nested values with their tensors on the device."""

        def move(tensor: Tensor) -> Tensor:
            if tensor.is_meta and self.device.type != "meta":
                raise InputError(
                    f"{where}: got a tensor on the meta device, which has no values "
                    f"({described(tree)}); feed data from the CPU or a GPU"
                )
            return tensor.to(self.device, non_blocking=True)

        return pytree.tree_map_only(Tensor, move, tree)

    def samples(self, values: Mapping[str, Any]) -> int:
        """How many samples values hold: along the dimension that grows with the batch."""
        for name, value in values.items():
            kind = self._partition.types.get(name)
            if isinstance(kind, TensorType) and len(kind.shape) == value.dim():
                for step, size in zip(kind.per_sample, value.shape, strict=True):
                    if step:
                        return int(size) // step
        return next((len(value) for value in values.values() if value.dim()), 1)


def called_with(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments, from a tensor, a tuple or a dict."""
    if isinstance(inputs, tuple | list):
        return tuple(inputs), {}
    if isinstance(inputs, dict):
        return (), inputs
    return (inputs,), {}


def _how_to_call(where: str, inputs: Any) -> str:
    takes = "`inputs` is what the model's forward takes: a tensor, a tuple of positional arguments "
    takes += "or a dict of keyword arguments"
    if where != "trainer.step":
        return f"Of a batch (inputs, target), {takes}."
    if isinstance(inputs, tuple | list) and len(inputs) == 2:
        return f"Call trainer.step(x, y), not trainer.step((x, y)); {takes}."
    if isinstance(inputs, dict):
        return f"Call trainer.step(inputs, target) with the targets taken out of the dict; {takes}."
    return f"Call trainer.step(inputs, target); {takes}."


def batch_pair(batch: Any) -> tuple[Any, Any]:
    """Inputs and target, from what a loader yields."""
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    raise InputError(
        f"trainer.evaluate: expected batches of (inputs, target), got {described(batch)}"
    )
