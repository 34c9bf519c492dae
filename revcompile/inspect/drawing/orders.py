"""A stage's action list, in few lines: rounds of the same kind are said once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from revcompile.schedule import Action, Method, Schedule, Tie, window

__all__ = ["Rounds", "action_rounds"]

_FULL: Final = 3
"""Rounds to show once the pipeline is full."""
_ENDS: Final = 12
"""Actions to show at either end of a long list."""


@dataclass(frozen=True)
class Rounds:
    """Rounds in a row that do the same with one micro-batch after the other."""

    count: int
    first: str
    last: str


def action_rounds(
    method: Method, stages: int, ties: Iterable[Tie] = ()
) -> tuple[tuple[Rounds, ...], ...]:
    """For every stage: filling the pipeline, some rounds at full speed, draining it.

    >>> from revcompile.schedule import choose
    >>> for rounds in action_rounds(choose("petra"), 2)[0]:
    ...     print(rounds.count, rounds.first, "...", rounds.last)
    1 F0 SY0 ... F0 SY0
    3 F1 SY1 RDY0 B0 U0 ... F3 SY3 RDY2 B2 U2
    1 RDY3 B3 U3 ... RDY3 B3 U3
    """
    schedule = Schedule(method, stages, ties=ties)
    played = [schedule.inject() for _ in range(window(method, stages, 0) - 1 + _FULL)]
    played.append(schedule.drain())
    return tuple(
        _together([played_round[stage] for played_round in played]) for stage in range(stages)
    )


def _together(rounds: Sequence[Sequence[Action]]) -> tuple[Rounds, ...]:
    found: list[Rounds] = []
    last: object = None
    for actions in rounds:
        kind = [(action.op, action.peer) for action in actions]
        said = " ".join(_shortened([str(action) for action in actions]))
        if not actions:
            continue
        if kind == last:
            found[-1] = Rounds(found[-1].count + 1, found[-1].first, said)
        else:
            found.append(Rounds(1, said, said))
        last = kind
    return tuple(found)


def _shortened(names: list[str]) -> list[str]:
    return names if len(names) <= 2 * _ENDS else [*names[:_ENDS], "…", *names[-_ENDS:]]
