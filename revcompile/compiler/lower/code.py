"""A stage's code: statements over values, printed as Python text.

A variable is reused as soon as its value is no longer read, which turns

    x2, x3 = x1, x0 + F(x1)              a, b = b, a + F(b)
    x4, x5 = x3, x2 + G(x3)      into    a, b = b, a + G(b)

`trace` executes the printed lines, which gives the graphs that run.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from revcompile.ir.program import Partition, commented, legal
from revcompile.ir.types import Coupling

GRADS: Final = "grads"
"""The variable in which gradients of parameters are added up, by name."""
_VALUE: Final = re.compile("\x02(.*?)\x1f(.*?)\x1f(.*?)\x03")


@dataclass(frozen=True)
class Value:
    """A live value in one of its roles, e.g. its gradient; numbers tell several apart.

    As a string it stands in an expression for the variable that will hold it.
    """

    name: str
    role: str = ""
    """key, kept, returned, entered, arranged, branch, leaf, graph, gradient, shapes, sign, lost."""
    number: int = 0

    def __str__(self) -> str:
        return f"\x02{self.name}\x1f{self.role}\x1f{self.number}\x03"

    @property
    def key(self) -> str:
        """The name under which forward keeps it for backward."""
        if self.role == "leaf":  # each unit that keeps its graph has leaves of its own
            return f"{self.name} leaf {self.number}"
        return f"{self.name} {self.role}" if self.role in ("graph", "shapes", "lost") else self.name


KEY: Final = Value("key", "key")
"""The value that random seeds are made from."""


def listed(items: Iterable[Any]) -> str:
    """The items of a call or an assignment."""
    return ", ".join(map(str, items))


def tupled(items: Iterable[Any]) -> str:
    """A tuple as an expression."""
    texts = [*map(str, items)]
    return f"({listed(texts)}{',' * (len(texts) == 1)})"


def _reads(expressions: Iterable[str]) -> set[Value]:
    found = (_VALUE.findall(expression) for expression in expressions)
    return {Value(name, role, int(number)) for one in found for name, role, number in one}


@dataclass(frozen=True)
class Statement:
    """`targets = values`: an expression for each target, or one call that returns all of them."""

    targets: tuple[Value | None, ...]
    """None for a result that nobody reads."""
    values: tuple[str, ...]
    unpacks: bool = False
    """Whether a call returns a tuple of the targets, even if there is only one."""
    comment: str = ""
    note: str = ""
    """A comment before the first statement of a program that has it."""
    parameters: tuple[str, ...] = ()
    """Parameters of the functions that are differentiated."""

    def is_idle(self, live: set[Value]) -> bool:
        """Whether it only gives names to values, and nothing reads those names."""
        has_call = any("(" in _VALUE.sub("", value) for value in self.values)
        return not has_call and live.isdisjoint(self.targets)


@dataclass(frozen=True, eq=False)
class Program:
    """Statements with arguments and a result: forward, backward, or a run of pieces."""

    name: str
    arguments: tuple[Value, ...]
    statements: tuple[Statement, ...]
    result: str
    comment: str = ""
    result_comment: str = ""

    def needed(self) -> list[tuple[Statement, set[Value]]]:
        """The statements that are not idle, each with the values that are read after it."""
        live = _reads([self.result])
        needed: list[tuple[Statement, set[Value]]] = []
        for statement in reversed(self.statements):
            if not statement.is_idle(live):
                needed.append((statement, set(live)))
                live = live.difference(statement.targets) | _reads(statement.values)
        return needed[::-1]


# -- text ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """A statement as text, and the values that variables hold after it."""

    text: str
    held: Mapping[str, Value] = field(default_factory=dict)
    parameters: tuple[str, ...] = ()


@dataclass(frozen=True)
class Printed:
    """A program as text: `text` is `lines` and `result` as a function of `arguments`."""

    name: str
    arguments: Mapping[str, Value]
    lines: tuple[Line, ...]
    result: str
    text: str
    variables: Mapping[Value, str]
    """The variable that each value was last in."""


class Printer:
    """Prints programs; `taken` are names that no variable may have."""

    def __init__(self, partition: Partition, taken: set[str], has_key: bool) -> None:
        self.hints, self.taken, self.has_key = hints(partition), taken, has_key

    def print(self, program: Program) -> Printed:
        variables: dict[Value, str] = {}
        for argument in program.arguments:
            if argument != KEY or self.has_key:
                variables[argument] = self._variable(argument, variables.values())
        arguments = {name: value for value, name in variables.items()}
        lines = [Line(f"{GRADS} = {{}}")] if program.result.endswith(GRADS) else []
        head = f"def {program.name}({listed(['self', *arguments])}):"
        texts = [commented(head, program.comment), *(f"    {line.text}" for line in lines)]
        notes = {""}
        for statement, live in program.needed():
            line = self._line(statement, live, variables)
            if line.text:
                lines.append(line)
                texts += [] if statement.note in notes else [f"    # {statement.note}"]
                notes.add(statement.note)
                texts.append(commented(f"    {line.text}", statement.comment))
        result = _text(program.result, variables)
        comment = f"  # {program.result_comment}" if program.result_comment else ""
        text = "\n".join([*texts, f"    return {result}{comment}"])
        return Printed(program.name, arguments, tuple(lines), result, text, variables)

    def _line(self, statement: Statement, live: set[Value], variables: dict[Value, str]) -> Line:
        right = _text(listed(statement.values), variables)
        held: dict[str, Value] = {}
        left = []
        for target in statement.targets:
            name = "_"
            if target is not None:
                in_use = (variables[value] for value in variables if value in live)
                variables[target] = name = self._variable(target, (*in_use, *held))
                held[name] = target
            left.append(name)
        if not held:
            return Line(right, held, statement.parameters)
        names = f"({left[0]},)" if statement.unpacks and len(left) == 1 else listed(left)
        return Line(f"{names} = {right}" if names != right else "", held, statement.parameters)

    def _variable(self, value: Value, in_use: Iterable[str]) -> str:
        """A variable that holds no value that is still read; its name is readable if possible."""
        taken = {*in_use, *self.taken}
        hint = legal(self._hint(value))
        names = (hint, *(f"{hint}_{number}" for number in range(1, len(taken) + 2)))
        return next(name for name in names if name not in taken and not keyword.iskeyword(name))

    def _hint(self, value: Value) -> str:
        hint = self.hints.get(value.name, value.name)
        match value.role:
            case "gradient":
                return f"d{hint}" if hint in ("a", "b") else f"d_{hint}"
            case "leaf" | "graph":
                return f"{hint}_{value.role}"
            case "shapes" | "sign" | "lost":
                return value.role
            case "branch":
                return "f"
        return hint


def _text(expression: str, variables: Mapping[Value, str]) -> str:
    return _VALUE.sub(lambda v: variables[Value(v[1], v[2], int(v[3]))], expression)


def hints(partition: Partition) -> dict[str, str]:
    """Names of variables: `a` and `b` for streams, `grid` for grids; else the value's own name."""
    found: dict[str, str] = {}
    for piece in (piece for part in partition.parts for piece in part.pieces):
        if isinstance(piece, Coupling):
            for streams in (piece.streams_in, piece.streams_out):
                found |= dict(zip(streams, "ab", strict=True))
            if piece.grid is not None:
                found[piece.grid] = "grid"
    return found
