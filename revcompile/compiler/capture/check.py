"""Run a capture against the original: tracing can go wrong silently.

`full` compares outputs, gradients of parameters and inputs, and buffers, at two batch sizes and
two seeds, in both modes. `fast` compares only outputs and buffers, at the second batch size, in
training mode and, if the graph depends on the mode, in eval mode.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from revcompile.compiler.capture.example import Example
from revcompile.compiler.capture.isolation import copy_model, preserve_rng, seed_all, set_mode
from revcompile.compiler.capture.memory import overwrites_unshared, tensors_in
from revcompile.compiler.capture.random_draws import DrawsLeftOut
from revcompile.errors import InputError
from revcompile.ir.ops import batch_norm, select
from revcompile.ir.types import SOURCE, Captured


class Check(enum.Enum):
    """How thoroughly a capture is compared with the original."""

    FULL = "full"
    FAST = "fast"
    OFF = "off"


@dataclass(frozen=True)
class _Trial:
    """One comparison: at the first or second batch size, with a seed, in a mode."""

    which: int
    seed: int
    training: bool
    deep: bool
    grad: bool = False
    """Whether gradients are enabled although they are not compared."""


def check_capture(
    model: nn.Module, captured: Captured, example: Example, level: Check
) -> str | None:
    """How the capture differs from the model, or None."""
    on_meta = any(t.is_meta for t in (*model.parameters(), *example.tensors(0)))
    if level is Check.OFF or on_meta:
        return None
    for trial in _trials(captured, level):
        # In both runs: a leaf module may run such a line too, and its draw may decide something,
        # although in another instance of the class it decides nothing.
        with DrawsLeftOut(captured.draws):
            problem = _compare_once(model, captured, example, trial)
        if problem is not None:
            return problem
    return None


def _trials(captured: Captured, level: Check) -> list[_Trial]:
    if level is Check.FULL:
        cases = itertools.product((0, 1), (0, 1), (True, False))
        return [_Trial(*case, deep=True) for case in cases]
    chooses = captured.graph.find_nodes(op="call_function", target=select)
    modes = (True, False) if chooses or captured.eval_graph is not None else (True,)
    grad = bool(captured.guards.flags)  # the graph may equal the model only with gradients
    return [_Trial(1, 0, training, deep=False, grad=grad) for training in modes]


def why_it_fails(model: nn.Module, example: Example, which: int) -> Exception | None:
    """The exception the original raises in training mode on the example, if it does."""
    try:
        _run_original(model, example, _Trial(which, 0, training=True, deep=False))
    except Exception as error:
        return error
    return None


def _compare_once(
    model: nn.Module, captured: Captured, example: Example, trial: _Trial
) -> str | None:
    mode = "train" if trial.training else "eval"
    where = f"{mode} mode, batch {example.batch[trial.which]}, seed {trial.seed}"
    try:
        expected = _run_original(model, example, trial)
    except Exception as error:
        if trial.which == 0:
            raise InputError(
                f"capture: {type(model).__name__} fails on the example inputs themselves "
                f"({example}) in {mode} mode: {error}"
            ) from error
        return _compare_once(model, captured, example, replace(trial, which=0))
    try:
        actual = _run_captured(model, captured, example, trial)
    except Exception as error:
        return f"the graph fails in {where}: {type(error).__name__}: {error}"
    problem = compare(expected, actual)
    return f"{problem} ({where})" if problem else None


def run_graph(graph: fx.Graph, root: nn.Module, inputs: list[torch.Tensor]) -> Any:
    """Run a graph over a root module without registering anything on it.

    Fails if a node writes to a value that has other readers: where values are copied (for example
    between stages), these readers would not see the write.
    """
    return _PureInterpreter(root, graph=graph).run(*inputs)


class _PureInterpreter(fx.Interpreter):
    def run_node(self, n: fx.Node) -> Any:
        tensors = [t for source in n.all_input_nodes for t in tensors_in(self.env[source])]
        versions = [t._version for t in tensors if not t.is_inference()]
        result = super().run_node(n)
        is_written = versions != [t._version for t in tensors if not t.is_inference()]
        assert isinstance(self.module, nn.Module)
        is_layer = n.op == "call_module" and overwrites_unshared(n, self.module)
        if is_written and n.target is not batch_norm and not is_layer:
            raise RuntimeError(f"{n.name} writes to its input [{n.meta.get(SOURCE)}]")
        return result


def _run_original(model: nn.Module, example: Example, trial: _Trial) -> dict[str, Any]:
    def call(twin: nn.Module, inputs: list[torch.Tensor]) -> Any:
        args, kwargs = example.arguments(inputs)
        return twin(*args, **kwargs)

    return _run(set_mode(copy_model(model), model, trial.training), call, example, trial)


def _run_captured(
    model: nn.Module, captured: Captured, example: Example, trial: _Trial
) -> dict[str, Any]:
    def call(root: nn.Module, inputs: list[torch.Tensor]) -> Any:
        graph, spec = captured.graph, captured.signature.out_spec
        if not root.training:
            graph = captured.eval_graph or graph
            spec = captured.signature.eval_out_spec or spec
        return pytree.tree_unflatten(list(run_graph(graph, root, inputs)), spec)

    return _run(set_mode(copy_model(captured.root), model, trial.training), call, example, trial)


def _run(
    module: nn.Module,
    call: Callable[[nn.Module, list[torch.Tensor]], Any],
    example: Example,
    trial: _Trial,
) -> dict[str, Any]:
    """Outputs and buffers by name; in a deep trial also gradients of inputs and parameters."""
    inputs = [t.detach().clone() for t in example.tensors(trial.which)]
    for tensor in inputs if trial.deep else ():
        # a mask with -inf has no gradient, and torch may not even read a causal mask
        tensor.requires_grad_(tensor.is_floating_point() and bool(tensor.isfinite().all()))
    with preserve_rng(), torch.set_grad_enabled(trial.deep or trial.grad):
        seed_all(trial.seed)
        # models may write to their inputs, which then must not be leaves of autograd
        output = call(module, [t * 1 if t.requires_grad else t.clone() for t in inputs])
        flat = tensors_in(output)
        results: dict[str, Any] = {f"output {i}": t.detach() for i, t in enumerate(flat)}
        results |= {f"buffer {n}": b.detach().clone() for n, b in module.named_buffers()}
        if not trial.deep:
            return results
        seed_all(trial.seed)
        weighted = [(t * torch.randn_like(t)).sum() for t in flat if t.requires_grad]
        torch.autograd.backward([w.real if w.is_complex() else w for w in weighted])
    for label, tensor in zip(example.signature.labels, inputs, strict=True):
        results[f"the gradient of input {label}"] = tensor.grad
    results |= {f"the gradient of {name}": p.grad for name, p in module.named_parameters()}
    return results


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
    want, have = (t.to_dense() if t.is_sparse else t for t in (want, have))
    same_nan = torch.equal(want.isnan(), have.isnan())
    want, have = want.nan_to_num(), have.nan_to_num()
    scale = want.abs().max().clamp_min(1e-30)
    return float((want - have).abs().max() / scale) if same_nan else float("inf")


def _tolerance(dtype: torch.dtype) -> float:
    return {torch.float64: 1e-9, torch.float32: 1e-4}.get(dtype, 5e-2)
