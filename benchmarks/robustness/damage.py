"""Load damaged and hostile checkpoints, receive hostile messages: an error each time, no more.

    python -m benchmarks run damage --cases 10000

Half of the checkpoints are damaged as a disk would (bits, blocks, lengths), half as somebody with
bad intentions would, who writes digests that fit. Messages are damaged on their way: headers,
descriptions, tensors. A case is refused with an error of revcompile, or loads: exactly what was
saved where a disk damaged it (it hit nothing that is read), anything well-formed where somebody
rewrote it. Everything else is a failure: another exception, values that changed unnoticed, a
trainer that is refused and yet changed, unpickling, importing, compiling or starting anything (an
audit hook watches), more memory, more time.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

import torch
from rich.progress import track
from torch import Tensor, nn

import revcompile
from benchmarks.harness import show
from benchmarks.registry import Benchmark, Row
from benchmarks.robustness.mutate import DAMAGE, damaged_json, damaged_safetensors
from revcompile.errors import InputError, RevcompileError
from revcompile.runtime.checkpoint.codec import as_text, encode_tree, parse_json
from revcompile.runtime.checkpoint.tensor_files import digest
from revcompile.runtime.checkpoint.weights import load_weights
from revcompile.runtime.distributed.message_format import HEADER
from revcompile.runtime.distributed.p2p import Arrival, Channel
from revcompile.runtime.distributed.transport import ReceiveThread, SendThread
from revcompile.runtime.executor.transport import Message, MessageKind

LIMIT: Final = 10.0
"""Seconds for a case."""
MEMORY: Final = 512 << 20
"""Bytes that all cases together may add to the process."""
FORBIDDEN: Final = (
    *("pickle.find_class", "marshal.loads", "exec", "compile", "import", "os.system", "os.exec"),
    *("os.fork", "os.posix_spawn", "os.spawn", "subprocess.Popen", "ctypes.dlopen"),
    *("socket.connect", "os.remove", "os.rename", "os.mkdir", "os.rmdir", "shutil.rmtree"),
)
"""Audit events of things that reading must not do."""
OURS: Final = ("InputError", "VerificationError", "Interrupted")


class Watch:
    """Notes forbidden events while it is on; audit hooks stay for the life of a process."""

    _only: Watch | None = None

    def __init__(self) -> None:
        self.on = False
        self.events: list[str] = []
        sys.addaudithook(self._note)

    @classmethod
    def get(cls) -> Watch:
        """The one of this process."""
        cls._only = cls._only or cls()
        return cls._only

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.on and event in FORBIDDEN:
            self.events.append(f"{event} {arguments!r:.100}")

    @contextmanager
    def watching(self) -> Iterator[list[str]]:
        """The events in here, none of which should be."""
        self.events, self.on = [], True
        try:
            yield self.events
        finally:
            self.on = False


class Hung(BaseException):
    """A case has taken too long."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `Hung` in the main thread after so long."""

    def stop(*_: Any) -> None:
        raise Hung

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def judged(act: Callable[[], str]) -> tuple[str, str]:
    """What came of a case: ("refused" or "loaded" or "failed", why)."""
    watch = Watch.get()
    began = time.monotonic()
    try:
        with time_limit(LIMIT), watch.watching() as events:
            outcome, why = "loaded", act()
    except RevcompileError as error:
        outcome, why = "refused", str(error)
    except Hung:
        return "failed", "it hangs"
    except BaseException as error:  # also a panic of a library
        return "failed", f"{type(error).__name__}: {error}"
    if events:
        return "failed", f"{events[0]} ({why:.80})"
    if why.startswith("!"):
        return "failed", why[1:]
    if time.monotonic() - began > LIMIT:
        return "failed", f"it took {time.monotonic() - began:.0f} s"
    return outcome, why


# -- checkpoints ----------------------------------------------------------------------------------


class Checkpoints:
    """A small training's checkpoint, damaged again and again."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), *(_Block() for _ in range(2)), nn.Linear(4, 3))
        staged = revcompile.petrafy(net, 2, torch.randn(2, 4), check="off")
        optimizer = lambda p: torch.optim.AdamW(p, lr=0.01)  # noqa: E731
        self.trainer = staged.trainer(optimizer, nn.functional.cross_entropy, method="petra")
        for _ in range(3):
            self.trainer.step(torch.randn(2, 4), torch.randint(0, 3, (2,)))
        self.place = self.trainer.save(folder / "whole")
        self.damaged = folder / "damaged" / self.place.name
        self.damaged.mkdir(parents=True)
        self.files = {file.name: file.read_bytes() for file in sorted(self.place.iterdir())}
        self.trainer.load(self.place)  # imports what loading imports
        load_weights(self.place)
        self.before = self.state()

    def state(self) -> str:
        """A digest of all that the trainer holds."""
        plain, tensors = encode_tree(self.trainer.state_dict())
        total = hashlib.sha256(as_text(plain).encode())
        for name in sorted(tensors):
            total.update(name.encode() + tensors[name].numpy().tobytes())
        return total.hexdigest()

    def case(self, dice: random.Random) -> tuple[str, str, str]:
        """One: how it was damaged, and what came of it."""
        is_rewritten = dice.random() < 0.5
        files = dict(self.files)
        name = dice.choice(list(files))
        if is_rewritten:
            change = damaged_json if name.endswith(".json") else damaged_safetensors
            files[name] = change(files[name], dice)
            with suppress(Exception):  # an index can be such that nothing fits it
                refit(files)
        elif dice.random() < 0.05:
            other = dice.choice(list(files))
            files[name], files[other] = files[other], files[name]
        else:
            files[name] = dice.choice(DAMAGE)(files[name], dice)
        for file, content in files.items():
            (self.damaged / file).write_bytes(content)
        reads_weights = dice.random() < 0.2

        def act() -> str:
            if reads_weights:
                load_weights(self.damaged)
                return ""
            self.trainer.load(self.damaged)
            changed = not is_rewritten and self.state() != self.before
            return "!other values, and nobody noticed" if changed else ""

        outcome, why = judged(act)
        if not reads_weights:
            if outcome == "refused" and self.usable() and self.state() != self.before:
                outcome, why = "failed", f"refused, yet the trainer has changed ({why})"
            if outcome != "refused":
                self.trainer.load(self.place)
        return f"{'rewritten' if is_rewritten else 'damaged'} {name}", outcome, why

    def usable(self) -> bool:
        """Whether the trainer goes on; one that a load has stopped says so and is set anew."""
        try:
            self.trainer.state_dict()
        except RevcompileError:
            self.trainer.load(self.place)
            return False
        return True


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


def refit(files: dict[str, bytes]) -> None:
    """Sizes and digests that fit, as somebody would write them who knows the format."""
    index = parse_json(files["checkpoint.json"])
    index["files"] = {n: len(files.get(n, b"")) for n in index["files"]}
    index["digests"] = {n: digest(files.get(n, b"")) for n in index["digests"]}
    index.pop("digest", None)
    index["digest"] = digest(as_text(index).encode())
    files["checkpoint.json"] = as_text(index).encode()


# -- messages -------------------------------------------------------------------------------------


class Interrupted(RevcompileError):
    """What the stand-in for a connection raises where a real one would stop."""


class Tape:
    """Keeps what is sent; plays it back, whatever it has become."""

    uses_cuda = False
    device = torch.device("cpu")
    source, target, tags = 0, 1, 1

    def __init__(self, packets: list[bytes] | None = None) -> None:
        self.packets = packets if packets is not None else []

    def control_exchange(self, packet: Tensor, sends: bool, tag: int = 0) -> None:
        """As a channel does."""
        self.post(packet, sends, tag).wait()

    def post(self, packet: Tensor, sends: bool, tag: int) -> Any:
        """As a channel does."""
        return SimpleNamespace(wait=lambda *_: self._exchange(packet, sends))

    def _exchange(self, packet: Tensor, sends: bool) -> None:
        if sends:
            self.packets.append(packet.numpy().tobytes())
            return
        if not self.packets:
            raise Interrupted("nothing more was sent")
        content = self.packets.pop(0)
        if len(content) != len(packet):
            raise Interrupted(f"{len(content)} bytes were sent, {len(packet)} expected")
        packet.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))


def recorded() -> list[bytes]:
    """The packets of a few messages, and of the end."""
    tape = Tape()
    sender = SendThread(cast(Channel, tape), print, notify=lambda: None, wait=print)
    for index in range(4):
        x = torch.full((2, 5), float(index))
        values = {"x": x.t(), "n": 3, "mask": (None, torch.float16, x[:1].expand(2, 5))}
        sender.send(MessageKind.X, Message(index, values, {"dx": x.double()}))
        sender.send(MessageKind.DY, Message(index, {}, {"dx": x}, scale=2.0))
    sender.end()
    if not sender.join(10.0):
        raise InputError("damage: the sender did not end")
    return tape.packets


def message_case(packets: list[bytes], dice: random.Random) -> tuple[str, str, str]:
    """One: which packet was damaged and how, and what came of it."""
    packets = list(packets)
    at = dice.randrange(len(packets))
    content = packets[at]
    is_text = content[:1] == b"["
    is_rewritten = dice.random() < 0.5
    if is_rewritten and is_text:
        changed = damaged_json(content, dice)
        packets[at] = changed
        for before in range(at - 1, -1, -1):  # its header says how long it is
            if len(packets[before]) >= 8 * HEADER and packets[before][:1] != b"[":
                packets[before] = _with_number(packets[before], 3, len(changed))
                break
    elif is_rewritten and len(content) >= 8 * HEADER:
        number = dice.choice((-1, -(2**63), 2**60, 2**63 - 1, 2**40, 0, 1, 5, 64, 255))
        packets[at] = _with_number(content, dice.randrange(8), number)
    else:
        packets[at] = dice.choice(DAMAGE)(content, dice)
    arrived: list[Arrival] = []
    failures: list[str] = []

    def act() -> str:
        receiver = ReceiveThread(
            cast(Channel, Tape(packets)),
            lambda channel, arrival: arrived.append(arrival),
            lambda channel, cause: None,
            failures.append,
        )
        if not receiver.join(LIMIT):
            return "!it hangs"
        if failures and not failures[0].startswith(OURS):
            return f"!{failures[0]}"
        if failures:
            raise InputError(failures[0])
        return ""

    kind = "description" if is_text else "packet"
    return f"{'rewritten' if is_rewritten else 'damaged'} {kind}", *judged(act)


def _with_number(packet: bytes, position: int, number: int) -> bytes:
    place = 8 * position
    return packet[:place] + number.to_bytes(8, sys.byteorder, signed=True) + packet[place + 8 :]


# -- all of them ----------------------------------------------------------------------------------


def arguments(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    parser.add_argument("--cases", type=int, default=1000, help="of checkpoints, and of messages")
    parser.add_argument("--seed", type=int, default=0)


def main(options: argparse.Namespace) -> Iterator[Row]:
    """All cases."""
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp())
    try:
        checkpoints, packets = Checkpoints(folder), recorded()
        message_case(packets, random.Random(0))
        kinds: dict[str, Callable[[random.Random], tuple[str, str, str]]] = {
            "checkpoint": checkpoints.case,
            "message": lambda dice: message_case(packets, dice),
        }
        counts: Counter[tuple[str, str]] = Counter()
        problems: list[str] = []
        slowest, before = 0.0, _peak()
        for name, case in kinds.items():
            for number in track(range(options.cases), name):
                began = time.monotonic()
                how, outcome, why = case(random.Random(f"{options.seed} {name} {number}"))
                slowest = max(slowest, time.monotonic() - began)
                counts[f"{name}, {how}", outcome] += 1
                if outcome == "failed":
                    problems.append(f"{name} {number}, {how}: {why}")
        grown = _peak() - before
        if grown > MEMORY:
            problems.append(f"memory has grown by {grown >> 20} MiB")
        rows = sorted({how for how, _ in counts})
        outcomes = ("refused", "loaded", "failed")
        show("Damage", ("what", *outcomes), [(h, *(counts[h, o] for o in outcomes)) for h in rows])
        print(f"slowest case {slowest:.2f} s, memory grown by {grown / 2**20:.0f} MiB")
        for problem in problems[:50]:
            print(f"    {problem}")
        for how in rows:
            found = {outcome: counts[how, outcome] for outcome in outcomes}
            own = [p for p in problems if f", {how.partition(', ')[2]}:" in p]
            yield {"variant": how, **found, "failed": own}
        yield {"variant": "all", "slowest": slowest, "grown": grown, "failed": problems}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _peak() -> int:
    """The most memory this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


BENCHMARK = Benchmark("damage", arguments, main, smallest=("--cases", "150"))
