"""The front end: FX traces of both modes, with the same leaf modules in both.

A module may turn out to be a leaf module in one mode only, because its two modes differ in
structure, or because it writes to memory that others see. Both modes are then traced again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

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
from revcompile.ir.types import SOURCE


def trace(
    fake: nn.Module,
    model: nn.Module,
    example: Example,
    mode: FakeTensorMode,
    leaf_paths: Iterable[str] = (),
    constants: dict[str, torch.Tensor] | None = None,
) -> Tracer:
    """Trace a fake copy of a model in the mode that it is in; the tracer has all that it found.

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


def _run(fake: nn.Module, tracer: Tracer) -> Tracer:
    try:
        with torch.enable_grad():
            graph = tracer.trace(fake)
    except SuspectedDraw:
        raise
    except Exception as error:
        raise (tracer.failure or describe_failure("", error)) from error
    remove_unused(graph)
    mark_state(graph, fake)
    detach_no_grad(graph)
    return tracer


class FxFrontend:
    """Traces a model with `torch.fx`, see `tracer.py`.

    Attributes:
        leaves: paths of modules that are single calls.
        reasons: for leaf modules that the user has not requested: why.
        stateful: leaf modules whose next call computes something else.
        leaked: attributes in which forward passes leave tensors: path, name, key of a dict entry.
    """

    def __init__(
        self,
        model: nn.Module,
        example: Example,
        leaves: frozenset[str],
        device: torch.device | None,
        constants: Mapping[str, torch.Tensor],
    ) -> None:
        self.model, self.example = model, example
        self.leaves, self.reasons, self.stateful = set(leaves), dict[str, str](), set[str]()
        self.leaked: list[tuple[str, str, Any]] = []
        self._mode = FakeMode()
        self._fake = fake_copy(model, self._mode, device)
        self._constants = dict(constants)

    def trace(self) -> tuple[nn.Module, Tracer, Tracer]:
        """Trace both modes until they have the same leaf modules; the root that both run on."""
        while True:
            train, evaluation = self._run(True), self._run(False)
            if evaluation.untraceable:
                continue
            more = mode_dependent(self.model, train.graph, evaluation.graph)
            if self.leaves.issuperset(more):
                break
            self.leaves.update(more)
        root = copy_model(self.model)
        for name, tensor in {**train.constants, **evaluation.constants}.items():
            register_constant(root, name, tensor)
        # A leaf module is called as it is, and sets its attributes itself.
        inside = tuple(f"{path}." for path in self.leaves)
        self.leaked = [
            entry
            for entry in sorted(train.leaked | evaluation.leaked, key=repr)
            if entry[0] not in self.leaves and not entry[0].startswith(inside)
        ]
        return root, train, evaluation

    def add_leaf(self, error: NotFunctional) -> None:
        """Make the innermost module around a write a leaf module."""
        path = innermost_module(error.nodes, self.leaves)
        if not path:
            raise Untraceable("", str(error), str(error.nodes[0].meta.get(SOURCE, "?")))
        self.leaves.add(path)
        self.reasons[path] = str(error)

    def _run(self, training: bool) -> Tracer:
        fake = set_mode(self._fake, self.model, training)
        args = self.model, self.example, self._mode, self.leaves, self._constants
        traced = trace(fake, *args)
        self.leaves.update(traced.untraceable)
        self.reasons.update(traced.untraceable)
        self.stateful.update(traced.stateful)
        return traced
