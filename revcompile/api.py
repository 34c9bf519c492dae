"""`reversify`, `petrafy` and `check_invertible`: each is the list of passes it runs, in order."""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from revcompile.arguments import (
    CheckName,
    CostName,
    KeepName,
    OverlapName,
    PolicyName,
    check_leaf_modules,
    check_meta,
    check_model,
    check_optimizer_copies,
    known_keywords,
    member_of,
    number,
    whole_number,
)
from revcompile.compiler.capture import capture, make_example
from revcompile.compiler.capture.check import Check
from revcompile.compiler.capture.isolation import as_defined, preserve_model, preserve_rng
from revcompile.compiler.cost import CostSource, Workload, segment_costs
from revcompile.compiler.find import find
from revcompile.compiler.partition import Pieces, partition
from revcompile.compiler.recapture import Recompiler
from revcompile.compiler.rewire import rewire
from revcompile.compiler.verify import verify_partition, verify_rewired
from revcompile.errors import CaptureError, InputError, InversionError, warn
from revcompile.gradcheck import Compared, compare_chain, compare_stages, why_not_compared
from revcompile.inspect.formatting import first_few, plural
from revcompile.inspect.tables import invertibility_table, refusals, summary_text
from revcompile.inspect.views import block_of
from revcompile.interop import huggingface
from revcompile.ir.module_tree import child_path, looks_trained
from revcompile.ir.policy import POLICY_MARK, Policy
from revcompile.ir.snapshot import HOOKS
from revcompile.ir.types import Captured, Coupling, Rewired
from revcompile.kernels.fixed_point import STREAM_RANGE
from revcompile.plan.budget import free_memory
from revcompile.runtime.reversible.bindings import filled
from revcompile.runtime.reversible.keeping import Budget, checked_budget
from revcompile.runtime.reversible.module import Reversible
from revcompile.runtime.reversible.overlap import Overlap
from revcompile.runtime.reversible.reconstruction import Tolerance, tolerance_for
from revcompile.schedule import Keep, choose
from revcompile.staged import StagedModel, original_model
from revcompile.units import bytes_of


class ReversibleModule(Reversible):
    """What `reversify` returns: the rewired model as an ordinary `nn.Module`.

    Parameters and buffers keep the original's names, and a state dict of the original loads.

    >>> import torch, revcompile
    >>> block = torch.nn.TransformerEncoderLayer(8, 2, 16, norm_first=True, batch_first=True)
    >>> net = revcompile.reversify(block, torch.randn(2, 5, 8))
    >>> [segment.name for segment in net.rewired.couplings]
    ['self_attn', 'linear1']
    """

    def summary(self, verbose: bool = False) -> str:
        """What became reversible, and why the rest did not; with `verbose`, all segments."""
        text = summary_text(self.rewired, segment_costs(self.rewired), verbose)
        losing = (f"captured again: {case}" for case in self._cases.losing)
        return "\n".join((text, *losing, *filter(None, [self.extra_repr()])))

    def extra_repr(self) -> str:
        """The lines that `print(net)` adds: what is compiled, and which couplings are kept."""
        if not self.rewired.couplings:
            return ""
        plans = (
            f"inputs {[list(each) for each in sizes]}: {plan}"
            for sizes, plan in self._memory.plans.items()
            if plan.count
        )
        return "\n".join((self._compilation(), *plans))

    def _compilation(self) -> str:
        """Whether couplings are compiled, in a line."""
        compiler = self.compiler or self._latest_compiler
        if compiler is None:
            return "couplings run eagerly; net.compile() compiles them"
        eager = self._run_eagerly(compiler)
        reasons = first_few([f"{name} ({reason})" for name, reason in eager.items()])
        return (
            f"couplings are compiled by {compiler.backend}, "
            f"{plural(len(compiler.artifacts), 'artifact')} so far"
            + f"; eager: {reasons}"
            * bool(eager)
        )

    def to_original(self) -> nn.Module:
        """A model of the original's own class with copies of these weights, to save and serve.

        Only for `policy="pretrained"`, under which both compute the same function.

        Raises:
            InputError: The rewired model computes another function than the original.
        """
        return original_model(self, self)


def work_of(rewired: Rewired) -> list[float] | None:
    """The work of each coupling's branch in forward, and that of all other segments.

    Counting runs copies of the layers, without their hooks, which are the user's. Layers that are
    sharded cannot be copied: None.
    """
    layers = rewired.root.modules()
    slots = [((vars(layer), kind), OrderedDict[Any, Any]()) for layer in layers for kind in HOOKS]
    try:
        with filled(slots), as_defined():
            costs = segment_costs(rewired)
    except CaptureError:
        return None
    pairs = list(zip(rewired.body.segments, costs, strict=True))
    inside = [cost.forward for segment, cost in pairs if isinstance(segment, Coupling)]
    return [*inside, sum(cost.forward for _, cost in pairs) - sum(inside)]


@known_keywords("reversify")
def reversify(
    model: nn.Module,
    example_inputs: Any = None,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    policy: PolicyName | None = None,
    check: CheckName = "fast",
    leaf_modules: Iterable[str | type[nn.Module]] = (),
    tolerance: float | None = None,
    overlap: OverlapName | Overlap = "auto",
    memory_budget: Budget = None,
    optimizer_copies: int = 2,
) -> ReversibleModule:
    """Rewire a model so that training it stores no activations inside its residual chains.

    Args:
        model: Left as it is; the result owns copies of its weights, and is in the same mode
            (`train()` or `eval()`).
        example_inputs: A tensor, or a tuple of positional arguments, with a batch of two or more.
            Default: timm's input size.
        example_kwargs: Keyword arguments of the example.
        policy: How the two streams begin and end. "paper": as in PETRA's RevNets, with a wider stem
            and head (convolution, linear layer), to train from scratch; "same_parameters": with
            the original's parameters, to train from scratch; "pretrained": the original's function
            in eval mode, and with noise that averages out in training. Default: "paper", or that
            in the config of a saved model; a model that looks trained needs one.
        check: What is compared with the original on the example. "full": outputs, gradients and
            buffers; "fast": outputs, and gradients unless that takes longer than compiling or too
            much memory (the summary says so); "off": nothing.
        leaf_modules: Paths or classes of modules that stay one piece instead of being traced.
        tolerance: The largest relative error with which a chain may reconstruct its input, on the
            example and in training. Default: by data type, 1e-3 for float32; in training, float32
            errors of up to 1e-2 only warn.
        overlap: Whether backward rebuilds one block while it differentiates the next, on two CUDA
            streams. "auto": in steps captured as CUDA graphs, if their kernels are small.
        memory_budget: What a training step may hold beside parameters, gradients and batch: bytes,
            also as "8GiB"; "auto": four fifths of what the device has free after parameters,
            gradients and the optimizer; "least": every block is rebuilt. Blocks keep their
            activations as far as that allows, which saves their second run. Default: on CUDA,
            those that do not raise the peak. The first step of an input shape rebuilds and
            measures all. Also to be set later, as `net.memory_budget`.
        optimizer_copies: Values of optimizer state per parameter, for "auto": 2 for Adam.

    Raises:
        CaptureError: The model cannot be turned into a graph.
        InversionError: A chain does not reconstruct its input within the tolerance.
        InputError: An argument is not usable as given.

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
    net, _ = _reversified(
        "reversify",
        model,
        example_inputs,
        example_kwargs,
        policy=policy,
        check=check,
        leaf_modules=leaf_modules,
        tolerance=tolerance,
        overlap=overlap,
    )
    net._memory.set(checked_budget("reversify", memory_budget))
    check_optimizer_copies("reversify", optimizer_copies)
    net._memory.optimizer_copies = optimizer_copies
    _warn_if_nothing_is_reversible(net.rewired, "reversify")
    if huggingface.is_pretrained_model(model):
        huggingface.adopt_class(net)
    return net


def _reversified(
    caller: str,
    model: nn.Module,
    example_inputs: Any,
    example_kwargs: Mapping[str, Any] | None,
    *,
    policy: str | None,
    check: str,
    leaf_modules: Iterable[str | type[nn.Module]] = (),
    tolerance: float | None,
    overlap: str | Overlap = "auto",
) -> tuple[ReversibleModule, Compared | None]:
    """Run the passes from a model to a module; also return the gradients it was compared with."""
    _refuse_reversible(model, caller)
    check_model(caller, model)
    chosen = _chosen_policy(caller, model, policy)
    level = member_of(caller, "check", check, Check)
    check_leaf_modules(leaf_modules)
    check_meta(caller, model, (example_inputs, example_kwargs))
    if tolerance is not None:
        number(caller, "tolerance", tolerance, "use a number above 0, or None")
    overlaps = member_of(caller, "overlap", overlap, Overlap)
    is_pretrained = huggingface.is_pretrained_model(model)
    if is_pretrained and isinstance(example_kwargs, Mapping):
        example_kwargs = huggingface.call_arguments(example_kwargs)
    compared = None
    with preserve_rng(), as_defined():
        captured = capture(
            model, example_inputs, example_kwargs, check=level, leaf_modules=leaf_modules
        )
        _warn_of_stored(captured, caller)
        found = find(captured)
        rewired = rewire(captured, found, chosen)
        verify_rewired(captured, rewired)
        limit: Tolerance = "auto" if tolerance is None else tolerance
        net = ReversibleModule(rewired, limit, overlaps)
        net._cases.recapture = Recompiler(model, captured, chosen)
        net._memory.work_of = work_of
        if is_pretrained:
            net._cases.arguments = huggingface.call_arguments
        for path in net._inlined.hooked:
            warn(
                f"{caller}: {path} has hooks, but its forward is part of the captured graph now: "
                "what they computed was traced, and they will not run again. Register hooks on the "
                f"layers inside {path}, or keep it whole with leaf_modules=[{path!r}]"
            )
        branches = (coupling.branch for coupling in rewired.couplings)
        calls = (n for branch in branches for n in branch.find_nodes(op="call_module"))
        _refuse_state_in_python(rewired, caller, (str(node.target) for node in calls))
        if level is not Check.OFF:
            is_single = net.rewired.batch == 1  # the model takes one sample only
            example = make_example(model, example_inputs, example_kwargs, is_single)
            args, kwargs = example.arguments(example.tensors(0))
            _refuse_uninvertible(net, args, kwargs, caller)
            why_not = why_not_compared(net, level)
            if why_not is None:
                compared = compare_chain(net, args, kwargs)
            else:
                noted = dataclasses.replace(net.rewired, notes=(*net.rewired.notes, why_not))
                net.__dict__["rewired"] = noted
    return net, compared


def _chosen_policy(caller: str, model: nn.Module, policy: str | None) -> Policy:
    """The policy by its name; without one, that of saved weights, or "paper" for new ones."""
    chosen = member_of(caller, "policy", "paper" if policy is None else policy, Policy)
    name = type(model).__name__
    if (saved := huggingface.saved_policy(model)) is not None:
        if policy is None:
            return Policy(saved)
        if chosen.averaged:
            raise InputError(
                f"{caller}: the weights of this {name} were trained with policy={saved!r} (its "
                f"config has {POLICY_MARK}), and the original's function with them is "
                f"not the trained one. Pass policy={saved!r}, or delete "
                f"model.config.{POLICY_MARK} if they were trained as {name} since"
            )
    if policy is None and looks_trained(model):
        raise InputError(
            f"{caller}: {name} looks trained. Pass policy='pretrained' to fine-tune the function "
            "that it is, or policy='paper' to make a new two-stream model of it, which computes "
            "another function and has to be trained anew"
        )
    return chosen


@known_keywords("petrafy")
def petrafy(
    model: nn.Module,
    num_stages: int,
    example_inputs: Any = None,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    policy: PolicyName | None = None,
    check: CheckName = "fast",
    leaf_modules: Iterable[str | type[nn.Module]] = (),
    tolerance: float | None = None,
    cost: CostName = "analytic",
    memory_budget: int | str | None = None,
    microbatch_size: int | None = None,
    optimizer_copies: int = 1,
    keep: KeepName | Sequence[KeepName] | None = None,
) -> StagedModel:
    """Rewire a model, cut it into balanced stages and generate each stage's programs.

    Args:
        model, example_inputs, example_kwargs, policy, check, leaf_modules, tolerance: As for
            `reversify`. Trainers train in train mode: see `StagedModel.trainer`.
        num_stages: How many stages to cut the model into.
        cost: How the work of a block is estimated. "analytic": FLOPs and bytes; "measured": timed
            on the model's device, updates included.
        memory_budget: Memory of a device that holds one stage, as "8GiB" or in bytes; "auto": four
            fifths of what the model's CUDA device has free. Cuts that need more are not considered,
            and trainers do not use more, see `StagedModel.trainer`.
        microbatch_size: Samples in a micro-batch, for the budget and as `net.microbatch_size`.
            Default: the example's.
        optimizer_copies: Values of optimizer state per parameter, for the budget: 1 for SGD with
            momentum, 2 for Adam.
        keep: What stages keep of each micro-batch: balancing counts the work of computing the rest
            again. "nothing": backward rebuilds; "input": it recomputes; "graph": neither. Or a list
            with one for each stage. Default: what the method says, and "graph" where a trainer has
            the memory; balanced for "nothing".

    Raises:
        CaptureError, InversionError: As for `reversify`.
        InputError: An argument is not usable as given, or the model cannot be cut that way.

    >>> import timm, revcompile
    >>> net = revcompile.petrafy(timm.create_model("resnet18"), num_stages=4, check="off")
    >>> net
    StagedModel(ResNet: 4 stages, ... reversible blocks)
    """
    order = " stage: petrafy(model, num_stages, example_inputs)"
    num_stages = whole_number("petrafy", "num_stages", num_stages, 1, order)
    names = list(keep) if isinstance(keep, list | tuple) else [keep or "nothing"] * num_stages
    keeps = tuple(member_of("petrafy", "keep", name, Keep) for name in names)
    if len(keeps) != num_stages:
        raise InputError(
            f"petrafy: keep has {len(keeps)} items, num_stages={num_stages}; give one name, or one "
            "for each stage"
        )
    source = member_of("petrafy", "cost", cost, CostSource)
    budget = None
    if memory_budget is not None:
        is_auto = memory_budget == "auto" and isinstance(model, nn.Module)
        budget = free_memory(model, None) if is_auto else bytes_of(memory_budget)
    if microbatch_size is not None:
        whole_number("petrafy", "microbatch_size", microbatch_size, 1)
    check_optimizer_copies("petrafy", optimizer_copies)
    net, compared = _reversified(
        "petrafy",
        model,
        example_inputs,
        example_kwargs,
        policy=policy,
        check=check,
        leaf_modules=leaf_modules,
        tolerance=tolerance,
    )
    _refuse_state_in_python(net.rewired, "petrafy", net.rewired.stateful)
    _warn_if_nothing_is_reversible(net.rewired, "petrafy")
    method = choose("petra_stashed" if net.rewired.policy.averaged else "petra")
    batch = microbatch_size or net.rewired.batch
    workload = Workload(method, batch, optimizer_copies=optimizer_copies)
    pieces = Pieces.of(net.rewired, source)
    cut = partition(pieces, num_stages, workload, memory_budget=budget, keeps=keeps)
    verify_partition(cut)
    staged = StagedModel(net, cut, method, None if keep is None else keeps, budget)
    staged.microbatch_size = batch
    if compared is not None:
        methods = choose("backprop"), method
        programs = {method.name: staged._programs(method) for method in methods}
        with as_defined():
            compare_stages(net, cut, programs, compared)
    return staged


@dataclass(frozen=True)
class InversionReport:
    """Reconstruction error of every reversible block, relative to its largest input element.

    >>> report = InversionReport((("blocks.0", 2e-7), ("blocks.1", 1e-7)), tolerance=1e-3)
    >>> report.ok, report.worst
    (True, ('blocks.0', 2e-07))
    """

    errors: tuple[tuple[str, float], ...]
    tolerance: float

    @property
    def ok(self) -> bool:
        return all(error <= self.tolerance for _, error in self.errors)

    @property
    def worst(self) -> tuple[str, float]:
        """The block with the largest error."""
        return max(self.errors, key=lambda entry: entry[1], default=("", 0.0))

    def __str__(self) -> str:
        return invertibility_table(self.errors, self.tolerance)


def check_invertible(
    model: nn.Module,
    *args: Any,
    policy: PolicyName | None = None,
    tolerance: float | None = None,
    **kwargs: Any,
) -> InversionReport:
    """Run a model forward and back, and report each block's reconstruction error.

    Errors accumulate along a chain from its end to its beginning, as in training.

    Args:
        model: What `reversify` returned, or a plain model, which is then rewired first.
        args, kwargs: What the model is called with.
        policy: How a plain model is rewired, as for `reversify`; "paper" by default. Other options
            of `reversify`: pass its result, compiled with `check="off"`.
        tolerance: The largest relative error that is `ok`. Default: by data type, 1e-3 for float32.

    >>> import torch, revcompile
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, norm_first=True, batch_first=True)
    >>> revcompile.check_invertible(layer, torch.randn(2, 5, 8)).ok
    True
    """
    if tolerance is not None:
        number("check_invertible", "tolerance", tolerance, "use a number above 0, or None")
    if isinstance(model, StagedModel):
        raise InputError("check_invertible: got a StagedModel; pass its module, net.to_module()")
    if isinstance(model, Reversible):
        if policy not in (None, model.rewired.policy.value):
            raise InputError(
                f"check_invertible: policy={policy!r}, but the model was rewired with another one; "
                "leave policy= out, or pass the original model"
            )
    else:
        model, _ = _reversified(
            "check_invertible",
            model,
            args or None,
            kwargs,
            policy="paper" if policy is None else policy,
            check="off",
            tolerance=tolerance,
        )
    return _inversion_report(model, args, kwargs, tolerance)


def _inversion_report(
    model: Reversible, args: Sequence[Any], kwargs: Mapping[str, Any], tolerance: Tolerance
) -> InversionReport:
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    with preserve_model(model):
        errors = model._inversion_errors(*args, **kwargs)
    return InversionReport(tuple(errors), tolerance_for(dtype, tolerance))


def _refuse_reversible(model: Any, caller: str) -> None:
    if isinstance(model, Reversible | StagedModel):
        raise InputError(
            f"{caller}: the model is already reversible (it comes from "
            f"{'petrafy' if isinstance(model, StagedModel) else 'reversify'}); pass the original "
            "model, and load_state_dict the weights into the result if they have been trained"
        )


def _refuse_state_in_python(rewired: Rewired, caller: str, computed_again: Iterable[str]) -> None:
    """Raise for modules with state that backward computes again: it would advance their state."""
    found = sorted(rewired.stateful.keys() & set(computed_again))
    if found:
        raise InputError(
            f"{caller}: {found[0]}: {rewired.stateful[found[0]]}. The backward pass runs modules "
            "again: keep what they count or store in buffers (self.register_buffer), or outside "
            "the model"
        )


def _warn_if_nothing_is_reversible(rewired: Rewired, caller: str) -> None:
    """Warn, at the line that called `caller`, if there is no coupling."""
    if rewired.couplings:
        return
    leaves = [note for note in rewired.notes if " is a leaf module: " in note]
    why = (
        "; ".join((refusals(rewired) or leaves)[:3])
        or "it has no sum x + F(x) of the input and the output of layers"
    )
    effect = {
        "reversify": "training it keeps all activations, as training the original does",
        "petrafy": "every stage keeps its inputs and computes the rest again",
    }
    warn(f"{caller}: nothing in {rewired.name} became reversible, so {effect[caller]}. Why: {why}")


def _warn_of_stored(captured: Captured, caller: str) -> None:
    """Warn if the original's forward pass leaves values in attributes for a loss outside."""
    if not captured.stored:
        return
    (path, name), *others = captured.stored
    more = f" and {len(others)} more" if others else ""
    leaf = f", or keep the module whole (and not reversible) with leaf_modules=[{path!r}]"
    warn(
        f"{caller}: forward stores a value with gradients in {child_path(path, name)}{more}. The "
        "compiled model does not store it, so a loss that reads the attribute would miss it: "
        f"return it from forward{leaf if path else ''}"
    )


def _refuse_uninvertible(net: ReversibleModule, args: Any, kwargs: Any, caller: str) -> None:
    tensors = [*net.parameters(), *(a for a in args if isinstance(a, torch.Tensor))]
    if any(t.is_meta for t in tensors):
        return
    with preserve_model(net):
        if not net.training:  # net.train() would also switch frozen modules to train mode
            net.train()
        report = _inversion_report(net, args, kwargs, net.tolerance)
    if not report.ok:
        name, error = report.worst
        coupling = next(segment for segment in net.rewired.couplings if segment.name == name)
        block = block_of(net.rewired, coupling)
        around = repr(block.path) if block is not None and block.path else "..."
        if not math.isfinite(error):
            grow = (
                f", or grow to more than {STREAM_RANGE} times the chain's input (or 1), which is "
                "all that the fixed-point streams of an averaged coupling can hold; keep the "
                "blocks that do it as one piece with leaf_modules=[...]"
            )
            raise InversionError(
                f"{caller}: in the chain of {name} numbers are not finite on the example"
                f"{grow if net.rewired.policy.averaged else '; give finite inputs'}"
            )
        raise InversionError(
            f"{caller}: {name} reconstructs its input only to {error:.1e} "
            f"(tolerance {report.tolerance:.1e}), so gradients behind it would be wrong. "
            "Its branch is much larger than the stream it is added to, or it is not a function "
            "of its input (it counts, or reads torch.is_grad_enabled()), or batch norms see too "
            "few samples of the example; give an example with a larger batch, scale the branch "
            "down, keep the whole block, shortcut included, as one piece with "
            f"leaf_modules=[{around}], or accept the error with "
            f"tolerance={error * 2:.0e}"
        )
