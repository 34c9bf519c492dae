"""The first front end: FX traces of both modes, with the same leaf modules in both.

A module may turn out to be a leaf module in one mode only, because its two modes differ in
structure, or because it writes to memory that others see. Both modes are then traced again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from revcompile.compiler.capture.cleanup import detach_no_grad, remove_unused
from revcompile.compiler.capture.example import Example
from revcompile.compiler.capture.fake_values import FakeMode, fake_copy
from revcompile.compiler.capture.functional import NotFunctional
from revcompile.compiler.capture.isolation import (
    copy_model,
    foreign_rng,
    register_constant,
    set_mode,
)
from revcompile.compiler.capture.leaf_modules import innermost_module, mode_dependent
from revcompile.compiler.capture.memory import mark_state
from revcompile.compiler.capture.random_draws import SuspectedDraw
from revcompile.compiler.capture.trace_errors import Untraceable, describe_failure
from revcompile.compiler.capture.tracer import Tracer
from revcompile.compiler.capture.unseen_calls import foreign_draws
from revcompile.ir.guards import ModeGuards
from revcompile.ir.types import SOURCE


@dataclass(frozen=True)
class Traced:
    """The raw graph of one mode, the structure of its output, and what tracing found out."""

    graph: fx.Graph
    out_spec: pytree.TreeSpec
    guards: ModeGuards
    asked: frozenset[tuple[str, str]]
    """Names that modules were asked for and that are no plain attributes: path and name."""
    written: frozenset[tuple[str, str]]
    """Attributes that the forward pass itself sets: path of the module, and name."""
    draws: frozenset[str] = frozenset()
    """Lines that draw random numbers which decide nothing; the graph does not draw them."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Tensors that the graph reads and that are neither parameters nor buffers."""
    untraceable: Mapping[str, str] = field(default_factory=dict)
    """Modules that became leaf modules, and why."""
    stateful: frozenset[str] = frozenset()
    """Those of them whose next call computes something else."""
    leaked: frozenset[tuple[str, str, Any]] = frozenset()
    """Attributes in which forward passes left tensors: path, name, and the key of a dict entry."""


def trace(
    fake: nn.Module,
    model: nn.Module,
    example: Example,
    mode: FakeTensorMode,
    leaf_paths: Iterable[str] = (),
    constants: dict[str, torch.Tensor] | None = None,
) -> Traced:
    """Trace a fake copy of a model in the mode that it is in.

    Args:
        fake: the fake copy, on tensors of `mode`.
        model: the model itself, for leaf modules that need real tensors.
        example: the example arguments.
        mode: the fake tensors' mode.
        leaf_paths: modules that become single calls.
        constants: collects tensors found while tracing; with the same dict for both modes, equal
            constants get equal names.
    """
    made = model, example, mode, frozenset(leaf_paths), {} if constants is None else constants
    restore = foreign_rng()
    try:
        return _run(fake, Tracer(*made))
    except SuspectedDraw:
        with foreign_draws() as has_drawn:
            try:
                return _run(fake, Tracer(*made, has_drawn))
            finally:
                if has_drawn():
                    restore()


def _run(fake: nn.Module, tracer: Tracer) -> Traced:
    try:
        with torch.enable_grad():
            graph = tracer.trace(fake)
    except SuspectedDraw:
        raise
    except Exception as error:
        raise (tracer.failure or describe_failure("", error)) from error
    reads = {str(n.target): tracer.values[n].first for n in graph.find_nodes(op="get_attr")}
    state = {name for name, _ in (*fake.named_parameters(), *fake.named_buffers())}
    guards = tracer.guards()
    remove_unused(graph)
    mark_state(graph, fake)
    detach_no_grad(graph)
    assert tracer.out_spec is not None
    return Traced(
        graph,
        tracer.out_spec,
        guards,
        frozenset(tracer.asked),
        frozenset(tracer.written),
        draws=frozenset(tracer.draws),
        constants={name: value for name, value in reads.items() if name not in state},
        untraceable=tracer.untraceable,
        stateful=frozenset(tracer.stateful),
        leaked=frozenset(tracer.leaked),
    )


@dataclass(frozen=True)
class Traces:
    """The result of a front end: a raw graph for each mode, and the root that both run on."""

    root: nn.Module
    modes: tuple[Traced, Traced]
    """Train mode, eval mode."""
    leaves: tuple[str, ...] = ()
    """Paths of modules that are single calls."""
    leaf_reasons: Mapping[str, str] = field(default_factory=dict)
    """For leaf modules that the user has not requested: why."""
    stateful: tuple[str, ...] = ()
    """Leaf modules whose next call computes something else."""
    leaked: tuple[tuple[str, str, Any], ...] = ()
    """Attributes in which forward passes leave tensors: path, name, and the key of a dict entry."""


class FxFrontend:
    """Traces a model with `torch.fx`, see `tracer.py`."""

    def __init__(
        self,
        model: nn.Module,
        example: Example,
        leaves: frozenset[str],
        device: torch.device | None,
        constants: Mapping[str, torch.Tensor],
    ) -> None:
        self.model, self.example = model, example
        self._mode = FakeMode()
        self._fake = fake_copy(model, self._mode, device)
        self._leaves, self._reasons = set(leaves), dict[str, str]()
        self._stateful = set[str]()
        self._constants = dict(constants)

    def trace(self) -> Traces:
        """Trace both modes until they have the same leaf modules."""
        while True:
            train, evaluation = self._run(True), self._run(False)
            if evaluation.untraceable:
                continue
            more = mode_dependent(self.model, train.graph, evaluation.graph)
            if self._leaves.issuperset(more):
                break
            self._leaves.update(more)
        root = copy_model(self.model)
        for name, tensor in {**train.constants, **evaluation.constants}.items():
            register_constant(root, name, tensor)
        inside = tuple(f"{path}." for path in self._leaves)
        leaked = sorted(train.leaked | evaluation.leaked, key=repr)
        return Traces(
            root,
            (train, evaluation),
            tuple(sorted(self._leaves)),
            dict(self._reasons),
            tuple(sorted(self._stateful)),
            # A leaf module is called as it is, and sets its attributes itself.
            tuple(
                entry
                for entry in leaked
                if entry[0] not in self._leaves and not entry[0].startswith(inside)
            ),
        )

    def add_leaf(self, error: NotFunctional) -> None:
        """Make the innermost module around a write a leaf module."""
        path = innermost_module(error.nodes, self._leaves)
        if not path:
            raise Untraceable("", str(error), str(error.nodes[0].meta.get(SOURCE, "?")))
        self._leaves.add(path)
        self._reasons[path] = str(error)

    def _run(self, training: bool) -> Traced:
        fake = set_mode(self._fake, self.model, training)
        args = self.model, self.example, self._mode, self._leaves, self._constants
        traced = trace(fake, *args)
        self._leaves.update(traced.untraceable)
        self._reasons.update(traced.untraceable)
        self._stateful.update(traced.stateful)
        return traced
