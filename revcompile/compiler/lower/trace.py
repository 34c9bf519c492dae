"""The flat graph that runs, traced from a program's printed lines.

The lines are executed on nodes of the graph instead of tensors. A function of `ir.coupling_ops`
adds one node, but those in `COMPOSED` are executed, too. The stage's functions add the nodes of
their graphs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import FunctionType
from typing import Any, Final

import torch
from torch import fx

from revcompile.compiler.lower.code import Printed, Value
from revcompile.ir import coupling_ops
from revcompile.ir.coupling_ops import COMPOSED, HELPERS, PURE
from revcompile.ir.program import GraphFunction, Partition, legal
from revcompile.ir.types import LIVE_VALUES, TYPE
from revcompile.kernels import fixed_point

_RESULTS: Final[dict[Any, int]] = {
    fixed_point.uncouple_gradients: 3,
    fixed_point.couple_average: 2,
    fixed_point.enter_average: 3,
    coupling_ops.enter_chain: 3,
}
"""The number of results of each function that returns several."""


def trace(
    program: Printed,
    arguments: Iterable[Value],
    functions: Iterable[GraphFunction | Printed],
    partition: Partition,
    parameters: Sequence[str],
) -> fx.Graph:
    """The graph of a program that calls `functions`; gradients are ordered as `parameters`."""
    flat = _Trace(functions)
    places = {"returned": 1, "gradient": 2}  # what was kept comes first
    ordered = sorted(arguments, key=lambda argument: places.get(argument.role, 0))
    given = {argument: flat.placeholder(argument, partition.types) for argument in ordered}
    result = flat.run(program, flat, *(given[value] for value in program.arguments.values()))
    return flat.finish(
        tuple(map(item.get, parameters)) if isinstance(item, dict) else item for item in result
    )


class _Trace:
    """Executes lines. In them it is `self`, the model, with the parameters that a line uses."""

    def __init__(self, functions: Iterable[GraphFunction | Printed]) -> None:
        self.graph = fx.Graph()
        self.parameters: tuple[str, ...] = ()
        self.leaves: set[fx.Node] = set()
        self.unnamed: set[fx.Node] = set()
        self.namespace: dict[str, Any] = {**vars(coupling_ops), "torch": torch}
        for name in HELPERS & self.namespace.keys():
            self.namespace[name] = partial(self.call, self.namespace[name])
        for composed in COMPOSED:
            code, name = composed.__code__, composed.__name__
            again = FunctionType(code, self.namespace, name, composed.__defaults__)
            again.__kwdefaults__ = composed.__kwdefaults__
            self.namespace[name] = again
        for function in functions:
            run = self.inline if isinstance(function, GraphFunction) else self.run
            self.namespace[function.name] = partial(run, function)  # type: ignore[arg-type]

    def placeholder(self, argument: Value, types: Mapping[str, Any]) -> fx.Node:
        node = self.graph.placeholder(_node_name(argument))
        node.target = node.name  # else a variable could have the parameter's name
        if argument.role in ("", "kept", "returned", "gradient"):
            node.meta[TYPE] = types.get(argument.name)
        if argument.role == "leaf":
            self.leaves.add(node)
        self.name(node, argument)
        return node

    def finish(self, result: Iterable[Any]) -> fx.Graph:
        self.graph.output(tuple(result))
        pure = (operator.getitem, *PURE)
        self.graph.eliminate_dead_code(lambda n: n.op != "get_attr" and n.target not in pure)
        self.graph.lint()
        return self.graph

    # -- the model ----------------------------------------------------------------------------

    @property
    def training(self) -> fx.Node:
        return self.graph.get_attr("training")

    def named_parameters(self) -> Iterator[tuple[str, fx.Node]]:
        return ((name, self.graph.get_attr(name)) for name in self.parameters)

    # -- functions ----------------------------------------------------------------------------

    def run(self, program: Printed, _: Any, *inputs: Any) -> Any:
        """Execute a program's lines."""
        variables = {"self": self, **dict(zip(program.arguments, inputs, strict=True))}
        outside = self.parameters
        for line in program.lines:
            self.parameters, self.unnamed = line.parameters, set()
            exec(line.text, self.namespace, variables)
            for name, value in line.held.items():
                self.name(variables[name], value)
        self.parameters = outside
        return eval(program.result, self.namespace, variables)

    def inline(self, function: GraphFunction, _: Any, *inputs: Any) -> Any:
        """Copy the graph of a function."""
        placeholders = function.graph.find_nodes(op="placeholder")
        copies = dict(zip(placeholders, inputs, strict=True))
        result: Any = self.graph.graph_copy(function.graph, copies)
        results = tuple(
            self.graph.call_function(tuple, (list(item),))
            if isinstance(item, list | tuple)
            else item
            for item in (result if isinstance(result, list | tuple) else (result,))
        )
        return results[0] if len(results) == 1 else results

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Add a node for a function of `ir.coupling_ops`; returns its results."""
        if function in (coupling_ops.vjp, coupling_ops.branch_vjp):
            return self.vjp(function, *args)
        named = (arg.name for arg in args if isinstance(arg, fx.Node))
        suffix = function.__name__.removeprefix("stream_")
        is_silent = function in (coupling_ops.recording, coupling_ops.reseed)
        name = "_" if is_silent else f"{next(named, 'value')}_{suffix}"
        node = self.graph.create_node("call_function", function, args, kwargs, name=name)
        self.unnamed.add(node)
        if function is coupling_ops.leaf:
            self.leaves.add(node)
        if function in _RESULTS:
            return tuple(self.item(node, index) for index in range(_RESULTS[function]))
        return node

    def vjp(self, function: Callable[..., Any], *args: Any) -> tuple[Any, ...]:
        """Add `vjp` or `branch_vjp` of outputs with a gradient and inputs that are leaves."""
        *stream, outputs, gradients, inputs, parameters = args
        pairs = [pair for pair in zip(outputs, gradients, strict=True) if pair[1] is not None]
        leaves = tuple(node for node in inputs if node in self.leaves)
        ends, seeds = (tuple(pair[side] for pair in pairs) for side in (0, 1))
        given = (*stream, ends, seeds, leaves, parameters)
        grads = self.graph.create_node("call_function", function, given, name="grads")
        first = len(stream)
        results = [self.item(grads, index) for index in range(first + len(leaves))]
        of_leaves = dict(zip(leaves, results[first:], strict=True))
        of_parameters = [
            self.item(grads, index, f"grad_{node.name}")
            for index, node in enumerate(parameters, len(results))
        ]
        return *results[:first], *map(of_leaves.get, inputs), *of_parameters

    def item(self, values: fx.Node, index: int, name: str = "") -> fx.Node:
        name = name or f"{values.name}_item"
        node = self.graph.create_node("call_function", operator.getitem, (values, index), name=name)
        self.unnamed.add(node)
        return node

    def name(self, node: Any, value: Value) -> None:
        """Name a node after the value that a variable holds."""
        if not isinstance(node, fx.Node):
            return
        if node in self.unnamed:
            node._rename(_node_name(value))
            self.unnamed.remove(node)
        # Couplings rebuild the entered value, which may be rounded.
        if value.role in ("", "kept", "returned", "entered"):
            node.meta[LIVE_VALUES] = (*node.meta.get(LIVE_VALUES, ()), value.name)


def _node_name(value: Value) -> str:
    return legal(f"grad_{value.name}" if value.role == "gradient" else value.key)
