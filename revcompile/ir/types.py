"""The model from capture to rewire, and its types.

    nn.Module --capture--> Captured --find--> Residual, Refusal --rewire--> Rewired (Segments)

Graphs are `torch.fx.Graph`s. Facts about a node are in its `meta`, under the keys named here.
"""

from __future__ import annotations

import enum
import functools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from revcompile.ir.guards import NO_GUARDS, Guards
from revcompile.ir.policy import Policy
from revcompile.ir.signature import Signature
from revcompile.ir.stored_graphs import StoresGraphs
from revcompile.ir.weight_expansion import WeightExpansion
from revcompile.schedule import Keep

TYPE: Final = "revcompile_type"
"""`node.meta` key: the `TensorType` of a tensor, a tuple of them for a structure, else None."""

VALUE: Final = "revcompile_value"
"""`node.meta` key: a size's values at the example's batch size and at one more."""

PATH: Final = "revcompile_path"
"""`node.meta` key: the dotted path of the module whose `forward` created the node."""

SOURCE: Final = "revcompile_source"
"""`node.meta` key: `file:line` of the user's code that created the node."""

STORES: Final = "revcompile_stores"
"""`node.meta` key of leaf modules: (path, name) of attributes that get tensors with gradients."""

LIVE_VALUES: Final = "revcompile_live_values"
"""`node.meta` key, in stage programs: names of the live values that the node holds."""


@dataclass(frozen=True, slots=True)
class TensorType:
    """Shape and dtype of a value, with the batch left free.

    `shape` is the shape at the example's batch size, `per_sample` how much each dimension grows
    when the batch grows by one (0 where it does not).

    >>> t = TensorType((2, 196, 768), (1, 0, 0), torch.float32, batch=2)
    >>> t.at(5)
    (5, 196, 768)
    >>> print(t)
    float32[B, 196, 768]
    """

    shape: tuple[int, ...]
    per_sample: tuple[int, ...]
    dtype: torch.dtype
    batch: int

    @property
    def differentiable(self) -> bool:
        """Whether the value can have a gradient: its dtype is floating-point or complex."""
        return self.dtype.is_floating_point or self.dtype.is_complex

    def at(self, batch: int) -> tuple[int, ...]:
        grown = batch - self.batch
        return tuple(n + s * grown for n, s in zip(self.shape, self.per_sample, strict=True))

    @property
    def batch_dim(self) -> int | None:
        """The first dimension that grows with the batch."""
        return next((dim for dim, step in enumerate(self.per_sample) if step), None)

    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    def nbytes(self, batch: int | None = None) -> int:
        """Bytes at a batch size, by default the example's."""
        shape = self.shape if batch is None else self.at(batch)
        return torch.Size(shape).numel() * self.dtype.itemsize

    def __str__(self) -> str:
        dims = []
        for size, step in zip(self.shape, self.per_sample, strict=True):
            rest = size - step * self.batch
            scaled = {0: "", 1: "B"}.get(step, f"{step}B")
            dims.append(f"{scaled}{rest:+d}" if scaled and rest else scaled or str(size))
        return f"{str(self.dtype).removeprefix('torch.')}[{', '.join(dims)}]"


def types_in(kind: Any) -> list[TensorType]:
    """The types of all tensors in a value of this type."""
    return [leaf for leaf in pytree.tree_leaves(kind) if isinstance(leaf, TensorType)]


@dataclass(frozen=True)
class Captured:
    """A model as a graph. `root` is a private copy of the model that owns the parameters.

    `graph` serves train and eval mode: constants that differ are selected by `self.training`. Only
    if the modes differ in structure (auxiliary heads) is there an `eval_graph`.
    """

    name: str
    root: nn.Module
    graph: fx.Graph
    eval_graph: fx.Graph | None
    signature: Signature
    leaf_modules: tuple[str, ...] = ()
    """Paths of modules that are single calls in the graph."""
    notes: tuple[str, ...] = ()
    guards: Guards = NO_GUARDS
    draws: frozenset[str] = frozenset()
    """Lines (`file:line`) whose random draws have no effect; the graph leaves them out."""
    stateful: Mapping[str, str] = field(default_factory=dict)
    """Leaf modules whose next call computes something else: path -> reason."""
    computed: frozenset[tuple[str, str]] = frozenset()
    """Attributes in which the original's forward stores tensors: (path of the module, name)."""
    stored: tuple[tuple[str, str], ...] = ()
    """Those that a loss outside the model may read: with gradients, and not read by the model."""


class ResidualKind(enum.Enum):
    """What kind of additive shortcut a block is."""

    IDENTITY = "identity"
    POST_ACTIVATION = "post-activation"
    PROJECTED = "projected"
    PARALLEL = "parallel"


@dataclass(frozen=True)
class Residual:
    """A block: `total = shortcut(x) + branch(x, *sides); out = post(total)`.

    All names are nodes of the captured graph, in the graph's order.
    """

    path: str
    """The module whose forward has the sum."""
    kind: ResidualKind
    x: str
    total: str
    """The sum."""
    out: str
    """The sum, or the activation after it."""
    terms: tuple[str, ...]
    """The summands that the branch computes."""
    adds: tuple[str, ...]
    """The additions that join the summands."""
    branch: tuple[str, ...]
    """Every node between `x` and the sum."""
    shortcut_term: str
    """The summand that is `x` or its projection; "" if the branch computes a scaled `x` too."""
    shortcut: tuple[str, ...] = ()
    """The nodes of a projection."""
    post: tuple[str, ...] = ()
    """The activation after the sum."""
    sides: tuple[str, ...] = ()
    """Other values that the branch reads."""
    extras: tuple[str, ...] = ()
    """Values of the branch that are also read outside the block."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """All nodes of the block."""
        return (*self.branch, *self.shortcut, *self.adds, *self.post)

    @property
    def is_projected(self) -> bool:
        """Whether the shortcut is a projection."""
        return self.kind is ResidualKind.PROJECTED

    def __str__(self) -> str:
        return f"{self.path or '(top level)'}: {self.kind.value}"


@dataclass(frozen=True)
class Refusal:
    """A sum that is not rewired, and why, in words a user can act on."""

    path: str
    node: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path or '(top level)'}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Live:
    """A live value by name, as an item of `Body.result`, which may hold constants too."""

    name: str


class _Segment(StoresGraphs):
    """What couplings and opaque segments have in common."""

    @property
    def reversible(self) -> bool:
        return isinstance(self, Coupling)

    def recomputed(self, keep: Keep, is_last: bool) -> bool:
        """Whether the backward pass of a stage with this `keep` computes the segment again.

        With `Keep.NOTHING`, opaque segments of the last stage keep their graph, because backward
        follows at once.
        """
        kept = keep is Keep.GRAPH or (keep is Keep.NOTHING and is_last and not self.reversible)
        return not kept

    def work(self, cost: Cost, keep: Keep, is_last: bool) -> float:
        """The work of both passes (4N, or 3N without recomputation) and of an update."""
        spared = 0.0 if self.recomputed(keep, is_last) else cost.forward
        return cost.forward + cost.backward - spared + cost.update


@dataclass(frozen=True)
class Opaque(_Segment):
    """A segment that is not reversible: a graph from live values to live values."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    graph: fx.Graph
    reason: str


@dataclass(frozen=True)
class Rearrange(StoresGraphs):
    """A bijection of a stream's elements (NCHW to tokens, windows) and its inverse.

    `forward` maps `(stream, *sides)` to `(arranged, shapes)`; `inverse` maps
    `(arranged, shapes)` to the stream, with its strides. `sides` are sizes only.
    """

    forward: fx.Graph
    inverse: fx.Graph
    sides: tuple[str, ...]


@dataclass(frozen=True)
class Coupling(_Segment):
    """A reversible segment: `(a, b) -> (b, a + F(b, *sides))`, PETRA Fig. 2.

    `branch` is F; if values inside it are read elsewhere it returns `(F(b), *extras)`. If the block
    works on another arrangement of the stream than the block before it, `rearrange` is applied to
    both streams first.

    In stages, couplings of one chain share a `grid` (see `kernels.exact_sum`), a value that the
    chain's first coupling makes (`opens`) and that is passed on with the streams.
    """

    name: str
    kind: ResidualKind
    streams_in: tuple[str, str]
    streams_out: tuple[str, str]
    sides: tuple[str, ...]
    branch: fx.Graph
    rearrange: Rearrange | None = None
    extras: tuple[str, ...] = ()
    grid: str | None = None
    opens: bool = False
    averaged: bool = False
    """Whether it is `(a, b) -> (b, b + gamma (a - b) + (1 + gamma) F(b))` (see `Policy`)."""

    @property
    def graph(self) -> fx.Graph:
        """The branch, under the name that the graph of every segment has."""
        return self.branch

    @property
    def all_sides(self) -> tuple[str, ...]:
        """The sides of the branch, and the sizes that the rearrangement takes."""
        return (*self.sides, *(self.rearrange.sides if self.rearrange else ()))

    @property
    def inputs(self) -> tuple[str, ...]:
        """Every live value the segment reads."""
        shared = (self.grid,) if self.grid and not self.opens else ()
        return tuple(dict.fromkeys((*self.streams_in, *shared, *self.all_sides)))

    @property
    def outputs(self) -> tuple[str, ...]:
        """Every live value the segment defines."""
        return (*self.results, *((self.grid,) if self.grid and self.opens else ()))

    @property
    def results(self) -> tuple[str, ...]:
        """The outputs that the model computes: all except the grid."""
        return (*self.streams_out, *self.extras)


Segment = Coupling | Opaque


@dataclass(frozen=True)
class Cost:
    """What one segment, or a part of one, costs at the example's batch size.

    >>> Cost(flops=20, parameters=4, saved=800, shared=200, batch=2).at(batch=8).saved
    3200
    """

    flops: int
    """FLOPs of the forward pass."""
    parameters: int
    """Number of parameters; each counts where it is used first."""
    forward: float = 0.0
    """Work of the forward pass: FLOPs and bytes moved in one unit, seconds, or the user's unit."""
    backward: float = 0.0
    """Work of computing forward again (or inverting) and differentiating, in the same unit."""
    update: float = 0.0
    """Work of an update of its parameters, if it was measured, in the same unit."""
    saved: int = 0
    """Bytes autograd holds for one run with gradients: each storage once, no parameters."""
    shared: int = 0
    """Bytes of `saved` that the previous piece saves, too: in one graph they are held once."""
    passing: int = 0
    """The most bytes that one operation and its operands take, without parameters."""
    weights: int = 0
    """Bytes of the parameters."""
    trained: int = 0
    """Bytes of the parameters that receive gradients."""
    batch: int = 1
    """The example's batch size."""

    unsaved: int = 0
    """Bytes of its outputs that it has not saved itself."""

    def at(self, batch: int) -> Cost:
        """The same at another batch size, as if all activations grew with the batch."""
        grown = {
            name: getattr(self, name) * batch // self.batch
            for name in ("saved", "shared", "passing", "unsaved")
        }
        return replace(self, batch=batch, **grown)


@dataclass(frozen=True)
class Body:
    """Segments in order over named live values.

    `result` has the model's flat outputs (`Live` or constants), `types` the type of every value.
    """

    segments: tuple[Segment, ...]
    result: tuple[Any, ...]
    types: Mapping[str, Any]

    @property
    def returned(self) -> tuple[str, ...]:
        """The names of the live values in the result."""
        return tuple(leaf.name for leaf in self.result if isinstance(leaf, Live))

    def chains(self) -> list[list[Segment]]:
        """Runs of couplings whose streams only the next coupling reads; other segments alone."""
        readers = Counter(name for segment in self.segments for name in segment.inputs)
        readers.update(self.returned)
        runs: list[list[Segment]] = []
        for segment in self.segments:
            previous = runs[-1][-1] if runs else None
            if (
                isinstance(segment, Coupling)
                and isinstance(previous, Coupling)
                and previous.streams_out == segment.streams_in
                and not previous.extras
                and all(readers[name] == 1 for name in previous.streams_out)
            ):
                runs[-1].append(segment)
            else:
                runs.append([segment])
        return runs

    def __deepcopy__(self, memo: dict[int, Any]) -> Body:
        """A new body (plans are keyed by its identity) with the same segments: graphs are never
        changed in place."""
        return Body(self.segments, self.result, self.types)


@dataclass(frozen=True)
class Rewired:
    """The two-stream model. `root` owns the parameters under their original names.

    There is an `eval_body` only if the model has another structure in eval mode.
    """

    name: str
    root: nn.Module
    body: Body
    eval_body: Body | None
    signature: Signature
    policy: Policy
    residuals: tuple[Residual, ...]
    refusals: tuple[Refusal, ...]
    weight_expansions: Mapping[str, tuple[str, WeightExpansion]]
    """Name of each tensor that rewiring made -> (name in the original state dict, how)."""
    notes: tuple[str, ...] = ()
    guards: Guards = NO_GUARDS
    stateful: Mapping[str, str] = field(default_factory=dict)
    """As in `Captured`: such modules may run only once for each micro-batch."""

    @property
    def couplings(self) -> tuple[Coupling, ...]:
        return tuple(s for s in self.body.segments if isinstance(s, Coupling))

    @property
    def is_another_function(self) -> bool:
        """Whether it computes another function than the original, with the same weights."""
        return bool(self.couplings) and not self.policy.averaged

    @property
    def batch(self) -> int:
        """The batch size of the example."""
        kinds = self.body.types.values()
        return next(kind.batch for kind in kinds if isinstance(kind, TensorType))

    @functools.cached_property
    def stored(self) -> tuple[tuple[str, str], ...]:
        """Attributes in which leaf modules of branches leave tensors: path of the module, name."""
        couplings = (s for s in self._segments if isinstance(s, Coupling))
        nodes = (node for coupling in couplings for node in coupling.branch.nodes)
        return tuple(dict.fromkeys(entry for node in nodes for entry in node.meta.get(STORES, ())))

    @property
    def graphs(self) -> tuple[fx.Graph, ...]:
        """The graphs of all segments, of both modes."""
        return tuple(segment.graph for segment in self._segments)

    @property
    def _segments(self) -> tuple[Segment, ...]:
        return (*self.body.segments, *(self.eval_body.segments if self.eval_body else ()))
