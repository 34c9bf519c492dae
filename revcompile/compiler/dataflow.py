"""Dataflow questions about a captured graph, answered once and kept as bit sets."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import fx, nn

from revcompile.compiler.capture.memory import is_effect
from revcompile.ir.ops import attribute, out_of_place, read_buffer
from revcompile.ir.types import TYPE, TensorType

__all__ = [
    "Flow",
    "cuts_gradient",
    "draws_random",
    "holds_tensor",
    "is_add",
    "is_plain",
    "tensor_type",
]

_ADDS: Final = frozenset(
    {operator.add, operator.iadd, torch.add, torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor}
)

_WEIGHTED_FUNCTIONS: Final = frozenset(
    [
        "linear",
        "conv1d",
        "conv2d",
        "conv3d",
        "conv_transpose2d",
        "bilinear",
        "matmul",
        "bmm",
        "mm",
        "addmm",
    ]
)


_RANDOM_WORDS: Final = (
    "rand",
    "bernoulli",
    "cauchy",
    "dropout",
    "exponential_",
    "fractional",
    "geometric_",
    "gumbel",
    "multi_head_attention",
    "multinomial",
    "normal_",
    "poisson",
    "rrelu",
    "uniform",
)


def tensor_type(node: fx.Node) -> TensorType | None:
    """The node's type if it is a single tensor."""
    found = node.meta.get(TYPE)
    return found if isinstance(found, TensorType) else None


def is_plain(node: fx.Node) -> bool:
    """Is the value no tensor (a size, a flag, a device)?"""
    return node.op not in ("placeholder", "output") and not holds_tensor(node.meta.get(TYPE))


def holds_tensor(found: Any) -> bool:
    """Is a node's type that of a tensor, or of a structure with one inside?"""
    if isinstance(found, TensorType):
        return True
    if isinstance(found, dict):
        return any(map(holds_tensor, found.values()))
    return isinstance(found, tuple) and any(map(holds_tensor, found))


def cuts_gradient(node: fx.Node) -> bool:
    """Does the node compute nothing that a gradient goes back through, whatever it reads?"""
    if node.op in ("placeholder", "get_attr", "output"):
        return False
    if not _holds_differentiable(node.meta.get(TYPE)):
        return True
    if node.target is getattr:
        return bool(node.args[1] == "data")
    name = str(getattr(node.target, "__name__", node.target)).split(".")[0]
    return node.op != "call_module" and (
        name in ("detach", "detach_") or name.startswith("new_") or name.endswith("_like")
    )


def _holds_differentiable(found: Any) -> bool:
    if isinstance(found, TensorType):
        return found.differentiable
    inner = found.values() if isinstance(found, dict) else found
    return isinstance(found, (dict, tuple)) and any(map(_holds_differentiable, inner))


def is_add(node: fx.Node) -> bool:
    """Is the node a plain sum of two tensors of its own shape and type?"""
    by_function = node.op == "call_function" and node.target in _ADDS
    by_method = node.op == "call_method" and node.target in ("add", "add_")
    if not (by_function or by_method) or len(node.args) != 2 or node.kwargs.get("alpha", 1) != 1:
        return False
    mine = tensor_type(node)
    return mine is not None and all(
        isinstance(arg, fx.Node) and tensor_type(arg) == mine for arg in node.args
    )


class Flow:
    """Ancestors, parameter-only values and regions of one graph."""

    def __init__(self, graph: fx.Graph, root: nn.Module) -> None:
        self.graph = graph
        self.root = root
        self.nodes: list[fx.Node] = list(graph.nodes)
        self.by_name = {n.name: n for n in self.nodes}
        self.index = {n: i for i, n in enumerate(self.nodes)}
        self.plain = {n for n in self.nodes if is_plain(n)}
        self.effects = {n for n in self.nodes if is_effect(n)}
        self._ancestors: dict[fx.Node, int] = {}
        self.constant: set[fx.Node] = set()
        self.derived: set[fx.Node] = set()
        for node in self.nodes:
            self._visit(node)

    def _visit(self, node: fx.Node) -> None:
        mask = 0
        inputs = node.all_input_nodes
        if node not in self.plain:
            for source in inputs:
                mask |= self._ancestors[source] | (1 << self.index[source])
        self._ancestors[node] = mask
        from_constants = all(i in self.constant for i in inputs)
        is_call = node.op in ("call_function", "call_method") and bool(inputs)
        is_call = is_call and node not in self.effects and not draws_random(node)
        is_call = is_call and node.target is not read_buffer  # later it may hold something else
        if node.op == "get_attr" or (is_call and from_constants):
            self.constant.add(node)
        elif is_call and node not in self.plain:
            known = self.constant | self.plain | self.derived
            if all(i in known for i in inputs):
                self.derived.add(node)

    def anywhere(self, node: fx.Node) -> bool:
        """Can the value be computed anew wherever it is needed: from parameters and sizes?"""
        return node in self.constant or node in self.derived

    def sources(self, node: fx.Node) -> set[fx.Node]:
        """A value that can be computed anywhere, with all it is computed from."""
        found, work = {node}, [node]
        while work:
            for source in work.pop().all_input_nodes:
                if source not in found:
                    found.add(source)
                    if source not in self.plain:
                        work.append(source)
        return found

    def sources_with_sizes(self, node: fx.Node) -> set[fx.Node]:
        """Everything a value is computed from, values of which only a size is read included."""
        found, work = {node}, [node]
        while work:
            fresh = [source for source in work.pop().all_input_nodes if source not in found]
            found.update(fresh)
            work += fresh
        return found

    def depends(self, node: fx.Node, on: fx.Node) -> bool:
        """Is `on` a tensor ancestor of `node`?"""
        return bool(self._ancestors[node] >> self.index[on] & 1)

    def latest_common_ancestor(self, a: fx.Node, b: fx.Node) -> fx.Node | None:
        """The last value, not computed from parameters alone, that both nodes are made from."""
        mask = self._ancestors[a] & self._ancestors[b]
        while mask:
            last = mask.bit_length() - 1
            node = self.nodes[last]
            if node not in self.plain and not self.anywhere(node):
                return node
            mask ^= 1 << last
        return None

    def region(self, x: fx.Node, ends: Iterable[fx.Node]) -> tuple[set[fx.Node], list[fx.Node]]:
        """All nodes needed to compute `ends` from `x`, and the side values they read.

        Parameters, what is computed from them alone, sizes of values inside and all items of
        structured values inside belong to the region; everything else that does not depend on `x`
        is a side value.
        """
        inside: set[fx.Node] = set()
        sides: dict[fx.Node, None] = {}
        work = [end for end in ends if end is not x]
        seen = set(work)
        while work:
            node = work.pop()
            if not self._belongs(node, x):
                sides[node] = None
                continue
            inside.add(node)
            for other in (*node.all_input_nodes, *self.items(node)):
                if other is not x and other not in seen:
                    seen.add(other)
                    work.append(other)
        return inside, sorted(sides, key=self.index.__getitem__)

    def _belongs(self, node: fx.Node, x: fx.Node) -> bool:
        if self.anywhere(node):
            return True
        if node in self.plain:
            return self._plain_from(node, x)
        return self.depends(node, x)

    def _plain_from(self, node: fx.Node, x: fx.Node) -> bool:
        """Is a size computed from `x` and values after it alone?"""
        if not node.all_input_nodes:
            return node.op != "placeholder"
        for source in node.all_input_nodes:
            if source is x or self.anywhere(source):
                continue
            if source in self.plain:
                if not self._plain_from(source, x):
                    return False
            elif not self.depends(source, x):
                return False
        return True

    def items(self, node: fx.Node) -> list[fx.Node]:
        """What is taken out of a structured value: it stays with the node that computes that."""
        is_single = tensor_type(node) is not None or node in self.plain
        return [] if is_single or node.op in ("placeholder", "output") else list(node.users)

    def weights(self, nodes: Iterable[fx.Node]) -> int:
        """How many of the nodes multiply by a weight matrix or kernel."""
        return sum(self.is_weighted(n) for n in nodes)

    def is_weighted(self, node: fx.Node) -> bool:
        """Does the node multiply by a weight matrix or kernel?"""
        if node.op == "call_module":
            module = self.root.get_submodule(str(node.target))
            return any(p.dim() >= 2 for p in module.parameters())
        name = getattr(node.target, "__name__", "").split(".")[0]
        return node.op == "call_function" and name in _WEIGHTED_FUNCTIONS

    def in_order(self, names: Iterable[str]) -> list[fx.Node]:
        """Nodes by name, in the graph's order."""
        return sorted((self.by_name[name] for name in names), key=self.index.__getitem__)

    def module_name(self, node: fx.Node) -> str:
        """The class of the module a node calls, or nothing."""
        if node.op != "call_module":
            return ""
        return type(self.root.get_submodule(str(node.target))).__name__

    def parameter_count(self, node: fx.Node) -> int:
        """How many parameters the node itself brings in."""
        if node.op == "call_module":
            return sum(p.numel() for p in self.root.get_submodule(str(node.target)).parameters())
        if node.op != "get_attr":
            return 0
        value = attribute(self.root, str(node.target))
        return value.numel() if isinstance(value, nn.Parameter) else 0

    def read_with(self, node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
        """Where a buffer's contents first meet other values, and those values."""
        seen = {node}
        while node.users:
            node = min(node.users, key=self.index.__getitem__)
            others = [i for i in node.all_input_nodes if i not in seen and not self.anywhere(i)]
            if others:
                return node, others
            seen.add(node)
        return node, []

    def users(self, node: fx.Node) -> list[fx.Node]:
        """Users that read the value itself, not only its size."""
        return [u for u in node.users if u not in self.plain]


def draws_random(node: fx.Node) -> bool:
    """May a function or method draw random numbers, by its name and arguments?"""
    if node.op not in ("call_function", "call_method"):
        return False
    name = str(getattr(node.target, "__name__", node.target))
    if node.target is out_of_place:
        name = str(node.args[1])
    if "scaled_dot_product_attention" in name:
        rate = node.kwargs.get("dropout_p", node.args[4] if len(node.args) > 4 else 0)
        return bool(rate != 0)
    return name == "normal" or any(word in name for word in _RANDOM_WORDS)
