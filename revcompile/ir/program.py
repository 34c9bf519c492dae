"""Stages as the compiler cuts them and as the runtime executes them.

    Rewired --partition--> Part (pieces) --lower--> StageProgram (generated code) --run-->

A program is all a device needs to know of the model: what arrives, what it computes, what it
keeps, what it sends on and what it sends back.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Literal

import torch
from torch import fx

from revcompile.ir.types import Cost, Coupling, Rewired, Segment, TensorType
from revcompile.kernels.autocast import LOW_PRECISION
from revcompile.schedule import Keep, Method, Order, Tie, Weights


def legal(name: str) -> str:
    """A live value's or module's name as a Python identifier.

    >>> legal("layer1.0")
    'layer1_0'
    """
    spelled = "".join(c if c.isalnum() or c == "_" else "_" for c in name)
    return spelled if spelled.isidentifier() else f"_{spelled}"


COMMENT_COLUMN: Final = 60


def commented(line: str, comment: str) -> str:
    """A line of code with a comment at its end."""
    return f"{line:<{COMMENT_COLUMN}}  # {comment}" if comment else line


@dataclass(frozen=True)
class Part:
    """The pieces of one stage, and the live values that enter and leave it."""

    index: int
    pieces: tuple[Segment, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    costs: tuple[Cost, ...] = ()

    @property
    def reversible(self) -> bool:
        """Whether the stage's input can be rebuilt from its output."""
        return all(piece.reversible for piece in self.pieces)


@dataclass(frozen=True)
class Partition:
    """A rewired model cut into stages. `types` has the type of every live value."""

    rewired: Rewired
    parts: tuple[Part, ...]
    types: Mapping[str, Any]
    ties: Mapping[Tie, tuple[str, ...]]
    """Parameters (by name) that two stages share."""
    keeps: tuple[Keep, ...]
    """What balancing assumed that each stage keeps."""
    frozen: frozenset[str] = frozenset()
    """Live values that are computed without any trained parameter."""

    def requires_grad(self, name: str) -> bool:
        """Whether a live value has a gradient. The model's inputs, sizes and integers have none."""
        kind = self.types.get(name)
        has_none = name in self.frozen or name in self.rewired.signature.placeholders
        return isinstance(kind, TensorType) and kind.differentiable and not has_none

    def low_precision(self, name: str) -> torch.dtype | None:
        """The dtype of a live value that the model itself computes in float16 or bfloat16, or None.

        Streams are kept in float32, and converted to this dtype for the model's own code.
        """
        kind = self.types.get(name)
        if isinstance(kind, TensorType) and kind.dtype in LOW_PRECISION:
            return kind.dtype
        return None

    @property
    def stream_outputs(self) -> frozenset[str]:
        """Streams that couplings compute."""
        pieces = (piece for part in self.parts for piece in part.pieces)
        couplings = (piece for piece in pieces if isinstance(piece, Coupling))
        return frozenset(name for coupling in couplings for name in coupling.streams_out)

    def works(self, part: Part, keep: Keep | None = None) -> tuple[float, ...]:
        """The work of each piece of a stage for `keep`, by default the one assumed in balancing."""
        kept, is_last = keep or self.keeps[part.index], part.index == len(self.parts) - 1
        return tuple(
            piece.work(cost, kept, is_last)
            for piece, cost in zip(part.pieces, part.costs, strict=False)
        )

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """Where each stage's pieces begin and end, counted through all stages."""
        counts = (len(part.pieces) for part in self.parts)
        return tuple(itertools.pairwise(itertools.accumulate(counts, initial=0)))


@dataclass(frozen=True)
class Port:
    """A value that crosses a boundary. `type` is None for sizes and other plain values.

    `requires_grad`: whether a gradient comes back for it.
    """

    name: str
    type: TensorType | None
    requires_grad: bool

    def __str__(self) -> str:
        return f"{self.name}: {self.type or 'plain'}"


@dataclass(frozen=True)
class Unit:
    """Pieces differentiated together: a coupling, a run of opaque pieces, or a whole stage."""

    pieces: tuple[Segment, ...]
    keep: Keep
    parameters: tuple[str, ...]
    random: tuple[str, ...]
    """Pieces that may draw random numbers."""
    is_frozen: bool = False
    """Whether none of its outputs has a gradient. Then backward does not need it."""

    @property
    def name(self) -> str:
        """The piece's name, or those of the first and the last."""
        first, last = self.pieces[0].name, self.pieces[-1].name
        return first if len(self.pieces) == 1 else f"{first} .. {last}"

    @property
    def reversible(self) -> bool:
        """Whether all pieces are couplings."""
        return all(piece.reversible for piece in self.pieces)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Live values that the unit reads from outside."""
        computed = set(self.outputs)
        read = dict.fromkeys(name for piece in self.pieces for name in piece.inputs)
        return tuple(name for name in read if name not in computed)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Live values that the unit computes."""
        return tuple(dict.fromkeys(name for piece in self.pieces for name in piece.outputs))


Role = Literal["run", "arrange", "restore"]


@dataclass(frozen=True, eq=False)
class GraphFunction:
    """A function that computes what a graph does: F, an opaque piece, or a rearrangement.

    Casts of inputs and calls of batch norms are part of the graph. If backward calls it again, its
    writes to buffers go to copies, which the stage drops.
    """

    name: str
    segment: Segment
    role: Role
    graph: fx.Graph
    arguments: tuple[str, ...]
    """Names of the arguments in printed code; empty if they are the graph's names."""


@dataclass(frozen=True)
class StageCode:
    """A stage's code as Python: functions of graphs, and the text of the programs that call them.

    The graphs that run are traced from this text.
    """

    functions: tuple[GraphFunction, ...]
    programs: tuple[str, ...]
    variables: Mapping[str, str]
    """The variables of the stage's inputs and outputs in `forward`, by live value."""


@dataclass(frozen=True)
class StageProgram:
    """One stage for one method.

    The graphs that run are flat, with branches inlined; `code` is what they were traced from:

        forward   (key, *inputs)                          -> (outputs, kept)
        backward  (key, *kept, *needs_back, *gradients)   -> (values sent back, gradients of inputs,
                                                              gradients of parameters)

    The functions of `code` take `needs_back` before `kept`: streams are listed before their grid.

    Random numbers are drawn from seeds made of `key`, which identifies stage and micro-batch.
    """

    index: int
    stages: int
    method: Method
    units: tuple[Unit, ...]
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    kept: tuple[str, ...]
    """Values kept from forward to backward, for each micro-batch in flight."""
    needs_back: tuple[str, ...]
    """Outputs whose value must come back with their gradient."""
    sends_back: tuple[str, ...]
    """Inputs whose value is sent back, because the previous stage needs it."""
    parameters: tuple[str, ...]
    trained: frozenset[str]
    """The parameters that get a gradient, from this stage or from another that shares them."""
    code: StageCode
    forward: fx.Graph
    backward: fx.Graph

    @property
    def outputs_with_grad(self) -> tuple[str, ...]:
        """Outputs for which a gradient arrives."""
        return tuple(port.name for port in self.outputs if port.requires_grad)

    @property
    def inputs_with_grad(self) -> tuple[str, ...]:
        """Inputs for which a gradient is sent back."""
        return tuple(port.name for port in self.inputs if port.requires_grad)

    @property
    def needed_in_flight(self) -> list[str]:
        """The values of a micro-batch in flight that the backward pass needs.

        They depend on the memory budget: saved in-flight state fits only stages with the same list.
        """
        return [*self.kept, *self.needs_back]

    @property
    def reversible(self) -> bool:
        """Whether the stage keeps nothing between forward and backward."""
        return all(unit.reversible and unit.keep is Keep.NOTHING for unit in self.units)

    @property
    def is_last(self) -> bool:
        return self.index == self.stages - 1

    @property
    def keeps_graphs(self) -> bool:
        """Whether a forward pass keeps a graph for its backward pass."""
        return any(unit.keep is Keep.GRAPH for unit in self.units)

    @property
    def keeps_graphs_in_flight(self) -> bool:
        """Whether updates happen between a forward pass that keeps a graph and its backward."""
        is_late = self.method.order is Order.CONTINUOUS and not self.is_last
        return is_late and self.keeps_graphs

    @property
    def graphs_outlive_updates(self) -> bool:
        """Whether updates change parameters to which graphs in flight refer."""
        return self.keeps_graphs_in_flight and self.method.weights is Weights.LATEST


@dataclass(frozen=True)
class StageMemory:
    """What one stage holds at its peak, in bytes.

    >>> StageMemory(parameters=100, gradients=100, optimizer=100, buffers=700).total
    1000
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    summing: int = 0
    """Gradients of one micro-batch, before they are added to the sums of several."""
    stashed: int = 0
    """Older versions of the parameters."""
    newest: int = 0
    """A second copy of the parameters: for graphs in flight, or with the predicted values."""
    buffers: int = 0
    """Kept from forward to backward, for all micro-batches in flight."""
    messages: int = 0
    """What arrives while the stage computes: a forward message and a backward message."""
    working: int = 0
    """The graph being differentiated, with the gradients inside it."""
    waiting: int = 0
    """Backward messages that arrived before this stage is due to use them."""
    between: int = 0
    """Values and gradients that one piece of the stage passes back to the previous piece."""
    ends: int = 0
    """Inputs that kept graphs have not saved themselves, and the outputs of these graphs."""

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))
