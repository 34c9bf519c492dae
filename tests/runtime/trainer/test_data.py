"""Every replica reads its share of one order, which depends on a seed; other ranks nothing."""

from typing import Any

import pytest
import torch
from helpers import cases, refuses
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from training import settings_of

import revcompile
from revcompile.errors import InputError
from revcompile.runtime.trainer.trainer import Trainer

ROWS = TensorDataset(torch.arange(10.0))


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
    one, again = (trainer(seed=5).loader(ROWS, 4) for _ in range(2))
    assert [x.tolist() for (x,) in one] == [x.tolist() for (x,) in again]
    for other in (trainer(seed=6).loader(ROWS, 4), trainer(seed=5).loader(ROWS, 4, epoch=1)):
        assert [x.tolist() for (x,) in other] != [x.tolist() for (x,) in one]


@pytest.mark.parametrize("skip", [0, 1])
def test_a_rank_without_the_first_stage_reads_nothing(skip: int) -> None:
    middle = trainer()
    middle.is_first = False
    loader = middle.loader(Untouched(), 4, skip=skip)
    assert list(loader) == [(None, None)] * (3 - skip) and len(loader) == 3 - skip


def test_a_dataset_without_a_length_is_refused() -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(())

    refuses(InputError, r"got Stream\. For another order", trainer().loader, Stream(), 4)


def read(loader: Any) -> list[Any]:
    return [x.tolist() for (x,) in loader]


def test_options_are_those_of_torch() -> None:
    one = trainer(seed=5)
    plain = read(one.loader(ROWS, 4))
    assert read(one.loader(ROWS, 4, skip=1)) == plain[1:]
    assert read(one.loader(ROWS, 4, drop_last=True)) == plain[:2]
    in_order = [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0], [8.0, 9.0]]
    assert read(one.loader(ROWS, 4, epoch=3, shuffle=False)) == in_order
    negative = one.loader(ROWS, 4, collate_fn=lambda rows: (torch.stack([-x for (x,) in rows]),))
    assert read(negative) == [[-x for x in batch] for batch in plain]


def test_copies_of_the_pipeline_share_a_dataset() -> None:
    shares, copy = [], trainer()
    copy.replicas = 2
    for copy.replica in range(2):
        shares.append(read(copy.loader(ROWS, 5, shuffle=False)))
    assert shares == [[[0.0, 2.0, 4.0, 6.0, 8.0]], [[1.0, 3.0, 5.0, 7.0, 9.0]]]


@cases(
    "data, arguments, said",
    (DataLoader(ROWS, 2), {"batch_size": 2}, "got DataLoader. For another order iterate over a"),
    (ROWS, {"batch_size": 0}, "batch_size=0; expected a whole number, at least 1"),
    (ROWS, {"batch_size": 2, "skip": -1}, "skip=-1"),
    (ROWS, {"batch_size": 2, "sampler": [1]}, "sampler= is what the trainer chooses"),
    (ROWS, {"batch_size": 2, "wrong": 1}, "DataLoader refuses its options: .*wrong"),
    (iter([1]), {"batch_size": 2}, "expected a dataset .*got list_iterator"),
)
def test_what_has_no_order_of_the_trainer_is_refused(data: Any, arguments: Any, said: str) -> None:
    refuses(InputError, said, trainer().loader, data, **arguments)
