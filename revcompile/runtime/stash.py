"""Other parameters than the model's own, for the time of a call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

__all__ = ["Slots", "Stash"]


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
            self._current = {
                name: p.detach().clone().requires_grad_(p.requires_grad)
                for name, p in parameters.items()
            }
        return self._current

    def forget(self) -> None:
        """The parameters have changed: the next version is a new one."""
        self._current = None
