"""Micro-batches bound to the model's signature, moved to its device, and checked; and loaders."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from revcompile.arguments import whole_number
from revcompile.errors import InputError
from revcompile.ir.coupling_ops import mix
from revcompile.ir.program import Partition
from revcompile.ir.signature import bind
from revcompile.ir.types import TensorType
from revcompile.runtime.executor.messages import TARGET
from revcompile.runtime.reversible.module import Reversible
from revcompile.runtime.stage.loss import described
from revcompile.runtime.stage.slots import when_copied
from revcompile.runtime.trainer.placement import Placement


class InputBinder:
    """Turns what `trainer.step` is given into the values that the first stage gets."""

    def __init__(self, model: Reversible, partition: Partition, placement: Placement) -> None:
        self._partition, self._placement, self.device = partition, placement, placement.device
        self._guards = model._cases.first  # they compare the model with how it was captured
        self._copied: torch.cuda.Event | None = None
        """An event after which the device has read everything that is copied from the host."""

    def prepare(
        self, inputs: Any, target: Any, where: str = "trainer.step", dense: bool = False
    ) -> dict[str, Any]:
        """Inputs by argument name, and the target, if every guard holds; see `TARGET`.

        They are not copied (see `take`).
        """
        for part in (inputs, target):
            self.check_tensors(part, where, dense)
        self._placement.check_target(target, where)
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
        return {**values, TARGET: (target, self.count_samples(values))}

    def bind(self, inputs: Any, where: str = "trainer.step") -> dict[str, Any]:
        """Inputs by the names of the model's arguments, not moved to the device."""
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
            copy: False: tensors that are on the device already are not copied.
        """

        def own(tensor: Tensor) -> Tensor:
            return tensor.detach().to(self.device, non_blocking=True, copy=copy)

        taken = pytree.tree_map_only(Tensor, own, tree)
        self._copied = when_copied(pytree.tree_leaves(tree), self.device) or self._copied
        return taken

    def wait_copied(self) -> None:
        """Wait, at the end of a step, until inputs are copied; the device computes meanwhile."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None

    def check_tensors(self, tree: Any, where: str, dense: bool = False) -> None:
        """Refuse tensors on the meta device and, if `dense`, sparse ones."""
        for tensor in (leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)):
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


def split_batch(batch: Any, has_target: bool, where: str) -> tuple[Any, Any]:
    """Inputs and target of what a loader yields.

    A model that returns its own loss has no target: a batch is what `trainer.step` takes, and may
    also be written as `(inputs, None)`.

    >>> split_batch(("x", "y"), True, ""), split_batch(("x", "mask", "y"), True, "")
    (('x', 'y'), (('x', 'mask'), 'y'))
    >>> split_batch(("x", "mask"), False, ""), split_batch({"ids": "x"}, False, "")
    ((('x', 'mask'), None), ({'ids': 'x'}, None))
    """
    is_tuple = isinstance(batch, tuple | list)
    if is_tuple and len(batch) == 2 and (has_target or batch[1] is None):
        return as_dict(batch[0]), as_dict(batch[1])
    if is_tuple and len(batch) > 2 and has_target:
        return tuple(batch[:-1]), as_dict(batch[-1])
    if not has_target or isinstance(batch, Mapping):
        return as_dict(batch), None
    raise InputError(f"{where}: expected batches of (inputs, target), got {described(batch)}")


def as_dict(value: Any) -> Any:
    """A mapping as a dict: torch looks for tensors in no other, as tokenizers return them."""
    is_other = isinstance(value, Mapping) and not isinstance(value, dict)
    return dict(value) if is_other else value


# -- loaders --------------------------------------------------------------------------------------


Loader = DataLoader[Any] | list[tuple[None, None]]
"""A DataLoader; for ranks that need no data, as many empty batches."""


def make_loader(
    data: Any,
    batch_size: int,
    *,
    seed: int,
    epoch: int = 0,
    skip: int = 0,
    shuffle: bool = True,
    replica: int = 0,
    replicas: int = 1,
    needed: bool = True,
    **options: Any,
) -> Loader:
    """The batches of an epoch for one replica, after the first `skip`; see `Trainer.loader`.

    Replicas read disjoint samples, equally many. Random numbers in workers (augmentation) come from
    the same seed. If batches are not `needed` in this process, none are read.

    >>> rows = torch.utils.data.TensorDataset(torch.arange(6.0))
    >>> one, other = (make_loader(rows, 4, seed=1) for _ in range(2))
    >>> [len(x) for (x,) in one], all(x.equal(y) for (x,), (y,) in zip(one, other))
    ([4, 2], True)
    """
    for name, value, least in (
        ("batch_size", batch_size, 1),
        ("skip", skip, 0),
        ("epoch", epoch, 0),
    ):
        whole_number("trainer.loader", name, value, least)
    advice = (
        "For another order iterate over a DataLoader of your own: only the rank of the first stage "
        "reads its batches"
    )
    if fixed := sorted({"sampler", "batch_sampler", "generator"} & options.keys()):
        raise InputError(f"trainer.loader: {fixed[0]}= is what the trainer chooses. {advice}")
    is_indexed = isinstance(data, Sized) and hasattr(data, "__getitem__")
    if not is_indexed or isinstance(data, IterableDataset):
        raise InputError(
            "trainer.loader: expected a dataset with __len__ and __getitem__, got "
            f"{type(data).__name__}. {advice}"
        )
    epoch_seed = mix(seed, epoch) >> 1
    order: DistributedSampler[Any] = DistributedSampler(
        data, replicas, replica, shuffle, seed=epoch_seed, drop_last=True
    )
    generator = torch.Generator().manual_seed(epoch_seed)
    try:
        samples = list(order)[skip * batch_size :]
        loader = DataLoader(data, batch_size, sampler=samples, generator=generator, **options)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"trainer.loader: torch's DataLoader refuses its options: {error}"
        ) from error
    return loader if needed else [(None, None)] * len(loader)
