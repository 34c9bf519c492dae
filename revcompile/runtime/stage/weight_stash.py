"""Other parameters than those of the forward pass: for the time of a call, or in its graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

__all__ = ["Slots", "Stash", "as_of", "copied"]


class Slots:
    """Every place in a module tree where one of the given parameters is read from."""

    def __init__(self, root: nn.Module, parameters: Mapping[str, Tensor]) -> None:
        names = {id(parameter): name for name, parameter in parameters.items()}
        self._places = [
            (module._parameters, attribute, names[id(parameter)])
            for module in root.modules()
            for attribute, parameter in module._parameters.items()
            if id(parameter) in names
        ]

    @contextmanager
    def filled(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """Let the modules read `values` instead."""
        before = [place[attribute] for place, attribute, _ in self._places]
        for place, attribute, name in self._places:
            place[attribute] = values[name]  # type: ignore[assignment]
        try:
            yield
        finally:
            for (place, attribute, _), value in zip(self._places, before, strict=True):
                place[attribute] = value


class Stash:
    """A copy of the parameters, made when a version is first used after an update."""

    def __init__(self) -> None:
        self._current: dict[str, Tensor] | None = None

    def version(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The current parameters as tensors no optimizer will touch."""
        if self._current is None:
            self._current = copied(parameters)
        return self._current

    def is_current(self, version: int) -> bool:
        """Is this the id of the version that forward passes use now?"""
        return self._current is not None and id(self._current) == version

    def forget(self) -> None:
        """The parameters have changed: the next version is a new one."""
        self._current = None


def copied(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights that no optimizer will touch."""
    return {n: p.detach().clone().requires_grad_(p.requires_grad) for n, p in weights.items()}


@contextmanager
def as_of(tensors: tuple[Tensor, ...], versions: tuple[int, ...]) -> Iterator[None]:
    """Let graphs made when the tensors had these versions be differentiated with them as they are.

    Autograd saves parameters by reference, views of them too, and refuses to use those that were
    written to since. Here that is meant.

    >>> weight, x = torch.tensor([2.0], requires_grad=True), torch.ones(1, requires_grad=True)
    >>> y, version = x * weight, weight._version
    >>> with torch.no_grad():
    ...     _ = weight.add_(1)
    >>> with as_of((weight,), (version,)):
    ...     torch.autograd.grad(y, x)
    (tensor([3.]),)
    """
    now = tuple(tensor._version for tensor in tensors)
    torch._C._autograd._unsafe_set_version_counter(tensors, versions)
    try:
        yield
    finally:
        torch._C._autograd._unsafe_set_version_counter(tensors, now)
