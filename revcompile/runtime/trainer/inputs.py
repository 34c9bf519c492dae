"""Micro-batches bound to the model's signature, moved to its device, and checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from revcompile.errors import InputError, warn
from revcompile.ir.program import Partition
from revcompile.ir.signature import bind
from revcompile.ir.types import TensorType
from revcompile.runtime.reversible.guards import GuardChecker
from revcompile.runtime.reversible.module import Reversible
from revcompile.runtime.stage.loss import described
from revcompile.runtime.stage.slots import when_copied


def warn_if_larger_than_planned(planned: int, samples: int) -> None:
    if samples > planned:
        warn(
            f"memory_budget=: planned for micro-batches of {planned} samples, but one has "
            f"{samples} and takes more memory; set TrainerOptions(microbatch_size={samples})",
        )


class InputBinder:
    """Turns what `trainer.step` is given into the arguments of the model's stages."""

    def __init__(self, partition: Partition, device: torch.device) -> None:
        self._partition, self.device = partition, device
        rewired, root = partition.rewired, partition.rewired.root
        self._guards = (
            root._cases.checker  # it knows what it was like when it was made
            if isinstance(root, Reversible)
            else GuardChecker(rewired.guards, root)
        )
        self._copied: torch.cuda.Event | None = None
        """When the device has read all that was copied from the host."""

    def prepare(
        self, inputs: Any, where: str = "trainer.step", dense: bool = False
    ) -> dict[str, Any]:
        """Inputs by argument name, such that every guard holds; still the caller's (`take`)."""
        self.check_tensors(inputs, where, dense)
        values, rewired = self.bind(inputs, where), self._partition.rewired
        problem = self._guards.failing(rewired.root, values)
        if problem is not None:
            got = ", ".join(f"{name}: {described(value)}" for name, value in values.items())
            raise problem.error(
                f"{where}: {rewired.name}({got})",
                "Stages are compiled for one case: feed inputs of the captured form (pad them to "
                "the sizes of the example), undo the change, or call petrafy with an example of "
                "this case.",
            )
        return values

    def bind(self, inputs: Any, where: str = "trainer.step") -> dict[str, Any]:
        """Inputs by the names of the model's arguments; not moved."""
        args, kwargs = split_call(inputs)
        rewired = self._partition.rewired
        try:
            values = bind(rewired.signature, rewired.name, args, kwargs)
        except InputError as error:
            raise InputError(
                f"{where}: {error}\n  inputs: {described(inputs)}\n{_how_to_call(where, inputs)}"
            ) from error
        if self.count_samples(values) == 0:
            raise InputError(
                f"{where}: the batch has no samples ({described(inputs)}); leave it out"
            )
        return values

    def take(self, tree: Any, copy: bool = True) -> Any:
        """A copy on the device: once `wait_copied` returns, callers may refill their memory.

        Args:
            copy: False if what is there already may stay the caller's.
        """
        leaves, spec = pytree.tree_flatten(tree)
        own = [
            leaf.detach().to(self.device, non_blocking=True, copy=copy)
            if isinstance(leaf, Tensor)
            else leaf
            for leaf in leaves
        ]
        self._copied = when_copied(leaves, self.device) or self._copied
        return pytree.tree_unflatten(own, spec)

    def wait_copied(self) -> None:
        """At the end of a step: the device computes it while the host waits for its copies."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None

    def check_tensors(self, tree: Any, where: str = "trainer.step", dense: bool = False) -> Any:
        """The values; tensors on the meta device and, if `dense`, sparse ones are refused."""
        tensors = [tree]
        if not isinstance(tree, Tensor):
            tensors = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
        for tensor in tensors:
            if tensor.is_meta and self.device.type != "meta":
                raise InputError(
                    f"{where}: got a tensor on the meta device, which has no values "
                    f"({described(tree)}); feed data from the CPU or a GPU"
                )
            if dense and tensor.layout is not torch.strided:
                raise InputError(
                    f"{where}: got a tensor of layout {tensor.layout}, but captured steps take "
                    "dense ones; feed tensor.to_dense(), or pass backend='eager'"
                )
        return tree

    def count_samples(self, values: Mapping[str, Any]) -> int:
        """The size of the dimension that grows with the batch."""
        for name, value in values.items():
            kind = self._partition.types.get(name)
            if isinstance(kind, TensorType) and len(kind.shape) == value.dim():
                for step, size in zip(kind.per_sample, value.shape, strict=True):
                    if step:
                        return int(size) // step
        return next((len(value) for value in values.values() if value.dim()), 1)


def split_call(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
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


def split_batch(batch: Any, has_target: bool = True) -> tuple[Any, Any]:
    """Inputs and target of what a loader yields.

    A model that returns its own loss has no target: a batch is what `trainer.step` takes, and may
    also be written as `(inputs, None)`.
    """
    is_pair = isinstance(batch, tuple | list) and len(batch) == 2
    if is_pair and (has_target or batch[1] is None):
        return batch[0], batch[1]
    if not has_target or isinstance(batch, dict):
        return batch, None
    raise InputError(
        f"trainer.evaluate: expected batches of (inputs, target), got {described(batch)}"
    )
