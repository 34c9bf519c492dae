"""Two machines on a slow network: what the planner says against what happens; cuts and losses.

    sudo python -m benchmarks run machines

The machines are network namespaces with a cable between them in user space (`relay.py`), started by
torchrun with its own rendezvous, a rank on each. First, links with a rate and a latency: the window
(`alpha`) that the planner recommends, and its forecast for that, for half and for twice of it,
against the measured time of a micro-batch. What a micro-batch takes without the link (host time
included, which is most of it for these small models) is measured in the same run, in turns: so a
busy machine changes both sides alike. Then one training that is disturbed: connections are
reset, the link is cut for longer than the timeout, one machine vanishes without a word and comes
back; each step of each rank is compared with an undisturbed run. Needs root on Linux.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import revcompile
from benchmarks.harness import show
from benchmarks.ranks import victim
from benchmarks.ranks.kills import Outcome, Trial, compare, undisturbed, until
from benchmarks.ranks.victim import RankProcess, Run
from benchmarks.registry import Benchmark, Row
from benchmarks.robustness.relay import DEVICE
from revcompile.compiler.cost import Workload, piece_costs
from revcompile.errors import InputError
from revcompile.plan.cluster import NetworkLink, TimeModel, stage_times, update_speed
from revcompile.schedule import Costs, choose, hiding_alpha, period, stage_work
from revcompile.staged import StagedModel

ADDRESSES: Final = ("10.77.0.1", "10.77.0.2")
PORT: Final = 29500
"""Of torchrun's store, whose agents end when they lose it."""
HERE: Final = Path(__file__).resolve()


@dataclass(frozen=True)
class Cable:
    """Bits a second, seconds one way, at most so many seconds more; elements a micro-batch."""

    rate: float
    latency: float
    jitter: float = 0.0
    samples: int = 0

    def __str__(self) -> str:
        rate = f"{self.rate / 1e9:g} Gbps" if self.rate >= 1e9 else f"{self.rate / 1e6:g} Mbps"
        return f"{rate}, {1e3 * self.latency:g} ms"

    @property
    def numbers(self) -> tuple[str, ...]:
        """As the relay takes them."""
        return str(self.rate / 8), str(self.latency), str(self.jitter)


NO_LINK: Final = Cable(1e13, 0.0)
CABLES: Final = (Cable(1e9, 0.01, samples=1500), Cable(1e8, 0.05, samples=300))
WIDTH: Final = 64
ROUNDS: Final = 5


# -- machines -------------------------------------------------------------------------------------


class Machines:
    """Two namespaces and the cable between them."""

    def __init__(self, folder: Path, cable: Cable) -> None:
        self.folder, self.control = folder, folder / "control"
        os.mkfifo(self.control)
        command = [sys.executable, str(HERE.with_name("relay.py")), str(self.control)]
        self.relay = subprocess.Popen(
            [*command, *ADDRESSES, *cable.numbers], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.relay.stdout is not None
        numbers = self.relay.stdout.readline().split()
        if not numbers:
            raise InputError("machines: no TUN device; the kernel needs /dev/net/tun")
        self.namespaces = [
            os.open(f"/proc/{self.relay.pid}/fd/{int(n)}", os.O_RDONLY) for n in numbers
        ]
        self.agents: list[subprocess.Popen[bytes]] = []

    def tell(self, *words: object) -> None:
        """The relay."""
        tell(self.control, *words)

    def start(self, number: int, *script: str, restarts: int = 0) -> subprocess.Popen[bytes]:
        """torchrun on one of them."""
        command = [sys.executable, "-m", "torch.distributed.run"]
        command += ["--nnodes=2", "--nproc-per-node=1"]
        command += [
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={ADDRESSES[0]}:{PORT}",
            "--rdzv-id=run",
        ]
        command += [f"--local-addr={ADDRESSES[number]}", f"--max-restarts={restarts}"]
        # Which of them is the endpoint: torchrun would ask a name server, and there is none.
        command += [f"--rdzv-conf=is_host={int(number == 0)}", "--monitor-interval=0.5", *script]
        root = str(HERE.parents[2])
        environment = os.environ | {"PYTHONPATH": root, "GLOO_SOCKET_IFNAME": DEVICE}
        environment |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        with (self.folder / f"log{number}").open("ab") as log:
            join = functools.partial(_join_namespace, self.namespaces[number])
            agent = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, preexec_fn=join
            )
        self.agents.append(agent)
        return agent

    def end(self, number: int) -> None:
        """All processes of a machine, at once."""
        own = os.fstat(self.namespaces[number]).st_ino
        for place in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it may have ended
                if int(place.name) != self.relay.pid and (place / "ns/net").stat().st_ino == own:
                    os.kill(int(place.name), 9)

    def log(self) -> str:
        """The end of what they printed."""
        files = sorted(self.folder.glob("log*"))
        return "\n".join(file.read_text(errors="replace")[-1500:] for file in files)


@contextmanager
def machines(cable: Cable) -> Iterator[Machines]:
    """Two of them, gone afterwards."""
    with tempfile.TemporaryDirectory() as place:
        made = Machines(Path(place), cable)
        try:
            yield made
        finally:
            for number in (0, 1):
                made.end(number)
            for agent in made.agents:
                agent.wait()
            made.relay.kill()
            made.relay.wait()
            for namespace in made.namespaces:
                os.close(namespace)


def tell(control: Path, *words: object) -> None:
    """A line to a relay."""
    descriptor = os.open(control, os.O_WRONLY)
    os.write(descriptor, (" ".join(map(str, words)) + "\n").encode())
    os.close(descriptor)


def _join_namespace(descriptor: int) -> None:
    with suppress(OSError):
        os.nice(-10)  # what else this machine does should not matter
    if ctypes.CDLL(None).setns(descriptor, 0):
        os._exit(1)


# -- the planner ----------------------------------------------------------------------------------


class Block(nn.Module):
    """As little work as can be for what it sends: the link is to be the limit."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        """x + F(x)."""
        return x + x * self.weight


def made(cable: Cable) -> tuple[StagedModel, Tensor, Tensor]:
    """Two stages, and a micro-batch."""
    torch.manual_seed(0)
    x, y = torch.randn(cable.samples, WIDTH), torch.randint(0, 10, (cable.samples,))
    net = nn.Sequential(*(Block() for _ in range(4)), nn.Linear(WIDTH, 10))
    return revcompile.petrafy(net, 2, x, check="off"), x, y


@dataclass(frozen=True)
class Forecast:
    """What the planner says of a link."""

    costs: Costs
    busy: tuple[float, ...]
    """How long a micro-batch occupies the link, each way."""

    @classmethod
    def of(cls, cable: Cable) -> Forecast:
        """From costs measured here."""
        cut = made(cable)[0].partition
        link = NetworkLink(cable.rate / 8, cable.latency)
        pieces = [piece for part in cut.parts for piece in part.pieces]
        found = iter(piece_costs(cut.rewired, pieces, cut.types, "measured"))
        parts = tuple(replace(p, costs=tuple(next(found) for _ in p.pieces)) for p in cut.parts)
        time_model = TimeModel.measured(update_speed("cpu"))
        workload = Workload(choose("petra"), cable.samples)
        costs = stage_times(replace(cut, parts=parts), workload, time_model, link)
        transfers = (*costs.link_forward, *costs.link_backward)
        return cls(costs, tuple(max(time - link.latency, 0.0) for time in transfers))

    def at(self, seconds: float) -> Forecast:
        """If a micro-batch takes so long without the link."""
        scale = seconds / max(stage_work(self.costs, 1))
        times = {n: getattr(self.costs, n) for n in ("forward", "backward", "update")}
        scaled = {name: tuple(scale * t for t in each) for name, each in times.items()}
        return replace(self, costs=replace(self.costs, **scaled))

    def period(self, alpha: float) -> float:
        """Seconds a micro-batch."""
        return period(choose("petra", alpha=alpha), self.costs, 1, self.busy)

    def alphas(self) -> list[float]:
        """The recommended one, half of it, twice of it."""
        best = hiding_alpha("petra", self.costs, 1, self.busy)
        return [best, max(1.0, best / 2), 2 * best]


def measure(options: list[str]) -> None:
    """What torchrun starts: train with every alpha, in turns with and without the link."""
    control, steps = Path(options[0]), int(options[4])
    cable = Cable(float(options[1]), float(options[2]), samples=int(options[3]))
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])

    def trainer_of(alpha: float, through: Cable) -> tuple[Any, Tensor, Tensor]:
        """A trainer whose connections go through a link, and its micro-batch."""
        net, x, y = made(cable)
        if rank == 0:
            tell(control, "link", *through.numbers)
        time.sleep(0.2)  # the other rank may be the one to connect
        sgd = functools.partial(torch.optim.SGD, lr=1e-4)
        return net.trainer(sgd, F.cross_entropy, alpha=alpha, timeout=120.0), x, y

    def seconds(trainer: Any, x: Tensor, y: Tensor) -> float:
        """A micro-batch, once the pipeline is full."""
        for _ in range(10 + int(4 * trainer.schedule.method.alpha)):
            trainer.step(x, y)
        start = time.perf_counter()
        for _ in range(steps):
            trainer.step(x, y)
        return (time.perf_counter() - start) / steps

    alone = trainer_of(2.0, NO_LINK)
    forecast = Forecast.of(cable) if rank == 0 else None
    without = seconds(*alone)
    told = alone[0].everyone(forecast.at(without).alphas() if forecast is not None else None)
    rows: list[dict[str, Any]] = []
    for alpha in told[0]:
        linked = trainer_of(alpha, cable)
        pairs = [(seconds(*alone), seconds(*linked)) for _ in range(ROUNDS)]
        linked[0].close()
        if forecast is not None:
            predicted = [forecast.at(without).period(alpha) for without, _ in pairs]
            found = {"alone": [a for a, _ in pairs], "measured": [m for _, m in pairs]}
            rows.append({"alpha": alpha, "predicted": predicted, **found})
    alone[0].close()
    if forecast is not None:
        control.with_name("measured.json").write_text(json.dumps(rows))


def compared(cable: Cable, steps: int) -> Iterator[dict[str, Any]]:
    """Forecast and measurement on one link."""
    with machines(NO_LINK) as both:
        values = (str(cable.rate), str(cable.latency), str(cable.samples), str(steps))
        script = (str(HERE), str(both.control), *values)
        agents = [both.start(number, *script) for number in (0, 1)]
        if any(agent.wait(600) for agent in agents):
            raise InputError(f"machines: a rank failed:\n{both.log()}")
        found = json.loads((both.folder / "measured.json").read_text())
    for number, row in enumerate(found):
        ratios = [m / p for m, p in zip(row["measured"], row["predicted"], strict=True)]
        yield {"link": str(cable), "recommended": number == 0, **row, "ratio": median(ratios)}


# -- losses ---------------------------------------------------------------------------------------


def disturbed(cable: Cable) -> dict[str, Any]:
    """One training through resets, a cut and the loss of a machine."""
    run = Run("petra", 3)
    outcome = Outcome(Trial(0, 2, run, "machines", ()))
    expected = undisturbed(run)
    with machines(cable) as both:
        folder = both.folder
        script = (victim.__file__, str(folder), *map(str, astuple(run)))
        agents = [both.start(number, *script, restarts=5) for number in (0, 1)]
        lives: list[int] = []
        begun_again = 0

        def tend() -> None:
            """Start torchrun again where it has failed, as a service or a scheduler does."""
            nonlocal begun_again
            for number, agent in enumerate(agents):
                if agent.poll() and begun_again < 5:
                    begun_again += 1
                    agents[number] = both.start(number, *script, restarts=5)

        def steps() -> int:
            tend()
            new = [p for p in RankProcess.all(folder) if p.pid not in lives]
            return min((len(p.steps) for p in new if p.is_running), default=0) if new else 0

        def disturb(what: str, act: Callable[[], None], count: int) -> float:
            if not until(lambda: steps() >= count, 240):
                raise InputError(f"machines: no steps before {what}:\n{both.log()}")
            before = [p for p in RankProcess.all(folder) if p.is_running]
            lives.extend(p.pid for p in before)
            since = time.monotonic()
            act()
            if not until(lambda: not any(p.is_running for p in before), 120):
                outcome.hung = True
            outcome.killed.append(what)
            return time.monotonic() - since

        def vanish() -> None:
            both.tell("cut")
            both.end(1)
            time.sleep(10)
            both.tell("join")
            agents[1] = both.start(1, *script, restarts=5)

        def cut() -> None:
            both.tell("cut")
            time.sleep(run.timeout + 15)
            both.tell("join")

        times = {"reset": disturb("reset", lambda: both.tell("reset", str(PORT)), 9)}
        times["cut"] = disturb("cut", cut, 9)
        times["vanish"] = disturb("vanish", vanish, 9)

        def ended() -> bool:
            tend()
            return all(agent.poll() is not None for agent in agents)

        outcome.hung |= not until(ended, 300)
        if any(agent.poll() for agent in agents):
            outcome.failed = f"torchrun failed: {both.log()}"
        compare(RankProcess.all(folder), expected, outcome)
        outcome.orphans = sum(process.is_running for process in RankProcess.all(folder))
        ranks = len(RankProcess.all(folder))
    return {
        "link": str(cable),
        "disturbed": outcome.killed,
        "stopped_after": times,
        "processes": ranks,
        "torchrun begun again": begun_again,
        "compared": outcome.compared,
        "failed": outcome.problems,
    }


# -- all of it ------------------------------------------------------------------------------------


def arguments(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--only", choices=("forecasts", "losses"))


def main(options: argparse.Namespace) -> Iterator[Row]:
    """Forecasts, then losses."""
    if sys.platform != "linux" or os.geteuid() != 0:
        raise InputError("machines: needs root on Linux")
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # namespaces are removed
    rows: list[dict[str, Any]] = []
    for cable in CABLES if options.only != "losses" else ():
        for row in compared(cable, options.steps):
            rows.append(row)
            yield row
    table = [
        (
            row["link"],
            f"{row['alpha']:g}{' (recommended)' if row['recommended'] else ''}",
            *(f"{1e3 * median(row[name]):.1f} ms" for name in ("alone", "predicted", "measured")),
            f"{row['ratio']:.2f}",
        )
        for row in rows
    ]
    columns = ("link", "alpha", "without link", "forecast", "measured", "measured / forecast")
    if table:
        show("A micro-batch", columns, table)
    if options.only != "forecasts":
        row = disturbed(Cable(1e9, 0.005, 0.002))
        print(row)
        yield row


BENCHMARK = Benchmark(
    "machines", arguments, main, smallest=None, needs="root on Linux, network namespaces and TUN"
)

if __name__ == "__main__":
    measure(sys.argv[1:])
