"""Loaders whose order depends on a seed alone: the ranks of a pipeline read the same batches."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any, Final

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from revcompile.arguments import whole_number
from revcompile.errors import InputError
from revcompile.ir.coupling_ops import mix

Loader = DataLoader[Any] | list[tuple[None, None]]
"""For ranks that need no data: as many batches without any."""
_TAKEN_OVER: Final = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "drop_last"),
    *("multiprocessing_context", "prefetch_factor", "persistent_workers"),
)
_ADVICE: Final = (
    "Or iterate over a DataLoader that yields the same batches on all ranks of a pipeline "
    "(trainer.replica says which copy of it): trainer.step checks that inputs and targets fit"
)


def make_loader(
    data: Any,
    batch_size: int | None,
    *,
    seed: int,
    epoch: int = 0,
    skip: int = 0,
    replica: int = 0,
    replicas: int = 1,
    needed: bool = True,
    **options: Any,
) -> Loader:
    """The batches of an epoch for one replica, after the first `skip`; see `Trainer.loader`.

    Replicas read disjoint samples, equally many. What workers draw at random (augmentation) comes
    from the same seed too. If batches are not `needed` in this process, none are read.

    >>> rows = torch.utils.data.TensorDataset(torch.arange(6.0))
    >>> one, other = (make_loader(rows, 4, seed=1) for _ in range(2))
    >>> [len(x) for (x,) in one], all(x.equal(y) for (x,), (y,) in zip(one, other))
    ([4, 2], True)
    """
    own = data if isinstance(data, DataLoader) else None
    if own is not None:
        options = {name: getattr(own, name) for name in _TAKEN_OVER} | options
        batch_size = own.batch_size if batch_size is None else batch_size
        data = own.dataset
    elif batch_size is None:
        raise InputError("trainer.loader: give batch_size= with a dataset")
    for name, value, least in (
        ("batch_size", batch_size, 1),
        ("skip", skip, 0),
        ("epoch", epoch, 0),
    ):
        if value is not None:
            whole_number("trainer.loader", name, value, least)
    if fixed := sorted({"sampler", "batch_sampler", "shuffle", "generator"} & options.keys()):
        raise InputError(
            f"trainer.loader: {fixed[0]}= is what the trainer chooses, so that all ranks read one "
            "order; for another than a shuffled one pass a DataLoader instead of a dataset"
        )
    is_indexed = isinstance(data, Sized) and hasattr(data, "__getitem__")
    if not is_indexed or isinstance(data, IterableDataset):
        raise InputError(
            "trainer.loader: expected a dataset with __len__ and __getitem__, or a DataLoader of "
            f"one, got {type(data).__name__}. {_ADVICE}"
        )
    epoch_seed, shuffle = mix(seed, epoch) >> 1, own is None or _is_shuffled(own)
    order: DistributedSampler[Any] = DistributedSampler(
        data, replicas, replica, shuffle, seed=epoch_seed, drop_last=True
    )
    generator = torch.Generator().manual_seed(epoch_seed)
    try:
        samples = list(order)[skip * (batch_size or 1) :]
        loader = DataLoader(data, batch_size, sampler=samples, generator=generator, **options)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"trainer.loader: torch's DataLoader refuses its options: {error}"
        ) from error
    return loader if needed else [(None, None)] * len(loader)


def _is_shuffled(loader: DataLoader[Any]) -> bool:
    """Whether a DataLoader shuffles its dataset or reads it in order; refuse other samplers."""
    batches, sampler = loader.batch_sampler, loader.sampler
    known = sampler if batches is None or type(batches) is BatchSampler else batches
    if type(known) is SequentialSampler:
        return False
    is_random = type(known) is RandomSampler and not known.replacement
    if is_random and len(known) == len(loader.dataset):  # type: ignore[arg-type]
        return True
    raise InputError(
        f"trainer.loader: the DataLoader draws by a {type(known).__name__}, which may give ranks "
        "of one pipeline different samples. Use shuffle=True or shuffle=False; trainer.loader "
        f"itself gives each copy of the pipeline its share. {_ADVICE}"
    )
