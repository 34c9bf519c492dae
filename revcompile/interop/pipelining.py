"""The stages of a partition as plain modules, for the schedules of `torch.distributed.pipelining`.

    Partition --pipeline_stages--> one `StageModule` per stage: tensors in, tensors out, autograd

Each stage is a rewired model of its own: it owns copies of the weights it reads, under their
original names, and `Reversible` runs it. Only tensors are sent. A size that a later stage reads is
computed there again, from the batch size of its inputs, and the stage that owns the size checks
that this gives the same number.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from revcompile.errors import InputError
from revcompile.ir.module_tree import TreeReads
from revcompile.ir.ops import Size, grown_size, samples_beyond
from revcompile.ir.program import Part, Partition
from revcompile.ir.signature import Signature
from revcompile.ir.types import VALUE, Body, Coupling, Live, Opaque, Segment, TensorType
from revcompile.runtime.reversible.coupling import Chain
from revcompile.runtime.reversible.module import Reversible, _Step
from revcompile.runtime.reversible.reconstruction import ReconstructionCheck

_INSTEAD = "cut elsewhere with another num_stages, or train with net.trainer(...)"


def pipeline_stages(
    partition: Partition, device: torch.device | str | None = None, reversible: bool = False
) -> tuple[StageModule, ...]:
    """Every stage of the partition as a module; see `StagedModel.to_pipeline_stages`."""
    _refuse_shared(partition)
    sizes = _crossing_sizes(partition)
    stages = tuple(_stage(partition, part, sizes) for part in partition.parts)
    for stage in stages:
        stage.reversible = reversible
    return stages if device is None else tuple(stage.to(device) for stage in stages)


class StageModule(Reversible):
    """One stage: `forward(*tensors)` returns the inputs of the next stage, differentiably.

    It takes the outputs of the previous stage (the first: the model's tensors in order). All but
    the last return a tuple; the last returns the model's output if that is one tensor, and
    otherwise its tensors in order.
    """

    def forward(self, *tensors: Tensor) -> Any:
        """Run the stage on the outputs of the previous one."""
        if self.rewired.eval_body is not None and not self.training:
            raise InputError(
                f"{self.rewired.name}: the model returns something else in eval mode than in "
                "training, and stages are cut for training; evaluate net.to_module()"
            )
        outputs = super().forward(*map(_sendable, tensors))
        return tuple(map(_sendable, outputs)) if isinstance(outputs, tuple) else outputs

    def _steps(self, body: Body) -> tuple[_Step, ...]:
        """The steps; each of their chains may fail once to rebuild its input.

        Torch learns shapes by running a stage, forward and backward, on uninitialized memory:
        before the first step and again after every change between training and evaluation. So one
        failure is no evidence of an error, but two in a row are.
        """
        steps = super()._steps(body)
        for chain in (step.run for step in steps if isinstance(step.run, Chain)):
            chain.check = ReconstructionCheck(chain.name, chain.tolerance, failures_allowed=1)
            chain.is_short = False  # it may be part of a longer one, whose streams are float32
        return steps


class _Sendable(torch.autograd.Function):
    """The identity; makes the tensor and its gradient contiguous.

    Only contiguous tensors can be sent, and a stream may be half of a larger tensor. Also, torch's
    zero-bubble schedules detach a stage's outputs in place, which is not possible for views.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach().contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].contiguous()


def _sendable(value: Any) -> Any:
    return _Sendable.apply(value) if isinstance(value, Tensor) else value


# -- a stage as a model of its own ----------------------------------------------------------------


def _stage(partition: Partition, part: Part, sizes: Mapping[str, tuple[Size, Size]]) -> StageModule:
    rewired, types, root = partition.rewired, partition.types, partition.rewired.root
    is_last = part is partition.parts[-1]
    inputs = _tensors(part.inputs, types)
    outputs = _tensors(rewired.body.returned if is_last else part.outputs, types)
    pieces = tuple(
        replace(piece, grid=None) if isinstance(piece, Coupling) else piece for piece in part.pieces
    )
    expansions = rewired.weight_expansions
    read = {name for piece in pieces for name in piece.inputs}
    made = {name for piece in pieces for name in piece.outputs} & sizes.keys()
    entering = [name for name in part.inputs if name in sizes and name in read]
    computed = _sizes_segment(partition, part, entering, sizes)
    checked = _sizes_segment(partition, part, sorted(made), sizes, is_check=True)
    weights = _copy_of_read(root, pieces)
    names = dict(weights.named_parameters()) | dict(weights.named_buffers())
    takes_inputs = inputs == rewired.signature.placeholders
    stage_model = replace(
        rewired,
        name=f"{rewired.name}, stage {part.index}",
        root=weights,
        body=Body(
            tuple(filter(None, (computed, *pieces, checked))), tuple(map(Live, outputs)), types
        ),
        signature=_signature(inputs, outputs, is_last),
        residuals=(),
        refusals=(),
        weight_expansions={name: expansions[name] for name in expansions if name in names},
        guards=rewired.guards if takes_inputs else rewired.guards.without_inputs(),
    )
    tolerance = root.tolerance if isinstance(root, Reversible) else None
    return StageModule(stage_model, tolerance)


def _tensors(names: Iterable[str], types: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(name for name in names if isinstance(types.get(name), TensorType))


def _signature(inputs: Sequence[str], outputs: Sequence[str], is_last: bool) -> Signature:
    """Positional tensors in, a tuple (or the only output of the last stage) out."""
    labels = tuple(n if n.isidentifier() else f"value_{index}" for index, n in enumerate(inputs))
    kind = inspect.Parameter.POSITIONAL_ONLY
    is_alone = len(outputs) == 1 and is_last
    return Signature(
        forward=inspect.Signature([inspect.Parameter(label, kind) for label in labels]),
        given=(),
        in_spec=pytree.tree_structure(((0,) * len(labels), {})),
        fixed=(),
        placeholders=tuple(inputs),
        labels=labels,
        out_spec=pytree.tree_structure(0 if is_alone else (0,) * len(outputs)),
    )


# -- weights of a stage ---------------------------------------------------------------------------


def _refuse_shared(partition: Partition) -> None:
    """Raise if two stages share weights: they would be trained as two copies that drift apart."""
    root = partition.rewired.root
    for tie, names in partition.ties.items():
        trained = [name for name in names if root.get_parameter(name).requires_grad]
        if trained:
            raise InputError(_shared(f"the parameter {trained[0]!r}", tie.owner, tie.holder))
    first_stage: dict[str, int] = {}
    for part in partition.parts:
        graphs = [piece.graph for piece in part.pieces]
        for path, value in TreeReads(graphs, root).targets.items():
            first = first_stage.setdefault(path, part.index)
            inner = value.modules() if isinstance(value, nn.Module) else ()
            norms = (m for m in inner if isinstance(m, _BatchNorm))
            if first != part.index and any(norm.running_mean is not None for norm in norms):
                raise InputError(_shared(f"the running statistics of {path!r}", first, part.index))


def _shared(what: str, first: int, second: int) -> str:
    return (
        f"to_pipeline_stages: stages {first} and {second} share {what}, and "
        "torch.distributed.pipelining would train two copies that drift apart. Choose a num_stages "
        "that keeps both uses in one stage, give the model a layer for each, or train with "
        "net.trainer(...), which keeps the copies equal"
    )


def _copy_of_read(root: nn.Module, segments: Iterable[Segment]) -> nn.Module:
    """A module with copies of only what the segments read, under the original names."""
    copied, memo = nn.Module().train(root.training), dict[int, Any]()
    reads = TreeReads((segment.graph for segment in segments), root)
    for path in sorted(reads.targets):  # outer modules first
        owner, target = root, copied
        *outer, name = path.split(".")
        for step in outer:
            owner = getattr(owner, step)
            if step not in target._modules:
                target.add_module(step, nn.Module().train(owner.training))
            target = getattr(target, step)
        members = {*target._modules, *target._parameters, *target._buffers, *target.__dict__}
        if name in members:
            continue
        value = copy.deepcopy(getattr(owner, name), memo)
        if name in owner._buffers:
            persistent = name not in owner._non_persistent_buffers_set
            target.register_buffer(name, value, persistent=persistent)
        else:
            setattr(target, name, value)
    for parameter in copied.parameters():
        parameter.grad = None
    return copied


# -- sizes that cross a cut -----------------------------------------------------------------------


def _crossing_sizes(partition: Partition) -> dict[str, tuple[Size, Size]]:
    """Sizes that a later stage reads, each for the example's batch size and for one sample more."""
    made: dict[str, fx.Node] = {}
    sizes: dict[str, tuple[Size, Size]] = {}
    pieces = [piece for part in partition.parts for piece in part.pieces]
    grids = {piece.grid for piece in pieces if isinstance(piece, Coupling)}  # made in each stage
    for part in partition.parts:
        tensors = {*_tensors(part.inputs, partition.types)}
        read = {name for piece in part.pieces for name in piece.inputs}
        for name in (n for n in part.inputs if n in read and n not in tensors | grids):
            values = made[name].meta.get(VALUE) if name in made else None
            if values is None:
                raise InputError(
                    f"to_pipeline_stages: stage {part.index} reads {name!r} of an earlier stage, "
                    "which is neither a tensor nor a size, and torch.distributed.pipelining "
                    f"carries tensors only; {_INSTEAD}"
                )
            sizes[name] = values
        for piece in part.pieces:
            results: Any = piece.graph.output_node().args[0]
            names = piece.outputs if isinstance(piece, Opaque) else ("", *piece.extras)
            if isinstance(results, tuple | list):
                made.update(zip(names, results, strict=True))
    return sizes


def _sizes_segment(
    partition: Partition,
    part: Part,
    names: Sequence[str],
    sizes: Mapping[str, tuple[Size, Size]],
    is_check: bool = False,
) -> Segment | None:
    """A segment that computes sizes from the batch size of a stage's inputs.

    With `is_check`, it compares them with the stage's own sizes: later stages compute the same.
    """
    if not names:
        return None
    sources = [
        (name, dim, kind.shape[dim], step)
        for name in _tensors(part.inputs, partition.types)
        if (kind := partition.types[name])
        for dim, step in enumerate(kind.per_sample)
        if step
    ]
    if not sources:
        raise InputError(
            f"to_pipeline_stages: no tensor that enters stage {part.index} tells the batch size, "
            f"from which the size {names[0]!r} is computed; {_INSTEAD}"
        )
    source, *grows = sources[0]
    graph = fx.Graph()
    own = [graph.placeholder(f"size_{index}") for index in range(len(names) if is_check else 0)]
    beyond = graph.call_function(samples_beyond, (graph.placeholder("batch_source"), *grows))
    found = [graph.call_function(grown_size, (*sizes[name], beyond)) for name in names]
    if not is_check:
        graph.output(tuple(found))
        return Opaque("sizes", (source,), tuple(names), graph, "sizes of an earlier stage")
    for name, value, expected in zip(names, own, found, strict=True):
        graph.call_function(check_size, (name, value, expected))
    graph.output(())
    return Opaque("sizes checked", (*names, source), (), graph, "sizes for later stages")


def check_size(name: str, value: Size, expected: Size) -> None:
    """Raise if a size does not grow linearly with the batch: later stages would compute another."""
    if value != expected:
        raise InputError(
            f"to_pipeline_stages: the size {name!r} is {value} here, but later stages compute "
            f"{expected} from the batch size, as if it grew linearly from the example's; compile "
            "with example inputs of the size of a micro-batch"
        )
