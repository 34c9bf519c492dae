"""Between two passes: does the value handed over keep the rules of the next one?

Every violation is collected before anything is raised.
"""

from __future__ import annotations

from collections import Counter

from revcompile.compiler.flow import is_plain
from revcompile.compiler.rewire.region import ORIGIN
from revcompile.errors import VerificationError
from revcompile.ir import Body, Captured, Coupling, Live, Rewired

__all__ = ["verify_rewired"]


def verify_rewired(captured: Captured, rewired: Rewired) -> None:
    """Every captured value is computed exactly once, and read only after it is there."""
    problems = [*_computed_once(captured, rewired), *_defined_before_use(rewired, rewired.body)]
    if rewired.eval_body is not None:
        problems += _defined_before_use(rewired, rewired.eval_body)
    if problems:
        listed = "\n".join(f"  - {p}" for p in problems[:20])
        raise VerificationError(f"rewire: {rewired.name} came out wrong:\n{listed}")


def _computed_once(captured: Captured, rewired: Rewired) -> list[str]:
    replaced = {name for block in rewired.residuals for name in block.adds}
    replaced |= {n for block in rewired.residuals for n in (*block.shortcut, block.shortcut_term)}
    counts: Counter[str] = Counter()
    for segment in rewired.body.segments:
        graph = segment.branch if isinstance(segment, Coupling) else segment.graph
        counts.update(n.meta[ORIGIN] for n in graph.nodes if ORIGIN in n.meta)
        if isinstance(segment, Coupling) and segment.link is not None:
            linked = {n.meta[ORIGIN] for n in segment.link.forward.nodes if ORIGIN in n.meta}
            counts.update(name for name in linked if not counts[name])
    problems = []
    constants: set[str] = set()
    for node in captured.graph.nodes:
        if node.op in ("placeholder", "output", "get_attr"):
            constants.add(node.name) if node.op == "get_attr" else None
            continue
        inputs = node.all_input_nodes
        if inputs and all(i.name in constants for i in inputs):
            constants.add(node.name)
            continue
        if is_plain(node) or node.name in replaced:
            continue
        if counts[node.name] == 0 and node.users:
            problems.append(f"{node.name} is computed nowhere")
        elif counts[node.name] > 1 and node.op == "call_module":
            problems.append(f"{node.name} is computed {counts[node.name]} times")
    return problems


def _defined_before_use(rewired: Rewired, body: Body) -> list[str]:
    known = set(rewired.signature.placeholders)
    problems = []
    for segment in body.segments:
        for name in segment.inputs:
            if name not in known:
                problems.append(f"{segment.name} reads {name}, which nobody has computed yet")
        known |= set(segment.outputs)
    for leaf in body.result:
        if isinstance(leaf, Live) and leaf.name not in known:
            problems.append(f"the result reads {leaf.name}, which nobody has computed")
    return problems
