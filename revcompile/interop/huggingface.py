"""What models of Hugging Face's transformers need besides `reversify` and `petrafy`."""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from revcompile.errors import InputError, warn
from revcompile.ir.policy import POLICY_MARK
from revcompile.losses import linear_cross_entropy
from revcompile.runtime.reversible.module import Reversible
from revcompile.runtime.reversible.original import OriginalSurface

__all__ = ["adopt_class", "call_arguments", "chunk_loss", "is_pretrained_model", "saved_policy"]

_Model = TypeVar("_Model", bound=nn.Module)


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
    Methods of the original are still checked as in `runtime/reversible/original.py`.
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


# -- the loss --------------------------------------------------------------------------------------


def chunk_loss(model: _Model) -> _Model:
    """Let a causal language model compute its training loss without ever storing all logits.

    In training, `model(input_ids, labels=labels)` returns the loss alone, computed for some rows of
    logits at a time (`revcompile.losses.linear_cross_entropy`). In eval mode, and without labels,
    the model works as before. Call this function before `reversify` or `petrafy`.

    Args:
        model: A model like `LlamaForCausalLM`. It is changed in place, and returned.

    Raises:
        InputError: The model's loss is not the cross entropy of a linear layer.
    """
    kind: Any = type(model)
    signature = inspect.signature(kind.forward)
    get_head: Any = getattr(model, "get_output_embeddings", lambda: None)
    if (
        get_head() is None
        or "labels" not in signature.parameters
        or not hasattr(model, "base_model")
    ):
        raise InputError(
            f"chunk_loss: {kind.__name__} is not a language model of transformers with labels and "
            "an output layer; in a model of your own call revcompile.losses.linear_cross_entropy"
        )

    @functools.wraps(kind.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs)
        if not self.training or given.arguments.get("labels") is None:
            return kind.forward(self, *args, **kwargs)
        return _with_loss(self, given)

    members = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "forward": forward}
    chunked = types.new_class(kind.__name__, (kind,), {}, lambda body: body.update(members))
    _refuse_other_loss(model)
    model.__class__ = chunked
    return model


def _with_loss(model: Any, given: inspect.BoundArguments) -> Any:
    """The output of the model's forward in training, without logits."""
    from transformers import modeling_outputs

    arguments = dict(given.arguments)
    inputs: dict[str, Any] = arguments.pop("kwargs", {})
    inputs |= {name: value for name, value in arguments.items() if name not in ("self", "labels")}
    items = inputs.pop("num_items_in_batch", None)
    for name in ("logits_to_keep", "return_dict"):
        inputs.pop(name, None)
    hidden = model.base_model(**inputs)[0]
    head = model.get_output_embeddings()
    targets = F.pad(given.arguments["labels"], (0, 1), value=-100)[..., 1:]
    reduction: Any = "mean" if items is None else "sum"
    loss = linear_cross_entropy(
        hidden, head.weight, targets, getattr(head, "bias", None), reduction=reduction
    )
    if items is not None:
        loss = loss / (items.to(loss.device) if isinstance(items, Tensor) else items)
    output: Any = modeling_outputs.CausalLMOutputWithPast
    return output(loss=loss)


def _refuse_other_loss(model: Any) -> None:
    """Raise if, on a few tokens, the model scales or caps its logits, or adds to the loss."""
    ids = torch.arange(16, device=model.device).view(2, 8)
    ids %= model.get_input_embeddings().num_embeddings
    read: list[Tensor] = []

    def enlarged(head: nn.Module, inputs: tuple[Tensor, ...], logits: Tensor) -> Tensor:
        read.extend((inputs[0], logits * 100))  # large enough that a cap shows
        return read[1]

    was_training = model.training
    hook = model.get_output_embeddings().register_forward_hook(enlarged)
    try:
        with torch.no_grad():
            out = model.eval()(input_ids=ids, labels=ids, use_cache=False)
            hidden = model.base_model(input_ids=ids, use_cache=False)[0]
    finally:
        hook.remove()
        model.train(was_training)
    targets = F.pad(ids, (0, 1), value=-100)[..., 1:]
    loss = F.cross_entropy(read[1].flatten(0, 1).float(), targets.flatten())
    differs = [
        what
        for what, have, want in (
            ("its output layer reads something else than the last hidden state", read[0], hidden),
            ("it does something to its logits", read[1], out.logits),
            ("its loss is not the cross entropy of its logits", loss, out.loss.float()),
        )
        if have.shape != want.shape or not torch.allclose(have, want)
    ]
    if differs:
        raise InputError(
            f"chunk_loss: {type(model).__name__} computes more than the cross entropy of a linear "
            f"layer: {differs[0]}. Leave chunk_loss out"
        )
