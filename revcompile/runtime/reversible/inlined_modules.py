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
from revcompile.runtime.reversible.hooks import FORWARD_HOOKS, is_sharding_hook

__all__ = ["Inlined"]

_HOOKS: Final = (*FORWARD_HOOKS, "_backward_pre_hooks", "_backward_hooks")

_LISTS: Final = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
"""Containers: a new member would change what the model computes."""


class Inlined:
    """The inlined modules of a rewired model, as they were when it was made."""

    def __init__(self, rewired: Rewired, root: nn.Module) -> None:
        graphs = list(_graphs(rewired))
        called = {str(n.target) for g in graphs for n in g.find_nodes(op="call_module")}
        self._slots: list[tuple[dict[str, Any], str, nn.Module, str]] = []
        self._hooks: list[tuple[nn.Module, str, int]] = []
        self._identities: list[tuple[nn.Module, str, Any]] = []
        within = tuple(f"{path}." for path in called)
        paths = {path for g in graphs for n in g.nodes for path in _enclosing_paths(n)}
        for path in sorted(paths - called - {""}):
            if not path.startswith(within):
                self._add(root, path)

    def _add(self, root: nn.Module, path: str) -> None:
        outer, _, name = path.rpartition(".")
        try:
            owner = root.get_submodule(outer)
        except AttributeError:  # rewiring has put something else there
            return
        module = owner._modules.get(name)
        if module is not None:
            self._slots.append((owner._modules, name, module, path))
            self._hooks.append((module, path, _hook_count(module)))
            self._identities.append((module, path, _code_identity(module)))

    @property
    def hooked(self) -> tuple[str, ...]:
        """Those that had hooks already, which were traced with the forward."""
        return tuple(path for _, path, count in self._hooks if count)

    def check(self) -> None:
        """Raise if an inlined module was replaced, or given a hook, a forward or more members."""
        for children, name, module, path in self._slots:
            if children.get(name) is not module:
                raise InputError(
                    f"{path} was replaced after reversify, but its forward is part of the captured "
                    f"graph and would not be called; replace a layer inside {path}, or make the "
                    f"change before reversify, or keep it whole with leaf_modules=[{path!r}]"
                )
        for module, path, identity in self._identities:
            if _code_identity(module) != identity:
                what = "members" if isinstance(module, _LISTS) else "a forward"
                raise InputError(
                    f"{path} was given {what} of its own after reversify, but all it calls is "
                    "part of the captured graph and would not change; make the change before "
                    f"reversify, or keep it whole with leaf_modules=[{path!r}]"
                )
        for module, path, count in self._hooks:
            if _hook_count(module) != count:
                raise InputError(
                    f"{path} has a hook that would never run: its forward is part of the captured "
                    f"graph. Remove the hook and register it on a layer inside {path} (those are "
                    f"called), or keep the module whole with leaf_modules=[{path!r}]"
                )


def _graphs(rewired: Rewired) -> Iterator[fx.Graph]:
    bodies = [body for body in (rewired.body, rewired.eval_body) if body is not None]
    for segment in (segment for body in bodies for segment in body.segments):
        yield segment.graph


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


def _code_identity(module: nn.Module) -> Any:
    """What decides which code a call of the module runs."""
    own = vars(module)
    # By isinstance: `fully_shard` changes a module's class.
    return own.get("forward"), len(own["_modules"]) if isinstance(module, _LISTS) else 0


def _hook_count(module: nn.Module) -> int:
    own = vars(module)
    count = sum(len(own[kind]) for kind in _HOOKS)
    if not count:
        return 0
    hooks = [hook for kind in _HOOKS for hook in own[kind].values()]
    return sum(not is_sharding_hook(hook) for hook in hooks)
