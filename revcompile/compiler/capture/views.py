"""Which value a value is a view of, and how the view is taken."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from revcompile.compiler.capture.memory import MEMORY, PLACES, Place
from revcompile.ir.types import TYPE

__all__ = ["Call", "View", "is_structured", "place_of", "view_of"]


@dataclass(frozen=True)
class Call:
    """A view as `ops.with_view` takes it: arguments are those of the traced graph."""

    view: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    item: int | None = None


@dataclass(frozen=True)
class View:
    """What a node is a view of.

    `source` is the input whose new contents give the node's new contents when the node is
    computed again; `base` is the tensor to be changed when the node is written to, which `call`
    takes the view of. Without a call, the node is the same elements (`is_same`), or it is not
    known how the view is taken.
    """

    source: fx.Node
    base: fx.Node
    call: Call | None = None
    is_same: bool = False
    is_pure: bool = True
    """May the node be computed again?"""


def place_of(node: fx.Node) -> Place | None:
    """Where the node's value lies, if it is a single tensor."""
    places = node.meta.get(PLACES, ())
    return places[0] if len(places) == 1 and not is_structured(node) else None


def is_structured(node: fx.Node) -> bool:
    """Does the node's value hold several tensors, or hold them in a container?"""
    return isinstance(node.meta.get(TYPE), (tuple, dict))


def view_of(node: fx.Node, root: nn.Module, known: Callable[[fx.Node], View | None]) -> View | None:
    """What a node that writes nothing is a view of; None if it lies in memory of its own.

    `known` gives the views of nodes before it.
    """
    storages = node.meta.get(MEMORY, frozenset())
    sharing = [n for n in node.all_input_nodes if n.meta.get(MEMORY, frozenset()) & storages]
    if not sharing:
        return None
    first = node.args[0] if node.args else None
    source = first if isinstance(first, fx.Node) and first in sharing else sharing[0]
    if node.op == "call_module":
        return _view_by_layer(node, source, root)
    if is_structured(source):
        return _item(node, source, known(source))
    return View(source, source, _call(node) if source is first else None)


def _item(node: fx.Node, source: fx.Node, outer: View | None) -> View | None:
    """One of several values: of several views, or lying in memory of its own."""
    if outer is None:
        return None
    index = node.args[1] if node.target is operator.getitem else None
    if not isinstance(index, int) or outer.call is None or outer.call.item is not None:
        return View(source, outer.base)
    call = Call(outer.call.view, outer.call.args, outer.call.kwargs, index)
    return View(source, outer.base, call)


def _view_by_layer(node: fx.Node, source: fx.Node, root: nn.Module) -> View:
    module = root.get_submodule(str(node.target))
    mine, theirs = place_of(node), place_of(source)
    if mine is not None and theirs is not None and mine.same_elements(theirs):
        of_torch = type(module).__module__.startswith("torch.nn")  # none of which detaches
        if of_torch or mine.tensor == theirs.tensor:
            return View(source, source, is_same=True)
    if type(module) is nn.Flatten:
        return View(source, source, Call("flatten", (module.start_dim, module.end_dim)))
    if type(module) is nn.Unflatten:
        return View(source, source, Call("unflatten", (module.dim, module.unflattened_size)))
    return View(source, source, is_pure=False)


def _call(node: fx.Node) -> Call | None:
    """The view a function or method takes of its first argument."""
    args, kwargs = node.args[1:], node.kwargs
    if node.op == "call_method":
        name = str(node.target)
        return None if name == "as_strided" else Call(name, args, kwargs)
    if node.target is getattr:
        return Call("detach") if args == ("data",) else Call("getattr", args)
    if node.target is operator.getitem:
        return Call("__getitem__", args)
    if isinstance(node.target, torch._ops.OpOverload):
        name = str(node.target)
        return None if "as_strided" in name else Call(name, args, kwargs)
    name = str(getattr(node.target, "__name__", ""))
    known = hasattr(torch.Tensor, name) and name != "as_strided"
    return Call(name, args, kwargs) if known else None
