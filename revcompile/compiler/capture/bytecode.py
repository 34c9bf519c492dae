"""What the methods of a class name, from their bytecode."""

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from revcompile.ir.reached import reached


def is_of_torch(function: Any) -> bool:
    return str(function.__module__).partition(".")[0] == "torch"


@functools.cache
def asks_types(kind: type) -> bool:
    """Whether `forward`, or a method that it calls, calls `type(...)`."""
    loads = (each for code in _codes_of_forward(kind) for each in dis.get_instructions(code))
    return any(each.opname == "LOAD_GLOBAL" and each.argval == "type" for each in loads)


@functools.cache
def names_in_forward(kind: type) -> frozenset[str]:
    """Globals and attributes that `forward`, and methods that it calls, name."""
    return frozenset(name for code in _codes_of_forward(kind) for name in code.co_names)


def _codes_of_forward(kind: type) -> Iterator[types.CodeType]:
    codes = _codes_of(kind)
    return (code for method in ("forward", *methods_of_forward(kind)) for code in codes[method])


def methods_of_forward(kind: type) -> frozenset[str]:
    """Names of the methods that a class's `forward` calls: an instance may override them."""
    codes = _codes_of(kind)

    def called(method: str) -> set[str]:
        return {name for code in codes[method] for name in code.co_names} & codes.keys()

    return frozenset(reached(["forward"], called)) - {"forward"}


def reads_of_members(kind: type) -> frozenset[tuple[str, str]]:
    """Pairs of a member and an attribute of it that methods of a class read: `conv`, `padding`.

    Bytecode has only the name of a variable or an attribute, and the name that is read from it.
    """
    codes = (code for codes in _codes_of(kind).values() for code in codes)
    instructions = (each for code in codes for each in _loads(code))
    return frozenset((a, b) for a, b in instructions if a != "self")


def _codes_of(kind: type) -> dict[str, list[types.CodeType]]:
    """The bytecode of the methods of a class and of those they override, by name."""
    codes: dict[str, list[types.CodeType]] = {"forward": []}

    def inner(code: types.CodeType) -> list[types.CodeType]:
        return [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]

    own = [base for base in kind.__mro__ if not is_of_torch(base)]
    for base in own:
        for name, value in vars(base).items():
            if isinstance(value, types.FunctionType):
                codes.setdefault(name, []).extend(reached([inspect.unwrap(value).__code__], inner))
    return codes


def _loads(code: types.CodeType) -> Iterator[tuple[str, str]]:
    """Pairs of names: of a variable or an attribute, and of the attribute that is read from it."""
    for before, now in pairwise(dis.get_instructions(code)):
        is_named = before.opname.startswith(("LOAD_FAST", "LOAD_DEREF", "LOAD_ATTR"))
        if is_named and now.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            yield str(before.argval), str(now.argval)
