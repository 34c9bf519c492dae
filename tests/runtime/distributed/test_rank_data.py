"""Inputs and targets of a micro-batch belong together, whatever loader each rank has."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from distributed_worker import compiled, launch, optimizer, outcome
from helpers import cases
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset
from training import settings_of

import revcompile
from revcompile.errors import InputError, RankError
from revcompile.runtime.executor.fingerprints import Fingerprint, compared, fingerprint
from revcompile.runtime.trainer.trainer import Trainer


def dataset(seed: int = 5) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(13, 3, 8, 8, generator=generator)
    return TensorDataset(x, torch.randint(0, 5, (13,), generator=generator))


class Augmented(Dataset[Any]):
    """Every process changes the inputs in its own way, as transforms without a seed do."""

    def __len__(self) -> int:
        return 13

    def __getitem__(self, index: int) -> Any:
        x, y = dataset()[index]
        return x + random.random(), y


def unseeded(rank: int) -> Any:
    return DataLoader(dataset(), 3, shuffle=True)


def distributed_sampler(rank: int) -> Any:
    found = dataset()
    return DataLoader(found, 3, sampler=DistributedSampler(found, 2, rank))


def seeded(rank: int) -> Any:
    return DataLoader(dataset(), 3, shuffle=True, generator=torch.Generator().manual_seed(1))


def augmented(rank: int) -> Any:
    return DataLoader(Augmented(), 3)


def targets_apart(rank: int) -> Any:
    """The first rank is given inputs alone, the last one both, of other samples."""
    loader = DataLoader(dataset(), 3, shuffle=True)
    return ((x, y if rank else None) for x, y in loader)


def only_what_is_needed(rank: int) -> Any:
    return ((None, y) if rank else (x, None) for x, y in seeded(rank))


LOADERS: Final[dict[str, Callable[[int], Any]]] = {
    f.__name__: f
    for f in (unseeded, distributed_sampler, seeded, augmented, targets_apart, only_what_is_needed)
}


def small(**options: Any) -> Any:
    torch.set_num_threads(1)  # as in `trainer_of`
    net, start = compiled("resnet", 2, "cpu")
    net.model.load_state_dict(start)
    return net.trainer(optimizer, F.cross_entropy, seed=7, **settings_of(**options, timeout=30.0))


def trained_on(trainer: Trainer, loader: Any) -> list[float]:
    found = [trainer.step(x, y).loss for x, y in loader]
    trainer.flush()
    return found


def own_loader(rank: int, options: dict[str, Any]) -> Any:
    """Train on a loader of the user's own; losses, or what is said, and the weights afterwards."""
    trainer = small()
    torch.manual_seed(rank)
    random.seed(rank)
    before = _parameters(trainer)
    losses, said = [], ""
    try:
        losses = trained_on(trainer, LOADERS[options["loader"]](rank))
    except (InputError, RankError) as error:
        said = f"{type(error).__name__}: {error}"
    after = _parameters(trainer)
    if not said:
        trainer.close()
    return losses, said, all(torch.equal(t, after[name]) for name, t in before.items())


def own_loaders(rank: int, options: dict[str, Any]) -> Any:
    return [own_loader(rank, {"loader": name}) for name in options["loaders"]]


def _parameters(trainer: Trainer) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in trainer.named_parameters()}


def through_trainer(rank: int, options: dict[str, Any]) -> Any:
    """The same loaders, by way of the trainer's."""
    found = []
    for name in options["loaders"]:
        trainer = small()
        torch.manual_seed(rank)
        random.seed(rank)
        loaders = [trainer.loader(LOADERS[name](rank), epoch=epoch) for epoch in range(2)]
        found.append([trained_on(trainer, loader) for loader in loaders])
        if hasattr(trainer, "close"):
            trainer.close()
    return found


class Broken:
    """Cannot be read where the targets are needed."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Any:
        if self.rank:
            raise InputError("the disk is gone")
        return iter(DataLoader(dataset(), 3))


def evaluate(rank: int, options: dict[str, Any]) -> Any:
    """Evaluation on loaders of the user's own: the loss, or what is said; training goes on."""
    net, start = compiled("resnet", 2, "cpu")
    net.model.load_state_dict(start)
    said = list[Any]()

    def factory(parameters: Any) -> Any:  # may look at the whole model
        assert net.to_module().state_dict().keys() == start.keys()
        return optimizer(parameters)

    trainer = net.trainer(factory, F.cross_entropy, seed=7, **settings_of(timeout=30.0))
    torch.manual_seed(rank)
    cases = [DataLoader(dataset(), 3), DataLoader(dataset(), 3, shuffle=True)]
    cases += [
        list(DataLoader(dataset(), 3))[: 3 + rank],
        list(DataLoader(dataset(), 3))[: 4 - rank],
    ]
    cases += [iter(DataLoader(dataset(), 3)), Broken(rank)]
    drawn = torch.get_rng_state()
    for loader in cases:
        said.append(outcome(lambda loader=loader: trainer.evaluate(loader).loss))  # type: ignore[misc]
    assert torch.equal(torch.get_rng_state(), drawn)
    trained_on(trainer, trainer.loader(dataset(), 3))
    trainer.close()
    return said


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
    """An evaluation with an odd last batch, and a step."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = torch.randn(10, 4)
    net = revcompile.petrafy(OwnLoss(False), 2, x[:4])
    trainer = net.trainer(optimizer, None, **settings_of(timeout=30.0))
    evaluation = trainer.evaluate(x.split(4))
    found = [evaluation.loss, evaluation.samples, trainer.step(x[:4]).samples]
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


pytestmark = pytest.mark.filterwarnings("ignore")
GENERATOR = torch.Generator().manual_seed(0)


@cases(
    "loader, what",
    ("unseeded", "targets"),
    ("distributed_sampler", "targets"),
    ("targets_apart", "inputs"),
)
def test_ranks_that_read_other_samples_are_stopped(tmp_path: Path, loader: str, what: str) -> None:
    results = launch(tmp_path, 2, own_loader, loader=loader, limit=60)
    text = f"trainer.step, micro-batch 0: rank 1 (stage 1) was given other {what} than rank 0"
    for kind, (losses, said, unchanged) in zip(("RankError", "InputError"), results, strict=True):
        assert losses == [] and unchanged
        assert said.startswith(kind) and text in said
        assert "DistributedSampler" in said and "trainer.loader(dataset_or_dataloader" in said


def test_ranks_that_agree_on_the_targets_train(tmp_path: Path) -> None:
    """Seeded alike, with inputs that every rank augments in its own way, or only what is needed."""
    loaders = ["seeded", "augmented", "only_what_is_needed"]
    results = launch(tmp_path, 2, own_loaders, loaders=loaders, limit=60)
    for found in results:
        assert [(len(losses), said) for losses, said, _ in found] == [(5, "")] * 3


def test_a_loader_of_the_users_own_is_the_same_on_ranks_and_in_one_process(tmp_path: Path) -> None:
    names = ["unseeded", "seeded"]
    results = launch(tmp_path, 2, through_trainer, loaders=names, limit=60)
    expected = through_trainer(0, {"loaders": names})
    assert results[1] == expected
    one, other = expected[0]
    assert len(one) == 5 and one != other  # epochs differ


def test_evaluation_reads_the_same_samples_or_says_so(tmp_path: Path) -> None:
    results = launch(tmp_path, 2, evaluate, limit=60)
    expected = small().evaluate(DataLoader(dataset(), 3)).loss
    for loss, shuffled, longer, shorter, iterated, broken in results:
        assert "the disk is gone" in broken
        assert loss == iterated == pytest.approx(expected, rel=1e-6)
        assert "evaluation, batch 0: rank 1 (stage 1) was given other targets" in shuffled
        assert "more batches where targets are needed" in longer
        assert "ends after 3 batches where targets are needed" in shorter


def test_samples_are_counted_where_the_output_does_not_tell(tmp_path: Path) -> None:
    alone = own_loss(0, {})
    assert alone[1:] == [10, 4]
    assert launch(tmp_path, 2, own_loss, limit=60) == [alone, alone]


def test_ranks_evaluate_unless_eval_mode_has_other_operations(tmp_path: Path) -> None:
    results = launch(tmp_path, 2, evaluate_modes, limit=60)
    alone = evaluate_modes(0, {})
    assert all(isinstance(loss, float) for loss in alone)
    for same, other in results:
        assert same == alone[0]
        assert "Modes computes something else in eval mode than in training" in other


# -- fingerprints ---------------------------------------------------------------------------------


@cases(
    "tensor",
    torch.randint(0, 2, (16,), generator=GENERATOR),
    torch.randint(0, 2, (4096,), generator=GENERATOR),
    torch.randn(6, 3, 32, 32, generator=GENERATOR),
    torch.randn(6, 3, 32, 32, dtype=torch.complex64, generator=GENERATOR),
    torch.rand(100, 50, 40, generator=GENERATOR) > 0.5,
    torch.randn(6, 3, 32, 32, generator=GENERATOR).half(),
    ids=lambda t: f"{t.dtype}{list(t.shape)}",
)
def test_a_fingerprint_depends_on_values_types_and_order(tensor: Tensor) -> None:
    assert not torch.equal(tensor, tensor.flip(0))
    mine = fingerprint(tensor, 0)
    assert 0 < mine < 2**63
    assert fingerprint({"a": tensor.clone()}, 0) == mine
    if tensor.dim() == 4:
        assert fingerprint(tensor.to(memory_format=torch.channels_last), 0) == mine
    others = [tensor.flip(0), tensor[:-1], tensor.to(torch.float64), [tensor, tensor]]
    assert len({mine, *(fingerprint(other, 0) for other in others)}) == 5


def test_what_cannot_be_compared_is_not() -> None:
    x, y = torch.randn(3, 2), torch.tensor([1, 2, 3])
    with_target, without = Fingerprint.of(x, y, 0), Fingerprint.of(x, None, 0)
    assert compared(with_target, None, y, 0) is None
    assert compared(with_target, x + 1, y, 0) is None  # augmented otherwise
    assert compared(with_target, x, y + 1, 0) == "targets"
    assert compared(without, x, y + 1, 0) is None
    assert compared(without, x + 1, y, 0) == "inputs"
    assert compared(without, None, y, 0) is None
    assert compared(with_target, x, None, 0) is None  # the loss has no target
    assert Fingerprint.of(None, None, 0) == Fingerprint()
    assert fingerprint(nn.Module(), 0) > 0  # nothing is known of it but that it is there
