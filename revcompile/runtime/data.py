"""Loaders: every rank reads the same batches in the same order, from one seed, or nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from revcompile.errors import InputError
from revcompile.steps import mix

__all__ = ["SameOrder", "Unread", "same_order"]


class SameOrder(Sampler[int]):
    """A permutation that depends on the seed and the epoch alone, on whatever rank.

    With several copies of the pipeline each takes its own share: `replica` of `replicas`. The
    last few samples are left out where the shares would not be equal. The first `skip` are passed
    over: for going on in the middle of an epoch.

    >>> a, b = (SameOrder(range(6), seed=1) for _ in range(2))
    >>> list(a) == list(b)
    True
    >>> a.set_epoch(1)
    >>> list(a) == list(b)
    False
    """

    def __init__(
        self,
        dataset: Sized,
        seed: int,
        epoch: int = 0,
        *,
        replica: int = 0,
        replicas: int = 1,
        skip: int = 0,
    ) -> None:
        if not 0 <= replica < replicas:
            raise InputError(f"same_order: replica={replica} of {replicas}; use 0 <= replica < it")
        self.size, self.seed, self.epoch = len(dataset), seed, epoch
        self.replica, self.replicas, self.skip = replica, replicas, skip

    def set_epoch(self, epoch: int) -> None:
        """Another order from now on."""
        self.epoch = epoch

    def __len__(self) -> int:
        return max(0, self.size // self.replicas - self.skip)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(mix(self.seed, self.epoch) >> 1)
        order = torch.randperm(self.size, generator=generator).tolist()
        share = order[self.replica :: self.replicas][: self.size // self.replicas]
        return iter(share[self.skip :])


@dataclass(frozen=True)
class Unread:
    """As many batches as another loader has, of nothing: for ranks that need no data.

    >>> list(Unread(2))
    [(None, None), (None, None)]
    """

    count: int

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return iter([(None, None)] * self.count)


def same_order(
    dataset: Dataset[Any],
    batch_size: int,
    seed: int,
    epoch: int = 0,
    *,
    replica: int = 0,
    replicas: int = 1,
    skip: int = 0,
    **options: Any,
) -> DataLoader[Any]:
    """A loader that gives the same batches on every rank; `options` are torch's DataLoader's.

    The first `skip` batches are passed over and not read.

    What workers draw at random (augmentation) comes from the same seed too.

    >>> rows = torch.utils.data.TensorDataset(torch.arange(6.0))
    >>> one, other = (same_order(rows, batch_size=4, seed=1) for _ in range(2))
    >>> [len(x) for (x,) in one], all(x.equal(y) for (x,), (y,) in zip(one, other))
    ([4, 2], True)
    """
    if not isinstance(dataset, Sized):
        raise InputError(
            f"same_order: {type(dataset).__name__} has no length, so it cannot be shuffled; let "
            "the dataset itself yield the same order on every rank and use a plain DataLoader"
        )
    sampler = SameOrder(
        dataset, seed, epoch, replica=replica, replicas=replicas, skip=skip * batch_size
    )
    generator = torch.Generator().manual_seed(mix(seed, epoch) >> 1)
    return DataLoader(dataset, batch_size, sampler=sampler, generator=generator, **options)
