"""Checks guards at each call, to choose the capture that fits its inputs and the attributes.

If a call breaks a guard of every capture, the model is captured again (`Cases`).
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Final

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from revcompile.errors import GuardError, InputError, ModelError, warn
from revcompile.ir.guards import (
    DEVICE_ATTRIBUTES,
    Guards,
    SizeGuards,
    attempts_unlogged,
    flag,
    input_types,
)
from revcompile.ir.module_tree import child_path, copy_module, device_of_model
from revcompile.ir.ops import called, grown_size, samples_beyond
from revcompile.ir.plain_attributes import PlainAttributes
from revcompile.ir.signature import LeftOutError, bind
from revcompile.ir.snapshot import (
    HOOKS,
    Change,
    Kind,
    Presence,
    TreeSnapshot,
    read_by,
    shown,
)
from revcompile.ir.types import TYPE, Rewired, TensorType
from revcompile.kernels.autocast import WITH_AUTOCAST
from revcompile.kernels.layout import is_traced
from revcompile.runtime.reversible.original import OriginalSurface
from revcompile.runtime.reversible.transforms import (
    outside_tracers,
    outside_transforms,
)

_ABSENT: Final = object()
_AS_CAPTURED: Final = object()
_STATE: Final = ("dtype", "requires_grad")
"""Attributes of a parameter that may differ at each call."""


@dataclass(eq=False)
class Mismatch:
    """A guard that fails: the expression, its value when captured and now, and the source line.

    For an attribute or a flag, the line that read it is not known.
    """

    expression: str
    expected: Any
    found: Any
    source: str = ""

    def __str__(self) -> str:
        now = "cannot be computed" if self.found is _ABSENT else f"is {shown(self.found)}"
        where = f" [{self.source}]" if self.source else ""
        return (
            f"{self.expression} was {shown(self.expected)} when the model was captured and "
            f"{now} now{where}"
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
    """Checks the guards of one capture; attributes must keep their current values.

    Args:
        guards: The guards.
        root: The model.
        made: The model as this capture has made it; None: `root`.
    """

    def __init__(self, guards: Guards, root: nn.Module, made: nn.Module | None = None) -> None:
        self._guards, kind = guards, type(root)
        plain, asked = guards.plain, guards.asked
        if isinstance(root, OriginalSurface):
            kind, hidden = root._original.importable_kind or kind, root._own_names
            plain, asked = ({**n, "": n.get("", frozenset()) - hidden} for n in (plain, asked))
        self._attributes = PlainAttributes(root, plain, asked, kind, guards.fields)
        modules = dict(root.named_modules(remove_duplicate=False))
        self._modes = {
            training: [(modules[p], p, f) for p, f in mode.modes.items() if p in modules]
            for training, mode in ((True, guards.train), (False, guards.evaluation))
        }
        self._sizes = {
            training: _SizeChecker(guards, training, root, root if made is None else made)
            for training in (True, False)
        }

    def failing(self, root: nn.Module, values: Mapping[str, Any]) -> Mismatch | None:
        """The first guard that fails for a call, or None.

        `values` are the graph's inputs by name, in the order of its placeholders.
        """
        for name, value in self._guards.flags.items():
            if (now := flag(name)) != value:
                return Mismatch(f"torch.{name}()", value, now)
        for module, path, training in self._modes[root.training]:
            if module.training is not training:
                return Mismatch(child_path(path, "training"), training, module.training)
        if (change := self._attributes.first_change()) is not None:
            return Mismatch(change.where, change.before, change.now)
        return self._sizes[root.training].failing(root, list(values.values()))


class _SizeChecker:
    """Checks guards on sizes, once for each combination of shapes and types of the inputs."""

    def __init__(self, guards: Guards, training: bool, root: nn.Module, made: nn.Module) -> None:
        self._skeleton = guards.skeleton
        self._groups = [group for group in guards.of(training).sizes if group.guards]
        self._dtype = _parameter_type(guards.skeleton)
        graphs = (group.graph for group in self._groups if group.graph is not None)
        nodes = [node for graph in graphs for node in graph.nodes]
        reads = [n for n in nodes if n.target is getattr and n.args[1] in _STATE]
        self._state = sorted({n.args[0].target for n in reads if n.args[0].op == "get_attr"})
        names = {n.args[1] if n.target is getattr else n.target for n in nodes}
        self._reads_device = not DEVICE_ATTRIBUTES.isdisjoint(names)
        now = self._types_now(root, device_of_model(root)) if self._groups else None
        self._verdicts: dict[Any, Mismatch | None] = {(seen, now): None for seen in guards.seen}
        called = dict.fromkeys(str(node.target) for node in nodes if node.op == "call_module")
        here = dict(made.named_modules(remove_duplicate=False))  # of a stage, its own layers
        skeleton = root if guards.skeleton is None else guards.skeleton
        self._layers = _Layers([path for path in called if path in here], skeleton, made, root)
        if self._layers.changed(root):  # capturing again has not followed the change
            self._verdicts.clear()

    def __getstate__(self) -> dict[str, Any]:
        right = {key: None for key, problem in self._verdicts.items() if problem is None}
        return {**self.__dict__, "_verdicts": right}

    def failing(self, root: nn.Module, inputs: list[Tensor]) -> Mismatch | None:
        if not self._groups:
            return None
        device = inputs[0].device if inputs else device_of_model(root)
        if self._layers.have_changed(root):
            self._verdicts.clear()
        types = self._types_now(root, device)
        if any(isinstance(size, torch.SymInt) for tensor in inputs for size in tensor.shape):
            # Of a range of sizes, `torch.export` notes what the comparisons assume, and refuses
            # those that do not hold in all of the range.
            return self._computed(root, inputs, types)
        key = input_types(inputs), types
        if key not in self._verdicts:
            self._verdicts[key] = self._computed(root, inputs, types)
        return self._verdicts[key]

    def _types_now(self, root: nn.Module, device: torch.device) -> tuple[Any, ...]:
        """What guards read besides the inputs: the device, and types of parameters."""
        state = tuple(_state_of(root, name) for name in self._state)
        return device if self._reads_device else None, _parameter_type(root), state

    def _computed(
        self, root: nn.Module, inputs: list[Tensor], types: tuple[Any, ...]
    ) -> Mismatch | None:
        assert self._skeleton is not None
        state = dict(zip(self._state, types[2], strict=True))
        # Not on the meta device: there autocast does nothing, and the model may make tensors on
        # another device.
        sizes: list[Any] = [size for tensor in inputs for size in tensor.shape]
        symbols = (size for size in sizes if isinstance(size, torch.SymInt))
        env = next((symbol.node.shape_env for symbol in symbols), None)
        fakes = FakeTensorMode(allow_non_fake_inputs=True, shape_env=env)
        with outside_transforms(), attempts_unlogged(), fakes:
            is_cast = types[1] != self._dtype  # since it was captured
            dtype = types[1] if is_cast else None
            layers = self._layers.changed(root)
            root = _fake_copy(self._skeleton, device_of_model(root), dtype, layers)
            shapes = [_without_data(t) for t in inputs]
            results = (_Sizes(group, root, shapes, state, inputs) for group in self._groups)
            return next(filter(None, (sizes.first_mismatch() for sizes in results)), None)


class _Layers:
    """The layers that guards of sizes call: which of them are not those of the capture any more.

    Layers that rewiring has widened are left out: guards compute the sizes of the original.
    """

    def __init__(
        self, paths: Sequence[str], skeleton: nn.Module, made: nn.Module, root: nn.Module
    ) -> None:
        layers = [(path, made.get_submodule(path)) for path in paths]
        self._called = [p for p, m in layers if _shapes(m) == _shapes(skeleton.get_submodule(p))]
        pairs = ((path, layer, root.get_submodule(path)) for path, layer in layers)
        self._changed = {
            path
            for path, before, now in pairs
            if not isinstance(now, type(before)) or _shapes(now) != _shapes(before)
        }
        self._present = self._snapshot(root, Kind.MODULE, Kind.SETTING)
        if made is not root:
            self._note(self._snapshot(made, Kind.SETTING).changes(self._present))

    def _snapshot(self, root: nn.Module, *kinds: Kind) -> TreeSnapshot:
        graph = fx.Graph()
        for path in self._called:
            graph.call_module(path)
        return TreeSnapshot(read_by([graph], root), kinds)

    def _note(self, changes: Iterable[Change]) -> bool:
        """Note in which layers there are changes; returns whether there are any."""
        places = [f"{change.where}." for change in changes if not _is_internal(change)]
        for path in self._called:
            at = f"{path}."
            if any(at.startswith(place) or place.startswith(at) for place in places):
                self._changed.add(path)
        return bool(places)

    def have_changed(self, root: nn.Module) -> bool:
        """Whether a layer was replaced, or set otherwise, since the last call."""
        if self._present.first_change() is None:
            return False
        before = self._present
        self._present = self._snapshot(root, Kind.MODULE, Kind.SETTING)
        return self._note(before.changes(self._present))

    def changed(self, root: nn.Module) -> dict[str, nn.Module]:
        """The present layers at the paths of those that have changed, by path."""
        layers = {path: root.get_submodule(path) for path in self._called if path in self._changed}
        return {path: getattr(layer, "_orig_mod", layer) for path, layer in layers.items()}


def _is_internal(change: Change) -> bool:
    """Whether it is a mode, or a mark that torch leaves in a module (FSDP)."""
    is_mark = change.before is Presence.ABSENT and change.name.startswith("_")
    return is_mark or change.name == "training"


def _shapes(layer: nn.Module) -> list[torch.Size]:
    return [tensor.shape for tensor in (*layer.parameters(), *layer.buffers())]


def _state_of(root: nn.Module, name: str) -> Any:
    try:
        return attrgetter(*_STATE)(attrgetter(name)(root))
    except AttributeError:
        return _ABSENT


def _parameter_type(root: nn.Module | None) -> torch.dtype | None:
    # root.parameters() takes four times as long.
    for module in () if root is None else root.modules():
        for p in module._parameters.values():
            if p is not None and p.is_floating_point():
                return p.dtype
    return None


def _without_data(
    tensor: Tensor, device: torch.device | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    device = tensor.device if device is None else device
    dtype = tensor.dtype if dtype is None or not tensor.is_floating_point() else dtype
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=device)
    return made.requires_grad_(tensor.requires_grad)


def _fake_copy(
    skeleton: nn.Module,
    device: torch.device,
    dtype: torch.dtype | None,
    layers: Mapping[str, nn.Module],
) -> nn.Module:
    """A copy with fake tensors on a device, cast if `dtype` is given, in a `FakeTensorMode`.

    In it are copies of `layers`, without their hooks, at the paths given.
    """
    memo: dict[int, Any] = {}
    for part in (skeleton, *layers.values()):
        plain = (v for m in part.modules() for v in vars(m).values() if isinstance(v, Tensor))
        for tensor in (*part.parameters(), *part.buffers(), *plain):
            fake = _without_data(tensor.detach(), device, dtype if part is skeleton else None)
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
    with unset_fake_temporarily():  # what is left has data, which cannot be copied in that mode
        for path, layer in layers.items():
            copied = copy_module(layer, memo)
            for inner in copied.modules():
                vars(inner).update({kind: OrderedDict() for kind in HOOKS})
            memo[id(skeleton.get_submodule(path))] = copied
        return copy_module(skeleton, memo)  # type: ignore[no-any-return]


def _nothing_saved() -> AbstractContextManager[Any]:
    """Inside, there is no backward pass, and autograd saves nothing.

    The user's hooks for saved tensors (`save_on_cpu`) would fail on tensors without data.
    """
    # `torch.func.grad` disables such hooks.
    if torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is not None:
        return nullcontext()
    return saved_tensors_hooks(lambda _: None, lambda _: torch.empty(()))


class _Flat(tuple[Any, ...]):
    """The tensors in a result that has its captured structure, whatever that is."""


class _Sizes(fx.Interpreter):
    """Evaluates the graph of guards; values that cannot be computed are `_ABSENT`."""

    def __init__(
        self,
        sizes: SizeGuards,
        root: nn.Module,
        inputs: list[Tensor],
        state: Mapping[str, Any],
        given: Sequence[Tensor],
    ) -> None:
        """`state` has types of parameters, by name; `given` are the inputs with their data."""
        assert sizes.graph is not None
        super().__init__(root, garbage_collect_values=False, graph=sizes.graph)
        self._sizes, self._inputs, self._state, self._given = sizes, inputs, state, given

    def first_mismatch(self) -> Mismatch | None:
        with torch.enable_grad(), _nothing_saved(), torch.random.fork_rng(devices=()):
            values = list(self.run(*self._inputs))
            outputs: Any = self.graph.output_node().args[0]
            for position in sorted(self._sizes.contents):
                values[position] = _ABSENT
                with suppress(Exception), unset_fake_temporarily():
                    values[position] = self._contents(outputs[position]).tolist()
        for guard, now in zip(self._sizes.guards, values, strict=True):
            if now is _AS_CAPTURED:
                continue
            if isinstance(now, torch.SymBool):
                now = bool(now)  # noted by `torch.export`
            expected = guard.value
            if guard.grown is not None:
                expected = grown_size(guard.value, guard.grown, self._samples_beyond())
            if now is _ABSENT or now != expected:
                return Mismatch(guard.expression, guard.value, now, guard.source)
        return None

    def _samples_beyond(self) -> int:
        """How many more samples than the example the inputs hold."""
        kinds = (node.meta.get(TYPE) for node in self.graph.find_nodes(op="placeholder"))
        for kind, tensor in zip(kinds, self._inputs, strict=True):
            dim = kind.batch_dim
            if dim is not None and dim < tensor.dim():
                return samples_beyond(tensor, dim, kind.shape[dim], kind.per_sample[dim])
        return 0

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "output":
            return super().run_node(n)
        if any(self.env[source] is _ABSENT for source in n.all_input_nodes):
            return self._reshaped(n)
        if n.target is len and isinstance(self.env[n.all_input_nodes[0]], _Flat):
            return _AS_CAPTURED
        if n.op == "call_method" and n.target in DEVICE_ATTRIBUTES:
            return getattr(self._given[0], str(n.target))()
        if n.target is getattr and n.args[1] in DEVICE_ATTRIBUTES:
            return getattr(self._given[0], str(n.args[1]))
        with suppress(Exception):
            return super().run_node(n)
        with suppress(Exception):
            return self._extrapolated(n)
        return _ABSENT

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[Any, Any]:
        """Replace devices among the arguments by the device of the fake inputs."""
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        if not isinstance(n.meta.get(TYPE), TensorType) or not self._inputs:
            return args, kwargs

        def here(given: Any) -> Any:
            return self._inputs[0].device if isinstance(given, torch.device) else given

        return tuple(map(here, args)), {name: here(given) for name, given in kwargs.items()}

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        if target not in self._state:
            return value
        dtype, requires_grad = self._state[target]
        return value.detach().to(dtype).requires_grad_(requires_grad)

    def _extrapolated(self, node: fx.Node) -> Any:
        """The result of a module that needs real data: its captured type at this batch size."""
        if node.op != "call_module":
            return _ABSENT
        sources = [n for n in node.all_input_nodes if isinstance(n.meta.get(TYPE), TensorType)]
        like = self.env[sources[0]]
        if isinstance(self.fetch_attr(str(node.target)), _BatchNorm):
            return torch.empty_like(like)  # without momentum it reads the number of batches seen
        pairs = [(n.meta[TYPE], self.env[n]) for n in sources]
        (batch,) = {_batch(*pair) for pair in pairs if any(pair[0].per_sample)} or {0}
        is_known = all(kind.at(batch) == tuple(value.shape) for kind, value in pairs)

        def made(kind: Any) -> Any:
            if isinstance(kind, tuple):
                return _Flat(map(made, kind))
            return torch.empty(kind.at(batch), dtype=kind.dtype, device=like.device)

        return made(node.meta[TYPE]) if is_known else _ABSENT

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


def _batch(kind: TensorType, value: Tensor) -> int:
    """The batch size of a value whose other sizes are those of the capture."""
    sizes = zip(kind.shape, kind.per_sample, value.shape, strict=True)
    return next(kind.batch + (now - size) // step for size, step, now in sizes if step)


# -- the captures of one model --------------------------------------------------------------------


Recapture = Callable[[nn.Module, tuple[Any, ...], Mapping[str, Any], bool, bool], Rewired]
"""`recapture(root, args, kwargs, fixed_batch, autocast)` captures the model of `root` in its
present state, for a call; with `fixed_batch`, for the batch size of this call alone; with
`autocast`, under the caller's autocast."""

_MOST: Final = 64
"""The limit of captures of one model. More mean that a size or number is new at every call."""


_REQUIRES_GRAD: Final = (
    "Models are captured with inputs that require no gradient, so one whose forward reads "
    "requires_grad of an input cannot be rewired: keep the module that reads it as one piece with "
    "leaf_modules=[...]. If that is the whole model, first move the code that reads it into a "
    "submodule."
)


_TRACED: Final = (
    "It cannot be captured again while torch.export or torch.jit.trace runs: call it once with "
    "inputs like these, in this mode, then export it."
)


class _Case(GuardChecker):
    def __init__(self, rewired: Rewired, root: nn.Module) -> None:
        super().__init__(rewired.guards, root, rewired.root)
        self.rewired = replace(rewired, root=root)

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs of the graph; raises if it was captured for other arguments."""
        return bind(self.rewired.signature, self.rewired.name, args, kwargs)


class Cases:
    """A rewired model for each combination of sizes, flags and attributes seen so far.

    The first is the one that was compiled; the others are captured when a call needs them. With
    `arguments`, a call may need one because its arguments differ from the example's; without, only
    because it leaves out an optional tensor.
    """

    def __init__(self, first: Rewired) -> None:
        self.recapture: Recapture | None = None
        """Captures the model for a call that breaks a guard; if None, such a call raises."""
        self.arguments: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
        """Makes equal calls of a model that takes any arguments alike."""
        self.first = _Case(first, first.root)
        self._cases = [self.first]
        """All cases, the most recently used first."""
        self.losing: tuple[str, ...] = ()
        """Cases in which fewer blocks are reversible than in the first."""

    def first_only(self, recapture: Recapture | None) -> Cases:
        """A copy with the first case alone, to be stored."""
        twin = copy.copy(self)
        twin._cases, twin.recapture, twin.losing = [self.first], recapture, ()
        return twin

    @property
    def graphs(self) -> Iterator[fx.Graph]:
        """The graphs of all cases."""
        return (graph for case in self._cases for graph in case.rewired.graphs)

    def bound(
        self,
        root: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        only_known: bool = False,
    ) -> tuple[Rewired, dict[str, Any]]:
        """The graph for a call, and its inputs; with `only_known`, unknown arguments raise."""
        if self.arguments is not None:
            kwargs = self.arguments(kwargs)
        other_arguments: InputError | None = None
        is_open = self.arguments is not None
        mismatch: Mismatch | None = None
        tracing = is_traced()
        for index, case in enumerate(self._cases):
            try:
                values = case.bind(args, kwargs)
            except InputError as error:
                other_arguments = other_arguments or error
                is_open = is_open or isinstance(error, LeftOutError)
                continue
            with outside_tracers() if tracing else nullcontext():
                problem = case.failing(root, values)
            if problem is None:
                self._cases.insert(0, self._cases.pop(index))
                return case.rewired, values
            mismatch = mismatch or problem
        is_full = len(self._cases) >= _MOST
        if mismatch is not None:
            self._refuse(mismatch, is_full)
            if tracing:
                raise mismatch.error(self.first.rewired.name, _TRACED)
        elif only_known or not is_open or self.recapture is None or is_full or tracing:
            assert other_arguments is not None
            raise other_arguments
        return self._captured(root, args, kwargs, mismatch)

    def _refuse(self, problem: Mismatch, is_full: bool) -> None:
        """Raise if capturing the model again would not help, or is not possible."""
        name = self.first.rewired.name
        if self.recapture is None:
            advice = "Compile the model again for this case."
            raise problem.error(name, _REQUIRES_GRAD if self._asks_input(problem) else advice)
        if any(value is Presence.SET for value in (problem.expected, problem.found)):
            raise problem.error(
                name,
                "Capturing it again does not follow new or missing modules and parameters: undo "
                "the change, or make it in the original model and compile that.",
            )
        if is_full:
            raise problem.error(
                name,
                f"It has been captured for {_MOST} cases already; give it inputs of fewer sizes "
                "(pad them), or keep the module that reads this with leaf_modules=[...].",
            )

    def _captured(
        self,
        root: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        mismatch: Mismatch | None,
    ) -> tuple[Rewired, dict[str, Any]]:
        """Capture another case; for this batch size alone if a more general one does not hold."""
        assert self.recapture is not None
        name = self.first.rewired.name
        # Under autocast, casts split most sums: only if forward reads it, or types that it decides.
        is_cast = any(map(torch.is_autocast_enabled, WITH_AUTOCAST))
        attempts = [
            (fixed, cast) for cast in dict.fromkeys((False, is_cast)) for fixed in (False, True)
        ]
        for fixed_batch, autocast in attempts:
            try:
                with outside_transforms() as active, _nothing_saved():
                    given = (args, kwargs)
                    if active:  # capturing reads no data, and these tensors have none outside
                        given = pytree.tree_map_only(Tensor, _without_data, given)
                    rewired = self.recapture(root, *given, fixed_batch, autocast)
            except ModelError as error:  # the call is wrong, not the graph
                why = str(error.__cause__) or repr(error.__cause__)
                tensors = (t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor))
                sizes = ", ".join(str(list(tensor.shape)) for tensor in tensors)
                raise ModelError(f"{name} fails on these inputs ({sizes}): {why}") from None
            except Exception as error:
                if mismatch is None:
                    raise
                raise mismatch.error(
                    name,
                    f"Capturing the model for this case failed: {error}\nCompile it again with "
                    "example inputs of this case, or keep the module that reads this as one piece "
                    "with leaf_modules=[...].",
                ) from error
            case = _Case(rewired, root)
            values = case.bind(args, kwargs)
            remaining = case.failing(root, values)
            if remaining is None:
                self._cases.insert(0, case)
                self._warn_of_loss(rewired, mismatch)
                return case.rewired, values
        assert remaining is not None
        advice = "Compile it again with example inputs of this case."
        if remaining.expression.startswith("torch."):  # a flag of torch
            advice = (
                "Models are always captured with gradients enabled: call this one so as well, or "
                "move what reads it into a submodule, which then is called as it is."
            )
        raise remaining.error(name, _REQUIRES_GRAD if self._asks_input(remaining) else advice)

    def _warn_of_loss(self, rewired: Rewired, mismatch: Mismatch | None) -> None:
        """Warn, and note for the summary, if fewer blocks are reversible than in the first case."""
        now, before = len(rewired.couplings), len(self.first.rewired.couplings)
        if now >= before:
            return
        why = "a call has other arguments than the example" if mismatch is None else str(mismatch)
        reasons = dict.fromkeys(f"{each.path}: {each.reason}" for each in rewired.refusals)
        because = "".join(f" ({reason})" for reason in (*reasons,)[:1])
        case = f"{now} of {before} blocks are reversible where {why}{because}"
        self.losing += (case,)
        warn(
            f"{rewired.name} was captured again, and {case}. The others keep their activations in "
            "such calls, as in the original model; pass an example of these calls, or see summary()"
        )

    def _asks_input(self, problem: Mismatch) -> bool:
        """Whether the guard reads `requires_grad` of an input."""
        labels = self.first.rewired.signature.labels
        return problem.expression in [f"{label}.requires_grad" for label in labels]
