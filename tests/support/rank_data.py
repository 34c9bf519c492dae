"""What a rank does in the tests of its data: loaders of the user's own, and the trainer's."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

import torch
from distributed_worker import compiled, optimizer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset
from training import settings_of

import revcompile
from revcompile.errors import InputError, RankError
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


def evaluate(rank: int, options: dict[str, Any]) -> Any:
    """Evaluation on loaders of the user's own: the loss, or what is said; training goes on."""
    trainer, said = small(), list[Any]()
    torch.manual_seed(rank)
    cases = [DataLoader(dataset(), 3), DataLoader(dataset(), 3, shuffle=True)]
    cases += [
        list(DataLoader(dataset(), 3))[: 3 + rank],
        list(DataLoader(dataset(), 3))[: 4 - rank],
    ]
    cases += [iter(DataLoader(dataset(), 3))]
    for loader in cases:
        try:
            said.append(trainer.evaluate(loader).loss)
        except InputError as error:
            said.append(str(error))
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


def evaluate_modes(rank: int, options: dict[str, Any]) -> list[float | str]:
    """The loss of an evaluation, or what is said, of a model whose modes differ."""
    torch.set_num_threads(1)
    found = list[float | str]()
    for is_other_operation in (False, True):
        torch.manual_seed(0)
        x = torch.randn(3, 4)
        net = revcompile.petrafy(Modes(is_other_operation), 2, x)
        trainer = net.trainer(optimizer, F.mse_loss, **settings_of(timeout=30.0))
        try:
            found.append(trainer.evaluate([(x, x)]).loss)
        except InputError as error:
            found.append(str(error))
        trainer.close()
    return found
