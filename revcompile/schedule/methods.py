"""The table of methods: each is an order, what is kept, and which weights backward uses."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from revcompile.errors import InputError, nearest


class Keep(enum.Enum):
    """What a stage keeps of a micro-batch for its backward pass."""

    GRAPH = "graph"
    """Everything that autograd saved: nothing is computed twice."""
    INPUT = "input"
    """The stage's inputs, from which its forward pass is computed again."""
    NOTHING = "nothing"
    """Couplings rebuild their inputs; only pieces that are not reversible keep theirs."""


class Weights(enum.Enum):
    """Which parameters the forward and the backward pass use.

    t is the delay of a stage in updates, y its latest parameters, u what the last update subtracted
    from them (learning rate and weight decay included).
    """

    LATEST = "latest"
    """Each pass uses y as it is at that time (PETRA)."""
    STASHED = "stashed"
    """Backward uses the parameters of its forward pass: t copies, rounded up."""
    PREDICTED = "predicted"
    """Forward uses y - t u, a prediction of y in backward; backward uses y: one copy."""


class Order(enum.Enum):
    """The order of a stage's forward and backward passes."""

    LOCKED = "locked"
    """One micro-batch in the whole pipeline at a time."""
    GPIPE = "gpipe"
    """`accumulation_steps` forward passes, then as many backward passes, first in first out."""
    ONE_F_ONE_B = "1f1b"
    """One forward, one backward in turn; the pipeline is drained (flushed) before an update."""
    CONTINUOUS = "continuous"
    """One forward, one backward in turn, never drained; see `Method.in_flight_per_stage`."""
    SYNTHETIC = "synthetic"
    """Backward at once, with a predicted gradient (DNI)."""


@dataclass(frozen=True)
class Method:
    """One row of the table of methods.

    `in_flight_per_stage` is for the continuous order: stage j of J has one micro-batch in flight,
    and this many more for each of the J-1-j later stages, rounded up.

        1    a stage alternates forward and backward passes; gradients come back as early as
             possible, J-1-j updates late at stage j (with an update every micro-batch)
        2    the PETRA paper: in each time step all stages do a forward and a backward pass, and
             messages move by one stage; to the last stage and back takes 2(J-1-j) steps

    Both keep every stage equally busy.
    """

    name: str
    order: Order
    in_flight_per_stage: float
    keep: Keep
    weights: Weights

    def __post_init__(self) -> None:
        if self.order is Order.CONTINUOUS and not 1 <= self.in_flight_per_stage < math.inf:
            raise InputError(
                f"method {self.name!r}: in_flight_per_stage={self.in_flight_per_stage}, but below "
                "1 a stage would stall before its gradients are back; use in_flight_per_stage >= 1 "
                "(1: the least delay, 2: as in the PETRA paper)"
            )
        if self.weights is Weights.PREDICTED and (
            self.order is not Order.CONTINUOUS or self.keep is Keep.GRAPH
        ):
            raise InputError(
                f"method {self.name!r}: weights={self.weights.value!r} needs delayed gradients, "
                "and backward passes that compute with other tensors than forward passes, which "
                "kept graphs do not; use e.g. method='petra'"
            )


def _table() -> Iterator[Method]:
    latest, stashed = Weights.LATEST, Weights.STASHED
    #            name, order, in flight per stage, kept for backward, weights of backward
    yield Method("backprop", Order.LOCKED, 0.0, Keep.GRAPH, latest)
    yield Method("reversible_backprop", Order.LOCKED, 0.0, Keep.NOTHING, latest)
    yield Method("gpipe", Order.GPIPE, 0.0, Keep.GRAPH, latest)
    yield Method("1f1b", Order.ONE_F_ONE_B, 0.0, Keep.GRAPH, latest)
    yield Method("pipedream", Order.CONTINUOUS, 1.0, Keep.INPUT, stashed)
    yield Method("ddg", Order.CONTINUOUS, 1.0, Keep.GRAPH, stashed)
    yield Method("features_replay", Order.CONTINUOUS, 1.0, Keep.INPUT, latest)
    yield Method("delayed", Order.CONTINUOUS, 2.0, Keep.INPUT, stashed)
    yield Method("dsp", Order.CONTINUOUS, 2.0, Keep.INPUT, latest)
    yield Method("petra", Order.CONTINUOUS, 1.0, Keep.NOTHING, latest)
    yield Method("petra_stashed", Order.CONTINUOUS, 1.0, Keep.NOTHING, stashed)
    yield Method("dni", Order.SYNTHETIC, 0.0, Keep.GRAPH, latest)


METHODS: Final[Mapping[str, Method]] = MappingProxyType({m.name: m for m in _table()})
"""Every method by name."""


def choose(
    name: str | Method, *, in_flight_per_stage: float | None = None, weights: str | None = None
) -> Method:
    """Look up a method by name.

    Args:
        name: A name of `METHODS`, or a method, which is returned with other choices.
        in_flight_per_stage: See `Method`; for methods that never drain.
        weights: A value of `Weights`, for methods that never drain and keep no graphs. The result
            is named after the method of the table with these choices, if there is one.

    Raises:
        InputError: A method or choice does not exist, or the method does not have that choice.

    >>> choose("petra", in_flight_per_stage=2).in_flight_per_stage
    2.0
    >>> choose("petra", weights="stashed").name, choose("pipedream", weights="latest").name
    ('petra_stashed', 'features_replay')
    """
    if not isinstance(name, str | Method):
        raise InputError(f"method={name!r}; use the name of a method, e.g. method='petra'")
    if isinstance(name, str) and name not in METHODS:
        hint = nearest(name.lower(), METHODS, f"use one of: {', '.join(METHODS)}")
        raise InputError(f"method {name!r} does not exist; {hint}")
    method = METHODS[name] if isinstance(name, str) else name
    if weights is not None:
        method = _with_weights(method, weights)
    if in_flight_per_stage is None:
        return method
    if method.order is not Order.CONTINUOUS:
        free = ", ".join(m.name for m in METHODS.values() if m.order is Order.CONTINUOUS)
        raise InputError(
            f"method {method.name!r} has a fixed order; leave out in_flight_per_stage, "
            f"or use one of: {free}"
        )
    if isinstance(in_flight_per_stage, bool) or not isinstance(in_flight_per_stage, int | float):
        raise InputError(
            f"in_flight_per_stage={in_flight_per_stage!r}; use a number, at least 1 (1: the least "
            "delay, 2: as in the PETRA paper)"
        )
    return dataclasses.replace(method, in_flight_per_stage=float(in_flight_per_stage))


def _with_weights(method: Method, weights: str) -> Method:
    names = [choice.value for choice in Weights]
    if weights not in names:
        raise InputError(f"weights={weights!r} does not exist; use one of: {', '.join(names)}")
    chosen = Weights(weights)
    if chosen is method.weights and method.order is Order.CONTINUOUS:
        return method
    if method.order is not Order.CONTINUOUS or method.keep is Keep.GRAPH:
        raise InputError(
            f"method {method.name!r} has no choice of weights: there are no updates between "
            "forward and backward pass, or it keeps graphs, which hold those of the forward pass; "
            "leave out weights=, or use e.g. method='petra' or 'pipedream'"
        )
    # Named after the row of the table with these choices; no row has predicted weights.
    published = METHODS.get(method.name, method).in_flight_per_stage
    wanted = Weights.LATEST if chosen is Weights.PREDICTED else chosen
    rows = [
        row.name
        for row in METHODS.values()
        if (row.order, row.in_flight_per_stage, row.keep, row.weights)
        == (method.order, published, method.keep, wanted)
    ]
    return dataclasses.replace(method, name=(*rows, method.name)[0], weights=chosen)
