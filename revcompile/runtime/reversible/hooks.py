"""Hooks of layers and parameters while a branch runs for a second time.

A module's forward hooks and pre-hooks run in the forward pass. In the rebuild those run again that
took part in the computation: they returned something, or changed their module (weight norm sets a
weight) or a tensor they were given. The others only look on, and see every call once. Hooks on
gradients (`Tensor.register_hook`) of parameters run when the gradient is accumulated, as ever, not
already when the block's share of it is found.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from revcompile.errors import InputError
from revcompile.runtime.reversible.sharding import is_sharding_hook

__all__ = ["FORWARD_HOOKS", "HookRecord", "gradient_hooks_silenced", "recorded", "replayed"]

FORWARD_HOOKS: Final = ("_forward_pre_hooks", "_forward_hooks")
"""Where torch keeps a module's forward hooks: a dict by handle each."""

Hook = Callable[..., Any]
HookRecord = dict[nn.Module, dict[str, "OrderedDict[int, Hook]"]]
"""Of each module with hooks: what to run in their places in a rebuild."""


@contextmanager
def recorded(modules: Sequence[nn.Module], record: HookRecord) -> Iterator[None]:
    """Note in `record`, while a branch runs, which of the modules' hooks take part."""
    before = [(module, {kind: vars(module)[kind] for kind in FORWARD_HOOKS}) for module in modules]
    for module, hooks in before:
        again = record[module] = {}
        for kind, entries in hooks.items():
            again[kind] = OrderedDict.fromkeys(entries, _skipped)
            vars(module)[kind] = OrderedDict(
                (handle, _noting(module, hook, handle, again[kind]))
                for handle, hook in entries.items()
                if not is_sharding_hook(hook)
            )
    try:
        yield
    finally:
        for module, hooks in before:
            vars(module).update(hooks)


def _noting(
    module: nn.Module, hook: Hook, handle: int, again: OrderedDict[int, Hook]
) -> Callable[..., Any]:
    """The hook, which is to run again if it does more than look on."""

    def run(*given: Any) -> Any:
        looks_inside = not torch.is_grad_enabled()
        rest = _tapped(type(module).__name__, given[1:]) if looks_inside else given[1:]
        given_on = (module, *rest)
        before = _seen(module, given_on)
        with torch.enable_grad() if looks_inside else nullcontext():
            result = hook(*given_on)
        if result is not None or not _same(before, _seen(module, given_on)):
            again[handle] = hook
        return pytree.tree_map_only(Tensor, _detached, result) if looks_inside else result

    return run


class _Tap(torch.autograd.Function):
    """Tensors for a hook, from a forward pass that keeps no graph: a gradient is an error."""

    @staticmethod
    def forward(ctx: Any, name: str, anchor: Tensor, tensor: Tensor) -> Tensor:
        ctx.name = name
        return tensor.data  # the same memory, and no view: the hook may write into it

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise InputError(
            f"a gradient flows into a tensor that a forward hook took out of a reversible chain "
            f"(from a {ctx.name}), which keeps no graph of its forward pass, so the gradient would "
            "be lost. Let the model return the tensor, or store activations with "
            "net.reversible = False; detach what is only looked at"
        )


def _tapped(name: str, given: Any) -> Any:
    anchor = torch.empty(0, requires_grad=True)

    def tap(tensor: Tensor) -> Tensor:
        if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.is_inference():
            return tensor
        return _Tap.apply(name, anchor, tensor)  # type: ignore[no-any-return]

    with torch.enable_grad():
        return pytree.tree_map_only(Tensor, tap, given)


def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach() if tensor.requires_grad and tensor.grad_fn is not None else tensor


def _skipped(*_: Any) -> None:
    """Stands for a hook that looks on: the layer still counts as one with hooks."""


def _seen(module: nn.Module, given: tuple[Any, ...]) -> list[Any]:
    """All that a hook can change of its module and of the tensors it is given."""
    own = [entry for name, value in vars(module).items() for entry in (name, value)]
    tensors = [*module._parameters.values(), *module._buffers.values()]
    leaves = [leaf for leaf in pytree.tree_leaves(given[1:]) if isinstance(leaf, Tensor)]
    written = [t._version for t in (*tensors, *leaves) if t is not None and not t.is_inference()]
    return [*own, *tensors, tuple(written)]


def _same(before: list[Any], after: list[Any]) -> bool:
    *objects, versions = before
    *others, written = after
    return (
        len(objects) == len(others)
        and all(x is y for x, y in zip(objects, others, strict=True))
        and versions == written
    )


@contextmanager
def replayed(modules: Iterable[nn.Module], record: HookRecord) -> Iterator[None]:
    """Run the recorded hooks in the places of those that the modules have now."""
    before = [(module, {kind: vars(module)[kind] for kind in FORWARD_HOOKS}) for module in modules]
    for module, _ in before:
        none: dict[str, OrderedDict[int, Hook]] = {kind: OrderedDict() for kind in FORWARD_HOOKS}
        vars(module).update(record.get(module, none))
    try:
        yield
    finally:
        for module, hooks in before:
            vars(module).update(hooks)


def gradient_hooks_silenced(tensors: Sequence[Tensor]) -> AbstractContextManager[None]:
    """Let `torch.autograd.grad` find gradients of tensors without running their own hooks."""
    found = [hooks for tensor in tensors if (hooks := tensor._backward_hooks)]
    return _emptied(found) if found else nullcontext()


@contextmanager
def _emptied(dicts: Sequence[Any]) -> Iterator[None]:
    """Torch reads the dict of a tensor's hooks when it runs them."""
    contents = [dict(hooks) for hooks in dicts]
    for hooks in dicts:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, content in zip(dicts, contents, strict=True):
            hooks.update(content)
