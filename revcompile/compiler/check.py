"""Run a capture against the original: several tracing failures are silent.

`full` compares outputs, gradients of parameters and inputs, and buffers, at two batch sizes and
two seeds, in both modes; `fast` only outputs at the second batch size, in training mode.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from revcompile.errors import InputError
from revcompile.ir import Captured

if TYPE_CHECKING:
    from revcompile.compiler.capture import Example

__all__ = ["Check", "check_capture", "compare", "model_unchanged", "rng_kept", "run_graph"]


class Check(enum.Enum):
    """How thoroughly a capture is compared with the original."""

    FULL = "full"
    FAST = "fast"
    OFF = "off"

    @staticmethod
    def parse(level: Check | str) -> Check:
        """Accept the enum or its value."""
        try:
            return Check(level)
        except ValueError:
            known = ", ".join(repr(c.value) for c in Check)
            raise InputError(f"check: expected one of {known}, got {level!r}") from None


def check_capture(
    model: nn.Module, captured: Captured, example: Example, level: Check
) -> str | None:
    """What differs between the model and its capture, or None."""
    on_meta = any(t.is_meta for t in (*model.parameters(), *example.tensors(0)))
    if level is Check.OFF or on_meta:
        return None
    if level is Check.FAST:
        return _compare_once(model, captured, example, which=1, seed=0, training=True, deep=False)
    for which in (0, 1):
        for seed in (0, 1):
            for training in (True, False):
                problem = _compare_once(
                    model, captured, example, which, seed, training=training, deep=True
                )
                if problem is not None:
                    return problem
    return None


def _compare_once(
    model: nn.Module,
    captured: Captured,
    example: Example,
    which: int,
    seed: int,
    *,
    training: bool,
    deep: bool,
) -> str | None:
    mode = "train" if training else "eval"
    context = f"{mode} mode, batch {example.batch[which]}, seed {seed}"
    reference = _shadow(model)
    root = _shadow(captured.root)
    _match_mode(reference, model, training)
    _match_mode(root, model, training)
    try:
        expected = _run(lambda: _call(reference, example, which), seed, deep)
    except Exception as error:
        return f"the original itself fails in {context}: {error}" if which == 0 else None
    try:
        actual = _run(lambda: _call_graph(captured, root, example, which), seed, deep)
    except Exception as error:
        return f"the graph fails in {context}: {type(error).__name__}: {error}"
    problem = compare(expected, actual)
    if problem is None and deep:
        problem = _compare_state(reference, root)
    return f"{problem} ({context})" if problem else None


def run_graph(graph: fx.Graph, root: nn.Module, inputs: list[torch.Tensor]) -> Any:
    """Run a graph over a root module without registering anything on it."""
    return _Interpreter(root, graph).run(*inputs)


class _Interpreter(fx.Interpreter):
    """An interpreter over a graph that belongs to no GraphModule."""

    def __init__(self, root: nn.Module, graph: fx.Graph) -> None:
        super().__init__(root, graph=graph)


def _call(model: nn.Module, example: Example, which: int) -> tuple[Any, list[torch.Tensor]]:
    leaves, tensors = _fresh_inputs(example, which)
    args, kwargs = pytree.tree_unflatten(leaves, example.in_spec)
    return model(*args, **kwargs), tensors


def _call_graph(
    captured: Captured, root: nn.Module, example: Example, which: int
) -> tuple[Any, list[torch.Tensor]]:
    _, tensors = _fresh_inputs(example, which)
    graph = captured.graph
    if captured.eval_graph is not None and not root.training:
        graph = captured.eval_graph
    outputs = run_graph(graph, root, tensors)
    return pytree.tree_unflatten(list(outputs), captured.signature.out_spec), tensors


def _fresh_inputs(example: Example, which: int) -> tuple[list[Any], list[torch.Tensor]]:
    leaves: list[Any] = []
    for leaf in (example.leaves, example.grown)[which]:
        if isinstance(leaf, torch.Tensor):
            leaf = leaf.detach().clone()
            if leaf.is_floating_point():
                leaf.requires_grad_()
                leaf = leaf * 1  # a non-leaf: models may write into their input
                leaf.retain_grad()
        leaves.append(leaf)
    return leaves, [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _run(call: Any, seed: int, deep: bool) -> dict[str, Any]:
    with rng_kept(), torch.set_grad_enabled(deep):
        torch.manual_seed(seed)
        output, tensors = call()
        flat = [t for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor)]
        found = {f"output {i}": t.detach() for i, t in enumerate(flat)}
        if deep:
            torch.manual_seed(seed)
            scored = [t for t in flat if t.requires_grad]
            if scored:
                weighted = [(t * torch.randn_like(t)).sum() for t in scored]
                torch.autograd.backward([w.real if w.is_complex() else w for w in weighted])
            for i, tensor in enumerate(tensors):
                if tensor.is_floating_point():
                    found[f"the gradient of input {i}"] = tensor.grad
        return found


def compare(expected: dict[str, Any], actual: dict[str, Any]) -> str | None:
    """The first tensor in which two runs differ beyond rounding, or None."""
    if expected.keys() != actual.keys():
        return f"results {sorted(expected)} became {sorted(actual)}"
    for name, want in expected.items():
        have = actual[name]
        if (want is None) != (have is None):
            return f"{name} is {'missing' if have is None else 'not zero'}"
        if want is None:
            continue
        if want.shape != have.shape or want.dtype != have.dtype:
            return (
                f"{name}: expected {tuple(want.shape)} {want.dtype}, "
                f"got {tuple(have.shape)} {have.dtype}"
            )
        difference = _distance(want, have)
        if not difference <= _tolerance(want.dtype):
            return f"{name} differs by {difference:.2g} (relative)"
    return None


def _distance(want: torch.Tensor, have: torch.Tensor) -> float:
    if not want.numel():
        return 0.0
    if not (want.is_floating_point() or want.is_complex()):
        return float((want != have).any())
    same_nan = torch.equal(want.isnan(), have.isnan())
    want, have = want.nan_to_num(), have.nan_to_num()
    scale = want.abs().max().clamp_min(1e-30)
    return float((want - have).abs().max() / scale) if same_nan else float("inf")


def _tolerance(dtype: torch.dtype) -> float:
    return {torch.float64: 1e-9, torch.float32: 1e-4}.get(dtype, 5e-2)


def _compare_state(reference: nn.Module, root: nn.Module) -> str | None:
    expected: dict[str, Any] = {}
    actual: dict[str, Any] = {}
    for label, found in ((expected, reference), (actual, root)):
        for name, parameter in found.named_parameters():
            label[f"the gradient of {name}"] = parameter.grad
        for name, buffer in found.named_buffers():
            label[f"buffer {name}"] = buffer
    actual = {name: value for name, value in actual.items() if name in expected}
    return compare(expected, actual)


def _shadow(model: nn.Module) -> nn.Module:
    """A copy that shares the parameters' memory but nothing that can be written to."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        twin = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
        memo[id(parameter)] = twin
    return copy.deepcopy(model, memo)


def _match_mode(module: nn.Module, model: nn.Module, training: bool) -> None:
    frozen = {path for path, m in model.named_modules() if not m.training}
    for path, m in module.named_modules():
        m.training = training and (not model.training or path not in frozen)


@contextmanager
def rng_kept() -> Iterator[None]:
    """Leave every random generator as it was found."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        yield


@contextmanager
def model_unchanged(*models: nn.Module) -> Iterator[None]:
    """Leave random generators, and the buffers and modes of `models`, as they were found."""
    buffers = [(b, b.detach().clone()) for m in models for b in m.buffers() if not b.is_meta]
    modes = [(inner, inner.training) for m in models for inner in m.modules()]
    with rng_kept():
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
            for inner, training in modes:
                inner.training = training
