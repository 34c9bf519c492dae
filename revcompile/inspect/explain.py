"""How a block was found, by which rule it was rewired, and in which stage it runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import TextWrapper
from typing import Final

from revcompile.errors import InputError, nearest
from revcompile.inspect.formatting import plural, share, size
from revcompile.inspect.tables import counted_span, text_width
from revcompile.inspect.views import BlockView, ModelView, StageView, block_of, modules_of, tensors
from revcompile.ir.types import PATH, SOURCE, Coupling, Opaque, ResidualKind, TensorType
from revcompile.ir.weight_expansion import WeightExpansion
from revcompile.schedule import Keep

_OWN: Final = str(Path(__file__).parent.parent)
_SHAPES: Final = {
    ResidualKind.IDENTITY: "x + F(x), the shortcut being the block's input itself",
    ResidualKind.POST_ACTIVATION: "act(x + F(x)), an identity shortcut with an activation behind",
    ResidualKind.PROJECTED: "P(x) + F(x), a shortcut projected to another shape",
    ResidualKind.PARALLEL: "x + F(x) + G(x), branches side by side on one input",
}
_EXPANSIONS: Final = {
    WeightExpansion.TILE: "twice as wide, starting as [W, W]",
    WeightExpansion.HALVE: "reads both streams, starting as [W/2, W/2]",
    WeightExpansion.COPY: "a copy of its own",
    WeightExpansion.REVIVE_ZERO_INIT: (
        "starts as 1: it was 0, and behind the ReLU in F it would never get a gradient"
    ),
}


@dataclass(frozen=True)
class PieceExplanation:
    """What the compiler did with one piece of the model, in lines of text."""

    piece: str
    stage: int
    found: tuple[str, ...]
    rewired: tuple[str, ...]
    placed: tuple[str, ...]

    def __str__(self) -> str:
        lines = [self.piece]
        wrapper = TextWrapper(text_width(), subsequent_indent=" " * 13, break_long_words=False)
        wrapper.break_on_hyphens = False
        for title in ("found", "rewired", "placed"):
            for number, line in enumerate(getattr(self, title)):
                wrapper.initial_indent = f"  {title if number == 0 else '':8} "
                lines.append(wrapper.fill(line))
        return "\n".join(lines)


@dataclass(frozen=True, repr=False)
class Explanation:
    """The explanations of all pieces that run code of a module; prints as text."""

    path: str
    pieces: tuple[PieceExplanation, ...]

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.pieces))

    __repr__ = __str__


def explain(view: ModelView, path: str) -> Explanation:
    """Explain what the compiler did with a module, or with a piece of that name.

    Raises:
        InputError: if nothing has that name.
    """
    pieces = tuple(
        _Explainer(view, stage, block).explain()
        for stage in view.stages
        for block in stage.blocks
        if block.name == path or any(_within(module, path) for module in modules_of(block.piece))
    )
    if not pieces:
        known = [name for stage in view.stages for name in (*stage.pieces, *stage.modules)]
        hint = nearest(path, known, "see print(net)")
        raise InputError(f"explain: no part of {view.name} is called {path!r}; {hint}")
    return Explanation(path, pieces)


def _within(path: str, outer: str) -> bool:
    return f"{path}.".startswith(f"{outer}.")


class _Explainer:
    """Writes the explanation of one piece."""

    def __init__(self, view: ModelView, stage: StageView, shown: BlockView) -> None:
        self.view, self.stage, self.shown = view, stage, shown
        self.rewired, self.piece = view.rewired, shown.piece
        self.graph = self.piece.graph
        self.block = block_of(self.rewired, self.piece)

    def explain(self) -> PieceExplanation:
        lines = (tuple(part()) for part in (self._found, self._rewired, self._placed))
        return PieceExplanation(self.piece.name, self.stage.index, *lines)

    # -- found --------------------------------------------------------------------------------

    def _found(self) -> Iterator[str]:
        block = self.block
        if block is None:
            yield self.piece.reason if isinstance(self.piece, Opaque) else "no shortcut"
        else:
            yield f"in {block.path or 'the top level'}: {_SHAPES[block.kind]}"
            yield f"F = {self._layers(block.branch)}"
            if block.shortcut:
                yield f"P = {self._layers(block.shortcut)}"
            if block.sides:
                yield f"F also reads {', '.join(block.sides)}"
        called = (node for node in self.graph.nodes if node.op.startswith("call"))
        sources = (str(node.meta.get(SOURCE) or _OWN) for node in called)
        source = next((source for source in sources if not source.startswith(_OWN)), None)
        if source is not None:
            yield f"written at {source}"
        for refusal in self.rewired.refusals:
            if any(node.name == refusal.node for node in self.graph.nodes):
                yield f"a sum at {refusal.path or 'the top level'} was refused: {refusal.reason}"

    def _layers(self, names: tuple[str, ...]) -> str:
        """Module paths of nodes in the order they run, relative to the block."""
        nodes = [node for node in self.graph.nodes if node.name in names]
        paths = dict.fromkeys(str(n.meta.get(PATH, "")) or n.name for n in nodes)
        prefix = f"{self.block.path}." if self.block and self.block.path else ""
        return " > ".join(path.removeprefix(prefix) for path in paths) or "(one operation)"

    # -- rewired ------------------------------------------------------------------------------

    def _rewired(self) -> Iterator[str]:
        piece, block = self.piece, self.block
        if isinstance(piece, Coupling) and piece.averaged:
            yield "averaged coupling: (a, b) -> (b, b + gamma (a - b) + (1 + gamma) F(b))"
            yield ("gamma = ±1/16 for each sample in training, 0 in eval mode: the original block")
        elif isinstance(piece, Coupling):
            yield "reversible coupling: (a, b) -> (b, a + F(b)), back by (b, y) -> (y - F(b), b)"
            if piece.kind is ResidualKind.POST_ACTIVATION:
                yield "the activation behind the sum moved into F"
        elif block is not None and block.is_projected:
            yield "transition: (a, b) -> (s(b), P(a) + F(b)): two streams stay two"
            yield f"not reversible: {piece.reason}"
        else:
            yield "not reversible: it computes what it did, and stages keep its input"
        if isinstance(piece, Coupling) and piece.rearrange is not None:
            yield "both streams are rearranged first, and back in the inverse"
        modules = modules_of(self.piece)
        for name, (original, expansion) in self.rewired.weight_expansions.items():
            owner = name.rpartition(".")[0]
            if any(_within(owner, module) for module in modules):
                yield f"{name}: {_EXPANSIONS[expansion]}" + (
                    f", from {original}" if original != name else ""
                )
        for note in self.rewired.notes:
            if any(note.startswith(f"{module}: ") for module in modules):
                yield note

    # -- placed -------------------------------------------------------------------------------

    def _placed(self) -> Iterator[str]:
        stage, program, shown = self.stage, self.stage.program, self.shown
        yield (
            f"stage {stage.index} of {program.stages} ({counted_span(stage.pieces)}), piece "
            f"{stage.blocks.index(shown) + 1} of {len(stage.blocks)}"
        )
        work = share(shown.work, self.view.work)
        yield f"{shown.cost.parameters:,} parameters, {work} of the model's work"
        yield f"reads {self._values(self.piece.inputs)}"
        yield f"gives {self._values(self.piece.outputs)}"
        yield self._keeps()
        yield f"its gradients are {plural(stage.delay, 'update')} late, at accumulation_steps=1"

    def _values(self, names: Sequence[str]) -> str:
        kinds = ((name, self.view.partition.types.get(name)) for name in names)
        shown = [f"{name} {kind}" for name, kind in kinds if isinstance(kind, TensorType)]
        return ", ".join(shown) or "sizes only"

    def _keeps(self) -> str:
        """What is kept between forward and backward for the unit the piece belongs to."""
        units = self.stage.program.units
        unit = next(unit for unit in units if self.piece in unit.pieces)
        count = f"{plural(self.stage.window, 'micro-batch')} in flight"
        if unit.keep is Keep.NOTHING:
            return f"with {count} it keeps nothing: backward inverts it"
        if unit.keep is Keep.GRAPH:
            return f"with {count} its graph is kept"
        read = sum(kind.nbytes(None) for kind in tensors(self.stage.program.inputs))
        whole = f" ({size(read)} each)" if len(units) == 1 else ""
        return f"with {count} the input of {unit.name} is kept{whole}; backward recomputes from it"
