"""Modules whose forward is part of the captured graph, and is never called.

The graph calls their layers. A hook on such a module would never run, and a module put in its place
would never be called: both are errors at the next call.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from torch import fx, nn

from revcompile.errors import InputError
from revcompile.ir.module_tree import child_path
from revcompile.ir.types import PATH, Rewired
from revcompile.runtime.reversible.hooks import MODULE_HOOKS, is_sharding_hook
from revcompile.runtime.reversible.slots import Column

_LISTS: Final = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
"""Containers: a new member would change what the model computes.

By isinstance: `fully_shard` changes a module's class.
"""


class Inlined:
    """The inlined modules of a rewired model, as they were when it was made."""

    def __init__(self, rewired: Rewired, root: nn.Module) -> None:
        graphs = rewired.graphs
        called = {str(n.target) for g in graphs for n in g.find_nodes(op="call_module")}
        within = tuple(f"{path}." for path in called)
        paths = {path for g in graphs for n in g.nodes for path in _enclosing_paths(n)}
        # Calls of nn.Identity are left out of graphs.
        paths |= {path for path, m in root.named_modules() if type(m) is nn.Identity}
        self._slots: list[tuple[dict[str, Any], str, nn.Module, str]] = []
        """Where each module is, its name there, the module, and its path."""
        for path in sorted(paths - called - {""}):
            outer, _, name = path.rpartition(".")
            try:
                owner = None if path.startswith(within) else root.get_submodule(outer)
            except AttributeError:  # rewiring has put something else there
                continue
            if owner is not None and (module := owner._modules.get(name)) is not None:
                self._slots.append((owner._modules, name, module, path))
        self._modules = [module for _, _, module, _ in self._slots]
        self._hook_counts = list(map(_hook_count, self._modules))
        # Columns, to compare without a loop in Python in every call.
        self._children = Column((children, name) for children, name, _, _ in self._slots)
        self._dicts = list(map(vars, self._modules))
        self._lists = [own["_modules"] for own in self._dicts]
        self._hooks = [own[kind] for own in self._dicts for kind in MODULE_HOOKS]
        self._before = self._now()

    def _now(self) -> tuple[list[Any], ...]:
        forwards = [own.get("forward") for own in self._dicts]
        return forwards, list(map(len, self._lists)), list(map(len, self._hooks))

    @property
    def hooked(self) -> tuple[str, ...]:
        """Those that had hooks already, which were traced with the forward."""
        pairs = zip(self._slots, self._hook_counts, strict=True)
        return tuple(path for (_, _, _, path), count in pairs if count)

    def check(self) -> None:
        """Raise if an inlined module was replaced, or given a hook, a forward or more members."""
        if not self._children.holds(self._modules):
            path = next(p for children, n, m, p in self._slots if children.get(n) is not m)
            raise InputError(
                f"{path} was replaced after reversify, but its forward is part of the captured "
                f"graph and would not be called; replace a layer inside {path}, or make the "
                f"change before reversify, or keep it whole with leaf_modules=[{path!r}]"
            )
        now = self._now()
        if now != self._before:
            self._refuse(*now[:2])

    def _refuse(self, forwards: list[Any], members: list[int]) -> None:
        """Raise, unless what has changed is allowed: FSDP's hooks, members of other modules."""
        own_forwards, own_members = self._before[:2]
        for index, (_, _, module, path) in enumerate(self._slots):
            has_members = isinstance(module, _LISTS) and members[index] != own_members[index]
            if has_members or forwards[index] != own_forwards[index]:
                what = "members" if has_members else "a forward"
                raise InputError(
                    f"{path} was given {what} of its own after reversify, but all it calls is "
                    "part of the captured graph and would not change; make the change before "
                    f"reversify, or keep it whole with leaf_modules=[{path!r}]"
                )
            if _hook_count(module) != self._hook_counts[index]:
                raise InputError(
                    f"{path} has a hook that would never run: its forward is part of the captured "
                    f"graph. Remove the hook and register it on a layer inside {path} (those are "
                    f"called), or keep the module whole with leaf_modules=[{path!r}]"
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


def _hook_count(module: nn.Module) -> int:
    hooks = [hook for kind in MODULE_HOOKS for hook in vars(module)[kind].values()]
    return sum(not is_sharding_hook(hook) for hook in hooks)
