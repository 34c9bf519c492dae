"""One stage to read: its generated programs as Python, and its list of actions in words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

from torch import fx

from revcompile.ir.program import StageProgram
from revcompile.ir.stage_ops import normalised
from revcompile.ir.types import PATH
from revcompile.schedule import Action, Keep, Op

__all__ = ["ActionList", "action_list", "code_text"]

_RESULTLESS: Final = re.compile(r"_\w* = ((?:recording|reseed)\([^)]*\));  _\w* = None")
_ASSIGNED: Final = re.compile(r"    (\w+)(?: : .*?)? = ")


def code_text(program: StageProgram) -> str:
    """Forward, inverse (where there is one) and backward as generated, module paths beside."""
    kept = ", ".join(program.kept) or "nothing"
    head = [f"# stage {program.index} of {program.stages}, {program.method.name}"]
    head += [f"#   takes  {port}" for port in program.inputs]
    head += [f"#   gives  {port}" for port in program.outputs]
    head += [f"#   keeps  {kept}"]
    programs = (("forward", program.forward), ("inverse", program.inverse))
    code = [_source(graph, name) for name, graph in programs if graph is not None]
    return "\n\n".join(["\n".join(head), *code, _source(program.backward, "backward")])


def _source(graph: fx.Graph, name: str) -> str:
    text = graph.python_code("self").src.strip()
    text = text.replace("revcompile_steps_", "").replace("revcompile_ops_", "")
    text = _RESULTLESS.sub(r"\1", text)
    text = text.replace("def forward(", f"def {name}(", 1)
    return "\n".join(_with_paths(text.split("\n"), _owners(graph)))


def _owners(graph: fx.Graph) -> dict[str, tuple[str, str]]:
    """For the name of each node: the module whose code it is, and its own path."""
    found = {}
    for node in graph.nodes:
        path = str(node.meta.get(PATH, ""))
        if path:
            is_layer = node.op == "call_module" or _is_norm(node)
            owner = path.rpartition(".")[0] if is_layer else path
            found[node.name] = (owner, path)
    return found


def _is_norm(node: fx.Node) -> bool:
    """Batch norms are called through a step, which gets the layer as its first argument."""
    return node.target is normalised


def _with_paths(lines: Iterable[str], owners: Mapping[str, tuple[str, str]]) -> Iterable[str]:
    """A comment wherever the code of another module begins."""
    current = None
    for line in lines:
        found = _ASSIGNED.match(line)
        owner, path = owners.get(found[1], (None, "")) if found else (None, "")
        if owner is not None and (owner or path) != current:
            current = owner or path
            yield f"    # {current}"
        yield line


class ActionList(tuple[Action, ...]):
    """What a stage does, in order; as text in words, a line for each micro-batch that enters."""

    words: Mapping[Op, str]

    def __str__(self) -> str:
        lines: list[list[str]] = [[]]
        for action, before in zip(self, (None, *self), strict=False):
            enters = Op.FORWARD if before is None or before.op is not Op.RECV_X else None
            if action.op in (Op.RECV_X, enters) and lines[-1]:
                lines.append([])
            lines[-1].append(self._word(action))
        return "\n".join(" · ".join(line) for line in lines)

    def _word(self, action: Action) -> str:
        peer = "" if action.peer is None else f" stage {action.peer}"
        return self.words[action.op].format(action.index) + peer


def action_list(program: StageProgram, actions: Iterable[Action]) -> ActionList:
    """A stage's actions, in the words that fit its program."""
    found = ActionList(actions)
    found.words = {
        Op.RECV_X: "RECV x,m{}",
        Op.FORWARD: "FORWARD m{}",
        Op.SEND_Y: "SEND y,m{}",
        Op.RECV_DY: ("RECV (y,dy)" if program.wanted else "RECV dy") + ",m{}",
        Op.BACKWARD: _backward(program) + " m{}",
        Op.SEND_DX: ("SEND (x,dx)" if program.returned else "SEND dx") + ",m{}",
        Op.UPDATE: "UPDATE u{}",
        Op.TRAIN: "TRAIN m{}",
        Op.SEND_TIED_GRAD: "SEND tied grad,u{} to",
        Op.RECV_TIED_GRAD: "RECV tied grad,u{} from",
        Op.SEND_TIED_WEIGHT: "SEND tied weight,u{} to",
        Op.RECV_TIED_WEIGHT: "RECV tied weight,u{} from",
    }
    return found


def _backward(program: StageProgram) -> str:
    """What a backward pass consists of, e.g. INVERT+RECOMPUTE+VJP."""
    keeps = {unit.keep for unit in program.units}
    inverts = any(unit.reversible and unit.keep is Keep.NOTHING for unit in program.units)
    steps = ["INVERT"] if inverts else []
    return "+".join([*steps, *(["RECOMPUTE"] if Keep.INPUT in keeps else []), "VJP"])
