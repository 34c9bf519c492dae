"""Which trainer trains a model: the one that was made last.

Trainers write to the model's own parameters. Two that take turns would train each other's weights,
and weights that are loaded while micro-batches are in flight would get gradients that belong to
others: the trainer that cannot go on raises when it is used again.
"""

from __future__ import annotations

from typing import Any, Final
from weakref import WeakKeyDictionary, ref

from torch import nn

from revcompile.errors import TrainerStoppedError

_latest: Final[WeakKeyDictionary[nn.Module, ref[Any]]] = WeakKeyDictionary()


def make_latest(trainer: Any, model: nn.Module) -> None:
    """Let a trainer train a model from now on; it is told of weights that are loaded into it."""
    if model not in _latest:
        model.register_load_state_dict_post_hook(_tell_trainer)
    _latest[model] = ref(trainer)


def check_latest(trainer: Any, model: nn.Module, to_read: bool) -> None:
    """Raise if another trainer has taken over; the state can be read until that one trains."""
    found = _latest.get(model)
    latest = trainer if found is None else found()  # None if both are copies
    is_unused = latest is not None and latest.microbatches_seen == 0
    if latest is not trainer and not (to_read and is_unused):
        raise TrainerStoppedError(
            "net.trainer(...) has been called again, and the new trainer trains the model since; "
            "use that one, or call petrafy once more for a model of its own"
        )


def _tell_trainer(model: nn.Module, _: Any) -> None:
    """After `load_state_dict`; copies of the model have this hook, too, and no trainer."""
    latest = _latest.get(model)
    trainer = None if latest is None else latest()
    if trainer is not None:
        trainer._weights_loaded()
