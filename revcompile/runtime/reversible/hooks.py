"""Module hooks where a module's forward is part of a captured graph, or runs a second time.

A module's forward hooks and pre-hooks run in the forward pass. In a rebuild those run again that
took part in the computation: they returned something, or changed their module (weight norm sets a
weight) or a tensor they were given. The others only observe, and see every call once. Gradient
hooks of parameters (`Tensor.register_hook`) run when the gradient is accumulated, as always, not
when a block computes its part of it.

FSDP2 gathers a module's parameters in a pre-hook and frees them in a hook. Where `fully_shard` was
applied to a module whose forward is inlined into the graph, each block (or segment) made of its
layers calls these hooks in its place:

    unshard(modules, (b,))      gather; after the block's backward: reduce gradients, free
    reshard(modules, (y,))      free; before the block's backward: gather

Only tensors of the outer graph are passed to them; inside a block, and in its rebuild, the FSDP
hooks of layers are skipped.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import is_
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from revcompile.errors import InputError
from revcompile.ir.snapshot import HOOKS, is_sharding_hook
from revcompile.runtime.reversible.slots import Slot, filled

# -- FSDP2 modules --------------------------------------------------------------------------------


class ShardedModule(NamedTuple):
    """A module that `fully_shard` was applied to."""

    path: str
    module: nn.Module


def sharded_modules(modules: Iterable[tuple[nn.Module, str]]) -> tuple[ShardedModule, ...]:
    """Those of the modules (and their paths) that `fully_shard` was applied to."""
    return tuple(
        ShardedModule(path, module)
        for module, path in modules
        if any(map(is_sharding_hook, module._forward_hooks.values()))
    )


def unshard(modules: Sequence[ShardedModule], tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    """Gather the modules' parameters, outermost first; returns the tensors to go on with."""
    for path, module in modules:
        for hook in filter(is_sharding_hook, module._forward_pre_hooks.values()):
            tensors = _not_cast(path, tensors, hook(module, tensors, {})[0])
    return tensors


def reshard(modules: Sequence[ShardedModule], tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    """Free the modules' parameters, innermost first."""
    for path, module in reversed(modules):
        for hook in filter(is_sharding_hook, module._forward_hooks.values()):
            with warnings.catch_warnings():
                # about in-place operations on views, which captured graphs do not have
                warnings.filterwarnings("ignore", ".*returned a view tensor")
                tensors = _not_cast(path, tensors, hook(module, (), tensors))
    return tensors


def _not_cast(path: str, before: tuple[Any, ...], after: tuple[Any, ...]) -> tuple[Any, ...]:
    for old, new in zip(before, after, strict=True):
        if isinstance(old, Tensor) and old.dtype != new.dtype:
            raise InputError(
                f"{path}: fully_shard would cast its inputs or outputs to {new.dtype}, but "
                "residual streams keep their type inside a reversible chain; give it "
                "MixedPrecisionPolicy(..., cast_forward_inputs=False) without output_dtype, or "
                "shard the whole model only"
            )
    return after


# -- forward hooks in a rebuild -------------------------------------------------------------------


FORWARD_HOOKS: Final = ("_forward_pre_hooks", "_forward_hooks")
"""Where torch keeps a module's forward hooks: a dict by handle each."""

Hook = Callable[..., Any]
HookRecord = dict[nn.Module, dict[str, "OrderedDict[int, Hook]"]]
"""For each module with hooks: which to run in a rebuild, by kind and handle."""


def _recorded(modules: Sequence[nn.Module], record: HookRecord) -> AbstractContextManager[None]:
    """Note in `record`, while a branch runs, which of the modules' hooks are to run again."""
    marking: list[tuple[Slot, Any]] = []
    for module in modules:
        record[module] = {}
        for kind in FORWARD_HOOKS:
            entries = vars(module)[kind]
            rerun = record[module][kind] = OrderedDict.fromkeys(entries, _skipped)
            hooks = OrderedDict(
                (handle, _marking(module, hook, handle, rerun))
                for handle, hook in entries.items()
                if not is_sharding_hook(hook)
            )
            marking.append(((vars(module), kind), hooks))
    return filled(marking)


def _marking(
    module: nn.Module, hook: Hook, handle: int, rerun: OrderedDict[int, Hook]
) -> Callable[..., Any]:
    """The hook, which marks itself to run again if it does more than observe."""

    def run(*given: Any) -> Any:
        looks_inside = not torch.is_grad_enabled()
        rest = _tapped(type(module).__name__, given[1:]) if looks_inside else given[1:]
        given_on = (module, *rest)
        before = _seen(module, given_on)
        with torch.enable_grad() if looks_inside else nullcontext():
            result = hook(*given_on)
        if result is not None or not _same(before, _seen(module, given_on)):
            rerun[handle] = hook
        return pytree.tree_map_only(Tensor, _detached, result) if looks_inside else result

    return run


class _Tap(torch.autograd.Function):
    """Tensors for a hook in a forward pass without a graph: a gradient to them is an error."""

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
            "net.reversible = False; detach what you only observe"
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
    """Replaces a hook that only observes: the layer still counts as one with hooks."""


def _seen(module: nn.Module, given: tuple[Any, ...]) -> tuple[list[Any], list[int]]:
    """All that a hook could change of its module and of the tensors it is given, and versions."""
    own = [entry for name, value in vars(module).items() for entry in (name, value)]
    tensors = [*module._parameters.values(), *module._buffers.values()]
    leaves = [leaf for leaf in pytree.tree_leaves(given[1:]) if isinstance(leaf, Tensor)]
    written = [t._version for t in (*tensors, *leaves) if t is not None and not t.is_inference()]
    return [*own, *tensors], written


def _same(before: tuple[list[Any], list[int]], after: tuple[list[Any], list[int]]) -> bool:
    (objects, versions), (others, written) = before, after
    return len(objects) == len(others) and all(map(is_, objects, others)) and versions == written


class LayerHooks:
    """The hooks of layers that run in forward, and perhaps again in backward."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.layers = layers
        self._forward = [vars(layer)[kind] for layer in layers for kind in FORWARD_HOOKS]
        self._all = [vars(layer)[kind] for layer in layers for kind in HOOKS]

    def __bool__(self) -> bool:
        """Does any layer have hooks now?"""
        return any(self._all)

    @property
    def run_in_forward(self) -> bool:
        """Does any layer have forward hooks now?"""
        return any(self._forward)

    def recorded(self, record: HookRecord) -> AbstractContextManager[None]:
        """Around forward; notes in `record` what is to run again."""
        return _recorded(self.layers, record) if self.run_in_forward else nullcontext()

    def replayed(self, record: HookRecord | None) -> AbstractContextManager[None]:
        """Around backward, in which the recorded hooks run, or, if None, the present ones."""
        if record is None or not (record or self.run_in_forward):
            return nullcontext()
        kinds = [(layer, kind) for layer in self.layers for kind in FORWARD_HOOKS]
        return filled(
            [((vars(m), kind), record.get(m, {}).get(kind, OrderedDict())) for m, kind in kinds]
        )


def gradient_hooks_silenced(tensors: Sequence[Tensor]) -> AbstractContextManager[None]:
    """Around `torch.autograd.grad`: the tensors' own gradient hooks do not run."""
    hooks = [tensor._backward_hooks for tensor in tensors if tensor._backward_hooks]
    return _emptied(hooks) if hooks else nullcontext()


@contextmanager
def _emptied(dicts: Sequence[Any]) -> Iterator[None]:
    """Empty the dicts of hooks in place: torch holds on to them."""
    contents = [dict(hooks) for hooks in dicts]
    for hooks in dicts:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, content in zip(dicts, contents, strict=True):
            hooks.update(content)
