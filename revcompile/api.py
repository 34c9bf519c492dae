"""The front door: each entry a readable list of named passes."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from revcompile.arguments import check_cost, check_model, one_of, whole_number
from revcompile.compiler.capture import capture, make_example
from revcompile.compiler.capture.check import Check
from revcompile.compiler.capture.isolation import preserve_attributes, preserve_model
from revcompile.compiler.cost import CostSource, Workload, segment_costs
from revcompile.compiler.find import find
from revcompile.compiler.partition import partition
from revcompile.compiler.recapture import Recompiler
from revcompile.compiler.rewire import rewire
from revcompile.compiler.verify import verify_partition, verify_rewired
from revcompile.errors import InputError, InversionError, RevcompileWarning
from revcompile.gradcheck import Compared, compare_chain, compare_stages, why_not_compared
from revcompile.inspect.tables import invertibility_table, most_frequent_refusals, summary_text
from revcompile.ir.policy import Policy
from revcompile.ir.types import Rewired, TensorType
from revcompile.runtime.reversible.module import Reversible
from revcompile.runtime.reversible.overlap import Overlap
from revcompile.runtime.reversible.reconstruction import Tolerance, tolerance_for
from revcompile.schedule import Keep, choose
from revcompile.staged import StagedModel
from revcompile.units import parse_memory_budget

__all__ = [
    "InversionReport",
    "ReversibleModule",
    "StagedModel",
    "check_invertible",
    "petrafy",
    "reversify",
]


class ReversibleModule(Reversible):
    """What `reversify` returns: the rewired model as an ordinary `nn.Module`.

    Parameters and buffers keep the original's names, and a state dict of the original loads.

    >>> import torch, revcompile
    >>> block = torch.nn.TransformerEncoderLayer(8, 2, 16, norm_first=True, batch_first=True)
    >>> net = revcompile.reversify(block, torch.randn(2, 5, 8))
    >>> [segment.name for segment in net.rewired.couplings]
    ['self_attn', 'linear1']
    """

    def summary(self) -> str:
        """A table of the segments: what became reversible, what did not, and why."""
        return summary_text(self.rewired, segment_costs(self.rewired))


def reversify(
    model: nn.Module,
    example_inputs: Any = None,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    policy: str | Policy = "paper",
    check: str = "fast",
    leaf_modules: Iterable[str | type[nn.Module]] = (),
    tolerance: float | None = None,
    overlap: str | Overlap = "auto",
) -> ReversibleModule:
    """Rewire a model so that training it stores no activations inside its residual chains.

    The model itself is left alone; the result owns copies of its weights. `example_inputs` (a
    tensor, or a tuple of positional arguments) is not needed for timm models. `policy` is
    "paper" (PETRA's RevNets: a wider stem and head), "pretrained" (no new parameters), or a
    `Policy`. `check` says how much is compared on the example: the capture with the original, and
    the gradients of chains with those of stored activations. "full" compares everything, "fast"
    gradients only where that takes no longer than compiling (the summary says so), "off"
    nothing. A chain that reconstructs its input worse than `tolerance` (relative; 1e-3 for
    float32) is refused. `overlap` says whether a block is rebuilt while the next one is
    differentiated ("on", "off"; "auto": in steps recorded as CUDA graphs, if kernels are small).

    >>> import torch, revcompile
    >>> class Block(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.f, self.g = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    ...     def forward(self, x):
    ...         x = x + self.f(x).tanh()
    ...         return x + self.g(x).tanh()
    >>> net = revcompile.reversify(Block(), torch.randn(2, 4))
    >>> net(torch.randn(3, 4)).sum().backward()
    >>> net.f.weight.grad.shape
    torch.Size([4, 4])
    """
    _refuse_reversible(model, "reversify")
    check_model("reversify", model)
    net, _ = _reversified(
        model,
        example_inputs,
        example_kwargs,
        policy=policy,
        check=check,
        leaf_modules=leaf_modules,
        tolerance=tolerance,
        overlap=overlap,
    )
    _warn_if_nothing_is_reversible(net.rewired, "reversify")
    return net


def _reversified(
    model: nn.Module,
    example_inputs: Any,
    example_kwargs: Mapping[str, Any] | None,
    *,
    policy: str | Policy,
    check: str,
    leaf_modules: Iterable[str | type[nn.Module]],
    tolerance: Tolerance,
    overlap: str | Overlap = "auto",
) -> tuple[ReversibleModule, Compared | None]:
    """The passes from a model to a module, and the gradients its chains were compared with."""
    chosen = Policy.named(policy)
    level = Check.parse(check)
    if tolerance is not None and (isinstance(tolerance, str | bool) or not tolerance > 0):
        raise InputError(f"tolerance={tolerance!r}; use a number above 0, or None")
    compared = None
    with preserve_model():
        captured = capture(
            model, example_inputs, example_kwargs, check=level, leaf_modules=leaf_modules
        )
        found = find(captured)
        rewired = rewire(captured, found, chosen)
        verify_rewired(captured, rewired)
        limit: Tolerance = "auto" if tolerance is None else tolerance
        net = ReversibleModule(rewired, limit, Overlap.parse(overlap))
        net.on_new_case(Recompiler(model, captured, chosen))
        _warn_of_hooks(net)
        if level is not Check.OFF:
            args, kwargs = make_example(model, example_inputs, example_kwargs).call(0)
            _refuse_uninvertible(net, args, kwargs)
            why_not = why_not_compared(net, level)
            if why_not is None:
                compared = compare_chain(net, args, kwargs)
            else:
                noted = dataclasses.replace(net.rewired, notes=(*net.rewired.notes, why_not))
                net.__dict__["rewired"] = noted
    return net, compared


def petrafy(
    model: nn.Module,
    num_stages: int,
    example_inputs: Any = None,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    policy: str | Policy = "paper",
    check: str = "fast",
    leaf_modules: Iterable[str | type[nn.Module]] = (),
    tolerance: float | None = None,
    cost: CostSource = "analytic",
    memory_budget: int | str | None = None,
    batch_size: int | None = None,
    optimizer_copies: int = 1,
    keep: str = "nothing",
) -> StagedModel:
    """Rewire a model, cut it into balanced stages and generate each stage's programs.

    Arguments up to `tolerance` are those of `reversify`. `cost` says how work is measured:
    "analytic" (FLOPs and bytes), "measured" on the device the model is on, updates included,
    "replayed" (kernels alone, as recorded rounds on a GPU take them), or given as a mapping or
    function from a block's name to a number. `memory_budget` is what one device can hold, in
    bytes or as "2GiB", with `batch_size` samples a micro-batch (the example's if not given) and
    `optimizer_copies` numbers of optimizer state a parameter (SGD with momentum 1, Adam 2).
    `keep` is what stages will keep of a micro-batch, and so what they have to compute again:
    "nothing", or, where the trainer is given a `memory_budget` that suffices, their "graph".

    >>> import timm, revcompile
    >>> net = revcompile.petrafy(timm.create_model("resnet18"), num_stages=4, check="off")
    >>> net
    StagedModel(ResNet: 4 stages, ... reversible)
    """
    _refuse_reversible(model, "petrafy")
    check_model("petrafy", model)
    order = " stage: petrafy(model, num_stages, example_inputs)"
    num_stages = whole_number("petrafy", "num_stages", num_stages, 1, order)
    kept = Keep(one_of("petrafy", "keep", keep, [one.value for one in Keep]))
    check_cost(cost)
    budget = None if memory_budget is None else parse_memory_budget(memory_budget)
    if batch_size is not None:
        whole_number("petrafy", "batch_size", batch_size, 1)
    net, compared = _reversified(
        model,
        example_inputs,
        example_kwargs,
        policy=policy,
        check=check,
        leaf_modules=leaf_modules,
        tolerance=tolerance,
    )
    _refuse_state_in_python(net.rewired)
    _warn_if_nothing_is_reversible(net.rewired, "petrafy")
    method = choose("petra")
    workload = Workload(
        dataclasses.replace(method, keep=kept),
        batch_size or _example_batch(net),
        optimizer_copies=optimizer_copies,
    )
    cut = partition(net.rewired, num_stages, workload, cost=cost, memory_budget=budget)
    verify_partition(cut)
    staged = StagedModel(net, cut, method)
    if compared is not None:
        programs = {name: staged._programs(choose(name)) for name in ("backprop", "petra")}
        compare_stages(net, cut, programs, compared)
    return staged


def _example_batch(net: ReversibleModule) -> int:
    kinds = net.rewired.body.types.values()
    return next((kind.batch for kind in kinds if isinstance(kind, TensorType)), 1)


@dataclass(frozen=True)
class InversionReport:
    """Reconstruction error of every reversible block, relative to its largest input.

    >>> report = InversionReport((("blocks.0", 2e-7), ("blocks.1", 1e-7)), tolerance=1e-3)
    >>> report.ok, report.worst
    (True, ('blocks.0', 2e-07))
    """

    errors: tuple[tuple[str, float], ...]
    tolerance: float

    @property
    def ok(self) -> bool:
        """Is every block within the tolerance?"""
        return all(error <= self.tolerance for _, error in self.errors)

    @property
    def worst(self) -> tuple[str, float]:
        """The block with the largest error."""
        return max(self.errors, key=lambda entry: entry[1], default=("", 0.0))

    def __str__(self) -> str:
        return invertibility_table(self.errors, self.tolerance)


def check_invertible(
    model: nn.Module, *args: Any, tolerance: Tolerance = None, **kwargs: Any
) -> InversionReport:
    """Run a model forward and back, and report each block's reconstruction error.

    `model` is the result of `reversify`, or a plain model, which is then rewired first. The
    errors accumulate along a chain from its end to its beginning, as in training.

    >>> import torch, revcompile
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, norm_first=True, batch_first=True)
    >>> revcompile.check_invertible(layer, torch.randn(2, 5, 8)).ok
    True
    """
    if not isinstance(model, Reversible):
        check_model("check_invertible", model)
        model, _ = _reversified(
            model,
            args or None,
            kwargs,
            policy="paper",
            check="off",
            leaf_modules=(),
            tolerance=tolerance,
        )
    limit = _tolerance(model, tolerance)
    with preserve_model(model), ExitStack() as kept:
        for part in model.children():  # counters and memories start where the user left them
            kept.enter_context(preserve_attributes(part))
        errors = model.inversion_errors(*args, **kwargs)
    return InversionReport(tuple(errors), limit)


def _tolerance(model: nn.Module, tolerance: Tolerance) -> float:
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    return tolerance_for(dtype, tolerance)


def _refuse_reversible(model: Any, caller: str) -> None:
    if isinstance(model, Reversible | StagedModel):
        raise InputError(
            f"{caller}: the model is already reversible (it comes from "
            f"{'petrafy' if isinstance(model, StagedModel) else 'reversify'}); pass the original "
            "model, and load_state_dict the weights into the result if they have been trained"
        )


def _refuse_state_in_python(rewired: Rewired) -> None:
    """Stages compute a module again in backward, which would advance its state once more."""
    if rewired.stateful:
        raise InputError(
            f"petrafy: {rewired.stateful[0]}, and what it computes depends on that. Stages run "
            "modules again in their backward pass, micro-batches later: keep the state in a buffer "
            "(self.register_buffer), or outside the model"
        )


def _warn_if_nothing_is_reversible(rewired: Rewired, caller: str) -> None:
    """One warning, at the line that called `caller`."""
    if rewired.couplings:
        return
    reasons = most_frequent_refusals(rewired, 3)
    why = "; ".join(reasons) or "nowhere is the input of layers added to their output, x + F(x)"
    kept = {
        "reversify": "training it keeps all activations, as training the original does",
        "petrafy": "every stage keeps its inputs and computes the rest again",
    }
    warnings.warn(
        f"{caller}: nothing in {rewired.name} became reversible, so {kept[caller]}. Why: {why}",
        RevcompileWarning,
        stacklevel=3,
    )


def _warn_of_hooks(net: ReversibleModule) -> None:
    for path in net.inlined_hooks:
        warnings.warn(
            f"reversify: {path} has hooks, but its forward is part of the captured graph now: what "
            "they computed was traced, and they will not run again. Register hooks on the layers "
            f"inside {path}, or keep it whole with leaf_modules=[{path!r}]",
            RevcompileWarning,
            stacklevel=4,
        )


def _refuse_uninvertible(net: ReversibleModule, args: Any, kwargs: Any) -> None:
    tensors = [*net.parameters(), *(a for a in args if isinstance(a, torch.Tensor))]
    if any(t.is_meta for t in tensors):
        return
    with preserve_model(net):
        if not net.training:  # of a model in training mode what is frozen stays frozen
            net.train()
        report = check_invertible(net, *args, tolerance=net.tolerance, **kwargs)
    if not report.ok:
        name, error = report.worst
        raise InversionError(
            f"reversify: {name} reconstructs its input only to {error:.1e} "
            f"(tolerance {report.tolerance:.1e}), so gradients behind it would be wrong. "
            "Its branch is much larger than the stream it is added to, or it is not a function "
            "of its input, or batch norms see too few samples of the example; give an example with "
            "a larger batch, scale the branch down, keep its module as one piece with "
            f"leaf_modules=[...], or accept the error with tolerance={error * 2:.0e}"
        )
