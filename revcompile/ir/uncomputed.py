"""What stands in attributes where the forward pass of the original leaves tensors.

Guards see the attribute as it was before the forward pass: a cache that the model fills is empty,
and the captured graph computes its entries in every call.
"""

from __future__ import annotations

from typing import Any, NoReturn

from revcompile.errors import InputError


class UncomputedTensor:
    """In the place of a tensor that a traced forward stored in an attribute; using it raises.

    The captured graph does not set the attribute: what was there before would be used silently.

    >>> UncomputedTensor("blocks.0.aux") + 1
    Traceback (most recent call last):
    revcompile.errors.InputError: blocks.0.aux is set by a forward pass that is part of ...
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def _refuse(self, *_: Any) -> NoReturn:
        raise InputError(
            f"{self._name} is set by a forward pass that is part of the captured graph now, which "
            "computes only what the model returns: the attribute would be out of date, and a loss "
            "that uses it would have no gradient. Let the model return the tensor"
        )

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        given = [*args, *(kwargs or {}).values()]
        flat = [a for arg in given for a in (arg if isinstance(arg, list | tuple) else [arg])]
        next(a for a in flat if isinstance(a, UncomputedTensor))._refuse()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy and pickle look for optional methods
            raise AttributeError(name)
        self._refuse()

    def __repr__(self) -> str:
        return f"<{self.__dict__.get('_name', '?')}, which the captured graph does not set>"

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _refuse
    __rtruediv__ = __pow__ = __neg__ = __matmul__ = __rmatmul__ = __abs__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __float__ = __int__ = __bool__ = __len__ = __iter__ = __getitem__ = _refuse


def as_captured(value: Any, captured: Any = None) -> Any:
    """The value that guards see: what was captured stands where nothing is computed any more.

    >>> cache = {"a": 1, "b": UncomputedTensor("cache['b']"), "c": UncomputedTensor("cache['c']")}
    >>> as_captured(cache, {"a": 0, "b": None})
    {'a': 1, 'b': None}
    """
    if isinstance(value, UncomputedTensor):
        return captured
    if type(value) is not dict:
        return value
    known = captured if type(captured) is dict else {}
    is_set = {k: not isinstance(v, UncomputedTensor) for k, v in value.items()}
    if all(is_set.values()):
        return value
    return {k: v if is_set[k] else known[k] for k, v in value.items() if is_set[k] or k in known}
