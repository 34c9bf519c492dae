"""What models of Hugging Face's transformers need besides `reversify` and `petrafy`."""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from revcompile.errors import warn
from revcompile.ir.policy import POLICY_MARK
from revcompile.runtime.reversible.module import Reversible
from revcompile.runtime.reversible.original import OriginalSurface

__all__ = ["adopt_class", "call_arguments", "is_pretrained_model", "saved_policy"]


# -- the class of the original ---------------------------------------------------------------------


def is_pretrained_model(model: nn.Module) -> bool:
    """Whether it is a model of transformers; does not import the library."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(model, modeling.PreTrainedModel)


def saved_policy(model: nn.Module) -> str | None:
    """The policy whose function its weights were trained for; None for the model's own."""
    policy: str | None = vars(getattr(model, "config", None) or type).get(POLICY_MARK)
    return policy if is_pretrained_model(model) else None


def call_arguments(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments in the form in which equal calls are alike.

    None and a missing argument are the same. The count of targets, by which the Trainer has losses
    divided, is new in every call, so it is a tensor.

    >>> call_arguments({"labels": None, "num_items_in_batch": 7})
    {'num_items_in_batch': tensor(7)}
    """
    given = {name: value for name, value in kwargs.items() if value is not None}
    if isinstance(count := given.get("num_items_in_batch"), int | float):
        given["num_items_in_batch"] = torch.tensor(count)
    return given


def adopt_class(net: Reversible) -> None:
    """Make a reversible module an instance of its original's class, too.

    Trainers check for that class: they save only a `PreTrainedModel` with its configuration, and
    the signature of `forward` tells them which columns of a dataset it takes and what a label is.
    Methods of the original run as `runtime/reversible/original.py` says.
    """
    own: Any = type(net)
    kind: Any = net._original.kind
    if kind is not None:
        net.__class__ = _class_of_both(own, kind)


@functools.cache
def _class_of_both(own: Any, kind: Any) -> Any:
    inherited = {name for base in own.__mro__ for name in vars(base)}
    members: dict[str, Any] = {
        name: _OfOriginal(name, kind)
        for name in dir(kind)
        if not name.startswith("_")
        and name not in inherited
        and hasattr(inspect.getattr_static(kind, name), "__get__")
    }

    def reduce(self: Any, protocol: Any) -> Any:  # unpickling makes this class again
        return _restored, (own, self._original.importable_kind), self.__getstate__()

    def save_pretrained(self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        save, config = self._of_original("save_pretrained"), vars(self.config)
        if not self.rewired.is_another_function:
            config.pop(POLICY_MARK, None)
            return save(save_directory, *args, **kwargs)
        policy = config[POLICY_MARK] = self.rewired.policy.value
        name = kind.__name__
        warn(
            f"save_pretrained: these weights were trained with policy={policy!r}, and {name} "
            f"computes another function with them, although {name}.from_pretrained loads "
            f"{str(save_directory)!r}. Pass what it returns to reversify or petrafy, which find "
            f"the policy in its config"
        )
        return save(save_directory, *args, **kwargs)

    members |= {"__reduce_ex__": reduce, "__module__": kind.__module__}
    members["save_pretrained"] = save_pretrained
    members["_reserved_names"] = own._reserved_names  # not those of `kind`
    members["__qualname__"] = kind.__qualname__
    return types.new_class(kind.__name__, (own, kind), {}, lambda body: body.update(members))


def _restored(own: Any, kind: Any) -> Reversible:
    """An instance without attributes; pickle sets them."""
    made: Any = own if kind is None else _class_of_both(own, kind)
    module: Reversible = made.__new__(made)
    return module


class _OfOriginal:
    """A method or property of the original's class, on a module that was made from it."""

    def __init__(self, name: str, kind: type[nn.Module]) -> None:
        self.name, self.kind = name, kind

    def __get__(self, module: OriginalSurface | None, owner: Any = None) -> Any:
        return getattr(self.kind, self.name) if module is None else module._of_original(self.name)
