"""Every rank reads the same order from one seed, its share of it, or nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import revcompile
from revcompile.errors import InputError
from revcompile.runtime.data import SameOrder, same_order
from revcompile.runtime.trainer import Trainer


def test_every_rank_reads_the_same_order_from_one_seed() -> None:
    rows = TensorDataset(torch.arange(10.0))
    first, again = (torch.cat([x for (x,) in same_order(rows, 4, seed=3)]) for _ in range(2))
    torch.manual_seed(99)
    assert torch.equal(first, again) and not torch.equal(first, torch.arange(10.0))
    other = torch.cat([x for (x,) in same_order(rows, 4, seed=3, epoch=1)])
    assert not torch.equal(first, other) and torch.equal(first.sort()[0], other.sort()[0])


def test_copies_of_the_pipeline_share_the_data() -> None:
    shares = [list(SameOrder(range(7), seed=0, replica=r, replicas=3)) for r in range(3)]
    assert [len(share) for share in shares] == [2, 2, 2]
    assert len({sample for share in shares for sample in share}) == 6


def test_the_first_batches_can_be_passed_over() -> None:
    rows = TensorDataset(torch.arange(10.0))
    whole = [x.tolist() for (x,) in same_order(rows, 4, seed=3)]
    rest = same_order(rows, 4, seed=3, skip=1)
    assert [x.tolist() for (x,) in rest] == whole[1:] and len(rest) == 2
    assert list(same_order(rows, 4, seed=3, skip=9)) == []


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
    return net.trainer(lambda p: torch.optim.SGD(p, lr=0.1), nn.functional.mse_loss, **options)


def test_a_trainer_s_loader_depends_on_its_seed_and_the_epoch() -> None:
    rows = TensorDataset(torch.arange(10.0))
    one, again = (trainer(seed=5).loader(rows, 4) for _ in range(2))
    assert [x.tolist() for (x,) in one] == [x.tolist() for (x,) in again]
    for other in (trainer(seed=6).loader(rows, 4), trainer(seed=5).loader(rows, 4, epoch=1)):
        assert [x.tolist() for (x,) in other] != [x.tolist() for (x,) in one]


@pytest.mark.parametrize("skip", [0, 1])
def test_a_rank_in_the_middle_reads_nothing(monkeypatch: pytest.MonkeyPatch, skip: int) -> None:
    middle = trainer()
    monkeypatch.setattr(Trainer, "is_first", False)
    monkeypatch.setattr(Trainer, "is_last", False)
    loader = middle.loader(Untouched(), 4, skip=skip)
    assert list(loader) == [(None, None)] * (3 - skip) and len(loader) == 3 - skip


def test_a_dataset_without_a_length_is_refused() -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(())

    with pytest.raises(InputError, match="Stream has no length"):
        trainer().loader(Stream(), 4)
