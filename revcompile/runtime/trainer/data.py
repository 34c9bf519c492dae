"""Loaders: every rank reads the same batches in the same order, from one seed, or nothing."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from revcompile.errors import InputError
from revcompile.ir.stage_ops import mix

__all__ = ["Loader", "SameOrder", "Share", "Unread", "same_order", "shared_loader"]

Order = Callable[[torch.Generator], Sequence[int]]
"""An epoch's samples, drawn from a generator that is the same on every rank."""


class SameOrder(Sampler[int]):
    """A permutation that depends on the seed and the epoch alone, on whatever rank.

    With several copies of the pipeline each takes its own share: `replica` of `replicas`. The
    last few samples are left out where the shares would not be equal. The first `skip` are passed
    over: for going on in the middle of an epoch. `order` draws the samples instead.

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
        order: Order | None = None,
    ) -> None:
        if not 0 <= replica < replicas:
            raise InputError(f"same_order: replica={replica} of {replicas}; use 0 <= replica < it")
        self.seed, self.epoch = seed, epoch
        size = len(dataset)
        self._order: Order = order or (lambda g: torch.randperm(size, generator=g).tolist())
        self.size = size if order is None else len(self._drawn())
        self.replica, self.replicas, self.skip = replica, replicas, skip

    def set_epoch(self, epoch: int) -> None:
        """Another order from now on."""
        self.epoch = epoch

    def __len__(self) -> int:
        return max(0, self.size // self.replicas - self.skip)

    def _drawn(self) -> Sequence[int]:
        return self._order(torch.Generator().manual_seed(mix(self.seed, self.epoch) >> 1))

    def __iter__(self) -> Iterator[int]:
        share = self._drawn()[self.replica :: self.replicas][: self.size // self.replicas]
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


@dataclass(frozen=True)
class Skipping:
    """A loader without its first few batches."""

    loader: DataLoader[Any]
    skip: int

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self.loader, self.skip, None)


def same_order(
    dataset: Dataset[Any],
    batch_size: int | None,
    seed: int,
    epoch: int = 0,
    *,
    replica: int = 0,
    replicas: int = 1,
    skip: int = 0,
    order: Order | None = None,
    **options: Any,
) -> DataLoader[Any]:
    """A loader that gives the same batches on every rank; `options` are torch's DataLoader's.

    The first `skip` batches are passed over and not read. Without `order` samples are shuffled.

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
        dataset,
        seed,
        epoch,
        replica=replica,
        replicas=replicas,
        skip=skip * (batch_size or 1),
        order=order,
    )
    generator = torch.Generator().manual_seed(mix(seed, epoch) >> 1)
    try:
        return DataLoader(dataset, batch_size, sampler=sampler, generator=generator, **options)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"trainer.loader: torch's DataLoader refuses its options: {error}"
        ) from error


# -- a trainer's loaders --------------------------------------------------------------------------

Loader = DataLoader[Any] | Unread | Skipping
"""Something to iterate over, with batches or with nothing for ranks that need none."""


@dataclass(frozen=True)
class Share:
    """Which batches of an epoch a process reads."""

    seed: int
    epoch: int = 0
    replica: int = 0
    replicas: int = 1
    skip: int = 0


def shared_loader(
    data: Any, batch_size: int | None, share: Share, *, needed: bool = True, **options: Any
) -> Loader:
    """A share's batches of a dataset or of somebody's DataLoader, the same on every rank.

    Where no data are `needed` none are read.
    """
    order: Order | None = None
    if isinstance(data, DataLoader):
        order = _order_of(data)
        options = {**_options_of(data), **options}
        batch_size = data.batch_size if batch_size is None else batch_size
        data = data.dataset
    elif batch_size is None and "batch_sampler" not in options:
        raise InputError("trainer.loader: give batch_size= with a dataset")
    _check(data, batch_size, share, options)
    if isinstance(data, IterableDataset):
        return _stream(data, batch_size, share, options)
    found = same_order(
        data,
        batch_size,
        share.seed,
        share.epoch,
        replica=share.replica,
        replicas=share.replicas,
        skip=share.skip,
        order=order,
        **options,
    )
    return found if needed else Unread(len(found))


def _check(data: Any, batch_size: int | None, share: Share, options: Mapping[str, Any]) -> None:
    fixed = sorted({"sampler", "batch_sampler", "shuffle", "generator"} & options.keys())
    if fixed:
        raise InputError(
            f"trainer.loader: {fixed[0]}= is what the trainer chooses, so that all ranks read one "
            "order; pass a DataLoader with the sampling you want instead of a dataset"
        )
    if not isinstance(data, Dataset) and not hasattr(data, "__getitem__"):
        raise InputError(
            f"trainer.loader: expected a dataset or a DataLoader, got {type(data).__name__}; "
            "something that can only be iterated over cannot be dealt out to ranks"
        )
    for name, value in (("batch_size", batch_size), ("skip", share.skip), ("epoch", share.epoch)):
        least = 1 if name == "batch_size" else 0
        whole = isinstance(value, int) and not isinstance(value, bool)
        if value is not None and (not whole or value < least):
            raise InputError(f"trainer.loader: {name}={value!r}; use a whole number >= {least}")


def _options_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """What a DataLoader was made with, besides its order."""
    names = ["num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn"]
    names += ["multiprocessing_context", "prefetch_factor", "persistent_workers"]
    found = {name: getattr(loader, name) for name in names}
    if loader.batch_size is not None:
        found["drop_last"] = loader.drop_last
    return found


def _order_of(loader: DataLoader[Any]) -> Order | None:
    """The order a DataLoader asks for, as far as every rank can draw it; None: shuffled."""
    if isinstance(loader.dataset, IterableDataset):
        return None
    batches, sampler = loader.batch_sampler, loader.sampler
    if batches is not None and type(batches) is not BatchSampler:
        raise _unshared("batch sampler", batches)
    if isinstance(sampler, DistributedSampler):
        raise InputError(
            "trainer.loader: the DataLoader has a DistributedSampler, which gives every rank other "
            "samples, but the ranks of one pipeline need the same: inputs are read by the first, "
            "targets by the last. Leave the sampler out and say shuffle=True; trainer.loader "
            "deals the samples out to copies of the pipeline itself"
        )
    if isinstance(sampler, SequentialSampler) or type(sampler) in (list, tuple, range):
        return lambda generator: list(sampler)
    if type(sampler) not in (RandomSampler, SubsetRandomSampler, WeightedRandomSampler):
        raise _unshared("sampler", sampler)
    is_plain = type(sampler) is RandomSampler and not sampler.replacement
    if is_plain and len(sampler) == len(loader.dataset):  # type: ignore[arg-type]
        return None

    def drawn(generator: torch.Generator) -> Sequence[int]:
        twin = copy.copy(sampler)
        twin.generator = generator  # type: ignore[attr-defined]
        return list(twin)

    return drawn


def _unshared(what: str, sampler: Any) -> InputError:
    return InputError(
        f"trainer.loader: the DataLoader's {what} is a {type(sampler).__name__}, of which nobody "
        "can tell whether it draws the same order on every rank. Use shuffle=True or a sampler of "
        "torch.utils.data; or, if its order is the same everywhere (seeded alike on all ranks), "
        "iterate over the DataLoader itself: trainer.step checks that inputs and targets fit"
    )


def _stream(
    data: IterableDataset[Any], batch_size: int | None, share: Share, options: Mapping[str, Any]
) -> Loader:
    """A dataset that has its own order, if that depends on nothing but the epoch.

    Nobody knows how long it is: ranks that need no data read it too.
    """
    name = type(data).__name__
    set_epoch = getattr(data, "set_epoch", None)
    if not callable(set_epoch):
        raise InputError(
            f"trainer.loader: {name} has no length, so it cannot be shuffled, and no "
            "set_epoch(epoch), so nobody can tell whether it yields the same order on every rank. "
            "Give it that method, with an order that depends on the epoch alone; or iterate over a "
            "plain DataLoader of it: trainer.step checks that inputs and targets fit"
        )
    if share.replicas > 1:
        raise InputError(
            f"trainer.loader: {name} has no length, so it cannot be dealt out to "
            f"{share.replicas} copies of the pipeline; use a dataset with __len__ and __getitem__, "
            "or split it by trainer.replica yourself and iterate over a plain DataLoader"
        )
    set_epoch(share.epoch)
    generator = torch.Generator().manual_seed(mix(share.seed, share.epoch) >> 1)
    loader = DataLoader(data, batch_size, generator=generator, **options)
    return Skipping(loader, share.skip)
