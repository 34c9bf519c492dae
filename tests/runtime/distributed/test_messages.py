"""Messages between ranks: what is sent arrives as it was, in as few packets as possible."""

import queue
import random
from collections.abc import Sequence
from typing import Any, Final, cast

import pytest
import torch
from helpers import FORMS, cases
from torch import Tensor

from revcompile.errors import InputError
from revcompile.runtime.distributed.channel import ReceiveThread, SendThread
from revcompile.runtime.distributed.wire import Describer
from revcompile.runtime.executor.messages import Message, MessageKind

CPU: Final = torch.device("cpu")


class Tape:
    """A channel to oneself, which records the sizes of what was sent."""

    device, uses_cuda = CPU, False

    def __init__(self) -> None:
        self.on_its_way: queue.Queue[Tensor] = queue.Queue()
        self.sizes: list[int] = []

    def use_own_stream(self, purpose: str) -> None:
        pass

    def exchange(self, packets: Sequence[Tensor], sends: bool) -> None:
        for packet in packets:
            if sends:
                self.sizes.append(len(packet))
                self.on_its_way.put(packet.clone())
            else:
                sent = self.on_its_way.get(timeout=60)
                assert len(packet) == len(sent), "both ends expect the same"
                packet.copy_(sent)


class Ends:
    """Both ends of a channel in one process."""

    def __init__(self) -> None:
        self.tape = cast(Any, Tape())
        self.arrivals: queue.Queue[Any] = queue.Queue()
        self.ends: list[str] = []
        self.failures: list[str] = []
        fail = self.failures.append
        self.sender = SendThread(self.tape, fail, notify=lambda: None, wait=fail)
        self.receiver = ReceiveThread(
            self.tape,
            lambda _, kind, message: self.arrivals.put((kind, message)),
            lambda _, cause: self.ends.append(cause),
            fail,
        )

    def passed(self, message: Message, kind: MessageKind = MessageKind.X) -> Any:
        """What arrives."""
        assert self.sender.send(kind, message) is None
        arrived, found = self.arrivals.get(timeout=60)
        assert arrived is kind
        return found.ready()

    def close(self, cause: str = "") -> None:
        self.sender.end(cause)
        assert self.sender.join(60) and self.receiver.join(60)
        assert (self.ends, self.failures) == ([cause], [])


def through_the_wire(message: Message) -> Any:
    ends = Ends()
    found = ends.passed(message)
    ends.close()
    return found


@pytest.mark.parametrize("form", FORMS)
def test_a_tensor_arrives_as_it_was(form: str) -> None:
    tensor = FORMS[form]
    found = through_the_wire(Message(3, {"x": tensor})).values["x"]
    assert torch.equal(found, tensor)
    assert (found.dtype, found.stride()) == (tensor.dtype, tensor.stride())


def values(index: int, rows: int = 4) -> Any:
    x = torch.full((rows, 5), float(index))
    return Message(index, {"x": x, "n": rows}, {"dx": x.double().t()})


def test_a_form_is_described_once() -> None:
    ends = Ends()
    packets = []
    for index in range(5):
        ends.tape.sizes.clear()
        ends.passed(values(index))
        packets.append(len(ends.tape.sizes))
    assert packets == [3, 2, 2, 2, 2]  # header, description, payload; then without description
    ends.close()


@pytest.mark.parametrize("seed", range(8))
def test_messages_in_any_order_arrive_as_they_were(seed: int) -> None:
    """Forms that change, lost micro-batches: both ends always agree."""
    draw, ends, kept = random.Random(seed), Ends(), []
    for index in range(60):
        kind = draw.choice((MessageKind.X, MessageKind.X, MessageKind.TIED_WEIGHT))
        sent = values(index, rows=draw.choice((4, 4, 4, 2)))
        if draw.random() < 0.1:
            lost = ends.passed(Message(index, void=True), kind)
            assert lost.void and lost.index == index and not lost.values
            continue
        kept.append((sent, ends.passed(sent, kind)))
        for expected, found in kept:  # also earlier ones: their memory was not used again
            assert found.index == expected.index and not found.void
            assert torch.equal(found.values["x"], expected.values["x"])
            assert torch.equal(found.gradients["dx"], expected.gradients["dx"])
            assert found.values["n"] == expected.values["n"]
        if len(kept) > 3:
            del kept[draw.randrange(4)]
    ends.close()


def test_what_is_no_tensor_arrives_too() -> None:
    ends = Ends()
    assert not ends.passed(Message(7, {"x": torch.ones(2)})).is_exact
    assert ends.passed(Message(8, {}, {"dx": torch.ones(2)}, is_exact=True)).is_exact
    assert ends.passed(Message(9, void=True)).void
    found = ends.passed(Message(10, {}, {"dx": torch.ones(2)}, found_inf=torch.ones(())))
    assert float(found.found_inf) == 1.0 and not found.void
    ends.close(cause="rank 1 stopped: ZeroDivisionError: some bug")


def test_a_message_that_was_not_received_is_missed() -> None:
    ends = Ends()
    ends.passed(values(0))
    ends.sender.sent += 1
    ends.sender.send(MessageKind.X, values(2))
    assert ends.receiver.join(60)
    assert ends.failures == ["VerificationError: message 2 came, not 1"]


def test_what_is_sent_may_be_written_to_at_once() -> None:
    ends, x = Ends(), torch.zeros(3)
    for index in range(5):
        ends.sender.send(MessageKind.X, Message(index, {"x": x}))
        x += 1
    arrived = [ends.arrivals.get(timeout=60)[1].ready().values["x"].tolist() for _ in range(5)]
    assert arrived == [[float(index)] * 3 for index in range(5)]
    ends.close()


def test_plain_values_arrive_as_they_were() -> None:
    values = {"n": 3, "size": torch.Size((2, 3)), "kind": torch.float16, "nothing": None}
    values |= {"device": CPU}
    values |= {"pair": (1.5, [True, "a"]), "both": (torch.ones(2), 1)}
    found = through_the_wire(Message(1, values, {"x": None, "y": torch.zeros(2)}))
    both = found.values.pop("both")
    assert torch.equal(both[0], torch.ones(2)) and both[1] == 1
    values.pop("both")
    assert found.values == values
    assert found.gradients["x"] is None and torch.equal(found.gradients["y"], torch.zeros(2))


@cases(
    "value, said",
    (torch.Generator(), "Generator"),
    (torch.eye(2).to_sparse(), "layout torch.sparse_coo"),
)
def test_a_value_that_cannot_be_sent_says_what_to_do(value: Any, said: str) -> None:
    with pytest.raises(InputError, match=rf"{said} crosses from one rank.*stage_to_rank="):
        Describer(CPU).describe(Message(0, {"g": value}))
