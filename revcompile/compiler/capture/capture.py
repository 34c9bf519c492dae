"""capture: a model and example inputs -> `Captured`. This file orders the passes:

make_example         arguments bound, flattened, at two batch sizes           example.py
FxFrontend           a raw graph for train mode and one for eval mode         fx_frontend.py
functionalize        writes to memory become new values                       functional.py
remove_identities    nn.Identity hides where a block begins                   cleanup.py
unpack_structures    tuples and dicts of tensors become tensors               structures.py
forbid_inplace       layers with inplace=True that others would see           functional.py
merge_modes          one graph for both modes, where their structure agrees   modes.py
make_guards          conditions under which the graph is the model            guards.py
check_capture        the graph is run against the model                       check.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import fx, nn

from revcompile.compiler.capture.check import Check, Flags, check_capture, why_it_fails
from revcompile.compiler.capture.cleanup import remove_identities
from revcompile.compiler.capture.example import (
    Example,
    make_example,
    signature_of,
    with_other_batch_dims,
    with_other_batch_sizes,
)
from revcompile.compiler.capture.functional import (
    NotFunctional,
    forbid_inplace,
    functionalize,
    written_inputs,
)
from revcompile.compiler.capture.fx_frontend import FxFrontend
from revcompile.compiler.capture.guards import make_guards, with_attributes
from revcompile.compiler.capture.leaf_modules import requested_leaves
from revcompile.compiler.capture.modes import merge_modes
from revcompile.compiler.capture.structures import unpack_structures
from revcompile.compiler.capture.trace_errors import Untraceable
from revcompile.compiler.capture.tracer import Tracer
from revcompile.errors import CaptureError, InputError
from revcompile.ir.guards import FlagGuard
from revcompile.ir.module_tree import child_path
from revcompile.ir.types import Captured


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
    level = Check.parse(check)
    _refuse_hooks(model)
    example = make_example(model, example_inputs, example_kwargs)
    advice = _ADVICE
    try:
        captured, problem = _checked(model, example, requested_leaves(model, leaf_modules), level)
    except Untraceable as error:
        problem = f"tracing stopped in {error}"
        advice = advice if error.leaf_helps else ""
    else:
        if problem is None:
            return captured
        problem = f"the graph is not the model: {problem}"
    name = type(model).__name__
    raise CaptureError(f"capture: {name} could not be captured: {problem}{advice}")


_ADVICE: Final = (
    "\nWhat helps: make the module that cannot be traced a leaf module with "
    "leaf_modules=['its.path'] (or its class); fix optional arguments by passing them in "
    "example_inputs / example_kwargs; move control flow that depends on data, or a custom "
    "autograd function, into a submodule of its own."
)


def _checked(
    model: nn.Module, example: Example, leaves: frozenset[str], level: Check
) -> tuple[Captured, str | None]:
    """The graph of a model, and how it differs from the model, or None.

    A module that reads flags of torch becomes a leaf module; the flags that the model itself reads
    become guards.
    """
    while True:
        captured, example = capture_once(model, example, leaves)
        flags: Flags = {}
        problem = check_capture(model, captured, example, level, flags)
        inside = tuple(f"{path}." for path in captured.leaf_modules)
        known = {*captured.leaf_modules, ""}
        readers = {path for path in flags if path not in known and not path.startswith(inside)}
        if not readers:
            break
        leaves |= readers
    with torch.enable_grad():  # as it was traced
        guards = tuple(map(FlagGuard.of, sorted(flags.get("", ()))))
    return replace(captured, guards=replace(captured.guards, flags=guards)), problem


def _refuse_hooks(model: nn.Module) -> None:
    """A copy is compiled, and copies of parameters have no hooks."""
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
    constants: Mapping[str, torch.Tensor] | None = None,
) -> tuple[Captured, Example]:
    """Capture without a check; returns the example too, which may have to be read otherwise.

    Args:
        model: the model; on the meta device, with `device`, it is traced as if it were there.
        example: the example arguments.
        leaves: paths of leaf modules.
        device: see `model`.
        constants: tensors that earlier captures found, by the names they have there.
    """

    def run(reading: Example) -> Captured:
        return _captured(FxFrontend(model, reading, leaves, device, constants or {}))

    why = "the model fails at any other"
    try:
        captured = run(example)
    except Untraceable as error:
        captured, example = _read_otherwise(run, model, example, error)
        why = str(error) if error.by_batch else why
    if example.batch[0] == example.batch[1]:
        note = f"the batch size is fixed at {example.batch[0]}: {why}"
        captured = replace(captured, notes=(*captured.notes, note))
    return captured, example


def _captured(frontend: FxFrontend) -> Captured:
    """All passes from raw traces to a `Captured`."""
    while True:
        root, *modes = frontend.trace()
        try:
            train, evaluation = (_normalize(mode.graph, root) for mode in modes)
        except NotFunctional as error:
            frontend.add_leaf(error)  # a write that only a leaf module can hide; raises if none can
            continue
        break
    for graph in (train, evaluation):
        forbid_inplace(graph, root)
    for path, name, key in frontend.leaked:  # not set by the graph: better none than an old one
        own = vars(root.get_submodule(path))
        own.pop(name, None) if key is None else own[name].pop(key, None)
    return _assembled(frontend, root, modes, train, evaluation)


def _normalize(graph: fx.Graph, root: nn.Module) -> fx.Graph:
    """The form that the compiler works on: pure, without identities, tensors as values."""
    graph = functionalize(graph, root)
    graph = remove_identities(graph, root)
    unpack_structures(graph)
    return graph


def _assembled(
    frontend: FxFrontend,
    root: nn.Module,
    modes: Sequence[Tracer],
    train: fx.Graph,
    evaluation: fx.Graph,
) -> Captured:
    """One graph for both modes, or one each; with guards and notes."""
    first, second = modes
    has_one_spec = first.out_spec == second.out_spec
    readers = {path for traced in modes for path in traced.guards.modes}
    merged = merge_modes(train, evaluation, readers) if has_one_spec else None
    example, reasons = frontend.example, frontend.reasons
    notes = [f"{path} is a leaf module: {why}" for path, why in reasons.items()]
    if names := [child_path(path, name) for path, name, _ in frontend.leaked]:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        what = "set by the original's forward pass, not by this one"
        notes.append(f"{what}: {', '.join(names[:3])}{more}")
    return Captured(
        name=type(frontend.model).__name__,
        root=root,
        graph=train if merged is None else merged,
        eval_graph=evaluation if merged is None else None,
        signature=signature_of(example, first.out_spec, None if has_one_spec else second.out_spec),
        leaf_modules=tuple(sorted(frontend.leaves)),
        notes=(*notes, *written_inputs(first.graph)),
        computed=frozenset((path, name) for path, name, key in frontend.leaked if key is None),
        guards=with_attributes(
            make_guards((first.guards, second.guards), merged, root, example),
            frontend.model,
            (train, evaluation),
            first.asked | second.asked,
            first.written | second.written,
        ),
        draws=frozenset(first.draws | second.draws),
        stateful=tuple(f"{path}: {reasons[path]}" for path in sorted(frontend.stateful)),
    )


# -- other readings of the example ----------------------------------------------------------------


def _read_otherwise(
    run: Callable[[Example], Captured], model: nn.Module, example: Example, error: Untraceable
) -> tuple[Captured, Example]:
    """Capture with another second batch size, or with another batch dimension."""
    if error.by_batch:
        for reading in with_other_batch_sizes(example):
            try:
                return run(reading), reading
            except Untraceable:
                continue
    fitting = _fitting(model, example)
    if fitting is example:
        raise error
    return run(fitting), fitting


def _fitting(model: nn.Module, example: Example) -> Example:
    """The example, grown along a dimension along which the model lets it grow."""
    on_meta = any(t.is_meta for t in (*model.parameters(), *example.tensors(0)))
    error = why_it_fails(model, example, 0)
    if error is not None and example.single is not None:
        single = example.single
        example = replace(example, leaves=single, grown=single, batch=(1, 1), single=None)
        error = why_it_fails(model, example, 0)
    if error is not None:
        if on_meta and "meta" in str(error).lower():  # it reads values, which there are none of
            return example
        raise InputError(
            f"capture: {type(model).__name__} fails on the example inputs themselves "
            f"({example}): {str(error) or repr(error)}"
        ) from error
    if on_meta:
        return example
    readings = (example, *with_other_batch_dims(example))
    return next(e for e in readings if why_it_fails(model, e, 1) is None)
