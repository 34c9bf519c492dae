"""PETRA's Eq. 5 and Algorithm 1, and the systems around it, as they stand in the papers.

Slow and obvious: what the engine is compared with. It reads the stages' pieces and knows nothing
of action lists, generated programs or the runtime. All stages move together, tick by tick; what a
stage sends in one tick is there in the next.

    paper   x and delta take a tick each. Stage j of J has its gradients 2(J-1-j) ticks later.
    half    x goes through all stages within the tick (the iteration of Features Replay,
            Algorithm 1), delta takes a tick to each next stage: J-1-j.

Values are named, as in the compiler: a stage's x is all that is alive at its boundary. What only
passes through travels on, and back, unchanged; gradients of a value with several readers add up.
Everything is float64, where couplings need no grid. The file is longer than others because what
others are measured by should be read in one go.
"""

import copy
import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from revcompile.ir.program import Part, Partition
from revcompile.ir.types import Coupling, Live, Opaque, Segment

Values = dict[str, Any]
Gradients = dict[str, Tensor]
"""A name that is missing has no gradient."""
Weights = Mapping[str, Tensor]
Factory = Callable[[Any], Optimizer]
Loss = Callable[[Any, Any], Tensor]


class Row(enum.Enum):
    """What the backward pass of a stage starts from."""

    RECONSTRUCT = "the output is inverted with the latest parameters; no input is kept"
    REPLAY = "the input is kept, the parameters are the latest"
    STASH = "the input is kept, and so are the forward pass's parameters"
    GRAPH = "the forward pass's graph is kept; the parameters in it become the latest"
    SYNTHETIC = "the gradient is predicted"


ROWS: Final = {
    "petra": (Row.RECONSTRUCT, 1),
    "petra_stashed": (Row.STASH, 1),  # what is rebuilt is what would have been kept
    "pipedream": (Row.STASH, 1),
    "ddg": (Row.STASH, 1),
    "features_replay": (Row.REPLAY, 1),
    "delayed": (Row.STASH, 2),
    "dsp": (Row.REPLAY, 2),
    "dni": (Row.SYNTHETIC, 1),
}
"""The methods whose stages do not wait for each other, and the order each is published in."""


# -- what the pieces compute ----------------------------------------------------------------------


class Mathematics:
    """F and its inverse for every piece, with any parameters."""

    def __init__(self, partition: Partition) -> None:
        self.root = copy.deepcopy(partition.rewired.root).train()
        self.names = {id(p): name for name, p in self.root.named_parameters()}
        self.slots = [
            (module._parameters, slot, self.names[id(parameter)], parameter)
            for module in self.root.modules()
            for slot, parameter in module._parameters.items()
            if parameter is not None
        ]
        """Where modules read their parameters from; tied ones have one name and several slots."""

    def run(self, graph: fx.Graph, theta: Weights, *inputs: Any) -> Any:
        """A graph's results with the parameters `theta`."""
        for place, slot, name, original in self.slots:
            place[slot] = theta.get(name, original)  # type: ignore[assignment]
        try:
            return fx.Interpreter(self.root, graph=graph).run(*inputs)
        finally:
            for place, slot, _, original in self.slots:
                place[slot] = original

    def forward(self, piece: Segment, values: Values, theta: Weights) -> Values:
        """The values a piece defines; a coupling: `(a, b) -> (b, a + F(b))`."""
        if isinstance(piece, Opaque):
            found = self.run(piece.graph, theta, *(values[name] for name in piece.inputs))
            return dict(zip(piece.outputs, found, strict=True))
        made: Values = {piece.grid: None} if piece.grid and piece.opens else {}
        a, b = (self.rearrange(piece, values[n], values)[0] for n in piece.streams_in)
        addend, extras = self.branch(piece, b, values, theta)
        return made | dict(zip(piece.results, (b, a + addend, *extras), strict=True))

    def inverse(self, segment: Coupling, values: Values, shapes: Any, theta: Weights) -> Values:
        """The streams a coupling had come from: `(b, y) -> (y - F(b), b)`."""
        b, y = (values[name] for name in segment.streams_out)
        a = y - self.branch(segment, b, values, theta)[0]
        if segment.rearrange is not None:
            a, b = (self.run(segment.rearrange.inverse, {}, stream, shapes) for stream in (a, b))
        return dict(zip(segment.streams_in, (a, b), strict=True))

    def branch(
        self, segment: Coupling, b: Tensor, values: Values, theta: Weights
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """F(b), and what else is read of it."""
        found = self.run(segment.branch, theta, b, *(values[name] for name in segment.sides))
        return (found[0], found[1:]) if segment.extras else (found, ())

    def rearrange(self, segment: Coupling, stream: Tensor, values: Values) -> tuple[Tensor, Any]:
        """A stream in the arrangement of the block, and the shapes that lead back."""
        if segment.rearrange is None:
            return stream, None
        sizes = (values[name] for name in segment.rearrange.sides)
        arranged, shapes = self.run(segment.rearrange.forward, {}, stream, *sizes)
        return arranged, tuple(shapes)

    def parameters(self, pieces: Sequence[Segment]) -> list[str]:
        """Parameters the pieces read; tied ones have one name."""
        found: dict[str, None] = {}
        for piece in pieces:
            graph = piece.branch if isinstance(piece, Coupling) else piece.graph
            for node in graph.nodes:
                if node.op == "call_module":
                    read = list(self.root.get_submodule(node.target).parameters())
                elif node.op == "get_attr":
                    owner, _, name = node.target.rpartition(".")
                    read = [getattr(self.root.get_submodule(owner), name)]
                else:
                    read = []
                found |= {self.names[id(p)]: None for p in read if id(p) in self.names}
        return list(found)


# -- one stage ------------------------------------------------------------------------------------


@dataclass
class Message:
    """What neighbours send each other. Behind the last micro-batch goes one with no number.

    `shared` are parameters on their way to a later stage that reads them too.
    """

    microbatch: int | None
    values: Values = field(default_factory=dict)
    deltas: Gradients = field(default_factory=dict)
    shared: Gradients = field(default_factory=dict)


@dataclass
class Kept:
    """Of a micro-batch in flight. `values` are read only where Algorithm 1 has a buffer."""

    values: Values
    theta: Weights
    shapes: dict[str, Any]
    graph: tuple[Values, Values] | None = None
    """Inputs and all values, as autograd has recorded them."""


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


class Stage:
    """Algorithm 1, the worker's perspective. `held` are parameters an earlier stage owns."""

    def __init__(
        self,
        mathematics: Mathematics,
        partition: Partition,
        part: Part,
        row: Row,
        factory: Factory,
        loss: Loss,
        accumulation_steps: int,
    ) -> None:
        self.do, self.partition, self.part = mathematics, partition, part
        self.row, self.loss, self.k = row, loss, accumulation_steps
        self.is_last = part is partition.parts[-1]
        names = mathematics.parameters(part.pieces)
        self.theta = {n: _copied(mathematics.root.get_parameter(n)) for n in names}
        ties = partition.ties.items()
        self.held = {n: tie.owner for tie, ns in ties if tie.holder == part.index for n in ns}
        self.owned = {n for tie, ns in ties if tie.owner == part.index for n in ns}
        # Written to as `.data`, which autograd does not notice: graphs have the latest parameters.
        self.written = {n: nn.Parameter(p.data, p.requires_grad) for n, p in self.theta.items()}
        own = [p for n, p in self.written.items() if n not in self.held and p.requires_grad]
        self.optimizer = factory(own) if own else None
        self.gradient_predictor = self._synthesiser(factory)
        self.flight: dict[int, Kept] = {}
        self.sums: Gradients = {}
        self.count = 0
        self.groups: list[Gradients] = []
        """The mean gradient of each update."""

    def forward(self, message: Message) -> Message:
        """Lines 2 to 10: `x_j = F_j(x_{j-1}, theta_j)`."""
        self._take_shared(message)
        shared = message.shared | {n: self.theta[n].detach().clone() for n in self.owned}
        if message.microbatch is None:
            return Message(None, shared=shared)
        if self.row is Row.GRAPH:
            return self._recorded(message, shared)
        values, shapes = dict(message.values), {}
        with torch.no_grad():
            for piece in self.part.pieces:
                if isinstance(piece, Coupling):
                    stream = values[piece.streams_in[0]]
                    shapes[piece.name] = self.do.rearrange(piece, stream, values)[1]
                values |= self.do.forward(piece, values, self.theta)
        kept = self.theta if self.row is Row.STASH else {}
        theta = {name: _copied(p) for name, p in kept.items()}
        self.flight[message.microbatch] = Kept(values, theta, shapes)
        return Message(message.microbatch, self._only(self.part.outputs, values), shared=shared)

    def _recorded(self, message: Message, shared: Gradients) -> Message:
        """`x_j = F_j(x_{j-1}, theta_j)` with autograd on."""
        assert message.microbatch is not None
        leaves, values = self._run(self.part.pieces, message.values, self.theta)
        self.flight[message.microbatch] = Kept(message.values, {}, {}, (leaves, values))
        sent = self._only(self.part.outputs, values)
        out = {n: v.detach() if isinstance(v, Tensor) else v for n, v in sent.items()}
        return Message(message.microbatch, out, shared=shared)

    def conclude(self, message: Message, target: Any) -> Message | None:
        """The final stage: forward, loss and gradients at once."""
        self._take_shared(message)
        if message.microbatch is None:
            return None

        def loss(values: Values) -> tuple[list[Tensor], None]:
            leaves = [
                values[leaf.name] if isinstance(leaf, Live) else leaf
                for leaf in self.partition.rewired.body.result
            ]
            spec = self.partition.rewired.signature.out_spec
            return [self.loss(pytree.tree_unflatten(leaves, spec), target)], None

        deltas = self._differentiate(self.part.pieces, message.values, self.theta, loss)
        self.count += 1
        return Message(message.microbatch, message.values, deltas)

    def backward(self, message: Message) -> Message:
        """Lines 11 to 19, for every run of pieces from the last to the first."""
        assert message.microbatch is not None
        kept = self.flight.pop(message.microbatch)
        theta = kept.theta if self.row is Row.STASH else self.theta
        values, deltas = {**kept.values, **message.values}, dict(message.deltas)
        for pieces in reversed(self._runs()):
            x = self._input(pieces, values, kept, theta)
            made = {name for piece in pieces for name in piece.outputs}
            seeds = {name: delta for name, delta in deltas.items() if name in made}

            def seeded(
                values: Values, seeds: Gradients = seeds
            ) -> tuple[list[Tensor], list[Tensor]]:
                ends = [name for name in seeds if values[name].requires_grad]
                return [values[name] for name in ends], [seeds[name] for name in ends]

            _add(deltas, self._differentiate(pieces, x, theta, seeded, kept.graph))
            values |= x
        self.count += 1
        x, delta = self._only(self.part.inputs, values), self._only(self.part.inputs, deltas)
        return Message(message.microbatch, x, delta)

    def _runs(self) -> list[list[Segment]]:
        """What is inverted, or computed again, at once. Kept inputs are those of the stage."""
        if self.row is not Row.RECONSTRUCT:
            return [list(self.part.pieces)]
        runs: list[list[Segment]] = []
        for piece in self.part.pieces:
            if piece.reversible or not runs or runs[-1][0].reversible:
                runs.append([])
            runs[-1].append(piece)
        return runs

    def _input(
        self, pieces: Sequence[Segment], values: Values, kept: Kept, theta: Weights
    ) -> Values:
        """Lines 13 to 16: inverted where that can be done, from the buffer elsewhere."""
        first = pieces[0]
        if self.row is Row.RECONSTRUCT and isinstance(first, Coupling):
            with torch.no_grad():
                streams = self.do.inverse(first, values, kept.shapes[first.name], theta)
            return self._only(first.inputs, values) | streams
        made = {name for piece in pieces for name in piece.outputs}
        read = {name for piece in pieces for name in piece.inputs}
        return self._only(read - made, kept.values)

    def _differentiate(
        self,
        pieces: Sequence[Segment],
        x: Values,
        theta: Weights,
        close: Callable[[Values], tuple[list[Tensor], list[Tensor] | None]],
        graph: tuple[Values, Values] | None = None,
    ) -> Gradients:
        """Lines 17 to 19: F anew from x, then delta; the gradient of theta is added up."""
        leaves, values = graph or self._run(pieces, x, theta)
        ends, seeds = close(values)
        starts = {n: v for n, v in leaves.items() if _is_float(v)}
        names = [n for n in self.do.parameters(pieces) if theta[n].requires_grad]
        wanted = [*starts.values(), *(theta[n] for n in names)]
        if not ends or not wanted:
            return {}
        found = list(torch.autograd.grad(ends, wanted, seeds, allow_unused=True))
        of_x, of_theta = found[: len(starts)], found[len(starts) :]
        _add(self.sums, dict(zip(names, of_theta, strict=True)))
        return {n: g for n, g in zip(starts, of_x, strict=True) if g is not None}

    def _run(self, pieces: Sequence[Segment], x: Values, theta: Weights) -> tuple[Values, Values]:
        """F with autograd on: where it begins, and all values."""
        leaves = {n: v.detach().requires_grad_() if _is_float(v) else v for n, v in x.items()}
        values = dict(leaves)
        for piece in pieces:
            values |= self.do.forward(piece, values, theta)
        return leaves, values

    def update(self, of_holders: Sequence["Stage"], *, partial: bool = False) -> None:
        """Lines 20 to 22; the owner of shared parameters adds their readers' gradients."""
        if self.count < (1 if partial else self.k):
            return
        mean = {name: total / self.count for name, total in self.sums.items()}
        for holder in of_holders:
            shared = holder.groups[len(self.groups)]
            _add(mean, {n: g for n, g in shared.items() if holder.held.get(n) == self.part.index})
        self.groups.append(mean)
        self.sums, self.count = {}, 0
        for name, parameter in self.written.items():
            parameter.grad = None if name in self.held else mean.get(name)
        if self.optimizer is not None:
            self.optimizer.step()

    def _take_shared(self, message: Message) -> None:
        """A shared parameter is, at a later stage, what the micro-batch has met at its owner."""
        with torch.no_grad():
            for name in self.held.keys() & message.shared.keys():
                self.written[name].copy_(message.shared[name])

    @staticmethod
    def _only(names: Any, values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: values[name] for name in names if name in values}

    # -- synthetic gradients --------------------------------------------------------------------

    def _synthesiser(self, factory: Factory) -> "GradientPredictor | None":
        if self.row is not Row.SYNTHETIC or self.is_last:
            return None
        data = self.partition.rewired.signature.placeholders
        types = {n: self.partition.types.get(n) for n in self.part.outputs if n not in data}
        return GradientPredictor(
            {n: t.shape for n, t in types.items() if t is not None and t.dtype.is_floating_point},
            factory,
        )

    def predicted(self) -> Message:
        """The micro-batch in flight as if its gradient had come back."""
        assert self.gradient_predictor is not None
        ((microbatch, kept),) = self.flight.items()
        self.gradient_predictor.seen[microbatch] = kept.values
        return Message(microbatch, {}, self.gradient_predictor.predict(kept.values))


class GradientPredictor:
    """DNI: for every output a layer that is zero at first and learns the gradient of it."""

    def __init__(self, shapes: Mapping[str, Sequence[int]], factory: Factory) -> None:
        self.layers: dict[str, nn.Module] = {}
        for name, shape in shapes.items():
            is_image = len(shape) == 4
            width = shape[1] if is_image else shape[-1]
            layer = nn.Conv2d(width, width, 1) if is_image else nn.Linear(width, width)
            self.layers[name] = layer.double()
        self.parameters = [p for layer in self.layers.values() for p in layer.parameters()]
        for parameter in self.parameters:
            nn.init.zeros_(parameter)
        self.optimizer = factory(self.parameters)
        self.seen: dict[int, Values] = {}

    def predict(self, y: Values) -> Gradients:
        return {name: layer(y[name]).detach() for name, layer in self.layers.items()}

    def train(self, message: Message) -> None:
        """One step on the mean squared error of the gradient that has come back."""
        assert message.microbatch is not None
        y = self.seen.pop(message.microbatch)
        errors = [
            F.mse_loss(self.layers[name](y[name]), delta)
            for name, delta in message.deltas.items()
            if name in self.layers
        ]
        self.optimizer.zero_grad()
        sum(errors, torch.zeros(())).backward()
        self.optimizer.step()


def _copied(parameter: Tensor) -> nn.Parameter:
    return nn.Parameter(parameter.detach().clone(), parameter.requires_grad)


def _add(sums: Gradients, more: Mapping[str, Tensor | None]) -> None:
    for name, gradient in more.items():
        if gradient is not None:
            sums[name] = sums[name] + gradient if name in sums else gradient.clone()


# -- all of them ----------------------------------------------------------------------------------


class Transcription:
    """A whole pipeline. Make it before the engine trains: it copies the parameters.

    `rows` has stages start their backward passes from something else than the method does.
    """

    def __init__(
        self,
        partition: Partition,
        method: str,
        factory: Factory,
        loss: Loss,
        *,
        in_flight_per_stage: float | None = None,
        accumulation_steps: int = 1,
        rows: Sequence[Row] | None = None,
    ) -> None:
        row, published = ROWS[method]
        rows = rows or [row] * len(partition.parts)
        self.in_flight_per_stage = in_flight_per_stage or published
        assert self.in_flight_per_stage in (1, 2)
        mathematics = Mathematics(partition)
        self.placeholders = partition.rewired.signature.placeholders
        self.stages = [
            Stage(mathematics, partition, part, row, factory, loss, accumulation_steps)
            for part, row in zip(partition.parts, rows, strict=True)
        ]
        self.up: dict[int, Message] = {}
        self.down: dict[int, Message] = {}
        self.injected = 0

    def run(self, batches: Sequence[tuple[Sequence[Any], Any]]) -> None:
        """All micro-batches, until the pipeline is empty; an incomplete group counts too."""
        targets = {}
        for inputs, target in batches:
            targets[self.injected] = target
            values = dict(zip(self.placeholders, inputs, strict=True))
            self.up[0] = Message(self.injected, values)
            self.injected += 1
            self._tick(targets)
        self.up[0] = Message(None)
        while self.up or self.down:
            self._tick(targets)
        for stage in reversed(self.stages):
            stage.update(self._holders(stage), partial=True)
        end = Message(None)
        for stage in self.stages:
            end = stage.forward(end)

    def parameters(self) -> dict[str, Tensor]:
        """All parameters; shared ones must be equal wherever they are read."""
        found: dict[str, Tensor] = {}
        for stage in self.stages:
            for name, value in stage.theta.items():
                torch.testing.assert_close(found.setdefault(name, value), value, rtol=0, atol=0)
        return {name: value.detach() for name, value in found.items()}

    def gradients(self) -> list[dict[str, Tensor]]:
        """The gradient of each update, of all parameters an owner has."""
        rounds = zip(*(stage.groups for stage in self.stages), strict=True)
        return [
            {
                name: gradient
                for stage, group in zip(self.stages, groups, strict=True)
                for name, gradient in group.items()
                if name not in stage.held
            }
            for groups in rounds
        ]

    def _tick(self, targets: Mapping[int, Any]) -> None:
        """Eq. 5: every stage at once, with what had arrived before."""
        up: dict[int, Message] = {}
        down: dict[int, Message] = {}
        for j, stage in enumerate(self.stages):
            message = self.up.pop(j, None)
            if message is None:
                continue
            if stage.is_last:
                number = message.microbatch
                target = None if number is None else targets[number]
                self._send(down, j - 1, stage.conclude(message, target))
            elif self.in_flight_per_stage == 1:
                self.up[j + 1] = stage.forward(message)
            else:
                up[j + 1] = stage.forward(message)
        for j, stage in enumerate(self.stages):
            self._back(j, stage, down)
        for stage in reversed(self.stages):
            stage.update(self._holders(stage))
        self.up |= up
        self.down |= down

    def _back(self, j: int, stage: Stage, down: dict[int, Message]) -> None:
        """The backward half of a stage's tick."""
        message = self.down.pop(j, None)
        if stage.gradient_predictor is None:
            if message is not None:
                self._send(down, j - 1, stage.backward(message))
            return
        if message is not None:
            stage.gradient_predictor.train(message)
        if stage.flight:
            self._send(down, j - 1, stage.backward(stage.predicted()))

    def _holders(self, owner: Stage) -> list[Stage]:
        return [stage for stage in self.stages if owner.part.index in stage.held.values()]

    @staticmethod
    def _send(box: dict[int, Message], target: int, message: Message | None) -> None:
        if target >= 0 and message is not None:
            box[target] = message
