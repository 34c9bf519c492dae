"""A cable between two network namespaces, in user space: rate, latency, jitter, cuts and resets.

    python benchmarks/robustness/relay.py A 10.77.0.1 B 10.77.0.2 RATE LATENCY JITTER

Each namespace gets a TUN device, and every IP packet goes through this process. Lines of standard
input change the link while it is in use: `cut`, `join`, `reset PORT` (the next TCP segments with
data, one of each connection but those of this port, become resets). Needs root and Linux.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import sys
import time
from typing import Final

MTU: Final = 60_000
"""Large packets: fewer of them, for what Python can carry."""
DEVICE: Final = "rc0"
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI, _CLONE_NEWNET = 0x400454CA, 0x0001, 0x1000, 0x40000000
_QUEUE: Final = 8 << 20
"""Bytes that wait for the link in one direction; more are lost, as in a switch."""
_TCP, _RST, _ACK = 6, 0x04, 0x10


def open_tun(namespace: str, address: str) -> int:
    """A TUN device in a namespace, with an address there."""
    libc = ctypes.CDLL(None, use_errno=True)
    own = os.open("/proc/self/ns/net", os.O_RDONLY)
    other = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        if libc.setns(other, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        name = DEVICE.encode()
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22s", name, _IFF_TUN | _IFF_NO_PI, b""))
        for command in (
            f"ip address add {address}/24 dev {DEVICE}",
            f"ip link set {DEVICE} mtu {MTU} txqueuelen 1000 up",
            "ip link set lo up",
        ):
            subprocess.run(command.split(), check=True)
    finally:
        libc.setns(own, _CLONE_NEWNET)
        os.close(own)
        os.close(other)
    return device


class Direction:
    """One way through the cable."""

    def __init__(self, source: int, target: int) -> None:
        self.source, self.target = source, target
        self.free_at = self.last = 0.0
        self.waiting: list[tuple[float, int, bytes]] = []
        self.bytes = 0
        self._count = 0

    def take(self, packet: bytes, now: float, rate: float, delay: float) -> None:
        """A packet begins its way."""
        if self.bytes + len(packet) > _QUEUE:
            return
        self.free_at = max(now, self.free_at) + len(packet) / rate
        self.last = max(self.last, self.free_at + delay)  # in order, as TCP likes it
        self._count += 1
        self.bytes += len(packet)
        heapq.heappush(self.waiting, (self.last, self._count, packet))

    def give(self, now: float) -> None:
        """Packets that have arrived."""
        while self.waiting and self.waiting[0][0] <= now:
            packet = heapq.heappop(self.waiting)[2]
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
    os.nice(-15)  # else it is a slower cable than it says
    first, own, second, other, *numbers = sys.argv[1:]
    rate, latency, jitter = map(float, numbers)
    devices = open_tun(first, own), open_tun(second, other)
    ways = {devices[0]: Direction(*devices), devices[1]: Direction(*reversed(devices))}
    is_cut, resets, spared = False, 0.0, 0
    done: set[bytes] = set()
    dice = random.Random(0)
    poll = select.epoll()
    for descriptor in (*devices, 0):
        poll.register(descriptor, select.EPOLLIN)
    print("ready", flush=True)
    while True:
        now = time.monotonic()
        due = min((way.waiting[0][0] for way in ways.values() if way.waiting), default=now + 1)
        for descriptor, _ in poll.poll(max(0.0, due - now)):
            if descriptor == 0:
                words = os.read(0, 1000).decode().split()
                if not words:
                    return
                is_cut = {"cut": True, "join": False}.get(words[0], is_cut)
                if words[0] == "reset":
                    resets, spared, done = time.monotonic() + 5, int(words[1]), set()
                continue
            for _ in range(64):
                try:
                    packet = os.read(descriptor, 70_000)
                except BlockingIOError:
                    break
                now = time.monotonic()
                connection = packet[12:24]
                if now < resets and connection not in done and (made := as_reset(packet, spared)):
                    packet = made
                    done.add(connection)
                if not is_cut:
                    ways[descriptor].take(packet, now, rate, latency + dice.uniform(0, jitter))
        now = time.monotonic()
        for way in ways.values():
            way.give(now)


if __name__ == "__main__":
    main()
