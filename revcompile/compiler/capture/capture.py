"""capture: a model and example inputs -> `Captured`. This file orders the passes:

make_example         arguments bound, flattened, at two batch sizes           example.py
trace                a raw graph for train mode and one for eval mode         tracer.py
functionalize        writes become new values, identities are removed         functional.py
forbid_inplace       inplace=False where a write would have other readers     functional.py
merge_modes          one graph for both modes, where their structure agrees   modes.py
make_guards          conditions under which the graph equals the model        guards.py
check_capture        the graph is run against the model                       check.py
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from revcompile.compiler.capture.bytecode import names_in_forward
from revcompile.compiler.capture.check import Check, check_capture, why_it_fails
from revcompile.compiler.capture.example import (
    Example,
    make_example,
    with_fixed_batch,
    with_other_batch_dims,
)
from revcompile.compiler.capture.fake_values import FakeMode, fake_copy
from revcompile.compiler.capture.functional import (
    NotFunctional,
    forbid_inplace,
    functionalize,
    written_inputs,
)
from revcompile.compiler.capture.guards import make_guards
from revcompile.compiler.capture.isolation import (
    copy_model,
    foreign_rng_state,
    register_constant,
    restore_foreign_rng,
    set_mode,
)
from revcompile.compiler.capture.leaf_modules import (
    innermost_module,
    is_leaf,
    mode_dependent,
    requested_leaves,
)
from revcompile.compiler.capture.modes import merge_modes
from revcompile.compiler.capture.trace_errors import (
    BatchDependent,
    DrawsElsewhere,
    Rejected,
    Untraceable,
)
from revcompile.compiler.capture.tracer import Tracer
from revcompile.errors import CaptureError, InputError, ModelError
from revcompile.ir.guards import FLAGS, flag
from revcompile.ir.module_tree import child_path
from revcompile.ir.types import SOURCE, Captured


def capture(
    model: nn.Module,
    example_inputs: Any = None,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    check: Check | str = Check.FAST,
    leaf_modules: Iterable[str | type[nn.Module]] = (),
) -> Captured:
    """Turn a model into a graph that was checked against it. The model itself is not changed.

    Args:
        model: any `nn.Module`.
        example_inputs: positional arguments, a batch of two or more.
        example_kwargs: keyword arguments.
        check: how the graph is compared with the model, "fast", "full" or "off".
        leaf_modules: paths or classes of modules that become single calls.

    Raises:
        CaptureError: tracing gives no graph that computes what the model computes.

    >>> import torch
    >>> captured = capture(torch.nn.Linear(3, 2), torch.randn(2, 3), check="full")
    >>> captured.signature.placeholders
    ('input_1',)
    """
    level = Check(check)
    _refuse_hooks(model)
    example = make_example(model, example_inputs, example_kwargs)
    advice = _ADVICE
    try:
        captured, problem = _checked(model, example, requested_leaves(model, leaf_modules), level)
    except Untraceable as error:
        problem = f"tracing stopped in {error}"
        advice = "" if isinstance(error.error, Rejected) else advice
    else:
        if problem is None:
            return captured
        problem = f"the graph is not the model: {problem}"
    name = type(model).__name__
    raise CaptureError(f"capture: {name} could not be captured: {problem}{advice}")


_ADVICE: Final = (
    "\nWhat helps: make the module that cannot be traced a leaf module with "
    "leaf_modules=['its.path'] (or its class); fix optional arguments by passing them in "
    "example_inputs / example_kwargs; move control flow that depends on data, a custom autograd "
    "function, or what writes into buffers, into a submodule of its own."
)


def _checked(
    model: nn.Module, example: Example, leaves: frozenset[str], level: Check
) -> tuple[Captured, str | None]:
    """The graph of a model, and how it differs from the model, or None.

    A module whose forward names flags of torch is a leaf module, which reads them in each call; the
    flags that the model itself names are guards.
    """
    readers = {
        path: FLAGS & names_in_forward(type(module))  # type: ignore[arg-type]
        for path, module in model.named_modules()
        if not is_leaf(module)
    }
    leaves |= {path for path, names in readers.items() if path and names}
    captured, example = capture_once(model, example, leaves)
    with torch.enable_grad():  # as it was traced
        flags = {name: flag(name) for name in sorted(readers.get("", ()))}
    captured = replace(captured, guards=replace(captured.guards, flags=flags))
    return captured, check_capture(model, captured, example, level)


def _refuse_hooks(model: nn.Module) -> None:
    """Refuse hooks of parameters: a copy of the model is compiled, and its parameters have none."""
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise InputError(
                f"capture: the parameter {name} has a hook (register_hook), which would not run: "
                "a copy of the model is compiled. Remove the hook, and register it on the "
                "parameter of the compiled model"
            )


def capture_once(
    model: nn.Module,
    example: Example,
    leaves: frozenset[str],
    device: torch.device | None = None,
) -> tuple[Captured, Example]:
    """Capture without a check; also returns the example, whose batch sizes may have to change.

    Args:
        model: the model; if it is on the meta device, it is traced as if it were on `device`.
        example: the example arguments.
        leaves: paths of leaf modules.
        device: see `model`.
    """

    def run(reading: Example) -> Captured:
        return _Capture(model, reading, leaves, device).run()

    why = "the model fails at any other"
    try:
        captured = run(example)
    except Untraceable as error:
        captured, example = _read_otherwise(run, model, example, error)
        why = str(error) if isinstance(error.error, BatchDependent) else why
    if example.batch[0] == example.batch[1]:
        note = f"the batch size is fixed at {example.batch[0]}: {why}"
        captured = replace(captured, notes=(*captured.notes, note))
    return captured, example


class _Capture:
    """All passes from a model to a `Captured`, for one reading of the example.

    A module may turn out to be a leaf module in one mode only, because its two modes differ in
    structure, or because it writes to memory that others see. Both modes are then traced again.
    """

    def __init__(
        self,
        model: nn.Module,
        example: Example,
        leaves: frozenset[str],
        device: torch.device | None,
    ) -> None:
        self._model, self._example = model, example
        self._leaves, self._stateful = set(leaves), set[str]()
        self._reasons: dict[str, str] = {}
        """Why modules are leaf modules that the user has not requested, by path."""
        self._mode = FakeMode()
        self._fake = fake_copy(model, self._mode, device)

    def run(self) -> Captured:
        while True:
            traced = train, evaluation = self._traced(True), self._traced(False)
            if evaluation.untraceable:
                continue
            more = mode_dependent(self._model, train.graph, evaluation.graph)
            if not self._leaves.issuperset(more):
                self._leaves.update(more)
                continue
            root = copy_model(self._model)
            for name, tensor in {**train.constants, **evaluation.constants}.items():
                register_constant(root, name, tensor)
            try:
                graphs = [functionalize(mode.graph, root) for mode in traced]
            except NotFunctional as error:  # a write that only a leaf module can hide
                self._add_leaf(error)
                continue
            return self._assembled(root, traced, *graphs)

    def _traced(self, training: bool) -> Tracer:
        fake = set_mode(self._fake, self._model, training)
        args = self._model, self._example, self._mode, self._leaves
        traced = trace(fake, *args)
        self._leaves.update(traced.untraceable)
        self._reasons.update(traced.untraceable)
        self._stateful.update(traced.stateful)
        return traced

    def _add_leaf(self, error: NotFunctional) -> None:
        """Make the innermost module around a write a leaf module."""
        path = innermost_module(error.nodes, self._leaves)
        if not path:
            raise Untraceable("", str(error), str(error.nodes[0].meta.get(SOURCE, "?")))
        self._leaves.add(path)
        self._reasons[path] = str(error)

    def _leaked(self, traced: Sequence[Tracer]) -> list[tuple[str, str, Any]]:
        """Attributes in which forward passes leave tensors, except those that leaf modules set."""
        inside = tuple(f"{path}." for path in self._leaves)
        found = sorted({entry for mode in traced for entry in mode.leaked}, key=repr)
        return [e for e in found if e[0] not in self._leaves and not e[0].startswith(inside)]

    def _assembled(
        self, root: nn.Module, traced: Sequence[Tracer], train: fx.Graph, evaluation: fx.Graph
    ) -> Captured:
        """One graph for both modes, or one each; with guards and notes."""
        for graph in (train, evaluation):
            forbid_inplace(graph, root)
        first, second = traced
        leaked, in_training = self._leaked(traced), {entry[:2] for entry in first.leaked}
        for path, name, key in leaked:  # the graph does not set it: remove the old value
            own = vars(root.get_submodule(path))
            if key is not None and name in own:
                own[name].pop(key, None)
            # An emptied dict would look as if nothing had been stored. One that only eval mode
            # fills stays: such a cache starts out empty.
            if key is None or ((path, name) in in_training and not own.get(name)):
                own.pop(name, None)
        has_one_spec = first.out_spec == second.out_spec
        readers = {path for mode in traced for path in mode.guards.modes}
        merged = merge_modes(train, evaluation, readers) if has_one_spec else None
        notes = [f"{path} is a leaf module: {why}" for path, why in self._reasons.items()]
        if names := [child_path(path, name) for path, name, _ in leaked]:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            what = "set by the original's forward pass, not by this one"
            notes.append(f"{what}: {', '.join(names[:3])}{more}")
        eval_spec = None if has_one_spec else second.out_spec
        return Captured(
            name=type(self._model).__name__,
            root=root,
            graph=train if merged is None else merged,
            eval_graph=evaluation if merged is None else None,
            signature=replace(
                self._example.signature, out_spec=first.out_spec, eval_out_spec=eval_spec
            ),
            leaf_modules=tuple(sorted(self._leaves)),
            notes=(*notes, *written_inputs(first.graph)),
            computed=frozenset(
                (path, name)
                for path, name, _ in leaked
                if name not in vars(root.get_submodule(path))
            ),
            stored=tuple(sorted({(path, name) for path, name, _ in leaked} & first.stored)),
            guards=make_guards(
                self._model, root, self._example, traced, (train, evaluation), merged
            ),
            draws=frozenset(first.draws | second.draws),
            stateful={path: self._reasons[path] for path in sorted(self._stateful)},
        )


def trace(
    fake: nn.Module,
    model: nn.Module,
    example: Example,
    mode: FakeTensorMode,
    leaf_paths: Iterable[str] = (),
) -> Tracer:
    """Trace a fake copy of a model in its current mode; returns the tracer, which has the results.

    Args:
        fake: the fake copy, on tensors of `mode`.
        model: the model itself, for leaf modules that need real tensors.
        example: the example arguments.
        mode: the fake tensors' mode.
        leaf_paths: modules that become single calls.
    """
    made = model, example, mode, frozenset(leaf_paths)
    state, attempts = foreign_rng_state(), 3
    while True:
        try:
            return Tracer(*made).run(fake)
        except Untraceable as error:
            if not isinstance(error.error, DrawsElsewhere):
                raise
            attempts -= 1
            if not attempts or threading.active_count() == 1:
                restore_foreign_rng(state)
                raise
            # Else another thread may have drawn, and may be done.


# -- other readings of the example ----------------------------------------------------------------


def _read_otherwise(
    run: Callable[[Example], Captured], model: nn.Module, example: Example, error: Untraceable
) -> tuple[Captured, Example]:
    """Capture with a fixed batch size, or with another batch dimension."""
    if isinstance(error.error, BatchDependent) and example.grown is not example.leaves:
        fixed = with_fixed_batch(example)
        with suppress(Untraceable):
            return run(fixed), fixed
    fitting = _fitting(model, example)
    if fitting is example:
        raise error
    return run(fitting), fitting


def _fitting(model: nn.Module, example: Example) -> Example:
    """The example with a batch dimension along which the model accepts another size."""
    on_meta = any(t.is_meta for t in (*model.parameters(), *example.tensors(0)))
    error = why_it_fails(model, example, 0)
    if error is not None and example.single is not None:
        single = example.single
        example = replace(example, leaves=single, grown=single, batch=(1, 1), single=None)
        error = why_it_fails(model, example, 0)
    if error is not None:
        if on_meta and "meta" in str(error).lower():  # it reads values, but meta tensors have none
            return example
        raise ModelError(
            f"capture: {type(model).__name__} fails on the example inputs themselves "
            f"({example}): {str(error) or repr(error)}"
        ) from error
    if on_meta:
        return example
    readings = (example, *with_other_batch_dims(example))
    return next(e for e in readings if why_it_fails(model, e, 1) is None)
