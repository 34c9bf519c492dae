"""Programs as statements over values, printed as Python with few variable names.

A text refers to a value as `value(name)`, in marks that no Python code has, so that expressions are
written as plain f-strings. Each value is assigned once; variables are chosen when all statements
are known. A variable is used again as soon as its value is not read any more, which turns

    x2, x3 = x1, x0 + F(x1)              a, b = b, a + F(b)
    x4, x5 = x3, x2 + G(x3)      into    a, b = b, a + G(b)
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from revcompile.ir.program import legal

__all__ = ["Body", "commented", "joined", "value"]

_VALUE: Final = re.compile("«([^«»]+)»")
_COMMENT_COLUMN: Final = 60


def value(name: str) -> str:
    """How texts refer to a value."""
    return f"«{name}»"


def joined(texts: Iterable[str | None], brackets: bool = True) -> str:
    """Texts as a tuple; without `brackets`, one alone stands as it is.

    >>> joined(["a"]), joined(["a"], brackets=False), joined(["a", None])
    ('(a,)', 'a', '(a, None)')
    """
    parts = [str(text) for text in texts]
    if len(parts) == 1 and not brackets:
        return parts[0]
    return f"({', '.join(parts)}{',' * (len(parts) == 1)})"


def commented(line: str, comment: str) -> str:
    """A line of code with a comment at its end."""
    return f"{line:<{_COMMENT_COLUMN}}  # {comment}" if comment else line


@dataclass(frozen=True)
class _Statement:
    """`targets = texts`: a text for each target, or one call that returns all of them."""

    targets: tuple[str, ...]
    texts: tuple[str, ...]
    comment: str
    effects: bool

    @property
    def reads(self) -> list[str]:
        return [name for text in self.texts for name in _VALUE.findall(text)]

    def needed(self, live: set[str]) -> _Statement | None:
        """The part whose results are read, or that has effects."""
        read = [index for index, target in enumerate(self.targets) if target in live]
        if self.effects or len(read) == len(self.targets):
            return self
        if not read or len(self.texts) != len(self.targets):
            return self if read else None
        targets = tuple(self.targets[index] for index in read)
        return replace(self, targets=targets, texts=tuple(self.texts[index] for index in read))


@dataclass
class Body:
    """A function in the making."""

    parameters: Sequence[str]
    hints: dict[str, str]
    """Which variable a value should be in, if not one of its own name."""
    statements: list[_Statement] = field(default_factory=list)

    def assign(
        self, targets: Sequence[str], *texts: str, comment: str = "", effects: bool = True
    ) -> None:
        """Add a statement.

        Args:
            targets: Names of the values it assigns; those that are never read become `_`.
            texts: An expression for each, or one that returns all of them.
            comment: Written at the end of the line.
            effects: If False, what is not read is left out.
        """
        self.statements.append(_Statement(tuple(targets), texts, comment, effects))

    def text(
        self, name: str, result: str, taken: Iterable[str], comment: str = ""
    ) -> tuple[str, dict[str, str]]:
        """Print the function.

        Args:
            name: What it is called.
            result: The text of what it returns.
            taken: Names that variables must not have.
            comment: Written behind the first line.

        Returns:
            The code, and the variable that each value was last seen in.
        """
        reserved = set(taken)
        variables: dict[str, str] = {}
        for parameter in self.parameters:
            variables[parameter] = self._variable(parameter, {*variables.values(), *reserved})
        arguments = ", ".join(["self", *variables.values()])
        lines = [commented(f"def {name}({arguments}):", comment)]
        for statement, live in self._live(result):
            right = ", ".join(_filled(text, variables) for text in statement.texts)
            in_use = {variables[read] for read in live if read in variables} | reserved
            left = []
            for target in statement.targets:
                variables[target] = self._variable(target, in_use) if target in live else "_"
                in_use.add(variables[target])
                left.append(variables[target])
            line = f"{', '.join(left)} = {right}" if set(left) - {"_"} else right
            if line != f"{right} = {right}":
                lines.append(commented(f"    {line}", statement.comment))
        return "\n".join([*lines, f"    return {_filled(result, variables)}"]), variables

    def _live(self, result: str) -> list[tuple[_Statement, set[str]]]:
        """The statements that are needed, each with the values that are read after it."""
        live = set(_VALUE.findall(result))
        needed: list[tuple[_Statement, set[str]]] = []
        for statement in reversed(self.statements):
            part = statement.needed(live)
            if part is not None:
                needed.append((part, set(live)))
                live -= set(part.targets)
                live |= set(part.reads)
        return needed[::-1]

    def _variable(self, name: str, taken: set[str]) -> str:
        hint = legal(self.hints.get(name, name))
        names = (hint, *(f"{hint}_{number}" for number in range(1, len(taken) + 2)))
        return next(name for name in names if name not in taken and not keyword.iskeyword(name))


def _filled(text: str, variables: Mapping[str, str]) -> str:
    return _VALUE.sub(lambda match: variables[match[1]], text)
