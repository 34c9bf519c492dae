"""Weights in low precision, made once an update: autocast makes them anew at every call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor, nn

from revcompile.runtime.stage import Stage

__all__ = ["Casts"]

_CAST: Final = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Layers whose weight and bias autocast turns to low precision before it uses them."""


class Casts:
    """A stage's weights as its layers use them under autocast."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        names = _castable(stage) if stage.autocast is not None else []
        self.tensors: dict[str, Tensor] = {
            name: stage.parameters[name]
            .detach()
            .to(stage.autocast, copy=True)
            .requires_grad_(stage.parameters[name].requires_grad)
            for name in names
        }
        self._masters = [stage.parameters[name].detach() for name in names]
        self._copies = [tensor.detach() for tensor in self.tensors.values()]
        self._own = stage.reads
        self._read = {**stage.parameters, **self.tensors} if self.tensors else stage.reads
        self._version = -1

    def use(self, on: bool) -> None:
        """Let the stage's modules compute with them, or with what they had before."""
        self._stage.reads = self._read if on else self._own

    def refresh(self) -> None:
        """The weights have changed."""
        if self._copies:
            torch._foreach_copy_(self._copies, self._masters)

    def check(self) -> None:
        """Have the weights changed behind the stage's back, by whoever loads or averages them?"""
        if self._version != self._seen():
            self.refresh()
            self.note()

    def note(self) -> None:
        """The copies are as the weights are."""
        self._version = self._seen()

    def _seen(self) -> int:
        return sum(self._stage.parameters[name]._version for name in self.tensors)

    def widened(self, found: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        """Gradients in the precision of the weights themselves."""
        narrow = {n: g for n, g in found.items() if g is not None and n in self.tensors}
        if not narrow:
            return dict(found)
        wide = [
            torch.empty_like(gradient, dtype=self._stage.parameters[name].dtype)
            for name, gradient in narrow.items()
        ]
        torch._foreach_copy_(wide, list(narrow.values()))
        return {**found, **dict(zip(narrow, wide, strict=True))}


def _castable(stage: Stage) -> list[str]:
    """Float32 parameters that nothing reads but layers which cast them."""
    root, program = stage.root, stage.program
    called = {str(n.target) for n in program.forward.nodes if n.op == "call_module"}
    direct = {str(n.target) for n in program.forward.nodes if n.op == "get_attr"}
    casting = {
        id(module)
        for module in map(root.get_submodule, called)
        if type(module) in _CAST and not _hooked(module)
    }
    readers: dict[int, set[int]] = {}
    for module in root.modules():
        for parameter in module._parameters.values():
            readers.setdefault(id(parameter), set()).add(id(module))
    return [
        name
        for name, parameter in stage.parameters.items()
        if name not in direct
        and parameter.dtype == torch.float32
        and readers.get(id(parameter), {-1}) <= casting
    ]


def _hooked(module: nn.Module) -> bool:
    """Does somebody look at the layer's calls, or make its weight?"""
    return bool(module._forward_pre_hooks or module._forward_hooks)
