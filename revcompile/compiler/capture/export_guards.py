"""What `torch.export` has specialised a graph to, as guards on the sizes of its inputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from revcompile.compiler.capture.example import Example
from revcompile.ir.guards import SizeGuard, SizeGuards

__all__ = ["exported_guards", "free_dimensions"]


def free_dimensions(example: Example, lengths_free: bool) -> list[dict[int, Any] | None]:
    """For each leaf of the example, the dimensions an export is to leave free.

    Those that grow with the batch must be; lengths of token inputs (sizes of integer inputs
    beyond the first dimension) may be, where `lengths_free`.
    """
    tokens = (t for t in example.tensors(0) if not t.is_floating_point() and not t.is_complex())
    lengths = {int(n) for t in tokens for n in t.shape[1:]} if lengths_free else set()
    auto, dynamic = torch.export.Dim.AUTO, torch.export.Dim.DYNAMIC
    found: list[dict[int, Any] | None] = []
    for leaf, grown in zip(example.leaves, example.grown, strict=True):
        if not isinstance(leaf, torch.Tensor):
            found.append(None)
            continue
        free: dict[int, Any] = {d: auto for d, n in enumerate(leaf.shape) if d and n in lengths}
        sizes = enumerate(zip(leaf.shape, grown.shape, strict=True))
        free |= {d: dynamic for d, (n, m) in sizes if n != m}
        found.append(free or None)
    return found


def exported_guards(recorded: fx.Graph, example: Example) -> SizeGuards:
    """Sizes that were fixed, equal, or within bounds when the graph was recorded."""
    given = [n.meta.get("val") for n in recorded.find_nodes(op="placeholder")]
    fakes = [fake for fake in given if isinstance(fake, torch.Tensor)]
    graph = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(graph)
    inputs: list[Any] = [fx.Proxy(graph.placeholder(name), tracer) for name in example.names]
    sizes: dict[Any, tuple[fx.Proxy, str]] = {}
    conditions: list[tuple[str, Any, Any, str]] = []
    for proxy, fake, label in zip(inputs, fakes, example.labels, strict=True):
        for dim, size in enumerate(fake.shape):
            text, now = f"{label}.shape[{dim}]", proxy.shape[dim]
            expression = size.node.expr if isinstance(size, torch.SymInt) else None
            if expression is None or expression.is_number:
                conditions.append((text, now, int(size), "torch.export"))
            elif isinstance(expression, sympy.Symbol) and expression not in sizes:
                sizes[expression] = now, text
            else:
                conditions.append((text, now, expression, "torch.export"))
    guards, outputs = [], []
    for text, now, wanted, source in (*conditions, *_asked(fakes)):
        if isinstance(wanted, int):
            outputs.append(now)
            guards.append(SizeGuard(text, wanted, source))
        elif wanted.free_symbols <= set(sizes):
            value = _computed(wanted, sizes)
            outputs.append(value if now is None else now == value)
            words = _words(wanted, sizes)
            guards.append(SizeGuard(words if now is None else f"{text} == {words}", True, source))
    graph.output(tuple(getattr(o, "node", o) for o in outputs))
    graph.eliminate_dead_code()
    return SizeGuards(tuple(guards), graph) if guards else SizeGuards()


def _asked(fakes: Iterable[torch.Tensor]) -> Iterator[tuple[str, None, Any, str]]:
    """Conditions on sizes that were asked for on the way."""
    symbolic: list[Any] = [n for f in fakes for n in f.shape if isinstance(n, torch.SymInt)]
    if not symbolic:
        return
    environment, seen = symbolic[0].node.shape_env, set[Any]()
    for guard in environment.guards:
        expression = environment.replace(guard.expr)
        if expression in seen or not isinstance(expression, sympy.Basic):
            continue
        seen.add(expression)
        if expression is not sympy.true:
            where = guard.sloc.maybe_user_loc or guard.sloc.framework_loc
            line = f"{where.filename}:{where.lineno}" if hasattr(where, "filename") else str(where)
            yield "", None, expression, line


def _computed(expression: Any, sizes: dict[Any, tuple[fx.Proxy, str]]) -> Any:
    values = {symbol: proxy for symbol, (proxy, _) in sizes.items()}
    return sympy_interp(PythonReferenceAnalysis, values, expression)


def _words(expression: Any, sizes: dict[Any, tuple[fx.Proxy, str]]) -> str:
    text = str(expression)
    for symbol, (_, words) in sizes.items():
        text = text.replace(str(symbol), words)
    return text
