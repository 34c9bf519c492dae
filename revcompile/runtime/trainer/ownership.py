"""Which trainer trains a model: the one that was made last.

Trainers write to the model's own parameters. Two that take turns would train each other's weights,
and weights that are loaded while micro-batches are in flight would get gradients that belong to
others: the trainer that cannot go on raises when it is used again.
"""

from __future__ import annotations

from typing import Any, Final, Protocol
from weakref import WeakKeyDictionary, ref

from torch import nn


class _Trains(Protocol):
    @property
    def is_unused(self) -> bool:
        """Has it not changed the model yet?"""
        ...

    def weights_loaded(self) -> None:
        """A state dict has been loaded into the model."""
        ...


_latest: Final[WeakKeyDictionary[nn.Module, ref[_Trains]]] = WeakKeyDictionary()


def take_over(model: nn.Module, trainer: _Trains) -> None:
    """From now on this trainer trains the model, and no other."""
    if model not in _latest:
        model.register_load_state_dict_post_hook(_tell_trainer)
    _latest[model] = ref(trainer)


def is_latest(model: nn.Module, trainer: _Trains, *, or_next_unused: bool = False) -> bool:
    """Is it the model's last trainer, or, with `or_next_unused`, are its weights still there?"""
    if model not in _latest:  # both are copies
        return True
    latest = _latest[model]()
    return latest is trainer or (or_next_unused and latest is not None and latest.is_unused)


def _tell_trainer(model: nn.Module, _: Any) -> None:
    """After `load_state_dict`; copies of the model have this hook, too, and no trainer."""
    latest = _latest.get(model)
    trainer = None if latest is None else latest()
    if trainer is not None:
        trainer.weights_loaded()
