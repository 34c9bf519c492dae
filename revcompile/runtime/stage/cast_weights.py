"""Weights in low precision, made once an update: autocast makes them anew at every call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from revcompile.ir.module_tree import TreeReads, is_cast
from revcompile.ir.program import StageProgram
from revcompile.schedule import Order, Weights

__all__ = ["Casts", "castable"]


class Casts:
    """Some of a stage's weights as its layers use them under autocast.

    Whoever changes a weight in place is noticed (torch counts that), but not through `.data`.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], names: Sequence[str], dtype: torch.dtype | None
    ) -> None:
        self._parameters, self._names, self._dtype = parameters, tuple(names), dtype
        self._tensors: dict[str, Tensor] = {}
        self._noted: list[tuple[int, int]] = []

    def read(self) -> dict[str, Tensor] | None:
        """All parameters as they are to be read now; None: as they are."""
        self.check()
        return {**self._parameters, **self._tensors} if self._names else None

    def refresh(self) -> None:
        """The weights have changed."""
        if not self._names:
            return
        masters = [self._parameters[name] for name in self._names]
        if not self._tensors:
            for name, master in zip(self._names, masters, strict=True):
                copy = torch.empty_like(master, dtype=self._dtype, requires_grad=False)
                self._tensors[name] = copy.requires_grad_(master.requires_grad)
        copies = [tensor.detach() for tensor in self._tensors.values()]
        torch._foreach_copy_(copies, [master.detach() for master in masters])
        self.note()

    def check(self) -> None:
        """Have the weights changed, by whoever updates, loads or averages them?"""
        if self._noted != self._seen():
            self.refresh()

    def note(self) -> None:
        """The copies are as the weights are."""
        self._noted = self._seen()

    def _seen(self) -> list[tuple[int, int]]:
        found = (self._parameters[name] for name in self._names)
        return [(parameter._version, parameter.data_ptr()) for parameter in found]

    def widened(self, found: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        """Gradients in the precision of the weights themselves."""
        narrow = {n: g for n, g in found.items() if g is not None and n in self._tensors}
        if not narrow:
            return dict(found)
        wide = [
            torch.empty_like(gradient, dtype=self._parameters[name].dtype)
            for name, gradient in narrow.items()
        ]
        torch._foreach_copy_(wide, list(narrow.values()))
        return {**found, **dict(zip(narrow, wide, strict=True))}


def castable(program: StageProgram, root: nn.Module, parameters: Mapping[str, Tensor]) -> list[str]:
    """Float32 parameters that nothing reads but layers which cast them.

    None where weights may change while graphs or copies of them are in flight.
    """
    method = program.method
    if method.weights is Weights.STASHED or method.order in (Order.GPIPE, Order.ONE_F_ONE_B):
        return []
    reads = TreeReads(program.forward, root)
    casting = {id(module) for module in reads.called.values() if is_cast(module)}
    readers: dict[int, set[int]] = {}
    for module in root.modules():
        for parameter in module._parameters.values():
            readers.setdefault(id(parameter), set()).add(id(module))
    return [
        name
        for name, parameter in parameters.items()
        if name not in reads.targets
        and parameter.dtype == torch.float32
        and readers.get(id(parameter), {-1}) <= casting
    ]
