"""capture: a model and example inputs -> `Captured`.

FX first, with shapes known while tracing; modules that resist are kept as one piece;
`torch.export` where FX cannot follow. No capture is trusted: the graph is run against the
original (see `check.py`).
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from revcompile.compiler.capture.check import Check, check_capture, why_it_fails
from revcompile.compiler.capture.copies import copy_model, fake_copy, keep_constant, set_mode
from revcompile.compiler.capture.example import (
    Example,
    make_example,
    regrown,
    resized,
    signature_of,
)
from revcompile.compiler.capture.exported import export_capture
from revcompile.compiler.capture.functional import Entangled, forbid_inplace, written_inputs
from revcompile.compiler.capture.guards import make_guards
from revcompile.compiler.capture.leaf_modules import is_leaf
from revcompile.compiler.capture.leaked_tensors import put_in_place
from revcompile.compiler.capture.modes import first_difference, merge_modes
from revcompile.compiler.capture.proxy import BATCH_DECIDES
from revcompile.compiler.capture.rng import rng_kept
from revcompile.compiler.capture.simplify import simplify
from revcompile.compiler.capture.tracer import Traced, Untraceable, trace
from revcompile.errors import CaptureError, InputError
from revcompile.ir.guards import ModeGuards
from revcompile.ir.types import PATH, SOURCE, Captured, Frontend

__all__ = [
    "Example",
    "capture",
    "capture_for",
    "keep_constant",
    "make_example",
    "set_mode",
    "signature_of",
]


def capture(
    model: nn.Module,
    example_inputs: Any = None,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    check: Check | str = Check.FAST,
    leaf_modules: Iterable[str | type[nn.Module]] = (),
    frontend: Frontend | None = None,
) -> Captured:
    """Turn a model into a checked graph. The model itself is not touched.

    `leaf_modules` (paths or classes) are kept as single calls. `frontend` forces one of the two
    tracers; by default FX is tried first and `torch.export` second.

    >>> import torch, revcompile
    >>> captured = revcompile.capture(torch.nn.Linear(3, 2), torch.randn(2, 3), check="full")
    >>> captured.signature.placeholders, captured.frontend.value
    (('input_1',), 'torch.fx')
    """
    level = Check.parse(check)
    example = make_example(model, example_inputs, example_kwargs)
    leaf_paths = _leaf_paths(model, leaf_modules)
    failures: list[str] = []
    for attempt in (Frontend.FX, Frontend.EXPORT) if frontend is None else (frontend,):
        try:
            with rng_kept(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                captured, example = capture_for(attempt, model, example, leaf_paths)
                problem = check_capture(model, captured, example, level)
        except Untraceable as error:
            failures.append(f"{attempt.value} stopped in {error}")
            if error.is_final:
                break
            continue
        if problem is None:
            return captured
        failures.append(f"{attempt.value} gave a graph that is not the model: {problem}")
    raise CaptureError(
        f"capture: {type(model).__name__} could not be captured.\n"
        + "".join(f"  {i}. {text}\n" for i, text in enumerate(failures, 1))
        + "What helps: keep the module that resists as one piece with "
        "leaf_modules=['its.path'] (or its class); fix optional arguments by passing them in "
        "example_inputs / example_kwargs; move control flow that depends on data into a "
        "submodule of its own."
    )


def capture_for(
    frontend: Frontend,
    model: nn.Module,
    example: Example,
    leaf_paths: frozenset[str],
    device: torch.device | None = None,
    constants: dict[str, torch.Tensor] | None = None,
) -> tuple[Captured, Example]:
    """Capture; where that fails because of the example, say so or read it another way.

    With `device` a model on the meta device passes for one that is there; `constants` are names
    that tensors found on the way have already.
    """

    def make(reading: Example) -> Captured:
        if frontend is Frontend.FX:
            return _capture_fx(model, reading, leaf_paths, device, constants or {})
        return export_capture(model, reading, leaf_paths)

    try:
        captured = make(example)
    except Untraceable as error:
        captured, example = _read_otherwise(make, model, example, error)
    if example.batch[0] == example.batch[1]:
        note = f"the batch size is fixed at {example.batch[0]}: the model fails at any other"
        captured = replace(captured, notes=(*captured.notes, note))
    return captured, example


def _read_otherwise(
    make: Callable[[Example], Captured], model: nn.Module, example: Example, error: Untraceable
) -> tuple[Captured, Example]:
    """Capture with another second batch size, or with another batch dimension."""
    if BATCH_DECIDES in error.cause:
        for reading in resized(example):
            try:
                return make(reading), reading
            except Untraceable:
                continue
    fitting = _fitting(model, example)
    if fitting is example:
        raise error
    return make(fitting), fitting


def _fitting(model: nn.Module, example: Example) -> Example:
    """The example, grown along a dimension along which the model lets it grow."""
    if any(t.is_meta for t in (*model.parameters(), *example.tensors(0))):
        return example
    error = why_it_fails(model, example, 0)
    if error is not None:
        raise InputError(
            f"capture: {type(model).__name__} fails on the example inputs themselves "
            f"({example}): {error}"
        ) from error
    readings = (example, *regrown(example))
    return next(e for e in readings if why_it_fails(model, e, 1) is None)


def _capture_fx(
    model: nn.Module,
    example: Example,
    leaf_paths: frozenset[str],
    device: torch.device | None,
    constants: dict[str, torch.Tensor],
) -> Captured:
    """Trace both modes, with the same modules kept as one piece in both."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake = fake_copy(model, mode, device)
    leaves, resisted, stateful = set(leaf_paths), dict[str, str](), set[str]()
    constants = dict(constants)

    def run(training: bool) -> Traced:
        traced = trace(set_mode(fake, model, training), model, example, mode, leaves, constants)
        leaves.update(traced.resisted)
        resisted.update(traced.resisted)
        stateful.update(traced.stateful)
        return traced

    while True:
        train, evaluation = run(True), run(False)
        if evaluation.resisted:
            continue
        same = train.out_spec == evaluation.out_spec
        differs = not same or first_difference(train.graph, evaluation.graph)
        to_keep = _mode_dependent(model, train.graph, evaluation.graph) if differs else ()
        if not leaves.issuperset(to_keep):
            leaves.update(to_keep)
            continue
        root = copy_model(model)
        for name, tensor in (train.constants | evaluation.constants).items():
            keep_constant(root, name, tensor)
        try:
            pure = [simplify(traced.graph, root) for traced in (train, evaluation)]
        except Entangled as error:
            path, why = _module_around(error, leaves)
            leaves.add(path)
            resisted[path] = why
            continue
        break
    for one in pure:
        forbid_inplace(one, root)
    inside = tuple(f"{path}." for path in leaves)
    put_in_place(
        root,
        (
            one
            for one in sorted(train.left | evaluation.left, key=repr)
            if one[0] not in leaves and not one[0].startswith(inside)
        ),
    )
    readers = _flags_read(train.guards) | _flags_read(evaluation.guards)
    graph = merge_modes(pure[0], pure[1], readers) if same else None
    notes = [f"{path} is kept as one piece: {why}" for path, why in resisted.items()]
    return Captured(
        name=type(model).__name__,
        root=root,
        graph=graph if graph is not None else pure[0],
        eval_graph=None if graph is not None else pure[1],
        signature=signature_of(example, train.out_spec, None if same else evaluation.out_spec),
        frontend=Frontend.FX,
        leaves=tuple(sorted(leaves)),
        notes=(*notes, *written_inputs(train.graph)),
        guards=make_guards(train.guards, evaluation.guards, graph, root, example),
        draws=train.draws | evaluation.draws,
        stateful=tuple(f"{path}: {resisted[path]}" for path in sorted(stateful)),
    )


def _flags_read(guards: ModeGuards) -> set[str]:
    return {guard.path for guard in guards.attributes if guard.name == "training"}


def _module_around(error: Entangled, leaves: set[str]) -> tuple[str, str]:
    """The innermost module that holds all nodes of a write that cannot be made out of place.

    Kept as one call, it writes where nobody outside sees it.
    """
    paths = [str(node.meta.get(PATH, "")).split(".") for node in error.nodes]
    common = [a for a, *rest in zip(*paths, strict=False) if all(b == a for b in rest)]
    first = error.nodes[0]
    if first.op == "call_module" and ".".join(common) == str(first.target):
        common = common[:-1]
    path = ".".join(common)
    while path in leaves:
        path = path.rpartition(".")[0]
    if not path:
        raise Untraceable("", str(error), str(first.meta.get(SOURCE, "?")))
    return path, str(error)


def _mode_dependent(model: nn.Module, train: fx.Graph, evaluation: fx.Graph) -> tuple[str, ...]:
    """Childless modules to keep whole because their two modes have different structure."""
    for node in first_difference(train, evaluation):
        path = node.meta.get(PATH, "")
        culprit = model.get_submodule(path)
        if path and not any(culprit.children()) and not is_leaf(culprit):
            alike = (p for p, m in model.named_modules() if type(m) is type(culprit))
            return tuple(p for p in alike if p)
    return ()


def _leaf_paths(model: nn.Module, wanted: Iterable[str | type[nn.Module]]) -> frozenset[str]:
    """Paths of the modules to keep whole; a module of several names goes by its first."""
    modules = dict(model.named_modules(remove_duplicate=False))
    first_names = {module: path for path, module in model.named_modules()}
    paths: set[str] = set()
    for item in [wanted] if isinstance(wanted, (str, type)) else wanted:
        if not isinstance(item, str | type):
            raise InputError(
                f"capture: leaf_modules takes paths and classes of modules, not {item!r}"
            )
        if not isinstance(item, str):
            paths |= {path for module, path in first_names.items() if isinstance(module, item)}
        elif item in modules:
            paths.add(first_names[modules[item]])
        else:
            near = difflib.get_close_matches(item, modules, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise InputError(f"capture: leaf_modules names {item!r}, which the model has not{hint}")
    if "" in paths:
        raise InputError("capture: leaf_modules names the whole model, which leaves no graph")
    return frozenset(paths)
