"""Checks between passes: the result of one pass must satisfy the rules of the next.

All violations are collected before an error is raised.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from revcompile.compiler.dataflow import Flow
from revcompile.compiler.rewire.region import ORIGIN
from revcompile.errors import VerificationError
from revcompile.ir.program import Partition
from revcompile.ir.types import Captured, Coupling, Rewired, Segment


def verify_rewired(captured: Captured, rewired: Rewired) -> None:
    """Check that every captured value is computed once, and read only after that."""
    problems = _computed_once(captured, rewired)
    bodies = {"the model": rewired.body, "the model in eval mode": rewired.eval_body}
    for where, body in bodies.items():
        if body is not None:
            given = body.segments, rewired.signature.placeholders, body.returned
            problems += _defined_before_use(*given, where)
    _raise(f"rewire: invalid result for {rewired.name}", problems)


def _computed_once(captured: Captured, rewired: Rewired) -> list[str]:
    replaced = {name for block in rewired.residuals for name in block.adds}
    replaced |= {n for block in rewired.residuals for n in (*block.shortcut, block.shortcut_term)}
    counts: Counter[str] = Counter()
    for segment in rewired.body.segments:
        graph = segment.graph
        counts.update(n.meta[ORIGIN] for n in graph.nodes if ORIGIN in n.meta)
        if isinstance(segment, Coupling) and segment.rearrange is not None:
            nodes = (n.meta.get(ORIGIN) for n in segment.rearrange.forward.nodes)
            rearranged = dict.fromkeys(name for name in nodes if name is not None)
            counts.update([name for name in rearranged if not counts[name]])
    problems, flow = list[str](), Flow(captured.graph, captured.root)
    for node in flow.nodes:
        if node.op in ("placeholder", "output") or node in flow.constant:
            continue
        if node in flow.plain or node.name in replaced:
            continue
        if counts[node.name] == 0 and node.users:
            problems.append(f"{node.name} is computed nowhere")
        elif counts[node.name] > 1 and node.op == "call_module":
            problems.append(f"{node.name} is computed {counts[node.name]} times")
    return problems


def _defined_before_use(
    segments: Sequence[Segment], given: Iterable[str], results: Iterable[str], where: str
) -> list[str]:
    known, problems = set(given), []
    for segment in segments:
        unknown = [name for name in segment.inputs if name not in known]
        problems += [f"{where}: {segment.name} reads {n} before it is computed" for n in unknown]
        again = [name for name in segment.outputs if name in known]
        problems += [f"{where}: {segment.name} computes {name} again" for name in again]
        known |= set(segment.outputs)
    missing = [name for name in results if name not in known]
    return [*problems, *(f"{where}: the result {n} is computed nowhere" for n in missing)]


def verify_partition(partition: Partition) -> None:
    """Check that each stage can compute its outputs from its inputs, and the last the results."""
    problems, (*_, last) = list[str](), partition.parts
    for part in partition.parts:
        results = partition.rewired.body.returned if part is last else ()
        given = part.pieces, part.inputs, (*part.outputs, *results)
        problems += _defined_before_use(*given, f"stage {part.index}")
    _raise(f"partition: invalid result for {partition.rewired.name}", problems)


def _raise(what: str, problems: Sequence[str]) -> None:
    if problems:
        listed = "\n".join(f"  - {p}" for p in problems[:20])
        raise VerificationError(f"{what}:\n{listed}")
