"""What stands for a tensor that a forward pass left behind in an attribute.

    self.aux = p.mean()     in a forward that became part of the graph

The graph does not set the attribute: whoever reads it would find what was there before, and train
without it. `LeftBehind` is found there instead, and every use of it is an error.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

from torch import nn

from revcompile.errors import InputError

__all__ = ["LeftBehind", "put_in_place"]


class LeftBehind:
    """A value that is not computed; to use it raises an error.

    >>> LeftBehind("blocks.0.aux") + 1
    Traceback (most recent call last):
    revcompile.errors.InputError: blocks.0.aux is set by a forward pass that is part of ...
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def _refuse(self, *_: Any) -> NoReturn:
        raise InputError(
            f"{self._name} is set by a forward pass that is part of the captured graph now, which "
            "computes what the model returns and nothing else: the attribute would be out of date, "
            "and a loss that uses it would have no gradient. Let the model return the tensor"
        )

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        given = [*args, *(kwargs or {}).values()]
        found = [a for one in given for a in (one if isinstance(one, list | tuple) else [one])]
        next(a for a in found if isinstance(a, LeftBehind))._refuse()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy and pickle ask for what there may be
            raise AttributeError(name)
        self._refuse()

    def __repr__(self) -> str:
        return f"<{self.__dict__.get('_name', '?')}, which the captured graph does not set>"

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _refuse
    __rtruediv__ = __pow__ = __neg__ = __matmul__ = __rmatmul__ = __abs__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __float__ = __int__ = __bool__ = __len__ = __iter__ = __getitem__ = _refuse


def put_in_place(root: nn.Module, names: Iterable[tuple[str, str, Any]]) -> None:
    """Mark attributes (module's path, name, and None or the key of a dict's entry) of a model."""
    for path, name, key in names:
        owner = vars(root.get_submodule(path))
        full = f"{path}.{name}" if path else name
        if key is None:
            owner[name] = LeftBehind(full)
        elif type(owner.get(name)) is dict:
            owner[name][key] = LeftBehind(f"{full}[{key!r}]")
