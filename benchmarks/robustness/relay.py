"""A cable between two network namespaces, in user space: rate, latency, jitter, cuts and resets.

    python benchmarks/robustness/relay.py CONTROL 10.77.0.1 10.77.0.2 RATE LATENCY JITTER

The namespaces are this process's, which prints the numbers of their descriptors: others join them
by `/proc/PID/fd/NUMBER`, and they are gone when nobody is left. Each has a TUN device, and every IP
packet goes through this process. Lines of the pipe CONTROL say what happens: `cut` and `join` the
link; `reset PORT` (the next TCP segments with data, one of each connection but those of this port,
become resets); `link RATE LATENCY JITTER` (bytes a second, seconds) is another link beside those
before, for connections that begin from now on: a connection's link stays what it was, because TCP
learns from it. Needs root and Linux, no other program.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import random
import select
import socket
import struct
import sys
import time
from collections import deque
from dataclasses import dataclass
from typing import Final

MTU: Final = 60_000
"""Large packets: fewer of them, for what Python can carry."""
DEVICE: Final = "rc0"
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI, _CLONE_NEWNET = 0x400454CA, 0x0001, 0x1000, 0x40000000
_SIOCSIFFLAGS, _SIOCSIFADDR, _SIOCSIFNETMASK = 0x8914, 0x8916, 0x891C
_SIOCSIFMTU, _SIOCSIFTXQLEN, _UP = 0x8922, 0x8943, 0x41
_QUEUE: Final = 8 << 20
"""Bytes that wait for the link in one direction; more are lost, as in a switch."""
_TCP, _SYN, _RST, _ACK = 6, 0x02, 0x04, 0x10


def open_namespace(address: str) -> tuple[int, int]:
    """A new namespace, and a TUN device in it with this address: their descriptors."""
    libc = ctypes.CDLL(None, use_errno=True)
    own = os.open("/proc/self/ns/net", os.O_RDONLY)
    if libc.unshare(_CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare")
    try:
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        name = DEVICE.encode()
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22s", name, _IFF_TUN | _IFF_NO_PI, b""))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            for request, value in (
                (_SIOCSIFADDR, _internet(address)),
                (_SIOCSIFNETMASK, _internet("255.255.255.0")),
                (_SIOCSIFMTU, struct.pack("i20x", MTU)),
                (_SIOCSIFTXQLEN, struct.pack("i20x", 1000)),
                (_SIOCSIFFLAGS, struct.pack("H22x", _UP)),
            ):
                fcntl.ioctl(any_socket, request, struct.pack("16s24s", name, value))
            fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", _UP))
        return os.open("/proc/self/ns/net", os.O_RDONLY), device
    finally:
        libc.setns(own, _CLONE_NEWNET)
        os.close(own)


def _internet(address: str) -> bytes:
    """As the kernel takes addresses."""
    return struct.pack("HH4s16x", socket.AF_INET, 0, socket.inet_aton(address))


@dataclass(frozen=True)
class Link:
    """Bytes a second, seconds one way, and at most so many more."""

    rate: float
    latency: float
    jitter: float


class Direction:
    """One way through a link."""

    def __init__(self, target: int, link: Link) -> None:
        self.target, self.link = target, link
        self.free_at = self.last = 0.0
        self.waiting: deque[tuple[float, bytes]] = deque()
        self.bytes = 0
        self.dice = random.Random(0)

    def take(self, packet: bytes, now: float) -> None:
        """A packet begins its way."""
        if self.bytes + len(packet) > _QUEUE:
            return
        self.free_at = max(now, self.free_at) + len(packet) / self.link.rate
        arrives = self.free_at + self.link.latency + self.dice.uniform(0, self.link.jitter)
        self.last = max(self.last, arrives)  # in order, as TCP likes it
        self.bytes += len(packet)
        self.waiting.append((self.last, packet))

    def give(self, now: float) -> None:
        """Packets that have arrived."""
        while self.waiting and self.waiting[0][0] <= now:
            packet = self.waiting.popleft()[1]
            self.bytes -= len(packet)
            with contextlib.suppress(OSError):  # lost
                os.write(self.target, packet)


def as_reset(packet: bytes, spared: int) -> bytes | None:
    """A TCP segment with data as a reset of its connection; None for anything else."""
    start = 4 * (packet[0] & 15)
    if packet[0] >> 4 != 4 or packet[9] != _TCP or len(packet) - start < 200:
        return None
    if spared in struct.unpack("!HH", packet[start : start + 4]):
        return None
    tcp = bytearray(packet[start : start + 20])
    tcp[12:14] = bytes((5 << 4, _RST | _ACK))
    tcp[16:18] = b"\0\0"
    pseudo = packet[12:20] + struct.pack("!BBH", 0, _TCP, 20)
    tcp[16:18] = struct.pack("!H", _checksum(pseudo + bytes(tcp)))
    head = bytearray(packet[:start])
    head[2:4] = struct.pack("!H", start + 20)
    head[10:12] = b"\0\0"
    head[10:12] = struct.pack("!H", _checksum(bytes(head)))
    return bytes(head + tcp)


def _checksum(content: bytes) -> int:
    total = sum(struct.unpack(f"!{len(content) // 2}H", content))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def main() -> None:
    """Until standard input ends."""
    with contextlib.suppress(OSError):
        os.nice(-15)  # else it is a slower cable than it says
    pipe, own, other, *numbers = sys.argv[1:]
    link = Link(*map(float, numbers))
    control = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)  # open for writing too: it never ends
    (first, one), (second, two) = open_namespace(own), open_namespace(other)
    target = {one: two, two: one}
    links: dict[bytes, Link] = {}
    """Of each connection, by its addresses and ports, both ways."""
    ways: dict[tuple[int, Link], Direction] = {}
    is_cut, resets, spared = False, 0.0, 0
    done: set[bytes] = set()
    print(first, second, flush=True)
    while True:
        now = time.monotonic()
        due = min((way.waiting[0][0] for way in ways.values() if way.waiting), default=now + 1)
        # Not epoll, which waits for whole milliseconds.
        for descriptor in select.select((one, two, control, 0), (), (), max(0.0, due - now))[0]:
            if descriptor == 0:
                return
            if descriptor == control:
                for line in os.read(control, 1000).decode().splitlines():
                    name, *values = line.split()
                    is_cut = {"cut": True, "join": False}.get(name, is_cut)
                    if name == "link":
                        link = Link(*map(float, values))
                    if name == "reset":
                        resets, spared, done = time.monotonic() + 5, int(values[0]), set()
                continue
            for _ in range(64):
                try:
                    packet = os.read(descriptor, 70_000)
                except BlockingIOError:
                    break
                now = time.monotonic()
                connection = packet[12:24]
                if packet[9:10] == bytes([_TCP]) and packet[33] & (_SYN | _ACK) == _SYN:
                    back = packet[16:20] + packet[12:16] + packet[22:24] + packet[20:22]
                    links[connection] = links[back] = link
                if now < resets and connection not in done and (made := as_reset(packet, spared)):
                    packet = made
                    done.add(connection)
                if not is_cut:
                    its = links.get(connection, link)
                    if (descriptor, its) not in ways:
                        ways[descriptor, its] = Direction(target[descriptor], its)
                    ways[descriptor, its].take(packet, now)
        now = time.monotonic()
        for way in ways.values():
            way.give(now)


if __name__ == "__main__":
    main()
