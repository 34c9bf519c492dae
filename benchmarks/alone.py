"""Times of a rank's passes and messages, for forecasts of pipelines.

All ranks run their own stages at the same time, in the order of their schedule, and no rank waits
for another: a stage takes the message that has arrived, or the previous one again. So the times
contain everything that a rank does for a micro-batch, while all cores are busy, but no waiting.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from revcompile.runtime.executor.messages import Message, MessageKind, Route, next_message
from revcompile.schedule import Action, Costs, Method, Op, actions, dry_run
from revcompile.schedule.drained import Pass

EXCHANGES: Final = 8
"""Round trips over which the time of a message is averaged."""


class Passes(NamedTuple):
    """Seconds of one rank's passes and updates, by stage."""

    forward: dict[int, list[float]]
    backward: dict[int, list[float]]
    update: dict[int, list[float]]
    message: float
    """Seconds of a message to the next rank; nan if there is none."""


class Uneven(tuple[float, ...]):
    """Times by stage; each time a stage is read, it gives the next of its measured times."""

    _times: list[Iterator[float]]

    def __new__(cls, of_stages: Iterable[Sequence[float]]) -> Uneven:
        measured = list(of_stages)
        made = super().__new__(cls, map(fmean, measured))
        made._times = [itertools.cycle(times) for times in measured]
        return made

    def __getitem__(self, stage: Any) -> Any:
        return next(self._times[stage])


def costs_of(ranks: Sequence[Passes], is_uneven: bool = False) -> Costs:
    """The costs of all stages and messages: means, or with `is_uneven` single times in turn."""
    merged = ({s: t for rank in ranks for s, t in rank[part].items()} for part in range(3))
    times = [Uneven(found[stage] for stage in sorted(found)) for found in merged]
    forward, backward, update = times if is_uneven else map(tuple, times)
    messages = [rank.message for rank in ranks if not math.isnan(rank.message)]
    links = (fmean(messages) if messages else 0.0,) * (len(forward) - 1)
    return Costs(forward, backward, update, links, links)


def played(method: Method, costs: Costs, microbatches: int) -> float:
    """Seconds per micro-batch in a dry run of a schedule that never drains."""
    stages, updates = len(costs.link_forward) + 1, 6
    lists = actions(method, stages, updates * microbatches, microbatches)
    spans = [span for span in dry_run(lists, costs) if span.action.op is Op.BACKWARD]
    ends = sorted(span.end for span in spans if not span.stage)
    full = slice(microbatches, -microbatches)
    return (ends[full][-1] - ends[full][0]) / (len(ends[full]) - 1)


def message_time(send: Callable[[int], None], receive: Callable[[int], None]) -> float:
    """Seconds until a message reaches the next rank: half of a round trip.

    First ranks 0 and 1, 2 and 3, ... exchange messages, then ranks 1 and 2, 3 and 4, ...
    """
    rank, world, found = distributed.get_rank(), distributed.get_world_size(), math.nan
    for first in (0, 1):
        distributed.barrier()
        peer = rank + 1 if rank % 2 == first else rank - 1
        if not 0 <= peer < world:
            continue
        begin = time.perf_counter()
        for _ in range(EXCHANGES):
            for step in (send, receive) if peer > rank else (receive, send):
                step(peer)
        if peer > rank:
            found = (time.perf_counter() - begin) / EXCHANGES / 2
    return found


# -- torch's schedules -----------------------------------------------------------------------------


def torch_passes(listed: Sequence[Any]) -> tuple[Pass, ...]:
    """The passes of one rank in a schedule of torch."""
    found = (re.match(r"(\d+)([FBIW])(\d+)", str(action)) for action in listed if action)
    return tuple(Pass(each[2], int(each[1]), int(each[3])) for each in found if each)


def time_torch(
    passes: Sequence[Pass],
    modules: dict[int, nn.Module],
    inputs: dict[int, Tensor],
    loss: Callable[[Tensor], Tensor] | None,
    update: Callable[[], None],
) -> Passes:
    """Time the passes of one update, without messages.

    Args:
        loss: Function of the last module's output; for the last rank.
    """
    spent: dict[str, dict[tuple[int, int], float]] = {"F": {}, "B": {}}
    held: dict[tuple[int, int], Any] = {}
    last = max(modules)
    for kind, stage, microbatch in passes:
        begin, place, module = time.perf_counter(), (stage, microbatch), modules[stage]
        if kind == "F":
            x = inputs[stage].detach()
            x.requires_grad_(x.is_floating_point() and stage > 0)
            output = module(x)
            if stage == last and loss is not None:
                output = loss(output)
            held[place] = x, output
        elif kind == "W":
            stage_backward_weight(module.parameters(), held.pop(place))
        else:
            x, output = held.pop(place)
            gradient = None if output.dim() == 0 else torch.full_like(output, 1e-3)
            if kind == "B" or not x.requires_grad:
                output.backward(gradient)
                groups: Any = []
            else:
                given = None if gradient is None else [gradient]
                _, groups = stage_backward_input([output], given, [x], module.parameters())
            if kind == "I":
                held[place] = groups
        times = spent["F" if kind == "F" else "B"]
        times[place] = times.get(place, 0.0) + time.perf_counter() - begin
    begin = time.perf_counter()
    update()
    updating = (time.perf_counter() - begin) / len(modules)
    forward, backward = (
        {stage: [t for (s, _), t in times.items() if s == stage] for stage in modules}
        for times in spent.values()
    )
    return Passes(forward, backward, {stage: [updating] for stage in modules}, math.nan)


# -- PETRA -----------------------------------------------------------------------------------------


class Clock:
    """The seconds that the backward pass and the update of one step take."""

    def __init__(self) -> None:
        self.backward = self.update = self._began = 0.0

    def begins(self, stage: int, action: Action) -> None:
        self._began = time.perf_counter()

    def ends(self, stage: int, action: Action, done: bool) -> None:
        spent = time.perf_counter() - self._began
        if action.op is Op.UPDATE:
            self.update += spent
        elif action.op in (Op.RECV_DY, Op.BACKWARD, Op.SEND_DX):
            self.backward += spent


class Unawaited:
    """A rank's transport whose receives return at once."""

    def __init__(self, transport: Any) -> None:
        self._transport, self.latest = transport, dict[Route, Message]()

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record the latest message of every route."""
        send, receive = self._transport.send, self._transport.receive

        def noted_send(route: Route, message: Message) -> Any:
            self.latest[route] = message
            return send(route, message)

        def noted_receive(route: Route, number: int | None = None, **how: Any) -> Message | None:
            message: Message | None = receive(route, number, **how)
            if message is not None:
                self.latest[route] = message
            return message

        self._transport.send, self._transport.receive = noted_send, noted_receive
        yield
        del self._transport.send, self._transport.receive

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Receive the message that has arrived, whatever its number, or else the recorded one."""
        transport = self._transport

        def receive(route: Route, number: int | None = None, **how: Any) -> Message:
            queue = transport.queues.get(route)
            message = queue.popleft().ready() if queue else self.latest[route]
            return replace(message, index=message.index if number is None else number)

        transport.receive = receive
        yield
        transport.wait_all_delivered()
        for queue in transport.queues.values():
            queue.clear()
        del transport.receive

    def message_time(self) -> float:
        transport, rank = self._transport, distributed.get_rank()

        def route(source: int, target: int) -> Route:
            return source, target, MessageKind.X if target > source else MessageKind.DY

        def send(peer: int) -> None:
            transport.send(route(rank, peer), self.latest[route(rank, peer)])

        def receive(peer: int) -> None:
            next_message(transport, route(peer, rank), "a message that is timed")

        return message_time(send, receive)


def time_petra(trainer: Any, batch: tuple[Tensor, Tensor], microbatches: int) -> Passes:
    """Time the passes of one update, with its messages; nothing is in flight afterwards.

    Each rank has one stage.
    """
    (executor,), (inputs, targets) = trainer._executors, batch
    unawaited = Unawaited(executor.transport)

    def step() -> None:
        trainer.step(inputs, targets)

    with unawaited.recording():
        step()
        trainer.flush()
    distributed.barrier()
    check = executor.stage._samples  # fails on outputs of other micro-batches
    tolerance, check._tolerance = check._tolerance, math.inf
    with unawaited.at_once():
        for _ in range(trainer._schedule.windows[0]):
            step()
        forward, backward, updates = list[float](), list[float](), list[float]()
        for _ in range(microbatches):
            executor.observer = clock = Clock()
            begin = time.perf_counter()
            step()
            # The host's work for a step counts as forward.
            forward.append(time.perf_counter() - begin - clock.backward - clock.update)
            backward.append(clock.backward)
            updates += [clock.update] if clock.update else []
        executor.observer = None
        trainer.flush()
    check._tolerance = tolerance
    message, stage = unawaited.message_time(), executor.index
    return Passes({stage: forward}, {stage: backward}, {stage: updates}, message)
