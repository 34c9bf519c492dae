"""A stage's code as `compiler.lower` writes it: statements over values, each branch a function.

    a, b = b, plus(a, layer1_0(self, b), grid)
    a, b, da, db = uncouple(layer1_0, self, a, b, da, db, grid, grads)

`compiler.lower.flatten` makes the graphs that run of it: functions are inlined, `uncouple` and its
like expanded. `inspect.code` prints it as it is. What is called is a function of `ir.coupling_ops`
or one of the stage's own, which take the model (`SELF`) first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from torch import fx

from revcompile.ir import coupling_ops, ops
from revcompile.ir.types import Segment

HELPERS: Final = frozenset([*ops.__all__, *coupling_ops.__all__])
"""Functions that printed code calls by these names: no variable may have one."""
_WITHOUT_EFFECT: Final = frozenset(
    [
        coupling_ops.couple_average,
        coupling_ops.detached,
        coupling_ops.enter_average,
        coupling_ops.enter_chain,
        coupling_ops.leaf,
        coupling_ops.minus,
        coupling_ops.plus,
        coupling_ops.total,
        coupling_ops.uncouple_average,
        coupling_ops.zeros_if_none,
    ]
)


ValueRole = Literal[
    "",
    "kept",
    "returned",
    "entered",
    "arranged",
    "branch",
    "leaf",
    "graph",
    "gradient",
    "shapes",
    "sign",
    "lost",
]
FunctionRole = Literal["run", "again", "arrange", "restore"]


# -- expressions -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Value:
    """A live value in one of its roles, e.g. its gradient; numbers tell several apart."""

    name: str
    role: ValueRole = ""
    number: int = 0

    @property
    def key(self) -> str:
        """The name under which forward keeps it for backward."""
        if self.role == "leaf":  # each unit that keeps its graph has leaves of its own
            return f"{self.name} leaf {self.number}"
        return f"{self.name} {self.role}" if self.role in ("graph", "shapes", "lost") else self.name


KEY: Final = Value("key")
"""What random seeds are made of."""
SELF: Final = Value("self")
"""The model."""


@dataclass(frozen=True)
class ParameterGradients:
    """The gradients of these parameters: a call that is given them adds to them."""

    names: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class GraphFunction:
    """A function that computes what a graph does: F, an opaque piece, or a rearrangement.

    `again`: without the buffers it writes, for backward. Casts of inputs and calls of batch norms
    are part of the graph.
    """

    segment: Segment
    role: FunctionRole
    graph: fx.Graph
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class Call:
    """A call of a function in `ir.coupling_ops`, or of one of the stage's own."""

    target: Callable[..., Any] | Function
    arguments: tuple[Any, ...]
    """Values, calls, functions, constants, `ParameterGradients`, and tuples of them."""
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def has_effect(self) -> bool:
        """Must the call be made even if its result is not read?"""
        if isinstance(self.target, GraphFunction):
            is_pure = self.target.role in ("arrange", "restore")
        else:
            is_pure = self.target in _WITHOUT_EFFECT
        return not is_pure or any(_has_effect(argument) for argument in self.arguments)


def call(target: Callable[..., Any] | Function, *arguments: Any, **options: Any) -> Call:
    """A call; the stage's own functions are given the model."""
    first = (SELF,) if isinstance(target, GraphFunction | Program) else ()
    return Call(target, (*first, *arguments), options)


def _has_effect(expression: Any) -> bool:
    return isinstance(expression, Call) and expression.has_effect


def _reads(expression: Any) -> Iterator[Value]:
    if isinstance(expression, Value):
        yield expression
    elif isinstance(expression, tuple):
        for item in expression:
            yield from _reads(item)
    elif isinstance(expression, Call):
        yield from _reads((*expression.arguments, *expression.options.values()))


# -- statements ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Statement:
    """`targets = values`: an expression for each target, or one call that returns all of them."""

    targets: tuple[Value | None, ...]
    """None for a result that nobody reads."""
    values: tuple[Any, ...]
    unpacks: bool = False
    """Does a call return a tuple of the targets, even if there is only one?"""
    comment: str = ""

    def needed(self, live: set[Value]) -> Statement | None:
        """The part whose results are read, or that has effects."""
        if self.unpacks or len(self.values) != len(self.targets):
            is_read = any(target in live for target in self.targets)
            return self if is_read or any(map(_has_effect, self.values)) else None
        pairs = [
            (target, value)
            for target, value in zip(self.targets, self.values, strict=True)
            if target in live or _has_effect(value)
        ]
        if not pairs:
            return None
        targets, values = zip(*pairs, strict=True)
        return replace(self, targets=targets, values=values)


@dataclass(frozen=True, eq=False)
class Program:
    """Statements with arguments and a result: forward, inverse, backward, or a run of pieces."""

    name: str
    arguments: tuple[Value, ...]
    statements: tuple[Statement, ...]
    result: tuple[Any, ...]
    comment: str = ""
    result_comment: str = ""


Function = GraphFunction | Program


@dataclass(frozen=True)
class StageCode:
    """The three programs of a stage, in the order in which they are printed."""

    forward: Program
    inverse: Program | None
    backward: Program


def live_statements(program: Program) -> list[tuple[Statement, set[Value]]]:
    """The statements that are needed, each with the values that are read after it."""
    live = set(_reads(program.result))
    needed: list[tuple[Statement, set[Value]]] = []
    for statement in reversed(program.statements):
        part = statement.needed(live)
        if part is not None:
            needed.append((part, set(live)))
            live -= set(part.targets)
            live |= set(_reads(part.values))
    return needed[::-1]
