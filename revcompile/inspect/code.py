"""A stage as text: its programs as Python, and its list of actions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from textwrap import TextWrapper

from torch import fx

from revcompile.inspect.formatting import span
from revcompile.inspect.source import code_text
from revcompile.inspect.tables import text_width
from revcompile.ir.program import Part, Partition, StageProgram
from revcompile.schedule import Action, Keep, Op


class ActionList(tuple[Action, ...]):
    """A stage's actions in order; prints a line for each micro-batch that enters the stage."""

    texts: Mapping[Op, str]

    @property
    def lines(self) -> list[str]:
        """The text of the actions: a line for each micro-batch that enters the stage."""
        enters = Op.RECV_X if any(action.op is Op.RECV_X for action in self) else Op.FORWARD
        lines: list[list[str]] = [[]]
        for action in self:
            if action.op is enters and lines[-1]:
                lines.append([])
            lines[-1].append(self._text(action))
        return [" · ".join(line) for line in lines]

    def __str__(self) -> str:
        wrapper = TextWrapper(text_width(), subsequent_indent=" " * 4, break_on_hyphens=False)
        # Lines wrap between actions, not inside one.
        joined = (line.replace(" ", "\xa0").replace("\xa0·\xa0", " · ") for line in self.lines)
        return "\n".join(map(wrapper.fill, joined)).replace("\xa0", " ")

    def _text(self, action: Action) -> str:
        peer = "" if action.peer is None else f" stage {action.peer}"
        return self.texts[action.op].format(action.index) + peer


def action_list(program: StageProgram, actions: Iterable[Action]) -> ActionList:
    """A stage's actions; a printed backward pass shows its steps, e.g. INVERT+VJP."""
    listed = ActionList(actions)
    listed.texts = {
        Op.RECV_X: "RECV x,m{}",
        Op.FORWARD: "FORWARD m{}",
        Op.SEND_Y: "SEND y,m{}",
        Op.RECV_DY: ("RECV (y,dy)" if program.needs_back else "RECV dy") + ",m{}",
        Op.BACKWARD: _backward(program) + " m{}",
        Op.SEND_DX: ("SEND (x,dx)" if program.sends_back else "SEND dx") + ",m{}",
        Op.UPDATE: "UPDATE u{}",
        Op.TRAIN: "TRAIN m{}",
        Op.SEND_TIED_GRAD: "SEND tied grad,u{} to",
        Op.RECV_TIED_GRAD: "RECV tied grad,u{} from",
        Op.SEND_TIED_WEIGHT: "SEND tied weight,u{} to",
        Op.RECV_TIED_WEIGHT: "RECV tied weight,u{} from",
    }
    return listed


def _backward(program: StageProgram) -> str:
    """The steps of a backward pass, e.g. INVERT+RECOMPUTE+VJP."""
    keeps = {unit.keep for unit in program.units}
    inverts = any(unit.reversible and unit.keep is Keep.NOTHING for unit in program.units)
    steps = ["INVERT"] if inverts else []
    return "+".join([*steps, *(["RECOMPUTE"] if Keep.INPUT in keeps else []), "VJP"])


@dataclass(frozen=True)
class CompiledStage:
    """One stage as `net.stages[i]`: its generated code, its graph, its list of actions."""

    partition: Partition
    part: Part
    generated: StageProgram
    actions: tuple[Action, ...]

    @property
    def code(self) -> str:
        """The forward and backward programs as Python, each branch a function."""
        return code_text(self.partition, self.generated)

    @property
    def graph(self) -> fx.Graph:
        """The forward program as an FX graph."""
        return self.generated.forward

    @property
    def program(self) -> ActionList:
        """What the stage does, in order: an action list that prints as words."""
        return action_list(self.generated, self.actions)

    @property
    def reversible(self) -> bool:
        """Whether the stage's input can be rebuilt from its output, without keeping anything."""
        return self.part.reversible

    def __str__(self) -> str:
        return self.code

    def __repr__(self) -> str:
        shown = span([piece.name for piece in self.part.pieces])
        kind = "reversible" if self.reversible else "not reversible"
        return f"CompiledStage({self.part.index} of {self.generated.stages}: {shown}, {kind})"
