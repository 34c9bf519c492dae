"""Messages as bytes: what is sent arrives as it was, in as few packets as possible."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, Final, cast

import pytest
import torch
from torch import Tensor

from revcompile.errors import InputError
from revcompile.runtime.distributed import p2p
from revcompile.runtime.distributed.message_format import (
    Describer,
    Description,
    Flag,
    Header,
    Packing,
    TensorFormat,
    describe,
)
from revcompile.runtime.distributed.p2p import (
    Arrival,
    DeviceReceiver,
    DeviceSending,
    Outbound,
    PacketReceiver,
    PacketSender,
)
from revcompile.runtime.distributed.rank_weights import _as_bytes, _with_values
from revcompile.runtime.executor.captured.boundary import StaticMessage
from revcompile.runtime.executor.transport import Message, MessageKind, Packet

CPU: Final = torch.device("cpu")


def through_the_wire(message: Message) -> Any:
    text, tensors = describe(message, CPU)
    packing = Packing.of([form for form, _ in tensors])
    memory = torch.empty(packing.size, dtype=torch.uint8)
    packing.pack([tensor for _, tensor in tensors], memory)
    return Description(text).message(Header(MessageKind.X, message.index), memory, CPU)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(2, 3, 4),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(4, 6).t(),
        torch.randn(2, 8, 3).chunk(2, 1)[1],
        torch.randn(3, 1).expand(3, 5),
        torch.randn(6)[::2],
        torch.arange(7),
        torch.tensor(3.5, dtype=torch.float64),
        torch.randn(3).bfloat16(),
        torch.tensor([True, False]),
        torch.empty(0, 3),
        torch.randn(3, 4, dtype=torch.complex64),
        torch.randn(3, 4, dtype=torch.complex128).t(),
        torch.randn(3, 4, dtype=torch.complex64).conj(),
    ],
    ids=lambda t: f"{t.dtype}{list(t.shape)}{list(t.stride())}",
)
def test_a_tensor_arrives_as_it_was(tensor: Tensor) -> None:
    found = through_the_wire(Message(3, {"x": tensor})).values["x"]
    assert torch.equal(found, tensor)
    assert (found.dtype, found.stride()) == (tensor.dtype, tensor.stride())


class Tape:
    """A channel to oneself, which records what was sent."""

    device = CPU

    def __init__(self) -> None:
        self.on_its_way: list[tuple[int, Tensor]] = []
        self.sizes: list[int] = []

    def control_exchange(self, packet: Tensor, sends: bool, tag: int = 0) -> None:
        if sends:
            self.sizes.append(len(packet))
            self.on_its_way.append((tag, packet.clone()))
        else:
            self.post(packet, sends, tag).wait()

    def post(self, packet: Tensor, sends: bool, tag: int) -> Any:
        def wait(*_: Any) -> None:
            number, sent = self.on_its_way.pop(0)
            assert (number, len(packet)) == (tag, len(sent)), "both ends expect the same"
            packet.copy_(sent)

        return SimpleNamespace(wait=wait)


class Ends:
    """Both ends of a channel in one process."""

    def __init__(self, tags: int = 1) -> None:
        self.tape = cast(Any, Tape())
        self.senders = [PacketSender() for _ in range(tags)]
        self.receivers = [PacketReceiver(self.tape, tag) for tag in range(tags)]
        self.count = 0
        self.describers = {kind: Describer(CPU) for kind in MessageKind}
        self.known: dict[MessageKind, Description] = {}

    def passed(self, kind: MessageKind, message: Message) -> Any:
        """What arrives."""
        text, tensors, describer = b"", list[Any](), self.describers[kind]
        if not message.void:
            text, tensors = describer.describe(message)
        flags = Flag.VOID if message.void else Flag.DESCRIBED if text else Flag(0)
        header = Header(kind, message.index, flags, len(text))
        tag = self.count % len(self.senders)
        self.count += 1
        outbound = Outbound(header, text, tensors, None if message.void else describer.packing)
        for packet in self.senders[tag].packets(outbound)[0]():
            self.tape.control_exchange(packet, sends=True, tag=tag)
        for receiver in self.receivers:
            receiver.post()
        found = self.receivers[tag].header()
        assert (found.kind, found.index) == (kind, message.index)
        if found.length:
            text = torch.empty(found.length, dtype=torch.uint8)
            self.tape.control_exchange(text, sends=False, tag=tag)
            self.known[kind] = Description(bytes(text.tolist()))
        if found.flags & Flag.VOID:
            return Message(found.index, void=True)
        return self.receivers[tag].arrival(found, self.known[kind]).ready()


def values(index: int, rows: int = 4) -> Any:
    x = torch.full((rows, 5), float(index))
    return Message(index, {"x": x, "n": rows}, {"dx": x.double().t()})


def test_from_the_third_message_of_a_form_on_one_packet_is_all() -> None:
    ends = Ends()
    packets = []
    for index in range(5):
        ends.tape.sizes.clear()
        ends.passed(MessageKind.X, values(index))
        packets.append(len(ends.tape.sizes))
    assert packets == [3, 2, 1, 1, 1]  # header, description and tensors; header and tensors; one


@pytest.mark.parametrize("seed", range(8))
def test_messages_in_any_order_arrive_as_they_were(seed: int) -> None:
    """Forms that change, lost micro-batches, channels in turn: both ends always agree."""
    draw, ends, kept = random.Random(seed), Ends(tags=1 + seed % 4), []
    for index in range(60):
        kind = draw.choice((MessageKind.X, MessageKind.X, MessageKind.TIED_WEIGHT))
        sent = values(index, rows=draw.choice((4, 4, 4, 2)))
        if draw.random() < 0.1:
            assert ends.passed(kind, Message(index, void=True)).void
            continue
        kept.append((sent, ends.passed(kind, sent)))
        for expected, found in kept:  # also earlier ones: their memory was not used again
            assert torch.equal(found.values["x"], expected.values["x"])
            assert torch.equal(found.gradients["dx"], expected.gradients["dx"])
            assert found.values["n"] == expected.values["n"]
        if len(kept) > 3:
            del kept[draw.randrange(4)]
    assert sum(receiver.pool.allocations for receiver in ends.receivers) < 60


def test_tensors_of_one_packet_are_written_to_apart_from_each_other() -> None:
    ends = Ends()
    for index in range(3):
        found = ends.passed(MessageKind.X, values(index))
    version = found.gradients["dx"]._version
    found.values["x"].add_(1.0)
    assert found.gradients["dx"]._version == version
    assert torch.equal(found.gradients["dx"], values(2).gradients["dx"])


def test_repeated_elements_are_sent_once() -> None:
    form = TensorFormat.of(torch.zeros(4, 1).expand(4, 1000), CPU)
    assert form.numel == 4


def test_whoever_reads_a_message_waits_for_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a stream is not unequal to None, as before torch 2.15."""
    calls: list[str] = []

    class Stream:
        def __init__(self, number: int) -> None:
            self.stream_id = number

        def __ne__(self, other: object) -> bool:
            return False

    class Stub:
        def wait(self) -> None:
            calls.append("wait")

        def record_stream(self, stream: Stream) -> None:
            calls.append(f"used by {stream.stream_id}")

    arrival = Arrival(MessageKind.X, Message(0), Stub(), cast(Any, Stub()))
    for number in (0, 0, 7):
        monkeypatch.setattr(p2p, "current_stream", lambda _, n=number: Stream(n))
        arrival.ready()
    assert calls == ["wait", "used by 0", "wait", "used by 7"]


def test_a_message_is_sent_after_what_computes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is free when the thread has enqueued the send, and the device is done with it."""
    calls: list[str] = []

    class Stub:
        device, target = CPU, 1

        def record(self, stream: Stub) -> None:
            calls.append("computed")

        def wait_event(self, event: Stub) -> None:
            calls.append("after that")

        def exchange(self, memory: torch.Tensor, sends: bool) -> Stub:
            calls.append("send")
            return self

        def wait(self) -> None:
            calls.append("wait")

    def thread(what: str) -> None:
        assert "to stage 1" in what
        sending.enqueue()

    monkeypatch.setattr(p2p, "current_stream", lambda *_: Stub())
    stub, memory = cast(Any, Stub()), torch.zeros(2)
    sending = DeviceSending(stub, memory, stub, lambda: calls.append("notify"), thread)
    sending.wait()
    sending.wait()
    assert calls == ["computed", "after that", "send", "notify", "wait", "wait"]


def test_memory_that_was_copied_from_is_received_into_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the device after the copy; memory of another size is not."""
    calls: list[str] = []

    class Stub:
        device = CPU

        def record(self, stream: Stub) -> None:
            calls.append("copied")

        def wait_event(self, event: Stub) -> None:
            calls.append("after that")

        def exchange(self, memory: torch.Tensor, sends: bool) -> None:
            calls.append("receive")

    monkeypatch.setattr(p2p, "current_stream", lambda *_: Stub())
    monkeypatch.setattr(torch.cuda, "Event", Stub)
    receiver = DeviceReceiver(cast(Any, Stub()))

    def arrived(size: int) -> Packet:
        description = Description(describe(Message(0, {"x": torch.zeros(size)}), CPU)[0])
        packet = receiver.arrival(Header(MessageKind.X, 0), description).message.packet
        assert packet is not None and packet.release is not None
        return packet

    first, second = arrived(3), arrived(3)
    assert first.memory.data_ptr() != second.memory.data_ptr()
    buffers = StaticMessage(Message(0, {"x": torch.zeros(3)}))
    buffers.copy_if_alike(Message(0, packet=first))
    third = arrived(3)
    assert third.memory is not first.memory  # the device may be busy with it
    buffers.copy_if_alike(Message(0, packet=third))
    assert arrived(3).memory is first.memory
    assert second.release is not None
    second.release()
    assert arrived(500).memory is not third.memory
    assert calls.count("receive") == 5 and calls.count("copied") == 3
    assert calls.count("after that") == 1 and calls.index("after that") > calls.index("copied")


def test_plain_values_arrive_as_they_were() -> None:
    values = {"n": 3, "size": torch.Size((2, 3)), "kind": torch.float16, "nothing": None}
    values |= {"pair": (1.5, [True, "a"]), "both": (torch.ones(2), 1)}
    found = through_the_wire(Message(1, values, {"x": None, "y": torch.zeros(2)}))
    both = found.values.pop("both")
    assert torch.equal(both[0], torch.ones(2)) and both[1] == 1
    values.pop("both")
    assert found.values == values
    assert found.gradients["x"] is None and torch.equal(found.gradients["y"], torch.zeros(2))


def test_a_value_that_cannot_be_sent_says_what_to_do() -> None:
    with pytest.raises(InputError, match=r"Generator crosses from one rank.*stage_to_rank="):
        describe(Message(0, {"g": torch.Generator()}), CPU)


@pytest.mark.parametrize("shape", [(4, 3, 1, 1), (4, 3, 2, 2), ()])
def test_a_rank_s_own_weights_stay_as_they_are(shape: tuple[int, ...]) -> None:
    """Whatever their strides: kernels of one pixel have several that are contiguous."""
    weight = torch.randn(shape)
    if len(shape) == 4:
        weight = weight.to(memory_format=torch.channels_last)
    values, device = weight.clone(), weight.device
    kept = _with_values(weight, _as_bytes(weight, device, has_values=True), device)
    assert kept is weight and torch.equal(kept, values)
