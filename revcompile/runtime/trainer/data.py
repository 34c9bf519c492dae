"""Loaders whose order depends on a seed alone: the ranks of a pipeline read the same batches."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
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

from revcompile.arguments import whole_number
from revcompile.errors import InputError
from revcompile.ir.coupling_ops import mix

Draw = Callable[[torch.Generator], Sequence[int]]
"""Draws the sample indices of an epoch from a generator that is the same on every rank."""


@dataclass(frozen=True)
class BatchSelection:
    """Which batches of an epoch a process reads: those of one replica, after the first `skip`."""

    seed: int
    epoch: int = 0
    replica: int = 0
    replicas: int = 1
    skip: int = 0

    def generator(self) -> torch.Generator:
        """The same on every rank, another one for every epoch."""
        return torch.Generator().manual_seed(mix(self.seed, self.epoch) >> 1)


class SeededSampler(Sampler[int]):
    """A permutation of the samples that depends on the seed and the epoch alone.

    Replicas (copies of the pipeline) read disjoint samples, every n-th one; the last few are left
    out so that all read equally many. The first `skip` samples are skipped.

    Args:
        dataset: anything with a length.
        selection: seed, epoch, replica; its `skip` counts samples here.
        draw: draws other indices than a permutation.

    >>> a, b = (SeededSampler(range(6), BatchSelection(seed=1)) for _ in range(2))
    >>> list(a) == list(b)
    True
    >>> list(SeededSampler(range(6), BatchSelection(seed=1, epoch=1))) == list(b)
    False
    """

    def __init__(self, dataset: Sized, selection: BatchSelection, draw: Draw | None = None) -> None:
        self._selection, size = selection, len(dataset)
        self._draw: Draw = draw or (lambda g: torch.randperm(size, generator=g).tolist())
        drawn = size if draw is None else len(self._draw(selection.generator()))
        self._each = drawn // selection.replicas

    def __len__(self) -> int:
        return max(0, self._each - self._selection.skip)

    def __iter__(self) -> Iterator[int]:
        chosen, drawn = self._selection, self._draw(self._selection.generator())
        return iter(drawn[chosen.replica :: chosen.replicas][chosen.skip : self._each])


@dataclass(frozen=True)
class SkippedBatches:
    """A loader without its first few batches."""

    loader: DataLoader[Any]
    skip: int

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self.loader, self.skip, None)


Loader = DataLoader[Any] | list[tuple[None, None]] | SkippedBatches
"""For ranks that need no data: as many batches without any."""


def make_loader(
    data: Any,
    batch_size: int | None,
    selection: BatchSelection,
    *,
    needed: bool = True,
    **options: Any,
) -> Loader:
    """The selected batches of a dataset or of a user's DataLoader, the same on every rank.

    A dataset is shuffled. What workers draw at random (augmentation) comes from the same seed too.
    If batches are not `needed` in this process, none are read.

    >>> rows = torch.utils.data.TensorDataset(torch.arange(6.0))
    >>> one, other = (make_loader(rows, 4, BatchSelection(seed=1)) for _ in range(2))
    >>> [len(x) for (x,) in one], all(x.equal(y) for (x,), (y,) in zip(one, other))
    ([4, 2], True)
    """
    draw: Draw | None = None
    if isinstance(data, DataLoader):
        draw = _draw_of(data)
        options = {**_options_of(data), **options}
        batch_size = data.batch_size if batch_size is None else batch_size
        data = data.dataset
    elif batch_size is None and "batch_sampler" not in options:
        raise InputError("trainer.loader: give batch_size= with a dataset")
    _check(data, batch_size, selection, options)
    if isinstance(data, IterableDataset):
        return _stream(data, batch_size, selection, options)
    if not isinstance(data, Sized):
        raise InputError(
            f"trainer.loader: {type(data).__name__} has no length, so it cannot be shuffled; let "
            "the dataset itself yield the same order on every rank and use a plain DataLoader"
        )
    samples = replace(selection, skip=selection.skip * (batch_size or 1))
    sampler, generator = SeededSampler(data, samples, draw), selection.generator()
    try:
        given: Dataset[Any] = data  # type: ignore[assignment]
        loader = DataLoader(given, batch_size, sampler=sampler, generator=generator, **options)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"trainer.loader: torch's DataLoader refuses its options: {error}"
        ) from error
    return loader if needed else [(None, None)] * len(loader)


def _check(
    data: Any, batch_size: int | None, selection: BatchSelection, options: Mapping[str, Any]
) -> None:
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
    if batch_size is not None:
        whole_number("trainer.loader", "batch_size", batch_size, 1)
    whole_number("trainer.loader", "skip", selection.skip, 0)
    whole_number("trainer.loader", "epoch", selection.epoch, 0)


def _options_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """A DataLoader's options besides its order."""
    names = ["num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn"]
    names += ["multiprocessing_context", "prefetch_factor", "persistent_workers"]
    options = {name: getattr(loader, name) for name in names}
    if loader.batch_size is not None:
        options["drop_last"] = loader.drop_last
    return options


def _draw_of(loader: DataLoader[Any]) -> Draw | None:
    """How a DataLoader's sampler draws, if every rank can draw the same; None: shuffled."""
    if isinstance(loader.dataset, IterableDataset):
        return None
    batches, sampler = loader.batch_sampler, loader.sampler
    if batches is not None and type(batches) is not BatchSampler:
        raise _unknown_order("batch sampler", batches)
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
        raise _unknown_order("sampler", sampler)
    is_plain = type(sampler) is RandomSampler and not sampler.replacement
    if is_plain and len(sampler) == len(loader.dataset):  # type: ignore[arg-type]
        return None

    def draw(generator: torch.Generator) -> Sequence[int]:
        seeded = copy.copy(sampler)
        seeded.generator = generator  # type: ignore[attr-defined]
        return list(seeded)

    return draw


def _unknown_order(what: str, sampler: Any) -> InputError:
    return InputError(
        f"trainer.loader: the DataLoader's {what} is a {type(sampler).__name__}, which may draw "
        "another order on every rank. Use shuffle=True or a sampler of "
        "torch.utils.data; or, if its order is the same everywhere (seeded alike on all ranks), "
        "iterate over the DataLoader itself: trainer.step checks that inputs and targets fit"
    )


def _stream(
    data: IterableDataset[Any],
    batch_size: int | None,
    selection: BatchSelection,
    options: Mapping[str, Any],
) -> Loader:
    """A dataset with an order of its own, if that depends on the epoch alone.

    Its length is unknown, so ranks that need no data read it too.
    """
    name = type(data).__name__
    set_epoch = getattr(data, "set_epoch", None)
    if not callable(set_epoch):
        raise InputError(
            f"trainer.loader: {name} has no length, so it cannot be shuffled, and no "
            "set_epoch(epoch), so it may yield another order on every rank. "
            "Give it that method, with an order that depends on the epoch alone; or iterate over a "
            "plain DataLoader of it: trainer.step checks that inputs and targets fit"
        )
    if selection.replicas > 1:
        raise InputError(
            f"trainer.loader: {name} has no length, so it cannot be dealt out to "
            f"{selection.replicas} copies of the pipeline; use a dataset with __len__ and "
            "__getitem__, or split it by trainer.replica and iterate over a plain DataLoader"
        )
    set_epoch(selection.epoch)
    loader = DataLoader(data, batch_size, generator=selection.generator(), **options)
    return SkippedBatches(loader, selection.skip)
