"""A stage's code as the flat graph that runs: functions inlined, VJPs of named parameters.

Calls of higher order are expanded into what `ir.coupling_ops` defines them as, without what cannot
matter: gradients that are known to be None, and results that are not read.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Final

from torch import fx

from revcompile.ir import coupling_ops
from revcompile.ir.program import Partition, legal
from revcompile.ir.stage_code import (
    HELPERS,
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
from revcompile.ir.types import LIVE_VALUES, TYPE

_REMOVABLE: Final = (
    *(
        operator.getitem,
        coupling_ops.leaf,
        coupling_ops.minus,
        coupling_ops.stream_leaf,
        coupling_ops.total,
    ),
    *(coupling_ops.average_gradients, coupling_ops.uncouple_average),
)
"""Functions without side effects, called by expanded calls whose results may not all be read."""

Names = Sequence[str | None]
"""Variables for the results of a call; None for those that nobody reads."""


def flatten(program: Program, partition: Partition) -> fx.Graph:
    """The program as a graph."""
    flat = _Flattener()
    for argument in program.arguments:
        flat.values[argument] = flat.placeholder(argument, partition)
    flat.run(program)
    return flat.finish(program.result)


class _Flattener:
    """Appends nodes to a graph; `values` maps each value to its node."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.values: dict[Value, Any] = {SELF: None}
        self.of_parameters: dict[str, list[fx.Node]] = {}

    def placeholder(self, argument: Value, partition: Partition) -> fx.Node:
        node = self.graph.placeholder(str(_variable(argument)))
        node.target = node.name  # else a variable could have the parameter's name
        if argument.role in ("", "kept", "returned", "gradient"):
            node.meta[TYPE] = partition.types.get(argument.name)
        _name_value(argument, node)
        return node

    def finish(self, result: tuple[Any, ...]) -> fx.Graph:
        self.graph.output(tuple(map(self._result, result)))
        for node in reversed(list(self.graph.nodes)):
            if not node.users and (node.op == "get_attr" or node.target in _REMOVABLE):
                self.graph.erase_node(node)
        self.graph.lint()
        return self.graph

    # -- statements and expressions -----------------------------------------------------------

    def run(self, program: Program) -> None:
        for statement, _ in live_statements(program):
            self._assign(statement)

    def _assign(self, statement: Statement) -> None:
        targets, names = statement.targets, [_variable(target) for target in statement.targets]
        if statement.unpacks or len(statement.values) != len(targets):
            (called,) = statement.values
            results = self._call(called, names)
            if isinstance(results, fx.Node):
                results = [self.item(results, index, name) for index, name in enumerate(names)]
        else:
            pairs = zip(statement.values, names, strict=True)
            results = [self.evaluate(value, name) for value, name in pairs]
        for target, result in zip(targets, results, strict=True):
            if target is not None:
                self.values[target] = result
                _name_value(target, result)

    def evaluate(self, expression: Any, name: str | None = None) -> Any:
        """What an expression is in the graph; `name` is the variable for a call's result."""
        match expression:
            case Value():
                return self.values[expression]
            case tuple():
                return tuple(map(self.evaluate, expression))
            case Call():
                result = self._call(expression, [name])
                return result[0] if isinstance(result, tuple) else result
        return expression

    def _result(self, item: Any) -> Any:
        if isinstance(item, ParameterGradients):
            return tuple(map(self._of_parameter, item.names))
        return self.evaluate(item)

    def _of_parameter(self, name: str) -> fx.Node | None:
        terms = self.of_parameters.get(name, [])
        if len(terms) > 1:
            return self.call(coupling_ops.total, *terms, name=f"grad_{name}")
        return terms[0] if terms else None

    def _call(self, called: Call, names: Names) -> Any:
        """A node, or a tuple of results where the call is inlined."""
        target, arguments = called.target, [self.evaluate(value) for value in called.arguments]
        options = {option: self.evaluate(value) for option, value in called.options.items()}
        if isinstance(target, GraphFunction | Program):
            return self.inline(target, arguments[1:])
        if target in _EXPANDED:
            return _EXPANDED[target](self, names, arguments, **options)
        name = names[0] if len(names) == 1 else None if names else "_"
        if name is None and isinstance(arguments[0], fx.Node):
            name = f"{arguments[0].name}_{target.__name__}"
        return self.call(target, *arguments, name=name, **options)

    # -- nodes --------------------------------------------------------------------------------

    def call(
        self, function: Callable[..., Any], *args: Any, name: str | None = None, **kwargs: Any
    ) -> fx.Node:
        hint = legal(name) if name else None
        return self.graph.create_node("call_function", function, args, kwargs, name=hint)

    def item(self, values: fx.Node, index: int, name: str | None = None) -> fx.Node:
        return self.call(operator.getitem, values, index, name=name)

    def inline(self, function: Function, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Copy what a function does into this graph; returns its results."""
        if isinstance(function, Program):
            values = dict(zip(function.arguments, inputs, strict=True))
            outside, self.values = self.values, {SELF: None, **values}
            self.run(function)
            results: tuple[Any, ...] = self.evaluate(function.result)
            self.values = outside
            return results
        copies = dict(zip(function.graph.find_nodes(op="placeholder"), inputs, strict=True))
        result: Any = self.graph.graph_copy(function.graph, copies)
        for node in copies.values():
            if isinstance(node, fx.Node) and node.op != "placeholder" and node.name in HELPERS:
                node._rename(f"{node.name}_value")
        return tuple(
            self.call(tuple, list(item)) if isinstance(item, list | tuple) else item
            for item in (result if isinstance(result, list | tuple) else (result,))
        )

    # -- calls of higher order, with the arguments that `coupling_ops` names ---------------------

    def record(self, names: Names, arguments: Sequence[Any]) -> tuple[Any, ...]:
        function, _, *inputs = arguments
        self.call(coupling_ops.recording, True, name="_")
        results = self.inline(function, inputs)
        self.call(coupling_ops.recording, False, name="_")
        return results

    def accumulate_vjp(self, names: Names, arguments: Sequence[Any]) -> tuple[Any, ...]:
        _, outputs, gradients, inputs, of_parameters = arguments
        return self._vjp(names, outputs, gradients, inputs, of_parameters)

    def recompute_vjp(self, names: Names, arguments: Sequence[Any]) -> tuple[Any, ...]:
        function, model, inputs, gradients, of_parameters = arguments
        outputs = self.record((), (function, model, *inputs))
        return self._vjp(names, outputs, gradients, inputs, of_parameters)

    def uncouple(
        self,
        names: Names,
        arguments: Sequence[Any],
        extras: Sequence[Any] = (),
        averaged: Sequence[Any] = (),
    ) -> tuple[Any, ...]:
        branch, model, a, b, da, db, grid, of_parameters, *sides = arguments
        x = self.call(coupling_ops.stream_leaf, a, name=f"{a.name}_leaf")
        outputs = self.record((), (branch, model, x, *sides))
        of_branch = db
        if not averaged:
            rebuilt = self.call(coupling_ops.minus, b, outputs[0], grid, name=names[0])
        else:
            sign, lost = averaged
            given = b, a, outputs[0], sign, grid, lost
            rebuilt = self.call(coupling_ops.uncouple_average, *given, name=names[0])
            if db is not None:
                of_streams = self.call(
                    coupling_ops.average_gradients, da, db, sign, name="averaged"
                )
                db, da, of_branch = (self.item(of_streams, index) for index in range(3))
        of_x, *of_sides = self._vjp(
            names[3:], outputs, (of_branch, *extras), sides, of_parameters, stream=(x, da)
        )
        return rebuilt, a, db, of_x, *of_sides

    def with_mode(
        self, function: Callable[..., Any], names: Names, arguments: Sequence[Any]
    ) -> fx.Node:
        """A call that depends on the model's mode, which it is given instead of the model."""
        mode = self.graph.get_attr("training")
        return self.call(function, mode, *arguments[1:], name=names[0] if len(names) == 1 else None)

    def draw_sign(self, names: Names, arguments: Sequence[Any]) -> fx.Node:
        return self.with_mode(coupling_ops.draw_sign, names, arguments)

    def enter_average(self, names: Names, arguments: Sequence[Any]) -> fx.Node:
        return self.with_mode(coupling_ops.enter_average, names, arguments)

    def _vjp(
        self,
        names: Names,
        outputs: Sequence[Any],
        gradients: Sequence[Any],
        inputs: Sequence[Any],
        of_parameters: ParameterGradients,
        stream: tuple[Any, ...] = (),
    ) -> tuple[Any, ...]:
        """Gradients of the inputs that have names: the others are no leaves.

        Through a branch: also, and first, that of the stream which it reads. `stream` is that and
        its own gradient.
        """
        present = [index for index, gradient in enumerate(gradients) if gradient is not None]
        of_stream, names = names[: bool(stream)], names[bool(stream) :]
        leaves = [index for index, name in enumerate(names) if name is not None]
        results = self.call(
            coupling_ops.branch_vjp if stream else coupling_ops.vjp,
            *stream,
            tuple(outputs[index] for index in present),
            tuple(gradients[index] for index in present),
            tuple(inputs[index] for index in leaves),
            tuple(self.graph.get_attr(name) for name in of_parameters.names),
            name="grads",
        )
        of_inputs: list[fx.Node | None] = [None] * len(inputs)
        for place, index in enumerate(leaves, len(stream)):
            of_inputs[index] = self.item(results, place, names[index])
        for place, name in enumerate(of_parameters.names, len(stream) + len(leaves)):
            of_parameter = self.item(results, place, f"grad_{name}")
            self.of_parameters.setdefault(name, []).append(of_parameter)
        return *(self.item(results, 0, name) for name in of_stream), *of_inputs


_EXPANDED: Final[dict[Any, Callable[..., Any]]] = {
    coupling_ops.draw_sign: _Flattener.draw_sign,
    coupling_ops.enter_average: _Flattener.enter_average,
    coupling_ops.accumulate_vjp: _Flattener.accumulate_vjp,
    coupling_ops.recompute_vjp: _Flattener.recompute_vjp,
    coupling_ops.record: _Flattener.record,
    coupling_ops.uncouple: _Flattener.uncouple,
}


def _name_value(value: Value, node: Any) -> None:
    # Couplings start from the entered value, which may be rounded, so that is what they rebuild.
    if isinstance(node, fx.Node) and value.role in ("", "kept", "returned", "entered"):
        node.meta[LIVE_VALUES] = (*node.meta.get(LIVE_VALUES, ()), value.name)


def _variable(value: Value | None) -> str | None:
    if value is None:
        return None
    return legal(f"grad_{value.name}" if value.role == "gradient" else value.key)
