"""Refuses, by name, changes of a model that compiled graphs and stages would not follow.

    Inlined      modules of a chain whose forward is part of the captured graph, and is never called
    TreeGuard    all modules, as they were when the stages were compiled
    StageGuard   what the stages of a trainer read of them, since the last step

A graph calls the layers inside an inlined module, not the module. A hook on the module would never
run, and a replacement would never be called: both are errors at the next call. Hooks on layers that
stages call are followed, and so are settings and weights: with nothing in flight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import compress
from operator import ne
from typing import Any, Final

import torch
from torch import Tensor, fx, nn

from revcompile.errors import InputError
from revcompile.ir.module_tree import TreeReads, child_path
from revcompile.ir.snapshot import (
    STRUCTURE,
    Change,
    Kind,
    TreeSnapshot,
    Watched,
    below,
    hooks_of,
    versions,
)
from revcompile.ir.types import PATH, Rewired

_LISTS: Final = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
"""Containers: a new member would change what the model computes.

Modules are compared by isinstance, because `fully_shard` changes a module's class.
"""


class Inlined:
    """The inlined modules of a rewired model, as they were when it was made."""

    def __init__(self, rewired: Rewired, root: nn.Module) -> None:
        graphs = rewired.graphs
        called = {str(n.target) for g in graphs for n in g.find_nodes(op="call_module")}
        within = tuple(f"{path}." for path in called)
        paths = {path for g in graphs for n in g.nodes for path in _enclosing_paths(n)}
        modules = dict(root.named_modules(remove_duplicate=False))
        # Calls of nn.Identity are left out of graphs.
        paths |= {path for path, module in modules.items() if type(module) is nn.Identity}
        inlined = [
            Watched(modules[path], path)
            for path in sorted(paths - called - {""})
            if path in modules and not path.startswith(within)
        ]  # rewiring has replaced the modules at other paths
        used = {modules[path] for path in called if path in modules}
        uncalled = [
            Watched(module, path)
            for path, module in modules.items()
            if path and module not in used and not path.startswith(within)
        ]
        edges = (each.path.rpartition(".")[::2] for each in uncalled)
        owners = [Watched(modules[path], path, frozenset([name])) for path, name in edges]
        lists = [each for each in uncalled if isinstance(each.module, _LISTS)]
        self._snapshots = (
            TreeSnapshot(owners, (Kind.MODULE,)),
            TreeSnapshot(lists, (Kind.MEMBERS,)),
            TreeSnapshot(inlined, (Kind.FORWARD, Kind.HOOK)),
        )
        self.hooked = tuple(each.path for each in inlined if hooks_of(each.module))
        """Paths of inlined modules that had hooks already, which were traced with the forward."""

    def check(self) -> None:
        """Raise if an inlined module was replaced, or given a hook, a forward or more members."""
        for snapshot in self._snapshots:
            if (change := snapshot.first_change()) is not None:
                raise InputError(_refusal(change))


def _refusal(change: Change) -> str:
    path, advice = change.where, f"or keep it whole with leaf_modules=[{change.where!r}]"
    if change.kind is Kind.MODULE:
        return (
            f"{path} was replaced after reversify, but the captured graph does not call it: what "
            f"its forward does is part of the graph; replace a layer inside {path}, or make the "
            f"change before reversify, {advice}"
        )
    if change.kind is Kind.HOOK:
        return (
            f"{path} has a hook that would never run: its forward is part of the captured graph. "
            f"Remove the hook and register it on a layer inside {path} (those are called), {advice}"
        )
    if change.kind is Kind.FORWARD and change.name == "compiled":
        return (
            f"{path}.compile() would have no effect: its forward is part of the captured graph. "
            "Write net.compile() for the whole reversible module: it compiles each coupling once"
        )
    what = "members" if change.kind is Kind.MEMBERS else "a forward"
    return (
        f"{path} was given {what} of its own after reversify, but all it calls is part of the "
        f"captured graph and would not change; make the change before reversify, {advice}"
    )


def _enclosing_paths(node: fx.Node) -> Iterator[str]:
    """The paths of the modules in whose forward a node was traced."""
    paths = [str(node.meta.get(PATH) or "")]
    if node.op in ("call_module", "get_attr"):
        paths.append(str(node.target).rpartition(".")[0])
    for path in paths:
        around = ""
        for name in filter(None, path.split(".")):
            around = child_path(around, name)
            yield around


# -- stages ---------------------------------------------------------------------------------------


class TreeGuard:
    """The module tree of a model, and whether it is still the one that stages were compiled for.

    Args:
        only_here: Leave out layers whose parameters are on other ranks.
    """

    def __init__(self, rewired: Rewired, root: nn.Module, *, only_here: bool = False) -> None:
        own, *inner = below(root)
        called = set(TreeReads(rewired.graphs, root).modules)
        uncalled = [watched for watched in below(root) if watched.module not in called]
        if only_here:
            of_layers = [each.module.parameters(recurse=False) for each in inner]
            are_here = [not any(p.is_meta for p in parameters) for parameters in of_layers]
            inner = list(compress(inner, are_here))
        self._snapshots = (
            TreeSnapshot([own, *inner], STRUCTURE),
            TreeSnapshot(uncalled, (Kind.HOOK,)),
        )

    def problem(self) -> str | None:
        """What has changed and what to do, or None."""
        found = filter(None, (snapshot.first_change() for snapshot in self._snapshots))
        change = next(found, None)
        if change is None:
            return None
        if change.kind is not Kind.HOOK:
            return (
                f"{change}, but stages are compiled for what there was at petrafy, and would not "
                "follow; undo the change, or make it before petrafy"
            )
        path = change.path
        advice = f", or keep the module whole with petrafy(leaf_modules=[{path!r}])" if path else ""
        return (
            f"{change} after petrafy, but stages never call this module: its forward is part of "
            "their programs. Undo that, and register hooks on the layers inside, which are "
            f"called{advice}"
        )


class StageGuard:
    """What stages read of a model, as the trainer's last call has left it.

    Optimizers hold these parameter objects, and stashed and cast weights are copies of them, so
    parameters may not be replaced. All else may change, but not with micro-batches in flight:
    backward computes them again, which needs the model of their forward passes.

    Args:
        watched: The parts of the model that stages read.
        parameters: The stages' parameters, and their copies of those of other stages.
    """

    def __init__(
        self, watched: Sequence[Watched], parameters: Sequence[tuple[str, Tensor]]
    ) -> None:
        kinds = Kind.PARAMETER, Kind.REQUIRES_GRAD, Kind.GRADIENT_HOOK
        self._parameters = TreeSnapshot(watched, kinds)
        self._layers = TreeSnapshot(watched, (Kind.SETTING, Kind.BUFFER, Kind.HOOK))
        self._weights = parameters
        self.take()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_versions": None}  # copies have other versions and addresses

    def take(self) -> None:
        """Expect layers and tensors as they are now."""
        self._layers.take()
        found = [*self._layers.values(Kind.BUFFER).items(), *self._weights]
        named = [(name, tensor) for name, tensor in found if _has_version(tensor)]
        self._names, self._tensors = [n for n, _ in named], [t for _, t in named]
        self.see()

    def see(self) -> None:
        """Expect the contents of tensors as they are now."""
        self._versions: list[int] | None = versions(self._tensors)

    def written(self) -> dict[str, Tensor]:
        """The parameters and buffers that were written to since `see`."""
        before, now = self._versions, versions(self._tensors)
        if before is None or before == now:
            return {}
        is_new = list(map(ne, before, now))
        found = zip(self._names, self._tensors, is_new, is_new[len(self._names) :], strict=False)
        return {name: tensor for name, tensor, *differs in found if any(differs)}

    def change(self) -> Change | None:
        """How modes, settings, buffers or hooks of layers have changed since `take`, or None."""
        return self._layers.first_change()

    def problem(self) -> str | None:
        """How parameters have changed and what to do, or None."""
        change = self._parameters.first_change()
        if change is None:
            return None
        if change.kind is Kind.GRADIENT_HOOK:
            return hooked(change.where)
        if change.kind is Kind.REQUIRES_GRAD:
            return f"{change} after the trainer was built; build a new trainer"
        return (
            f"{change} after the trainer was built; build a new trainer (or copy the values into "
            "the original parameter)"
        )


def changed_in_flight(change: Change) -> str:
    return (
        f"{change}, but micro-batches are in flight, whose backward passes need the model of their "
        "forward passes. Undo the change, call trainer.flush(), and change it then"
    )


def written_in_flight(name: str) -> str:
    return (
        f"{name} was written to, but micro-batches are in flight, or updates of weights that "
        "stages share. Call trainer.flush() before you write to weights or buffers, or write in a "
        "hook of the optimizer (optimizer.register_step_post_hook). This trainer can only go on "
        "from a state that it loads"
    )


def _has_version(tensor: Tensor | None) -> bool:
    is_strided = tensor is not None and tensor.layout is torch.strided
    return is_strided and not tensor.is_inference()  # type: ignore[union-attr]


def hooked(parameter: str) -> str:
    """Why a parameter with a gradient hook is refused."""
    return (
        f"{parameter} has a gradient hook, but stages compute gradients piece by piece and keep "
        "them themselves, so it would see parts of a gradient, or nothing; remove it, and work on "
        "whole gradients in a step hook of the optimizer (optimizer.register_step_pre_hook)"
    )
