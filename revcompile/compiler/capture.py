"""capture: a model and example inputs -> `Captured`.

FX first, with shapes known while tracing; modules that resist become leaves, one at a time;
`torch.export` where FX cannot follow. No capture is trusted: the graph is run against the
original (see `check.py`).
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from revcompile.compiler.check import Check, check_capture
from revcompile.compiler.exported import export_capture
from revcompile.compiler.modes import first_difference, merge_modes
from revcompile.compiler.simplify import simplify
from revcompile.compiler.tracer import Traced, Untraceable, fake_copy, trace
from revcompile.errors import CaptureError, InputError
from revcompile.ir import PATH, Captured, Frontend, Signature

__all__ = ["Example", "capture", "make_example"]


@dataclass(frozen=True)
class Example:
    """Example arguments, flattened, at two batch sizes."""

    forward: inspect.Signature
    given: tuple[str, ...]
    in_spec: pytree.TreeSpec
    leaves: tuple[Any, ...]
    grown: tuple[Any, ...]
    names: tuple[str, ...]
    labels: tuple[str, ...]
    batch: tuple[int, int]

    def tensors(self, which: int) -> list[torch.Tensor]:
        """The tensors among the arguments at the first or the second batch size."""
        leaves = (self.leaves, self.grown)[which]
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def call(self, which: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """`(args, kwargs)` at the first or the second batch size."""
        leaves = (self.leaves, self.grown)[which]
        args, kwargs = pytree.tree_unflatten(list(leaves), self.in_spec)
        return args, kwargs


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
    """
    level = Check.parse(check)
    example = make_example(model, example_inputs, example_kwargs)
    leaf_paths = _leaf_paths(model, leaf_modules)
    failures: list[str] = []
    for attempt in (Frontend.FX, Frontend.EXPORT) if frontend is None else (frontend,):
        make = _capture_fx if attempt is Frontend.FX else export_capture
        try:
            captured = make(model, example, leaf_paths)
        except Untraceable as error:
            failures.append(f"{attempt.value} stopped in {error}")
            continue
        problem = check_capture(model, captured, example, level)
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


def make_example(
    model: nn.Module, example_inputs: Any, example_kwargs: Mapping[str, Any] | None = None
) -> Example:
    """Bind and flatten example arguments, and derive a second batch size."""
    args = _as_args(model, example_inputs, example_kwargs)
    kwargs = dict(example_kwargs or {})
    try:
        bound = inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise InputError(
            f"capture: the example inputs do not fit {type(model).__name__}.forward"
            f"{inspect.signature(model.forward)}: {error}"
        ) from None
    parameters = tuple(bound.signature.parameters)
    with_paths, in_spec = pytree.tree_flatten_with_path((bound.args, bound.kwargs))
    leaves = [leaf for _, leaf in with_paths]
    where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    if not where:
        raise InputError("capture: no tensor among the example inputs, so there is no graph")
    first = next((leaves[i] for i in where if leaves[i].dim()), None)
    size = 1 if first is None else first.shape[0]
    batched = [i for i in where if leaves[i].dim() and leaves[i].shape[0] == size]
    if size == 1:
        for i in batched:
            leaves[i] = torch.cat([leaves[i], leaves[i]])
        size = 2
    grown = list(leaves)
    for i in batched:
        grown[i] = torch.cat([leaves[i], leaves[i][:1]])
    labels = tuple(_label(parameters, with_paths[i][0]) for i in where)
    names = _unique(labels)
    return Example(
        bound.signature, tuple(bound.arguments), in_spec, tuple(leaves), tuple(grown), names, labels, (size, size + 1)
    )


def _as_args(
    model: nn.Module, example_inputs: Any, example_kwargs: Mapping[str, Any] | None
) -> tuple[Any, ...]:
    if isinstance(example_inputs, (tuple, list)):
        return tuple(example_inputs)
    if example_inputs is not None:
        return (example_inputs,)
    if example_kwargs:
        return ()
    config = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None)
    size = config.get("input_size") if isinstance(config, Mapping) else None
    if size is None:
        raise InputError(
            f"capture: {type(model).__name__} says nothing about its input (no timm default_cfg);"
            " pass example_inputs=(tensor, ...) with a batch of 2 or more"
        )
    channels = getattr(model, "in_chans", None)
    size = _size_set_by_user(model, tuple(size))
    if isinstance(channels, int):
        size = (channels, *size[1:])
    parameter = next(model.parameters(), torch.empty(0))
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(2, *size, generator=generator)
    return (image.to(device=parameter.device, dtype=parameter.dtype),)


def _size_set_by_user(model: nn.Module, size: tuple[int, ...]) -> tuple[int, ...]:
    """timm keeps an `img_size=` given by the user in the patch embedding, not in default_cfg."""
    chosen = getattr(getattr(model, "patch_embed", None), "img_size", None)
    if isinstance(chosen, (tuple, list)) and len(chosen) == 2:
        return (size[0], *map(int, chosen))
    return size


def _label(parameters: tuple[str, ...], path: tuple[Any, ...]) -> str:
    """`x`, `batch['mask']`: how a user would write the argument."""
    (side, index), rest = (path[0].idx, path[1]), path[2:]
    if side == 0:
        name = parameters[min(index.idx, len(parameters) - 1)]
    else:
        name = str(index.key)
    return name + "".join(str(key) for key in rest)


def _unique(labels: tuple[str, ...]) -> tuple[str, ...]:
    names: list[str] = []
    for label in labels:
        base = "".join(c if c.isalnum() else "_" for c in label).strip("_") or "x"
        name, n = base, 1
        while name in names:
            name, n = f"{base}_{n}", n + 1
        names.append(name)
    return tuple(names)


def _leaf_paths(model: nn.Module, wanted: Iterable[str | type[nn.Module]]) -> frozenset[str]:
    modules = dict(model.named_modules())
    paths: set[str] = set()
    for item in wanted:
        if isinstance(item, str):
            if item not in modules:
                raise InputError(f"capture: leaf_modules names {item!r}, which the model has not")
            paths.add(item)
        else:
            paths |= {path for path, module in modules.items() if isinstance(module, item)}
    return frozenset(paths)


def _capture_fx(model: nn.Module, example: Example, leaf_paths: frozenset[str]) -> Captured:
    """Trace both modes; make the innermost module that resists a leaf and try again."""
    leaves, reasons = set(leaf_paths), list[str]()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake = fake_copy(model, mode)
    examples = tuple([mode.from_tensor(t) for t in example.tensors(w)] for w in (0, 1))

    def run(training: bool) -> Traced:
        return trace(
            set_mode(fake, model, training),
            example.in_spec,
            example.leaves,
            example.names,
            (examples[0], examples[1]),
            mode,
            frozenset(leaves),
        )

    while True:
        try:
            train, evaluation = run(True), run(False)
        except Untraceable as error:
            if not error.path or error.path in leaves:
                raise
            leaves.add(error.path)
            reasons.append(f"{error.path} is kept as one piece: {error.cause}")
            continue
        graph = merge_modes(train.graph, evaluation.graph)
        if graph is not None:
            break
        path = _mode_dependent_module(model, train.graph, evaluation.graph)
        if path is None or path in leaves:
            break
        leaves.add(path)
    root = copy.deepcopy(model)
    for name, tensor in train.constants.items():
        keep_constant(root, name, tensor)
    return Captured(
        name=type(model).__name__,
        root=root,
        graph=simplify(graph if graph is not None else train.graph, root),
        eval_graph=None if graph is not None else simplify(evaluation.graph, root),
        signature=signature_of(example, train.out_spec),
        frontend=Frontend.FX,
        leaves=tuple(sorted(leaves)),
        notes=tuple(reasons),
    )


def signature_of(example: Example, out_spec: pytree.TreeSpec) -> Signature:
    """The calling convention that goes with an example."""
    fixed = tuple(
        (i, leaf) for i, leaf in enumerate(example.leaves) if not isinstance(leaf, torch.Tensor)
    )
    return Signature(
        example.forward, example.given, example.in_spec, fixed, example.names, example.labels, out_spec
    )


def set_mode(fake: nn.Module, model: nn.Module, training: bool) -> nn.Module:
    """Put the copy in a mode; modules the user froze in eval mode stay frozen."""
    frozen = {path for path, module in model.named_modules() if not module.training}
    for path, module in fake.named_modules():
        module.training = training and (not model.training or path not in frozen)
    return fake


def _mode_dependent_module(
    model: nn.Module, train: fx.Graph, evaluation: fx.Graph
) -> str | None:
    """A childless module to make a leaf because its two modes have different structure."""
    for node in first_difference(train, evaluation):
        path = node.meta.get(PATH, "")
        if path and not any(model.get_submodule(path).children()):
            return str(path)
    return None


def keep_constant(root: nn.Module, name: str, tensor: Any) -> None:
    """Give the private copy a tensor that tracing found, so that it moves with the module."""
    *parents, leaf = name.split(".")
    owner: Any = root
    for atom in parents:
        owner = getattr(owner, atom)
    existing = getattr(owner, leaf, None)
    value = existing if isinstance(existing, torch.Tensor) else tensor
    if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
        if isinstance(existing, torch.Tensor):
            delattr(owner, leaf)
        owner.register_buffer(leaf, value, persistent=False)


