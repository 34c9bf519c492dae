"""Modules whose forward is part of the captured graph, and is never called.

The graph calls their layers. A hook on such a module would never run, and a module put in its place
would never be called: both are errors at the next call.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from torch import fx, nn

from revcompile.errors import InputError
from revcompile.ir.module_tree import child_path
from revcompile.ir.snapshot import Change, Kind, TreeSnapshot, Watched, hooks_of
from revcompile.ir.types import PATH, Rewired

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
        modules = dict(root.named_modules(remove_duplicate=False))
        # Calls of nn.Identity are left out of graphs.
        paths |= {path for path, module in modules.items() if type(module) is nn.Identity}
        inlined = [
            Watched(modules[path], path)
            for path in sorted(paths - called - {""})
            if path in modules and not path.startswith(within)
        ]  # elsewhere rewiring has put something else
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
        """Those that had hooks already, which were traced with the forward."""

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
