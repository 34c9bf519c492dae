"""The first front end: FX traces of both modes, with the same leaf modules in both.

A module may turn out to be a leaf module in one mode only, because its two modes differ in
structure, or because it writes to memory that others see. Both modes are then traced again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from revcompile.compiler.capture.example import Example
from revcompile.compiler.capture.fake_values import fake_copy
from revcompile.compiler.capture.functional import NotFunctional
from revcompile.compiler.capture.isolation import copy_model, register_constant, set_mode
from revcompile.compiler.capture.leaf_modules import innermost_module, mode_dependent
from revcompile.compiler.capture.trace_errors import Untraceable
from revcompile.compiler.capture.tracer import Traced, trace
from revcompile.ir.types import SOURCE, Frontend

__all__ = ["FxFrontend", "Traces"]


@dataclass(frozen=True)
class Traces:
    """What a front end hands over: a raw graph for each mode, and the root that both run on."""

    root: nn.Module
    modes: tuple[Traced, Traced]
    """Train mode, eval mode."""
    leaves: tuple[str, ...] = ()
    """Paths of modules that are single calls."""
    leaf_reasons: Mapping[str, str] = field(default_factory=dict)
    """For leaf modules that the user has not asked for: why."""
    stateful: tuple[str, ...] = ()
    """Leaf modules whose next call computes something else."""
    leaked: tuple[tuple[str, str, Any], ...] = ()
    """Attributes in which forward passes leave tensors: path, name, and the key of a dict entry."""


class FxFrontend:
    """Traces a model with `torch.fx`, see `tracer.py`."""

    kind = Frontend.FX

    def __init__(
        self,
        model: nn.Module,
        example: Example,
        leaves: frozenset[str],
        device: torch.device | None,
        constants: Mapping[str, torch.Tensor],
    ) -> None:
        self.model, self.example = model, example
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
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
