"""Guards checked at a call: which capture of a model is right for these inputs and attributes?"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from itertools import repeat
from operator import is_, is_not
from typing import Any, Final

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.autograd.graph import saved_tensors_hooks

from revcompile.errors import GuardError
from revcompile.ir.conditions import (
    ABSENT,
    Condition,
    HasContents,
    HasKeys,
    HasType,
    Present,
    described,
    holds,
    look_up,
)
from revcompile.ir.guards import (
    AttributeGuard,
    Guards,
    ModeGuards,
    SizeGuard,
    SizeGuards,
    input_types,
)
from revcompile.ir.module_tree import copy_module, device_of_model
from revcompile.ir.ops import called
from revcompile.ir.python_code import compile_graph
from revcompile.ir.types import TYPE, TensorType
from revcompile.kernels.autocast import is_autocasting
from revcompile.runtime.reversible.slots import Column, Slot
from revcompile.runtime.reversible.transforms import is_transformed

_ABSENT: Final = object()
_META: Final = torch.device("meta")


@dataclass(eq=False)
class Mismatch:
    """A guard that fails: the expression, its value when captured and now, and the source line."""

    expression: str
    expected: Any
    found: Any
    source: str

    def __str__(self) -> str:
        now = "cannot be computed" if self.found is _ABSENT else f"is {described(self.found)}"
        if isinstance(self.expected, HasKeys):
            now = f"is {HasKeys.of(self.found)!r}"
        return (
            f"{self.expression} was {described(self.expected)} when the model was captured and "
            f"{now} now [{self.source}]"
        )

    @property
    def is_structural(self) -> bool:
        """Is it about modules or parameters, which capturing the model again does not follow?"""
        expected, is_condition = self.expected, isinstance(self.expected, Condition)
        return (is_condition and expected.is_structural) or isinstance(
            self.found, (nn.Module, nn.Parameter)
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
    """Checks the guards of one capture; results that need a run without data are cached."""

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
        self._mode, self._skeleton, self._flags = mode, guards.skeleton, guards.flags
        self._attributes = _Attributes(mode.attributes)
        self._direct, self._state = _compiled(mode.direct), _compiled(mode.state)
        graph = mode.state.graph
        self._no_inputs = (None,) * len(graph.find_nodes(op="placeholder") if graph else ())
        self._expected = tuple(guard.value for guard in mode.direct.guards)
        self._verdicts: dict[Any, Mismatch | None] = dict.fromkeys(guards.seen)
        self._dtype = _parameter_type(guards.skeleton)

    def failing(self, root: nn.Module, inputs: list[Tensor]) -> Mismatch | None:
        return self._sizes_now(inputs) or self.changed(root) or self._sizes_inside(root, inputs)

    def changed(self, root: nn.Module) -> Mismatch | None:
        for flag in self._flags:
            now = type(flag).of(flag.name)
            if now != flag:
                return Mismatch(flag.expression, flag.value, now.value, "the forward pass")
        return self._attributes.changed(root) or self._state_now(root)

    def _state_now(self, root: nn.Module) -> Mismatch | None:
        if self._state is None:
            return None
        try:
            values = self._state(root, *self._no_inputs)
        except Exception:  # a parameter is missing
            values = [_ABSENT] * len(self._mode.state.guards)
        return _first_mismatch(self._mode.state, values)

    def _sizes_now(self, inputs: list[Tensor]) -> Mismatch | None:
        if self._direct is None:
            return None
        try:
            values = self._direct(self._skeleton, *inputs)
        except Exception:  # a guard may be computed from another one that fails
            values = _Sizes(self._mode.direct, self._skeleton, inputs).results()
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
            skeleton = self._skeleton
            if skeleton is not None and dtype is not None and dtype != self._dtype:
                skeleton = copy.deepcopy(skeleton).to(dtype)
            device = device_of_model(root)
            problem = None
            if not is_autocasting(device):  # which leaves tensors on the meta device alone
                shapes = [_without_data(tensor, _META) for tensor in inputs]
                problem = _first_problem(groups, skeleton, shapes)
            if is_autocasting(device) or (problem and problem.found is _ABSENT):
                # slower, but they can be combined with tensors that the model makes on the CPU
                with FakeTensorMode(allow_non_fake_inputs=True):
                    skeleton = None if skeleton is None else _fake_copy(skeleton, device)
                    shapes = [_without_data(tensor, tensor.device) for tensor in inputs]
                    problem = _first_problem(groups, skeleton, shapes)
            self._verdicts[key] = problem
        return self._verdicts[key]


def _parameter_type(root: nn.Module | None) -> torch.dtype | None:
    # root.parameters() takes four times as long.
    for module in () if root is None else root.modules():
        for p in module._parameters.values():
            if p is not None and p.is_floating_point():
                return p.dtype
    return None


def _compiled(sizes: SizeGuards) -> Callable[..., Any] | None:
    return None if sizes.graph is None else compile_graph(sizes.graph, "guards")


def _first_problem(
    groups: Iterable[SizeGuards], skeleton: nn.Module | None, inputs: list[Tensor]
) -> Mismatch | None:
    problems = (_first_mismatch(g, _Sizes(g, skeleton, inputs).results()) for g in groups)
    return next(filter(None, problems), None)


def _first_mismatch(sizes: SizeGuards, values: Sequence[Any]) -> Mismatch | None:
    pairs: Iterable[tuple[SizeGuard, Any]] = zip(sizes.guards, values, strict=True)
    for guard, now in pairs:
        if now is _ABSENT or now != guard.value:
            return Mismatch(guard.expression, guard.value, now, guard.source)
    return None


def _without_data(tensor: Tensor, device: torch.device) -> Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return made.requires_grad_(tensor.requires_grad)


def _without_hooks() -> AbstractContextManager[Any]:
    """The user's hooks on saved tensors (`save_on_cpu`) would fail on tensors without data."""
    if is_transformed():  # `torch.func` has disabled them
        return nullcontext()
    # Nothing is saved: there is no backward pass.
    return saved_tensors_hooks(lambda _: None, lambda _: torch.empty(()))


def _fake_copy(skeleton: nn.Module, device: torch.device) -> nn.Module:
    """A copy on fake tensors of a device, inside a `FakeTensorMode`."""
    memo: dict[int, Any] = {}
    plain = (v for m in skeleton.modules() for v in vars(m).values() if isinstance(v, Tensor))
    for tensor in (*skeleton.parameters(), *skeleton.buffers(), *plain):
        fake = _without_data(tensor.detach(), device)
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
    with unset_fake_temporarily():  # what is left has data, which cannot be copied in that mode
        copied: nn.Module = copy_module(skeleton, memo)
    return copied


class _Sizes(fx.Interpreter):
    """Evaluates the graph of guards; what cannot be computed is `_ABSENT`."""

    def __init__(self, sizes: SizeGuards, root: nn.Module | None, inputs: list[Tensor]) -> None:
        assert sizes.graph is not None and root is not None
        super().__init__(root, garbage_collect_values=False, graph=sizes.graph)
        self._sizes, self._inputs = sizes, inputs

    def results(self) -> list[Any]:
        """The guards' values."""
        with torch.enable_grad(), _without_hooks(), torch.random.fork_rng(devices=()):
            values = list(self.run(*self._inputs))
            outputs: Any = self.graph.output_node().args[0]
            for position in sorted(self._sizes.contents):
                values[position] = _ABSENT
                with suppress(Exception), unset_fake_temporarily():
                    values[position] = self._contents(outputs[position]).tolist()
        return values

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "output":
            return super().run_node(n)
        if any(self.env[source] is _ABSENT for source in n.all_input_nodes):
            return self._reshaped(n)
        with suppress(Exception):
            return super().run_node(n)
        with suppress(Exception):
            return self._extrapolated(n)
        return _ABSENT

    def _extrapolated(self, node: fx.Node) -> Any:
        """The result of a module that needs real data: as captured, but for the batch size."""
        sources = [n for n in node.all_input_nodes if isinstance(n.meta.get(TYPE), TensorType)]
        batches = {_batch(n.meta[TYPE], self.env[n]) for n in sources}
        kind = node.meta.get(TYPE)
        is_known = len(batches) == 1 and None not in batches and node.op == "call_module"
        if not is_known or not isinstance(kind, TensorType):
            return _ABSENT
        shape, like = kind.at(batches.pop() or 0), self.env[sources[0]]
        return torch.empty(shape, dtype=kind.dtype, device=like.device)

    def _reshaped(self, node: fx.Node) -> Any:
        """A result whose shape follows from sizes alone: `y.reshape(sizes)` of any y."""
        name, kind = getattr(node.target, "__name__", node.target), node.meta.get(TYPE)
        if name not in ("reshape", "view") or node.kwargs or not isinstance(kind, TensorType):
            return _ABSENT
        given: Any = fx.node.map_arg(node.args[1:], self.env.__getitem__)
        sizes = tuple(given[0]) if isinstance(given[0], (tuple, list)) else given
        if not all(type(size) is int and size >= 0 for size in sizes):
            return _ABSENT
        return torch.empty(sizes, dtype=kind.dtype, device=self._inputs[0].device)

    def _contents(self, node: fx.Node) -> Any:
        """The contents of a tensor that is made from sizes alone, computed on the CPU."""
        value = self.env[node]
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if not isinstance(value, (Tensor, tuple, list)):
            return value
        return called(node, *fx.node.map_arg((node.args, node.kwargs), self._contents))


def _batch(kind: TensorType, value: Any) -> int | None:
    """The batch size at which a captured value has this shape, if there is one."""
    for size, step, now in zip(kind.shape, kind.per_sample, value.shape, strict=False):
        if step:
            batch = kind.batch + (now - size) // step
            return batch if kind.at(batch) == tuple(value.shape) else None
    return kind.batch if kind.shape == tuple(value.shape) else None


class _Attributes:
    """Guards on attributes, checked without a loop in Python as long as no object is another one.

    What was found when all guards held is kept in columns: dicts of modules, names, and the values
    there. Parameters are not kept: they must be there, whichever.
    """

    def __init__(self, guards: Sequence[AttributeGuard]) -> None:
        self._guards = guards
        self._root: nn.Module | None = None
        self._pairs: list[tuple[AttributeGuard, nn.Module]] = []
        """Guards that are always evaluated, such as those on fields."""

    def changed(self, root: nn.Module) -> Mismatch | None:
        is_known = root is self._root and self._finds_the_same()
        modules: dict[str, nn.Module | None] = {"": root}
        pairs = self._pairs if is_known else self._resolved(modules)
        for guard, module in pairs:
            problem = _mismatch(guard, module)
            if problem is not None:
                self._root = None
                return problem
        if not is_known:
            self._remember(modules, pairs)
            self._root = root
        return None

    def _finds_the_same(self) -> bool:
        return (
            self._found.holds(self._values)
            and all(map(is_not, self._present.read(), repeat(None)))
            and all(map(is_, map(getattr, self._classes, self._named, repeat(ABSENT)), self._plain))
        )

    def _resolved(
        self, modules: dict[str, nn.Module | None]
    ) -> list[tuple[AttributeGuard, nn.Module]]:
        """All guards and the modules at their paths; a graph that lacks a module reports that."""

        def at(path: str) -> nn.Module | None:
            if path not in modules:
                outer, _, name = path.rpartition(".")
                owner = at(outer)
                modules[path] = None if owner is None else owner._modules.get(name)
            return modules[path]

        pairs = ((guard, at(guard.path)) for guard in self._guards)
        return [(guard, module) for guard, module in pairs if module is not None]

    def _remember(
        self,
        modules: Mapping[str, nn.Module | None],
        pairs: Iterable[tuple[AttributeGuard, nn.Module]],
    ) -> None:
        self._pairs = []
        found: list[Slot] = []
        present: list[Slot] = []
        classes: list[tuple[type, str]] = []
        for path in filter(None, modules):
            outer, _, name = path.rpartition(".")
            if (owner := modules[outer]) is not None:
                found.append((owner._modules, name))
        for guard, module in pairs:
            own, name, kind = vars(module), guard.name, type(module)
            places = (own, own["_parameters"], own["_buffers"], own["_modules"])
            if guard.fields or not name or not _is_immutable(guard.value):
                self._pairs.append((guard, module))
            elif isinstance(guard.value, Present) and name in own["_parameters"]:
                present.append((own["_parameters"], name))
            elif any(name in place for place in places):
                place = next(place for place in places if name in place)
                found += [(p, name) for p in (own, place)]
            elif look_up(module, name) is getattr(kind, name, ABSENT):
                found += [(place, name) for place in places]
                classes.append((kind, name))
            else:
                self._pairs.append((guard, module))
        self._found, self._present = Column(found, missing=_ABSENT), Column(present)
        self._values = self._found.read()
        self._classes, self._named = [kind for kind, _ in classes], [name for _, name in classes]
        self._plain = [getattr(kind, name, ABSENT) for kind, name in classes]


def _is_immutable(value: Any) -> bool:
    """Is it enough that the object is the same one?"""
    if isinstance(value, (HasContents, HasKeys, HasType)):
        return False
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _mismatch(guard: AttributeGuard, module: nn.Module) -> Mismatch | None:
    now = guard.current(module)
    if holds(guard.value, now):
        return None
    return Mismatch(guard.expression, guard.value, now, guard.source)
