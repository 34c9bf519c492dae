"""schedule: complete action lists, delays, and dry runs of every method."""

import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator

import pytest
from helpers import cases, refuses

from revcompile.errors import InputError
from revcompile.schedule import (
    METHODS,
    Action,
    Costs,
    Keep,
    Method,
    Op,
    Order,
    Schedule,
    ScheduleError,
    Tie,
    Weights,
    actions,
    choose,
    delay,
    dry_run,
    generate,
    window,
)

Lists = tuple[tuple[Action, ...], ...]

LOCKED = """
F0 SY0 RDY0 B0 U0 F1 SY1 RDY1 B1 U1 F2 SY2 RDY2 B2 U2 F3 SY3 RDY3 B3 U3 F4 SY4 RDY4 B4 U4
RX0 F0 SY0 RDY0 B0 SDX0 U0 RX1 F1 SY1 RDY1 B1 SDX1 U1 RX2 F2 SY2 RDY2 B2 SDX2 U2 \
RX3 F3 SY3 RDY3 B3 SDX3 U3 RX4 F4 SY4 RDY4 B4 SDX4 U4
RX0 F0 B0 SDX0 U0 RX1 F1 B1 SDX1 U1 RX2 F2 B2 SDX2 U2 RX3 F3 B3 SDX3 U3 RX4 F4 B4 SDX4 U4
"""
LOCKED_3 = """
F0 SY0 RDY0 B0 F1 SY1 RDY1 B1 F2 SY2 RDY2 B2 U0 F3 SY3 RDY3 B3 F4 SY4 RDY4 B4 U1
RX0 F0 SY0 RDY0 B0 SDX0 RX1 F1 SY1 RDY1 B1 SDX1 RX2 F2 SY2 RDY2 B2 SDX2 U0 \
RX3 F3 SY3 RDY3 B3 SDX3 RX4 F4 SY4 RDY4 B4 SDX4 U1
RX0 F0 B0 SDX0 RX1 F1 B1 SDX1 RX2 F2 B2 SDX2 U0 RX3 F3 B3 SDX3 RX4 F4 B4 SDX4 U1
"""
GPIPE_3 = """
F0 SY0 F1 SY1 F2 SY2 RDY0 B0 RDY1 B1 RDY2 B2 U0 F3 SY3 F4 SY4 RDY3 B3 RDY4 B4 U1
RX0 F0 SY0 RX1 F1 SY1 RX2 F2 SY2 RDY0 B0 SDX0 RDY1 B1 SDX1 RDY2 B2 SDX2 U0 \
RX3 F3 SY3 RX4 F4 SY4 RDY3 B3 SDX3 RDY4 B4 SDX4 U1
RX0 F0 RX1 F1 RX2 F2 B0 SDX0 B1 SDX1 B2 SDX2 U0 RX3 F3 RX4 F4 B3 SDX3 B4 SDX4 U1
"""
ONE_F_ONE_B_3 = """
F0 SY0 F1 SY1 F2 SY2 RDY0 B0 RDY1 B1 RDY2 B2 U0 F3 SY3 F4 SY4 RDY3 B3 RDY4 B4 U1
RX0 F0 SY0 RX1 F1 SY1 RDY0 B0 SDX0 RX2 F2 SY2 RDY1 B1 SDX1 RDY2 B2 SDX2 U0 \
RX3 F3 SY3 RX4 F4 SY4 RDY3 B3 SDX3 RDY4 B4 SDX4 U1
RX0 F0 B0 SDX0 RX1 F1 B1 SDX1 RX2 F2 B2 SDX2 U0 RX3 F3 B3 SDX3 RX4 F4 B4 SDX4 U1
"""
NEVER_DRAINED = """
F0 SY0 F1 SY1 F2 SY2 RDY0 B0 U0 F3 SY3 RDY1 B1 U1 F4 SY4 RDY2 B2 U2 RDY3 B3 U3 RDY4 B4 U4
RX0 F0 SY0 RX1 F1 SY1 RDY0 B0 SDX0 U0 RX2 F2 SY2 RDY1 B1 SDX1 U1 \
RX3 F3 SY3 RDY2 B2 SDX2 U2 RX4 F4 SY4 RDY3 B3 SDX3 U3 RDY4 B4 SDX4 U4
RX0 F0 B0 SDX0 U0 RX1 F1 B1 SDX1 U1 RX2 F2 B2 SDX2 U2 RX3 F3 B3 SDX3 U3 RX4 F4 B4 SDX4 U4
"""
NEVER_DRAINED_3 = """
F0 SY0 F1 SY1 F2 SY2 RDY0 B0 F3 SY3 RDY1 B1 F4 SY4 RDY2 B2 U0 RDY3 B3 RDY4 B4 U1
RX0 F0 SY0 RX1 F1 SY1 RDY0 B0 SDX0 RX2 F2 SY2 RDY1 B1 SDX1 \
RX3 F3 SY3 RDY2 B2 SDX2 U0 RX4 F4 SY4 RDY3 B3 SDX3 RDY4 B4 SDX4 U1
RX0 F0 B0 SDX0 RX1 F1 B1 SDX1 RX2 F2 B2 SDX2 U0 RX3 F3 B3 SDX3 RX4 F4 B4 SDX4 U1
"""
PAPER = """
F0 SY0 F1 SY1 F2 SY2 F3 SY3 F4 SY4 RDY0 B0 U0 RDY1 B1 U1 RDY2 B2 U2 RDY3 B3 U3 RDY4 B4 U4
RX0 F0 SY0 RX1 F1 SY1 RX2 F2 SY2 RDY0 B0 SDX0 U0 RX3 F3 SY3 RDY1 B1 SDX1 U1 \
RX4 F4 SY4 RDY2 B2 SDX2 U2 RDY3 B3 SDX3 U3 RDY4 B4 SDX4 U4
RX0 F0 B0 SDX0 U0 RX1 F1 B1 SDX1 U1 RX2 F2 B2 SDX2 U2 RX3 F3 B3 SDX3 U3 RX4 F4 B4 SDX4 U4
"""
PAPER_3 = """
F0 SY0 F1 SY1 F2 SY2 F3 SY3 F4 SY4 RDY0 B0 RDY1 B1 RDY2 B2 U0 RDY3 B3 RDY4 B4 U1
RX0 F0 SY0 RX1 F1 SY1 RX2 F2 SY2 RDY0 B0 SDX0 RX3 F3 SY3 RDY1 B1 SDX1 \
RX4 F4 SY4 RDY2 B2 SDX2 U0 RDY3 B3 SDX3 RDY4 B4 SDX4 U1
RX0 F0 B0 SDX0 RX1 F1 B1 SDX1 RX2 F2 B2 SDX2 U0 RX3 F3 B3 SDX3 RX4 F4 B4 SDX4 U1
"""
DNI = """
F0 SY0 B0 U0 F1 SY1 RDY0 T0 B1 U1 F2 SY2 RDY1 T1 B2 U2 F3 SY3 RDY2 T2 B3 U3 \
F4 SY4 RDY3 T3 B4 U4 RDY4 T4
RX0 F0 SY0 B0 SDX0 U0 RX1 F1 SY1 RDY0 T0 B1 SDX1 U1 RX2 F2 SY2 RDY1 T1 B2 SDX2 U2 \
RX3 F3 SY3 RDY2 T2 B3 SDX3 U3 RX4 F4 SY4 RDY3 T3 B4 SDX4 U4 RDY4 T4
RX0 F0 B0 SDX0 U0 RX1 F1 B1 SDX1 U1 RX2 F2 B2 SDX2 U2 RX3 F3 B3 SDX3 U3 RX4 F4 B4 SDX4 U4
"""
DNI_3 = """
F0 SY0 B0 F1 SY1 RDY0 T0 B1 F2 SY2 RDY1 T1 B2 U0 F3 SY3 RDY2 T2 B3 F4 SY4 RDY3 T3 B4 RDY4 T4 U1
RX0 F0 SY0 B0 SDX0 RX1 F1 SY1 RDY0 T0 B1 SDX1 RX2 F2 SY2 RDY1 T1 B2 SDX2 U0 \
RX3 F3 SY3 RDY2 T2 B3 SDX3 RX4 F4 SY4 RDY3 T3 B4 SDX4 RDY4 T4 U1
RX0 F0 B0 SDX0 RX1 F1 B1 SDX1 RX2 F2 B2 SDX2 U0 RX3 F3 B3 SDX3 RX4 F4 B4 SDX4 U1
"""
WHOLE = {
    "backprop": (LOCKED, LOCKED_3),
    "reversible_backprop": (LOCKED, LOCKED_3),
    "gpipe": (LOCKED, GPIPE_3),  # a group of one is locked
    "1f1b": (LOCKED, ONE_F_ONE_B_3),
    "pipedream": (NEVER_DRAINED, NEVER_DRAINED_3),
    "ddg": (NEVER_DRAINED, NEVER_DRAINED_3),
    "features_replay": (NEVER_DRAINED, NEVER_DRAINED_3),
    "delayed": (PAPER, PAPER_3),
    "dsp": (PAPER, PAPER_3),
    "petra": (NEVER_DRAINED, NEVER_DRAINED_3),
    "petra_stashed": (NEVER_DRAINED, NEVER_DRAINED_3),
    "dni": (DNI, DNI_3),
}
PETRA_TIED = """
F0 SY0 F1 SY1 RDY0 B0 RTG0<1 U0 STW0>1 F2 SY2 RDY1 B1 RTG1<1 U1 STW1>1 RDY2 B2 RTG2<1 U2 STW2>1
RX0 F0 B0 SDX0 STG0>0 U0 RX1 F1 B1 SDX1 STG1>0 U1 RTW0<0 RX2 F2 B2 SDX2 STG2>0 U2 RTW1<0 RTW2<0
"""


def text(lists: Lists) -> str:
    return "\n" + "".join(" ".join(map(str, stage)) + "\n" for stage in lists)


def parse(lists: str) -> Lists:
    return tuple(tuple(map(Action.parse, line.split())) for line in lists.strip().splitlines())


def steps(schedule: Schedule, microbatches: int) -> Lists:
    """Injected one by one, then drained, put together."""
    found = [schedule.inject() for _ in range(microbatches)] + [schedule.drain()]
    return tuple(tuple(itertools.chain(*stage)) for stage in zip(*found, strict=True))


def indices(stage: tuple[Action, ...], op: Op) -> list[int]:
    return [action.index for action in stage if action.op is op]


def between(stage: tuple[Action, ...], microbatch: int) -> list[Op]:
    """What a stage does between forward and backward of one micro-batch."""
    start = stage.index(Action(Op.FORWARD, microbatch))
    return [a.op for a in stage[start : stage.index(Action(Op.BACKWARD, microbatch))]]


def test_the_table_above_the_generator_is_what_it_generates() -> None:
    schedule = Schedule("petra", stages=3)
    expected = [*(schedule.inject() for _ in range(4)), schedule.drain()]
    shown = re.findall(r"^    (?:\d|drain)  +(.*)$", generate.__doc__ or "", re.MULTILINE)
    for step, line in zip(expected, shown, strict=True):
        assert re.split(r"  +", line) == [" ".join(map(str, stage)) for stage in step if stage]


@pytest.mark.parametrize("name", METHODS)
def test_the_whole_list_of_every_stage(name: str) -> None:
    each, every_third = WHOLE[name]
    assert text(actions(name, stages=3, microbatches=5)) == each
    assert text(actions(name, stages=3, microbatches=5, accumulation_steps=3)) == every_third


def test_petra_in_the_papers_order() -> None:
    assert text(actions(choose("petra", in_flight_per_stage=2), 3, 5)) == PAPER
    assert text(actions(choose("dsp", in_flight_per_stage=1), 3, 5)) == NEVER_DRAINED


def test_tied_parameters_travel_at_updates() -> None:
    assert text(actions("petra", 2, 3, ties=[Tie(0, 1)])) == PETRA_TIED


FACTOR = dict.fromkeys(METHODS, 0) | {
    "pipedream": 1,
    "ddg": 1,
    "features_replay": 1,
    "petra": 1,
    "petra_stashed": 1,
    "delayed": 2,
    "dsp": 2,
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("stages", [1, 2, 5, 18])
def test_delays_of_the_table_are_those_of_the_lists(name: str, stages: int) -> None:
    method = METHODS[name]
    lists = actions(method, stages, 4 * stages)
    for stage, listed in enumerate(lists):
        expected = FACTOR[name] * (stages - 1 - stage)
        assert delay(method, stages, stage) == expected
        # From 2J on micro-batches meet a full pipeline, and a drain changes nothing any more.
        updates = {between(listed, m).count(Op.UPDATE) for m in range(2 * stages, 4 * stages)}
        assert updates == {expected}


@pytest.mark.parametrize("in_flight_per_stage", [1.0, 1.5, 2.0])
@pytest.mark.parametrize("accumulation_steps", [1, 2, 3, 8])
def test_delay_counts_updates(in_flight_per_stage: float, accumulation_steps: int) -> None:
    method = choose("petra", in_flight_per_stage=in_flight_per_stage)
    lists = actions(method, 6, 60, accumulation_steps)
    for stage, listed in enumerate(lists):
        seen = max(between(listed, m).count(Op.UPDATE) for m in range(12, 60))
        assert seen == delay(method, 6, stage, accumulation_steps)


def test_windows() -> None:
    def windows(method: Method, group: int = 1) -> list[int]:
        return [window(method, 4, stage, group) for stage in range(4)]

    assert windows(choose("petra")) == [4, 3, 2, 1]
    assert windows(choose("petra", in_flight_per_stage=2)) == [7, 5, 3, 1]
    assert windows(choose("petra", in_flight_per_stage=1.5)) == [6, 4, 3, 1]
    assert windows(choose("backprop"), 3) == [1, 1, 1, 1]
    assert windows(choose("dni"), 3) == [1, 1, 1, 1]
    assert windows(choose("gpipe"), 3) == [3, 3, 3, 3]
    assert windows(choose("1f1b"), 3) == [3, 3, 2, 1]
    assert 1.1 * 50 > 55, "in floating point"
    assert window(choose("petra", in_flight_per_stage=1.1), 51, 0) == 56


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("accumulation_steps", [1, 3, 7])
def test_no_stage_has_more_in_flight_than_its_window(name: str, accumulation_steps: int) -> None:
    for stages in (1, 4):
        lists = actions(name, stages, 20, accumulation_steps)
        windows = [
            window(METHODS[name], stages, stage, accumulation_steps) for stage in range(stages)
        ]
        assert [most_in_flight(stage) for stage in lists] == windows


def most_in_flight(listed: Iterable[Action]) -> int:
    changes = ((a.op is Op.FORWARD) - (a.op is Op.BACKWARD) for a in listed)
    return max(itertools.accumulate(changes))


def tied(stages: int) -> Iterator[list[Tie]]:
    """No ties, ends tied, all tied to the first, a stage that is owner and holder."""
    yield []
    if stages > 1:
        yield [Tie(0, stages - 1)]
        yield [Tie(0, stage) for stage in range(1, stages)]
        yield [Tie(stage, stage + 1) for stage in range(stages - 1)]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("accumulation_steps", [1, 3])
@pytest.mark.parametrize("stages", range(1, 7))
def test_every_schedule_comes_to_its_end(name: str, accumulation_steps: int, stages: int) -> None:
    for microbatches, ties in itertools.product(range(8), tied(stages)):
        lists = actions(name, stages, microbatches, accumulation_steps, ties)
        dry_run(lists, Costs.uniform(stages, link=1))
        for listed in lists:
            assert indices(listed, Op.FORWARD) == list(range(microbatches))
            assert indices(listed, Op.BACKWARD) == list(range(microbatches))
            updates = math.ceil(microbatches / accumulation_steps)
            assert indices(listed, Op.UPDATE) == list(range(updates))


@pytest.mark.parametrize("accumulation_steps", [1, 2, 3])
@pytest.mark.parametrize("name", ["petra", "dsp", "backprop"])
def test_tied_messages_that_wait_are_not_received(name: str, accumulation_steps: int) -> None:
    """Between any two steps, as their lists have it; the pipeline is drained after some of them."""
    ties = [Tie(0, 1), Tie(0, 2), Tie(1, 2)]
    for drained in range(12):
        schedule = Schedule(name, 3, accumulation_steps, ties)
        waiting: dict[tuple[int, int], list[int]] = {}
        for number in range(24):
            step = schedule.drain() if number == drained else schedule.inject()
            listed = [(stage, a, a.peer or 0) for stage, todo in enumerate(step) for a in todo]
            for stage, action, peer in listed:
                if action.op in (Op.SEND_TIED_GRAD, Op.SEND_TIED_WEIGHT):
                    waiting.setdefault((stage, peer), []).append(action.index)
            for stage, action, peer in listed:
                if action.op in (Op.RECV_TIED_GRAD, Op.RECV_TIED_WEIGHT):
                    waiting[peer, stage].remove(action.index)
            for tie in ties:
                for route in ((tie.owner, tie.holder), (tie.holder, tie.owner)):
                    assert list(schedule.waiting_tied(*route)) == waiting.get(route, [])


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("accumulation_steps", [1, 3])
def test_a_microbatch_meets_one_tied_version(name: str, accumulation_steps: int) -> None:
    owner, *_, holder = actions(name, 4, 20, accumulation_steps, [Tie(0, 3)])
    for m in range(20):
        forward = Action(Op.FORWARD, m)
        updated = indices(owner[: owner.index(forward)], Op.UPDATE)
        received = indices(holder[: holder.index(forward)], Op.RECV_TIED_WEIGHT)
        assert updated == received
    assert indices(holder, Op.RECV_TIED_WEIGHT) == indices(owner, Op.UPDATE)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("ties", [[], [Tie(0, 2)]], ids=["untied", "tied"])
def test_a_drained_pipeline_starts_again_at_its_numbers(name: str, ties: list[Tie]) -> None:
    schedule = Schedule(name, stages=3, accumulation_steps=2, ties=ties)
    steps(schedule, 5)
    assert schedule.injected == 5
    assert schedule.outstanding == ((), (), ())
    assert schedule.accumulated == (0, 0, 0)
    assert schedule.updates == (3, 3, 3)
    assert schedule.drain() == ((), (), ())

    again = steps(schedule, 5)
    dry_run(again, Costs.uniform(3))
    shift = dict.fromkeys(Op, 5) | {op: 3 for op in Op if op is Op.UPDATE or "tied" in op.value}
    first = actions(name, 3, 5, 2, ties)
    moved = [[Action(a.op, a.index + shift[a.op], a.peer) for a in stage] for stage in first]
    assert list(map(list, again)) == moved


def test_what_is_in_flight_can_be_read() -> None:
    schedule = Schedule("petra", stages=3, accumulation_steps=2)
    for _ in range(4):
        schedule.inject()
    assert schedule.injected == 4
    assert schedule.outstanding == ((2, 3), (3,), ())
    assert schedule.accumulated == (0, 1, 0)
    assert schedule.updates == (1, 1, 2)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("ties", [[], [Tie(0, 2)]], ids=["untied", "tied"])
def test_idle_means_a_drain_does_nothing(name: str, ties: list[Tie]) -> None:
    schedule = Schedule(name, stages=3, accumulation_steps=2, ties=ties)
    assert schedule.idle
    for _ in range(6):
        schedule.inject()
        assert schedule.idle == (not any(schedule.copy().drain()))
    schedule.drain()
    assert schedule.idle


@pytest.mark.parametrize("name", METHODS)
def test_a_saved_schedule_goes_on_as_if_never_saved(name: str) -> None:
    for before in range(7):
        schedule = Schedule(name, 4, accumulation_steps=3, ties=[Tie(0, 3), Tie(1, 2)])
        for _ in range(before):
            schedule.inject()
        state = json.loads(json.dumps(schedule.state()))
        loaded, copied = Schedule.load(state), schedule.copy()
        expected = steps(schedule, 5)
        assert steps(loaded, 5) == expected
        assert loaded.state() == schedule.state() != state
        assert steps(Schedule.load(state), 5) == expected, "loading must not use up the state"
        assert steps(copied, 5) == expected


def test_actions_round_trip_as_strings() -> None:
    for op in Op:
        action = Action(op, 12, 3 if "tied" in op.value else None)
        assert Action.parse(str(action)) == action
    assert len({str(Action(op, 0, 1 if "tied" in op.value else None)) for op in Op}) == len(Op)


@pytest.mark.parametrize("wrong", ["", "F", "3", "X3", "F3>1", "STG0", "STG0<1", "RTW0>1", "f3"])
def test_a_misspelt_action_is_refused(wrong: str) -> None:
    refuses(InputError, "is no action; examples: F3", Action.parse, wrong)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("accumulation_steps", [1, 3])
def test_no_action_can_be_left_out(name: str, accumulation_steps: int) -> None:
    lists = actions(name, 3, 4, accumulation_steps, [Tie(0, 2)])
    for stage, listed in enumerate(lists):
        for at in range(len(listed)):
            shorter = (*lists[:stage], listed[:at] + listed[at + 1 :], *lists[stage + 1 :])
            refuses(ScheduleError, r"stage \d", dry_run, shorter, Costs.uniform(3))


def test_stages_that_wait_for_each_other_are_shown() -> None:
    lists = parse("F0 SY0 RDY0 B0 U0\n RX0 F0 RDY0 SY0 B0 SDX0 U0\n RX0 F0 B0 SDX0 U0")
    with pytest.raises(ScheduleError) as caught:
        dry_run(lists, Costs.uniform(3))
    assert str(caught.value).splitlines() == [
        "stages wait for each other:",
        "  stage 0: F0 SY0 RDY0 <-- waits for SDX0 of stage 1 (then B0 U0)",
        "  stage 1: RX0 F0 RDY0 <-- waits for SDX0 of stage 2 (then SY0 B0 SDX0 U0)",
        "  stage 2: RX0 <-- waits for SY0 of stage 1 (then F0 B0 SDX0 U0)",
    ]


@cases(
    "first, second, message",
    ("F0 RDY0 B0 U0", "RX0 F0 B0 SDX0 U0", "stage 1: RX0 <-- waits for SY0 of stage 0"),
    ("F0 SY0 B0 U0", "RX0 F0 B0 SDX0 U0", "stage 0: F0 SY0 B0 <-- needs RDY0 first"),
    ("F0 SY0 RDY0 B0 U0", "F0 RX0 B0 SDX0 U0", "stage 1: F0 <-- needs RX0 first"),
    ("F0 SY0 RDY0 B0 U0", "RX0 B0 F0 SDX0 U0", "stage 1: RX0 B0 <-- needs F0 first"),
    ("F0 SY0 RDY0 B0 U0", "RX0 F0 SDX0 B0 U0", "stage 1: RX0 F0 SDX0 <-- needs B0 first"),
    ("SY0 F0 RDY0 B0 U0", "RX0 F0 B0 SDX0 U0", "stage 0: SY0 <-- needs F0 first"),
    ("F0 SY0 RDY0 B0 U0", "RX1 F1 B1 SDX1 U0", "RX1 <-- gets SY0 of stage 0 instead"),
    ("F0 SY0 RDY0 B0 U0", "RX0 F0 B0 SDX0 U0 SY0", "SY0 <-- there is no stage 2"),
    ("F0 SY0 RDY0 B0 B0 U0", "RX0 F0 B0 SDX0 U0", "B0 <-- is done already"),
    ("F0 SY0 RDY0 U0", "RX0 F0 B0 SDX0 U0", "ends here, but B0 is missing"),
    ("F0 SY0 RDY0 B0", "RX0 F0 B0 SDX0", "its last gradients are in no update"),
    ("F0 SY0 RDY0 B0 U1", "RX0 F0 B0 SDX0 U0", "stage 0 never does U0, stage 1 does"),
    ("F0 SY0 RDY0 B0 U0", "RX0 F0 B0 SDX0 U1", "stage 1 never does U0, stage 0 does"),
    ("F0 SY0 RDY0 B0 U0", "RX0 F0 B0 SDX0 STG0>0 U0", "sends STG0 to stage 0, which never"),
    ("F0 SY0 RDY0 B0 U0 RTG0<1", "RX0 F0 B0 SDX0 STG0>0 U0", "comes too late, after U0"),
    ("F0 SY0 RDY0 B0 STW0>1 U0", "RX0 F0 B0 SDX0 U0 RTW0<0", "STW0>1 <-- needs U0 first"),
)
def test_a_wrong_list_is_refused_where_it_is_wrong(first: str, second: str, message: str) -> None:
    refuses(ScheduleError, message, dry_run, parse(f"{first}\n{second}"), Costs.uniform(2))


def test_petra_has_no_bubbles_and_backprop_nothing_else() -> None:
    stages, microbatches = 5, 400
    costs = Costs.uniform(stages)

    def efficiency(name: str, accumulation_steps: int = 1) -> float:
        spans = dry_run(actions(name, stages, microbatches, accumulation_steps), costs)
        return 4 * microbatches / max(span.end for span in spans)

    assert efficiency("petra") == pytest.approx(microbatches / (microbatches + stages - 1))
    assert efficiency("backprop") == pytest.approx(1 / stages)
    assert efficiency("gpipe", 8) == pytest.approx(8 / (8 + stages - 1))
    assert efficiency("1f1b", 8) == pytest.approx(8 / (8 + stages - 1))


def test_time_waits_for_links_and_for_the_slowest_stage() -> None:
    costs = Costs((1, 2), (3, 4), (0.5, 0.25), link_forward=(10,), link_backward=(20,))
    spans = dry_run(actions("backprop", 2, 1), costs)
    ends = {f"{span.stage}:{span.action}": span.end for span in spans}
    assert ends["0:SY0"] == 1
    assert ends["1:RX0"] == 11
    assert ends["1:B0"] == 17
    assert ends["0:RDY0"] == 37
    assert ends["0:U0"] == max(ends.values()) == 40.5


@pytest.mark.parametrize("accumulation_steps", [1, 3])
def test_a_full_pipeline_advances_as_by_injecting(accumulation_steps: int) -> None:
    ties = [Tie(0, 2), Tie(1, 3)]
    injected = Schedule(choose("petra", in_flight_per_stage=2), 4, accumulation_steps, ties)
    for _ in range(window(injected.method, 4, 0, accumulation_steps)):
        injected.inject()
    advanced = injected.copy()
    for _ in range(7):
        injected.inject()
        advanced.advance()
        assert advanced.state() == injected.state()


@pytest.mark.parametrize("in_flight_per_stage", [0.99, 0, -1, math.inf, math.nan])
def test_a_pipeline_that_would_stall_is_refused(in_flight_per_stage: float) -> None:
    with pytest.raises(InputError, match="use in_flight_per_stage >= 1"):
        choose("petra", in_flight_per_stage=in_flight_per_stage)
    with pytest.raises(InputError, match="use in_flight_per_stage >= 1"):
        Method("mine", Order.CONTINUOUS, in_flight_per_stage, Keep.GRAPH, Weights.LATEST)


def test_sizes_are_checked() -> None:
    refuses(InputError, "stages=0", Schedule, "petra", 0)
    refuses(InputError, "accumulation_steps=0", Schedule, "petra", 1, accumulation_steps=0)
