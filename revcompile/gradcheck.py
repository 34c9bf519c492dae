"""Gradients compared on the example before training: stored activations, chain, stages.

    stored activations   the rewired model as plain operations, differentiated by autograd
    chain                the same with couplings that reconstruct their input
    stages               the generated programs, one after the other

All of it runs on copies; the model, its buffers and the random generators do not change. Whether a
model is too large is decided by counting operations, never by a clock, and is thus reproducible.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from revcompile.compiler.capture.check import Check
from revcompile.compiler.capture.isolation import (
    preserve_model,
    preserve_rng,
    rng_state,
    seed_all,
    set_mode,
)
from revcompile.compiler.capture.memory import tensors_in
from revcompile.compiler.cost import segment_costs
from revcompile.compiler.dataflow import tensor_type
from revcompile.errors import RevcompileError, VerificationError
from revcompile.ir.module_tree import copy_module, device_of_model
from revcompile.ir.program import Partition, StageProgram
from revcompile.ir.signature import bind
from revcompile.ir.types import Rewired
from revcompile.runtime.reversible.module import Reversible
from revcompile.runtime.reversible.reconstruction import Tolerance, tolerance_for
from revcompile.runtime.stage.loss import LossHead
from revcompile.runtime.stage.settings import Settings, Task
from revcompile.runtime.stage.stage import Stage
from revcompile.runtime.stage.tensors import add_gradients

_PASSES: Final = 14
"""Cost in forward passes: 3 with stored activations, 4 with rebuilt ones; for chain and stages."""
_WORK_PER_NODE: Final = 5e8
"""Operations that one core executes in the time it takes to compile one node."""
_MEMORY: Final = 2**31
"""Bytes of activations, weights and gradients above which nothing is compared."""
_LIMITS: Final = {torch.float64: 1e-6, torch.float32: 2e-2}
_LIMIT_LOW_PRECISION: Final = 0.3

Gradients = dict[str, Tensor | None]


@dataclass(frozen=True)
class Compared:
    """The example, and the gradients that autograd gives for it with stored activations."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    stored: Gradients


def why_not_compared(net: Reversible, level: Check) -> str | None:
    """Why gradients are not compared, as a line of the summary; None if they are."""
    tensors = (*net.parameters(), *net.buffers())
    if any(t.is_meta for t in tensors):
        return "gradients were not compared on the example: that needs real tensors, not meta ones"
    if level is Check.FULL:
        return None
    nodes, work, memory = _extent(net.rewired)
    weights = sum(p.numel() * p.element_size() for p in net.parameters())
    is_long = _PASSES * work > _WORK_PER_NODE * nodes
    if not is_long and memory + 3 * weights <= _MEMORY:
        return None
    cause = "take longer than compiling" if is_long else "need too much memory"
    return (
        f"gradients were not compared on the example, which would {cause} "
        f'({_PASSES * work / 1e9:,.0f} billion operations); check="full" compares them'
    )


def _extent(rewired: Rewired) -> tuple[int, float, int]:
    """Number of nodes, FLOPs of a forward pass, bytes of all values."""
    nodes, memory = 0, 0
    for segment in rewired.body.segments:
        for node in segment.graph.nodes:
            kind = tensor_type(node)
            if kind is None or node.op in ("placeholder", "output", "get_attr"):
                continue
            nodes += 1
            memory += kind.nbytes()
    return nodes, float(sum(cost.flops for cost in segment_costs(rewired))), memory


# -- chain ----------------------------------------------------------------------------------------


def compare_chain(net: Reversible, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Compared:
    """Check the chain's gradients against those with stored activations; return the latter."""
    with preserve_rng():
        twin = copy_module(net)
        stored = _module_gradients(net, twin, args, kwargs, reversible=False)
        if not stored:
            return Compared(args, kwargs, {})
        try:
            reversible = _module_gradients(net, twin, args, kwargs, reversible=True)
        except RevcompileError:
            raise
        except Exception as error:
            raise VerificationError(
                f"reversify: {net.rewired.name} cannot be differentiated on the example when its "
                f"chains reconstruct their inputs ({type(error).__name__}: {error}), but can with "
                "stored activations. " + _ADVICE
            ) from error
        if wrong := _differences(stored, reversible, net.tolerance):
            precise = _in_double(net, args, kwargs)
            if precise is None or precise:
                raise VerificationError(_message("reversify", net.rewired, "chains", wrong))
    return Compared(args, kwargs, stored)


def _in_double(
    net: Reversible, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[str] | None:
    """The differences in float64, where rounding is negligible; None if it cannot run."""
    try:
        twin = copy_module(net).double()
        given = pytree.tree_map_only(
            Tensor, lambda t: t.double() if t.is_floating_point() else t, (args, kwargs)
        )
        stored, rebuilt = (
            _module_gradients(net, twin, *given, reversible=reversible)
            for reversible in (False, True)
        )
    except Exception:
        return None
    return _differences(stored, rebuilt, None)


def _module_gradients(
    net: Reversible,
    twin: Reversible,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    reversible: bool,
) -> Gradients:
    """Gradients of all parameters and floating-point inputs; empty if the model has none.

    Runs on `twin`, a copy of `net`, and restores it: two calls share its compiled blocks.
    """
    given, inputs = _fresh((args, kwargs))
    with preserve_model(twin), torch.enable_grad():
        set_mode(twin, net, training=True)
        twin.reversible = reversible
        seed_all(0)
        loss = _loss(twin(*given[0], **given[1]))
        if loss is None or not loss.requires_grad or not bool(loss.isfinite()):
            return {}
        loss.backward()
    gradients = {name: p.grad for name, p in twin.named_parameters() if p.requires_grad}
    twin.zero_grad(set_to_none=True)
    return gradients | {f"input {i}": t.grad for i, t in enumerate(inputs)}


def _fresh(tree: Any) -> tuple[Any, list[Tensor]]:
    """A copy of the example whose floating-point tensors require gradients, and a list of them."""
    inputs: list[Tensor] = []

    def copy_of(tensor: Tensor) -> Tensor:
        made = tensor.detach().clone()
        if not made.is_floating_point() or not bool(made.isfinite().all()):
            return made
        inputs.append(made.requires_grad_())
        return made * 1  # not a leaf: models may write to their inputs in place

    return pytree.tree_map_only(Tensor, copy_of, tree), inputs


def _loss(output: Any) -> Tensor | None:
    """A weighted sum of all outputs, with a different weight for every element."""
    terms = []
    for tensor in tensors_in(output):
        real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
        if not real.is_floating_point() or not real.numel():
            continue
        places = torch.arange(real.numel(), dtype=torch.float64, device=real.device)
        weights = (places + 1).cos().view(real.shape).to(real.dtype)
        terms.append((real * weights).double().sum() / math.sqrt(real.numel()))
    return torch.stack(terms).sum() if terms else None


# -- stages ---------------------------------------------------------------------------------------


def compare_stages(
    net: Reversible,
    partition: Partition,
    programs: Mapping[str, Sequence[StageProgram]],
    compared: Compared,
) -> None:
    """Check that the stages' programs of all methods give the gradients of the model.

    Stages draw other random numbers than the model. If the model draws any, the stages are compared
    with each other only; the first of `programs` is the reference.
    """
    if not compared.stored:
        return
    stored = {n: g for n, g in compared.stored.items() if not n.startswith("input ")}
    with preserve_rng():
        by_method = {
            method: _staged_gradients(net, partition, given, compared)
            for method, given in programs.items()
        }
        first = next(iter(by_method))
        is_same = _is_deterministic(net, programs[first], compared)
        reference = stored if is_same else by_method[first]
    for method, gradients in by_method.items():
        if wrong := _differences(reference, gradients, net.tolerance):
            raise VerificationError(_message("petrafy", net.rewired, f"stages ({method})", wrong))


def _staged_gradients(
    net: Reversible, partition: Partition, programs: Sequence[StageProgram], compared: Compared
) -> Gradients:
    """Gradients of one micro-batch, run forward through all stages and backward."""
    twin = copy_module(net)
    set_mode(twin, net, training=True)
    task = Task(twin, partition, programs, torch.optim.SGD, _staged_loss, Settings())
    stages = [Stage(task, index, device_of_model(twin), 0) for index in range(len(programs))]
    loss_head = LossHead(partition.rewired, _staged_loss, None, len(stages) - 1)
    args, kwargs = compared.args, compared.kwargs
    values: Mapping[str, Any] = {
        name: value.detach().clone()
        for name, value in bind(net.rewired.signature, net.rewired.name, args, kwargs).items()
    }
    for stage in stages:
        stage.leaves_checked = True  # skip its check: lost gradients are reported together
        values = stage.forward(0, values)
    gradients: Mapping[str, Tensor | None] = loss_head(0, values, waits=False)
    values, summed = {}, dict[str, Tensor]()
    for stage in reversed(stages):
        values, gradients, own, *_ = stage.differentiate(0, values, gradients)
        add_gradients(summed, own, [g for g in gradients.values() if g is not None])
    return dict(summed)


def _staged_loss(output: Any, target: Any) -> Tensor:
    loss = _loss(output)
    assert loss is not None
    return loss


def _is_deterministic(
    net: Reversible, programs: Sequence[StageProgram], compared: Compared
) -> bool:
    """Whether the model draws no random numbers on the example.

    Checks the state of the generators. Outputs are no proof: a block that is dropped at random may
    run with two seeds and not with a third.
    """
    if not any(unit.random for program in programs for unit in program.units):
        return True
    twin = set_mode(copy_module(net), net, training=True)
    given, _ = _fresh((compared.args, dict(compared.kwargs)))
    seed_all(0)
    before = rng_state()
    with torch.no_grad():
        twin(*given[0], **given[1])
    return rng_state() == before


# -- comparing ------------------------------------------------------------------------------------


def _differences(expected: Gradients, actual: Gradients, tolerance: Tolerance) -> list[str]:
    """Gradients that are missing, or differ by more than rounding errors."""
    want = {name: _dense(gradient) for name, gradient in expected.items()}
    have = {name: _dense(gradient) for name, gradient in actual.items()}
    sizes = {name: _largest(g) for name, g in want.items() if g is not None}
    overall = max(sizes.values(), default=0.0)
    wrong = []
    for name, right in want.items():
        got = have.get(name)
        if right is None or got is None:
            size = _largest(got) if right is None else sizes[name]
            if size > 1e-6 * overall:
                wrong.append(f"{name} has {'a' if right is None else 'no'} gradient")
            continue
        if not math.isfinite(sizes[name]):
            wrong.append(f"{name} is not finite with stored activations, too: change the example")
            continue
        dtype = right.real.dtype
        allowed = 10 * tolerance_for(dtype, tolerance)
        limit = max(_LIMITS.get(dtype, _LIMIT_LOW_PRECISION), allowed)
        # A gradient that is zero in exact arithmetic is noise: compare it with the largest one.
        error = _largest(right - got.to(right.dtype)) / max(sizes[name], 1e-3 * overall, 1e-30)
        if not error <= limit:
            wrong.append(f"{name} differs by {error:.2g} (relative)")
    return wrong


def _dense(gradient: Tensor | None) -> Tensor | None:
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient


def _largest(gradient: Tensor | None) -> float:
    if gradient is None or not gradient.numel():
        return 0.0
    return float(gradient.detach().abs().max())


_ADVICE: Final = (
    "Keep the whole block of the first of these parameters, shortcut included, as one piece with "
    "leaf_modules=[...]. Its input cannot be rebuilt precisely enough if it makes values grow by "
    "orders of magnitude, or selects (max, max_pool2d) among numbers that are exactly equal. "
    'Otherwise this is a bug in revcompile: please report it (check="off" skips the comparison)'
)


def _message(where: str, rewired: Rewired, what: str, wrong: Sequence[str]) -> str:
    listed = "\n".join(f"  - {line}" for line in wrong[:10])
    more = f"\n  - and {len(wrong) - 10} more" if len(wrong) > 10 else ""
    return (
        f"{where}: gradients of {rewired.name}'s {what} are not those of the same model with "
        f"stored activations, on the example:\n{listed}{more}\n{_ADVICE}"
    )
