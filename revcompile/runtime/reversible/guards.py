"""Guards checked at a call: which capture of a model is right for these inputs and attributes?"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, fx, nn

from revcompile.errors import GuardError
from revcompile.ir.guards import (
    AttributeGuard,
    Guards,
    ModeGuards,
    SizeGuard,
    SizeGuards,
    input_types,
)
from revcompile.ir.ops import attribute
from revcompile.ir.python_code import compile_graph
from revcompile.ir.types import TYPE, Rewired, TensorType

__all__ = ["Cases", "GuardChecker", "Mismatch", "Recapture"]

_ABSENT: Final = object()


class Mismatch:
    """A guard that fails: the expression, its value when captured and now, and the source line."""

    def __init__(self, expression: str, expected: Any, found: Any, source: str) -> None:
        self.expression, self.expected, self.found = expression, expected, found
        self.source = source

    def __str__(self) -> str:
        now = "cannot be computed" if self.found is _ABSENT else f"is {self.found!r}"
        return (
            f"{self.expression} was {self.expected!r} when the model was captured and {now} now "
            f"[{self.source}]"
        )

    def error(self, where: str, advice: str) -> GuardError:
        return GuardError(
            f"{where}: {self}. The forward pass reads it in Python, so the captured graph may be "
            f"wrong. {advice}",
            expression=self.expression,
            expected=self.expected,
            found=None if self.found is _ABSENT else self.found,
            source=self.source,
        )


class GuardChecker:
    """Checks the guards of one capture; results that need a run on the meta device are cached."""

    def __init__(self, guards: Guards) -> None:
        self._guards = guards
        self._modes: dict[bool, _ModeChecker] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_modes": {}}  # compiled code is made again

    def _mode(self, training: bool) -> _ModeChecker:
        if training not in self._modes:
            self._modes[training] = _ModeChecker(self._guards.of(training), self._guards)
        return self._modes[training]

    def failing(self, root: nn.Module, values: Mapping[str, Any]) -> Mismatch | None:
        """The first guard that fails for a call, or None.

        `values` are the graph's inputs by name, in the order of its placeholders.
        """
        return self._mode(root.training).failing(root, list(values.values()))

    def changed(self, root: nn.Module) -> Mismatch | None:
        """The first attribute or flag that has changed, or None."""
        return self._mode(root.training).changed(root)


class _ModeChecker:
    """The guards of one mode, compiled."""

    def __init__(self, mode: ModeGuards, guards: Guards) -> None:
        self._mode, self._skeleton = mode, guards.skeleton
        self._tree = _Tree(mode)
        self._direct = _compiled(mode.direct)
        self._expected = tuple(guard.value for guard in mode.direct.guards)
        self._verdicts: dict[Any, Mismatch | None] = dict.fromkeys(guards.seen)
        self._dtype = _parameter_type(guards.skeleton)

    def failing(self, root: nn.Module, inputs: list[Tensor]) -> Mismatch | None:
        return self._sizes_now(inputs) or self.changed(root) or self._sizes_inside(root, inputs)

    def changed(self, root: nn.Module) -> Mismatch | None:
        for flag in self._mode.flags:
            now = getattr(torch, flag.name)(*flag.args)
            if now != flag.value:
                return Mismatch(flag.expression, flag.value, now, flag.source)
        return self._tree.changed(root)

    def _sizes_now(self, inputs: list[Tensor]) -> Mismatch | None:
        if self._direct is None:
            return None
        try:
            values = self._direct(self._skeleton, *inputs)
        except Exception:  # a guard may be computed from another one that fails
            return _first_mismatch(
                self._mode.direct, _each(self._mode.direct, self._skeleton, inputs)
            )
        if values == self._expected:
            return None
        return _first_mismatch(self._mode.direct, values)

    def _sizes_inside(self, root: nn.Module, inputs: list[Tensor]) -> Mismatch | None:
        groups = [g for g in (self._mode.derived, self._mode.written) if g.graph is not None]
        if not groups:
            return None
        key: Any = input_types(inputs)
        dtype = _parameter_type(root)
        if dtype != self._dtype:  # the model was cast after it was captured
            key = key, dtype
        if key not in self._verdicts:
            on_meta, skeleton = [_on_meta(tensor) for tensor in inputs], self._skeleton
            if skeleton is not None and dtype is not None and dtype != self._dtype:
                skeleton = copy.deepcopy(skeleton).to(dtype)
            results = (_first_mismatch(g, _each(g, skeleton, on_meta)) for g in groups)
            self._verdicts[key] = next(filter(None, results), None)
        return self._verdicts[key]


def _parameter_type(root: nn.Module | None) -> torch.dtype | None:
    parameters = () if root is None else root.parameters()
    return next((p.dtype for p in parameters if p.is_floating_point()), None)


def _compiled(sizes: SizeGuards) -> Callable[..., Any] | None:
    return None if sizes.graph is None else compile_graph(sizes.graph, "guards")


def _first_mismatch(sizes: SizeGuards, values: Sequence[Any]) -> Mismatch | None:
    pairs: Iterable[tuple[SizeGuard, Any]] = zip(sizes.guards, values, strict=True)
    for guard, now in pairs:
        if now is _ABSENT or now != guard.value:
            return Mismatch(guard.expression, guard.value, now, guard.source)
    return None


def _on_meta(tensor: Tensor) -> Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return made.requires_grad_(tensor.requires_grad)


def _each(sizes: SizeGuards, root: nn.Module | None, inputs: list[Tensor]) -> list[Any]:
    """The guards' values one by one; `_ABSENT` where one cannot be computed."""
    assert sizes.graph is not None and root is not None
    return _Sizes(sizes, root, inputs).results()


class _Sizes:
    """Evaluates the graph of guards, each node at most once."""

    def __init__(self, sizes: SizeGuards, root: nn.Module, inputs: list[Tensor]) -> None:
        assert sizes.graph is not None
        self._sizes, self._root = sizes, root
        self._graph = sizes.graph
        placeholders = self._graph.find_nodes(op="placeholder")
        self._known: dict[fx.Node, Any] = dict(zip(placeholders, inputs, strict=True))

    def results(self) -> list[Any]:
        with torch.enable_grad(), torch.random.fork_rng(devices=()):
            for node in self._graph.nodes:
                if node.op != "output" and node not in self._known:
                    self._known[node] = self._value(node)
            outputs: Any = next(iter(self._graph.find_nodes(op="output"))).args[0]
            return [self._result(i, node) for i, node in enumerate(outputs)]

    def _result(self, position: int, node: fx.Node) -> Any:
        if position not in self._sizes.contents:
            return self._known[node]
        try:
            return self._contents(node).tolist()
        except Exception:
            return _ABSENT

    def _value(self, node: fx.Node) -> Any:
        """The node's value; absent where it, or what it is made from, cannot be computed."""
        if any(self._known[source] is _ABSENT for source in node.all_input_nodes):
            return self._reshaped(node)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._known.__getitem__)
        try:
            return self._run(node, args, kwargs)
        except Exception:
            return _ABSENT

    def _run(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        target: Any = node.target
        if node.op == "get_attr":
            return attribute(self._root, target)
        if node.op == "call_method":
            return getattr(args[0], target)(*args[1:], **kwargs)
        if node.op != "call_module":
            return target(*args, **kwargs)
        try:
            return self._root.get_submodule(target)(*args, **kwargs)
        except Exception:
            return self._extrapolated(node)

    def _extrapolated(self, node: fx.Node) -> Any:
        """The result of a module that needs real data: as captured, but for the batch size."""
        sources = [n for n in node.all_input_nodes if isinstance(n.meta.get(TYPE), TensorType)]
        batches = {_batch(n.meta[TYPE], self._known[n]) for n in sources}
        kind = node.meta.get(TYPE)
        if len(batches) != 1 or None in batches or not isinstance(kind, TensorType):
            raise ValueError(f"{node.target} needs real data")
        return torch.empty(kind.at(batches.pop() or 0), dtype=kind.dtype, device="meta")

    def _reshaped(self, node: fx.Node) -> Any:
        """A result whose shape follows from sizes alone: `y.reshape(sizes)` of any y."""
        name, kind = getattr(node.target, "__name__", node.target), node.meta.get(TYPE)
        if name not in ("reshape", "view") or node.kwargs or not isinstance(kind, TensorType):
            return _ABSENT
        given: Any = fx.node.map_arg(node.args[1:], self._known.__getitem__)
        sizes = tuple(given[0]) if isinstance(given[0], (tuple, list)) else given
        if not all(type(size) is int and size >= 0 for size in sizes):
            return _ABSENT
        return torch.empty(sizes, dtype=kind.dtype, device="meta")

    def _contents(self, node: fx.Node) -> Any:
        """The contents of a tensor that is made from sizes alone, computed on the CPU."""
        value = self._known[node]
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if not isinstance(value, (Tensor, tuple, list)):
            return value
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._contents)
        target: Any = node.target
        if node.op == "call_method":
            return getattr(args[0], target)(*args[1:], **kwargs)
        return target(*args, **kwargs)


def _batch(kind: TensorType, value: Any) -> int | None:
    """The batch size at which a captured value has this shape, if there is one."""
    for size, step, now in zip(kind.shape, kind.per_sample, value.shape, strict=False):
        if step:
            batch = kind.batch + (now - size) // step
            return batch if kind.at(batch) == tuple(value.shape) else None
    return kind.batch if kind.shape == tuple(value.shape) else None


class _Tree:
    """Attributes to compare, as a tree like the modules: one walk per call, no lookup by path."""

    def __init__(self, mode: ModeGuards) -> None:
        self._guards: list[tuple[str, Any, AttributeGuard]] = []
        self._fields: list[AttributeGuard] = []
        self._children: dict[str, _Tree] = {}
        for guard in mode.attributes:
            tree = self
            for atom in guard.path.split(".") if guard.path else ():
                tree = tree._children.setdefault(atom, _Tree(ModeGuards()))
            if guard.fields:
                tree._fields.append(guard)
            else:
                tree._guards.append((guard.name, guard.value, guard))

    def changed(self, module: nn.Module) -> Mismatch | None:
        own = module.__dict__
        for name, value, guard in self._guards:
            now = own.get(name, value)
            if now is not value and (type(now) is not type(value) or now != value):
                return Mismatch(guard.expression, value, now, guard.source)
        for guard in self._fields:
            now = guard.current(module)
            if type(now) is not type(guard.value) or now != guard.value:
                return Mismatch(guard.expression, guard.value, now, guard.source)
        for name, tree in self._children.items():
            child = own["_modules"].get(name)
            problem = None if child is None else tree.changed(child)
            if problem is not None:
                return problem
        return None


# -- the captures of one model --------------------------------------------------------------------


Recapture = Callable[[nn.Module, tuple[Guards, ...], tuple[Any, ...], Mapping[str, Any]], Rewired]
"""Captures the model of a root in its present state, for the arguments of a call."""

_MOST: Final = 64
"""More captures of one model are an accident: a size that is new at every call."""


class Cases:
    """A rewired model for each combination of sizes, flags and attributes seen so far.

    The first is the one that was compiled; the others are captured when a call needs them.
    """

    def __init__(self, first: Rewired, recapture: Recapture | None = None) -> None:
        self.recapture = recapture
        self._cases = [(first, GuardChecker(first.guards))]
        self._last = self._cases[0]

    def matching(
        self,
        root: nn.Module,
        values: Mapping[str, Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Rewired:
        problem = self._last[1].failing(root, values)
        if problem is None:
            return self._last[0]
        for case in self._cases:
            if case[1].failing(root, values) is None:
                self._last = case
                return case[0]
        return self._recapture(problem, root, values, args, kwargs)

    def _recapture(
        self,
        problem: Mismatch,
        root: nn.Module,
        values: Mapping[str, Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Rewired:
        name = self._cases[0][0].name
        if self.recapture is None:
            raise problem.error(name, "Compile the model again for this case.")
        if len(self._cases) >= _MOST:
            raise problem.error(
                name,
                f"It has been captured for {_MOST} cases already; give it inputs of fewer sizes "
                "(pad them), or keep the module that reads this with leaf_modules=[...].",
            )
        try:
            rewired = self.recapture(root, tuple(r.guards for r, _ in self._cases), args, kwargs)
        except Exception as error:
            raise problem.error(
                name,
                f"Capturing the model for this case failed: {error}\nCompile it again with "
                "example inputs of this case, or keep the module that reads this as one piece with "
                "leaf_modules=[...].",
            ) from error
        rewired = replace(rewired, root=root)
        case = rewired, GuardChecker(rewired.guards)
        remaining = case[1].failing(root, values)
        if remaining is not None:
            raise remaining.error(name, "Compile it again with example inputs of this case.")
        self._cases.append(case)
        self._last = case
        return rewired
