"""Every rank reads the same order from one seed, its share of it, or nothing."""

from typing import Any

import pytest
import torch
from helpers import cases, refuses
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    TensorDataset,
)
from training import settings_of

import revcompile
from revcompile.errors import InputError
from revcompile.runtime.trainer.trainer import Trainer

# -- a trainer's own loader -----------------------------------------------------------------------


class Untouched(Dataset[Any]):
    """Nobody may read it."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("read")


def trainer(**options: Any) -> Trainer:
    net = revcompile.petrafy(
        nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2)), 2, torch.randn(2, 3)
    )
    return net.trainer(
        lambda p: torch.optim.SGD(p, lr=0.1), nn.functional.mse_loss, **settings_of(**options)
    )


def test_a_trainer_s_loader_depends_on_its_seed_and_the_epoch() -> None:
    rows = TensorDataset(torch.arange(10.0))
    one, again = (trainer(seed=5).loader(rows, 4) for _ in range(2))
    assert [x.tolist() for (x,) in one] == [x.tolist() for (x,) in again]
    for other in (trainer(seed=6).loader(rows, 4), trainer(seed=5).loader(rows, 4, epoch=1)):
        assert [x.tolist() for (x,) in other] != [x.tolist() for (x,) in one]


@pytest.mark.parametrize("skip", [0, 1])
def test_a_rank_in_the_middle_reads_nothing(skip: int) -> None:
    middle = trainer()
    middle.is_first = middle.is_last = False
    loader = middle.loader(Untouched(), 4, skip=skip)
    assert list(loader) == [(None, None)] * (3 - skip) and len(loader) == 3 - skip


def test_a_dataset_without_a_length_is_refused() -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(())

    for data in (Stream(), DataLoader(Stream(), 4)):
        refuses(InputError, r"got Stream\. Or iterate", trainer().loader, data, 4)


# -- loaders of the user's own --------------------------------------------------------------------

ROWS = TensorDataset(torch.arange(10.0))


class Odd(Sampler[int]):
    """Nobody can tell what it does."""

    def __iter__(self) -> Any:
        return iter(range(10))

    def __len__(self) -> int:
        return 10


def read(loader: Any) -> list[Any]:
    return [x.tolist() for (x,) in loader]


def test_a_dataloader_keeps_all_but_the_order_it_would_draw() -> None:
    one, again = trainer(seed=5), trainer(seed=5)
    plain = read(one.loader(ROWS, 4))
    assert read(one.loader(DataLoader(ROWS, 4, shuffle=True))) == plain
    torch.manual_seed(99)
    assert read(again.loader(DataLoader(ROWS, 4, shuffle=True))) == plain
    assert read(one.loader(DataLoader(ROWS, 4, shuffle=True), skip=1)) == plain[1:]
    assert read(one.loader(DataLoader(ROWS, 4, shuffle=True), epoch=1)) != plain
    assert read(one.loader(DataLoader(ROWS, 4, shuffle=True, drop_last=True))) == plain[:2]
    assert [len(b) for b in read(one.loader(DataLoader(ROWS, 4, shuffle=True), 5))] == [5, 5]
    in_order = [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0], [8.0, 9.0]]
    assert read(one.loader(DataLoader(ROWS, 4), epoch=3)) == in_order
    collated = DataLoader(ROWS, 4, collate_fn=lambda rows: (torch.stack([-x for (x,) in rows]),))
    assert read(one.loader(collated))[0] == [-0.0, -1.0, -2.0, -3.0]
    assert read(one.loader(DataLoader(ROWS, batch_size=None), skip=8)) == [8.0, 9.0]


def test_copies_of_the_pipeline_share_a_dataloader() -> None:
    shares, copy = [], trainer()
    copy.replicas = 2
    for copy.replica in range(2):
        shares.append(read(copy.loader(DataLoader(ROWS, 5))))
    assert shares == [[[0.0, 2.0, 4.0, 6.0, 8.0]], [[1.0, 3.0, 5.0, 7.0, 9.0]]]


@cases(
    "data, arguments, said",
    (DataLoader(ROWS, 2, sampler=DistributedSampler(ROWS, 2, 0)), {}, "DistributedSampler"),
    (DataLoader(ROWS, 2, sampler=Odd()), {}, "draws by a Odd, .*trainer.step checks"),
    (DataLoader(ROWS, 2, sampler=RandomSampler(ROWS, True, 6)), {}, "by a RandomSampler"),
    (DataLoader(ROWS, 2, sampler=RandomSampler(ROWS, num_samples=4)), {}, "by a RandomSampler"),
    (DataLoader(ROWS, batch_sampler=[[0], [1]]), {}, "draws by a list"),
    (ROWS, {}, "give batch_size="),
    (ROWS, {"batch_size": 0}, "batch_size=0; expected a whole number, at least 1"),
    (ROWS, {"batch_size": 2, "skip": -1}, "skip=-1"),
    (ROWS, {"batch_size": 2, "shuffle": True}, "shuffle= is what the trainer chooses"),
    (ROWS, {"batch_size": 2, "wrong": 1}, "DataLoader refuses its options: .*wrong"),
    (iter([1]), {"batch_size": 2}, "expected a dataset .*got list_iterator"),
)
def test_what_ranks_cannot_share_is_refused(data: Any, arguments: Any, said: str) -> None:
    refuses(InputError, said, trainer().loader, data, **arguments)
