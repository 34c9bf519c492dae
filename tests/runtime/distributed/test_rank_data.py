"""Data enters on the rank of the first stage: the target goes with it, whatever its form is."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_worker import calls, compiled, differences, launch, optimizer, outcome
from rank_targets import IGNORED, TARGETS, net_of, trained_on
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from training import settings_of

import revcompile
from revcompile.errors import InputError

pytestmark = pytest.mark.filterwarnings("ignore")


# -- targets --------------------------------------------------------------------------------------


def test_a_target_of_any_form_reaches_the_last_rank(tmp_path: Path) -> None:
    """As in one process: by way of a rank in the middle, action by action and in captured steps."""
    runs = [(kind, backend) for kind in TARGETS for backend in ("eager", "static")]
    todo = [(trained_on, (kind, 3), {"backend": backend}) for kind, backend in runs]
    first, middle, last = launch(tmp_path, 3, calls, calls=todo)
    for number, (kind, backend) in enumerate(runs):
        expected, where = trained_on(kind, 3, backend=backend), f"{kind}, {backend}"
        assert last[number]["losses"] == expected["losses"], where
        assert first[number]["samples"] == last[number]["samples"] == expected["samples"], where
        assert last[number]["captured"] == first[number]["captured"] == expected["captured"], where
        for each in (first, middle, last):
            assert not differences(expected["state"], each[number]["state"]), where
            assert each[number]["evaluated"] == pytest.approx(expected["evaluated"]), where
        is_captured = backend == "static" and kind != "another form each time"
        assert (sum(expected["captured"]) > 2) == is_captured, where


def test_the_targets_of_copies_of_the_pipeline_go_to_their_own_last_ranks(tmp_path: Path) -> None:
    assert launch(tmp_path, 4, of_copies) == [[0.0, 1.0]] * 4


def of_copies(rank: int, options: dict[str, Any]) -> list[float]:
    """Targets that tell which copy they are of: the mean loss of each copy, on every rank."""
    trainer = net_of(2).trainer(
        optimizer, lambda output, target: output.mean() * 0 + target, **settings_of(timeout=60.0)
    )
    given = (torch.randn(3, 7), torch.tensor(float(trainer.replica)))
    loss = trainer.step(*(given if trainer.is_first else IGNORED)).loss
    found = trainer._placement.gather(loss)
    trainer.flush()
    trainer.close()
    return [loss for loss in found if loss == loss]


class Opaque:
    """No tensor, and nothing that can be sent."""


def refused(rank: int, options: dict[str, Any]) -> Any:
    """Targets that cannot be used: what each rank says, and the losses of the others."""
    net = net_of(2)
    loss = lambda output, target: F.cross_entropy(output, target["label"])  # noqa: E731
    trainer = net.trainer(optimizer, loss, **settings_of(timeout=60.0))
    label = torch.tensor([0, 1, 2])
    targets = [label, label.to_sparse(), torch.nested.nested_tensor([label]), Opaque()]
    targets += [label.to("meta"), label[:1], label, None]
    said = []
    for target in targets:
        x = torch.ones(3, 7)
        given = (x, None if target is None else {"label": target}) if trainer.is_first else ()
        said.append(outcome(lambda given=given: trainer.step(*given).samples))  # type: ignore[misc]
    trainer.flush()
    trainer.close()
    return said


def test_a_target_that_cannot_be_used_is_skipped_by_all(tmp_path: Path) -> None:
    first, last = launch(tmp_path, 2, refused)
    for number, said in {
        1: "the target goes to the rank of the last stage, but it has a value of layout",
        2: "but it has a value of layout nested; give nested tuples, lists",
        3: "Opaque; give nested tuples, lists and dicts of dense tensors",
        4: "a tensor on the meta device",
    }.items():
        assert said in first[number] and last[number] == 0
    assert [first[i] for i in (0, 5, 6, 7)] == [3] * 4
    assert last[0] == last[6] == 3
    assert "check that the target fits the output" in last[5]
    assert "with the target where the inputs are" in last[7]


# -- loaders --------------------------------------------------------------------------------------


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(13, 3, 8, 8, generator=generator)
    return TensorDataset(x, torch.randint(0, 5, (13,), generator=generator))


def small(**options: Any) -> Any:
    torch.set_num_threads(1)  # as in `trainer_of`
    net, start = compiled("resnet", 2, "cpu")
    net.model.load_state_dict(start)
    return net.trainer(optimizer, F.cross_entropy, seed=7, **settings_of(**options, timeout=30.0))


def read(rank: int, options: dict[str, Any]) -> Any:
    """Losses with the trainer's loader; of steps with another order on every rank."""
    losses = []
    for steps in (False, True):
        trainer = small()
        torch.manual_seed(rank)
        order = None if rank else torch.Generator().manual_seed(3)
        own = DataLoader(dataset(), 3, shuffle=True, generator=order)
        loader = own if steps else trainer.loader(dataset(), 3)
        losses.append([metrics.loss for metrics in trainer.steps(loader)])
        trainer.flush()
        trainer.close()
    return losses


def test_only_the_first_rank_decides_what_is_read(tmp_path: Path) -> None:
    _, last = launch(tmp_path, 2, read)
    alone = read(0, {})
    assert last == alone and len(alone[0]) == len(alone[1]) == 5 and alone[0] != alone[1]


class Broken:
    """Ends with an error."""

    def __iter__(self) -> Iterator[Any]:
        yield from DataLoader(dataset(), 3)
        raise InputError("the disk is gone")


class Unread:
    """What ranks that need no data are given."""

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("read")


def evaluate(rank: int, options: dict[str, Any]) -> Any:
    """Evaluations on one trainer: each loss, or what is said; training goes on."""
    net, start = compiled("resnet", 2, "cpu")
    net.model.load_state_dict(start)
    said = list[Any]()

    def factory(parameters: Any) -> Any:  # may look at the whole model
        assert net.to_module().state_dict().keys() == start.keys()
        return optimizer(parameters)

    trainer = net.trainer(factory, F.cross_entropy, seed=7, **settings_of(timeout=30.0))
    loaders = [DataLoader(dataset(), 3), iter(DataLoader(dataset(), 3)), Broken(), [(1, 2)]]
    drawn = torch.get_rng_state()
    for loader in loaders:
        given = Unread() if rank else loader
        said.append(outcome(lambda given=given: trainer.evaluate(given).loss))  # type: ignore[misc]
    assert torch.equal(torch.get_rng_state(), drawn)
    losses = [metrics.loss for metrics in trainer.steps(trainer.loader(dataset(), 3))]
    trainer.close()
    return said, losses


def test_evaluation_reads_on_the_first_rank_alone(tmp_path: Path) -> None:
    expected = small().evaluate(DataLoader(dataset(), 3)).loss
    for (loss, iterated, broken, wrong), losses in launch(tmp_path, 2, evaluate):
        assert loss == iterated == pytest.approx(expected, rel=1e-6)
        assert "the disk is gone" in broken
        assert "expected" in wrong
        assert len(losses) == 5


# -- what a model returns -------------------------------------------------------------------------


class Modes(nn.Module):
    """Another constant in eval mode, or another operation."""

    def __init__(self, is_other_operation: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.is_other_operation = is_other_operation

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x).tanh()
        x = x + F.dropout(self.second(x), 0.5, self.training)
        return x.tanh() if self.is_other_operation and self.training else x


class OwnLoss(Modes):
    """Its output has no dimension for samples."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


def own_loss(rank: int, options: dict[str, Any]) -> Any:
    """An evaluation and steps with an odd last batch, of inputs alone."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = torch.randn(10, 4)
    net = revcompile.petrafy(OwnLoss(False), 2, x[:4])
    trainer = net.trainer(optimizer, None, **settings_of(timeout=30.0))
    data = x.split(4) if trainer.is_first else [None] * 3
    evaluation = trainer.evaluate(data)
    found = [evaluation.loss, evaluation.samples]
    found += [metrics.samples for metrics in trainer.steps(data)]
    trainer.close()
    return found


def evaluate_modes(rank: int, options: dict[str, Any]) -> list[float | str]:
    """The loss of an evaluation, or what is said, of a model whose modes differ."""
    torch.set_num_threads(1)
    found = list[float | str]()
    for is_other_operation in (False, True):
        torch.manual_seed(0)
        x = torch.randn(3, 4)
        net = revcompile.petrafy(Modes(is_other_operation), 2, x)
        trainer = net.trainer(optimizer, F.mse_loss, **settings_of(timeout=30.0))
        found.append(outcome(lambda batch=(x, x), t=trainer: t.evaluate([batch]).loss))  # type: ignore[misc]
        trainer.close()
    return found


def test_samples_are_counted_where_the_output_does_not_tell(tmp_path: Path) -> None:
    alone = own_loss(0, {})
    assert alone[1:] == [10, 4, 4, 2]
    assert launch(tmp_path, 2, own_loss, limit=60) == [alone, alone]


def test_ranks_evaluate_unless_eval_mode_has_other_operations(tmp_path: Path) -> None:
    results = launch(tmp_path, 2, evaluate_modes, limit=60)
    alone = evaluate_modes(0, {})
    assert all(isinstance(loss, float) for loss in alone)
    for same, other in results:
        assert same == alone[0]
        assert "Modes computes something else in eval mode than in training" in other
