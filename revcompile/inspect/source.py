"""A stage's code as Python text that can be executed.

Statements are printed as they are in `ir.stage_code`, after the functions that they call. Variables
are used again as soon as their value is not read any more, which turns

    x2, x3 = x1, x0 + F(x1)              a, b = b, a + F(b)
    x4, x5 = x3, x2 + G(x3)      into    a, b = b, a + G(b)
"""

from __future__ import annotations

import keyword
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from revcompile.inspect.function_text import Listing, commented
from revcompile.ir.program import Partition, StageProgram, legal
from revcompile.ir.stage_code import (
    KEY,
    SELF,
    Call,
    Function,
    GraphFunction,
    ParameterGradients,
    Program,
    Statement,
    Value,
    live_statements,
)
from revcompile.ir.types import Coupling

_GRADS = "grads"
"""The variable in which gradients of parameters are added up."""


class SourceText:
    """Imports, functions and programs of a stage; the variables of its inputs and outputs."""

    def __init__(self, partition: Partition, program: StageProgram) -> None:
        self.listing = Listing(
            partition.rewired.root, ["forward", "inverse", "backward", "self", "torch", _GRADS]
        )
        self.hints = _hints(partition)
        self.has_key = any(unit.random for unit in program.units)
        self._named: dict[Function, str] = {}
        code = program.code
        held = self._print(code.forward, "forward")
        for other in filter(None, (code.inverse, code.backward)):
            self._print(other, other.name)
        ports = [*program.inputs, *program.outputs]
        ends = [*code.forward.arguments[1:], *code.forward.result[0]]
        self.variables = {p.name: held[value] for p, value in zip(ports, ends, strict=True)}

    @property
    def parts(self) -> list[str]:
        """The text of the imports and of each function."""
        return [*self.listing.import_text(), *self.listing.functions]

    # -- functions ----------------------------------------------------------------------------

    def function(self, function: Function) -> str:
        """The name of a function, which is printed at its first use."""
        if function not in self._named:
            if isinstance(function, Program):
                name = self.listing.name(function.name)
                self._print(function, name)
            else:
                name = self._print_graph(function)
            self._named[function] = name
        return self._named[function]

    def _print_graph(self, function: GraphFunction) -> str:
        segment, role = function.segment, function.role
        name = segment.name if role == "run" else f"{segment.name}_{role}"
        if role in ("arrange", "restore"):
            comment = f"a stream {'back from' if role == 'restore' else 'in'} the arrangement of "
            return self.listing.add_graph(name, function.graph, comment + segment.name)
        if isinstance(segment, Coupling):
            comment = f"F of {segment.name}, {self._class(function) or segment.kind.value}"
        else:
            comment = self._class(function) or f"not reversible: {segment.reason}"
        if role == "again":
            comment += ", run again"
        arguments = [legal(self.hints.get(argument, argument)) for argument in function.arguments]
        return self.listing.add_graph(name, function.graph, comment, arguments)

    def _class(self, function: GraphFunction) -> str:
        """The class of the module that a segment is named after, if it runs only that module."""
        name = function.segment.name
        called = function.segment.graph.find_nodes(op="call_module")
        inside = all(f"{node.target}.".startswith(f"{name}.") for node in called)
        modules = dict(self.listing.root.named_modules())
        return type(modules[name]).__name__ if inside and name in modules else ""

    # -- programs -----------------------------------------------------------------------------

    def _print(self, program: Program, name: str) -> dict[Value, str]:
        """Print a program; returns the variable that each value was last seen in."""
        statements = live_statements(program)
        for statement, _ in statements:
            for function in _functions(statement.values):
                self.function(function)
        arguments = [value for value in program.arguments if value != KEY or self.has_key]
        variables = {SELF: "self"}
        for argument in arguments:
            variables[argument] = self._variable(argument, variables.values())
        lines = [commented(f"def {name}({', '.join(variables.values())}):", program.comment)]
        if any(isinstance(item, ParameterGradients) for item in program.result):
            lines.append(f"    {_GRADS} = {{}}")
        for statement, live in statements:
            line = self._statement(statement, live, variables)
            if line:
                lines.append(commented(f"    {line}", statement.comment))
        result = ", ".join(self._text(item, variables) for item in program.result)
        comment = f"  # {program.result_comment}" if program.result_comment else ""
        self.listing.functions.append("\n".join([*lines, f"    return {result}{comment}"]))
        return variables

    def _statement(
        self, statement: Statement, live: set[Value], variables: dict[Value, str]
    ) -> str:
        right = ", ".join(self._text(value, variables) for value in statement.values)
        in_use = [variables[value] for value in variables if value in live]
        left = []
        for target in statement.targets:
            name = "_"
            if target is not None and target in live:
                variables[target] = name = self._variable(target, in_use)
                in_use.append(name)
            left.append(name)
        if not any(name != "_" for name in left):
            return right
        targets = f"({left[0]},)" if statement.unpacks and len(left) == 1 else ", ".join(left)
        return f"{targets} = {right}" if targets != right else ""

    def _text(self, expression: Any, variables: Mapping[Value, str]) -> str:
        match expression:
            case Value():
                return variables[expression]
            case tuple():
                texts = [self._text(item, variables) for item in expression]
                return f"({', '.join(texts)}{',' * (len(texts) == 1)})"
            case ParameterGradients():
                return _GRADS
            case GraphFunction() | Program():
                return self.function(expression)
            case Call(target=target, arguments=arguments, options=options):
                if isinstance(target, GraphFunction | Program):
                    name = self.function(target)
                else:
                    name = self.listing.use(target.__name__)
                texts = [self._text(argument, variables) for argument in arguments]
                texts += [f"{option}={self._text(v, variables)}" for option, v in options.items()]
                return f"{name}({', '.join(texts)})"
            case torch.dtype():
                self.listing.imports["torch"] = ("", "torch")
        return str(expression)

    def _variable(self, value: Value, in_use: Iterable[str]) -> str:
        """A variable that holds nothing that is still read, if possible one that reads well."""
        taken = {*in_use, *self.listing.taken}
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


def _functions(expression: Any) -> Iterator[Function]:
    """The stage's own functions that an expression calls or passes on."""
    match expression:
        case GraphFunction() | Program():
            yield expression
        case tuple():
            for item in expression:
                yield from _functions(item)
        case Call():
            yield from _functions((expression.target, *expression.arguments))


def _hints(partition: Partition) -> dict[str, str]:
    """Variables: `a` and `b` for streams, `grid` for grids; others have their value's name."""
    hints: dict[str, str] = {}
    for part in partition.parts:
        for piece in part.pieces:
            if isinstance(piece, Coupling):
                for streams in (piece.streams_in, piece.streams_out):
                    hints |= dict(zip(streams, "ab", strict=True))
                if piece.grid is not None:
                    hints[piece.grid] = "grid"
    return hints
