"""Two machines on a slow network: what the planner says against what happens; cuts and losses.

    sudo python -m benchmarks run machines

The machines are network namespaces with a cable between them in user space (`relay.py`), started by
torchrun with its own rendezvous, a rank on each. First, links with a rate and a latency: the window
(`alpha`) that the planner recommends, and its forecast for that, for half and for twice of it,
against the measured time of a micro-batch. Then one training that is disturbed: connections are
reset, the link is cut for longer than the timeout, one machine vanishes without a word and comes
back; each step of each rank is compared with an undisturbed run. Needs root on Linux.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
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
from torch import Tensor, distributed, nn
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
from revcompile.schedule import choose, hiding_alpha, period
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


CABLES: Final = (Cable(1e9, 0.01, samples=1500), Cable(1e8, 0.05, samples=300))
WIDTH: Final = 64


# -- machines -------------------------------------------------------------------------------------


class Machines:
    """Two namespaces and the cable between them."""

    def __init__(self, folder: Path, cable: Cable) -> None:
        self.folder = folder
        self.names = tuple(f"rc{os.getpid()}{letter}" for letter in "ab")
        for name in self.names:
            subprocess.run(["ip", "netns", "add", name], check=True)
        ends = [word for pair in zip(self.names, ADDRESSES, strict=True) for word in pair]
        self.relay = subprocess.Popen(
            [sys.executable, str(HERE.with_name("relay.py")), *ends, *cable.numbers],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.relay.stdout is not None
        if self.relay.stdout.readline().strip() != "ready":
            raise InputError("machines: no TUN device; the kernel needs /dev/net/tun")
        self.agents: list[subprocess.Popen[bytes]] = []

    def tell(self, *words: str) -> None:
        """The relay."""
        assert self.relay.stdin is not None
        self.relay.stdin.write(" ".join(words) + "\n")
        self.relay.stdin.flush()

    def start(self, number: int, *script: str, restarts: int = 0) -> subprocess.Popen[bytes]:
        """torchrun on one of them."""
        command = ["ip", "netns", "exec", self.names[number], sys.executable]
        command += ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
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
            agent = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        self.agents.append(agent)
        return agent

    def end(self, number: int) -> None:
        """All processes of a machine, at once."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self.names[number]], capture_output=True, text=True, check=False
        )
        for process in listed.stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(process), 9)

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
            for name in made.names:
                subprocess.run(["ip", "netns", "delete", name], check=False)


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


def predicted(cable: Cable) -> dict[float, float]:
    """Seconds a micro-batch by alpha: the recommended one first, half of it, twice of it."""
    cut = made(cable)[0].partition
    link = NetworkLink(cable.rate / 8, cable.latency)
    pieces = [piece for part in cut.parts for piece in part.pieces]
    found = iter(piece_costs(cut.rewired, pieces, cut.types, "measured"))
    parts = tuple(replace(p, costs=tuple(next(found) for _ in p.pieces)) for p in cut.parts)
    time_model = TimeModel.measured(update_speed("cpu"))
    workload = Workload(choose("petra"), cable.samples)
    costs = stage_times(replace(cut, parts=parts), workload, time_model, link)
    transfers = (*costs.link_forward, *costs.link_backward)
    busy = tuple(max(time - link.latency, 0.0) for time in transfers)
    best = hiding_alpha("petra", costs, 1, busy)
    alphas = [best, max(1.0, best / 2), 2 * best]
    return {a: period(choose("petra", alpha=a), costs, 1, busy) for a in alphas}


def measure(options: list[str]) -> None:
    """What torchrun starts: train with every alpha, write seconds a micro-batch to a file."""
    file, cable, alphas, steps = (
        options[0],
        Cable(*map(float, options[1:4])),
        options[4],
        options[5],
    )
    cable = Cable(cable.rate, cable.latency, samples=int(options[3]))
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {}
    for alpha in json.loads(alphas):
        net, x, y = made(cable)
        trainer: Any = net.trainer(
            lambda p: torch.optim.SGD(p, lr=1e-4), F.cross_entropy, alpha=alpha, timeout=120.0
        )
        for _ in range(10 + int(4 * alpha)):
            trainer.step(x, y)
        rounds = []
        for _ in range(3):
            start = time.perf_counter()
            for _ in range(int(steps)):
                trainer.step(x, y)
            rounds.append((time.perf_counter() - start) / int(steps))
        found[str(alpha)] = rounds
        trainer.flush()
        trainer.close()
    if distributed.get_rank() == 0:
        Path(file).write_text(json.dumps(found))


def compared(cable: Cable, steps: int) -> Iterator[dict[str, Any]]:
    """Forecast and measurement on one link."""
    forecasts = predicted(cable)
    with machines(cable) as both:
        file = both.folder / "measured.json"
        values = (str(file), str(cable.rate), str(cable.latency), str(cable.samples))
        script = (str(HERE), *values, json.dumps(list(forecasts)), str(steps))
        agents = [both.start(number, *script) for number in (0, 1)]
        if any(agent.wait(600) for agent in agents):
            raise InputError(f"machines: a rank failed:\n{both.log()}")
        found = json.loads(file.read_text())
    for number, (alpha, seconds) in enumerate(forecasts.items()):
        real = median(found[str(alpha)])
        yield {
            "link": str(cable),
            "alpha": alpha,
            "recommended": number == 0,
            "predicted": seconds,
            "measured": found[str(alpha)],
            "ratio": real / seconds,
        }


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
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None:
        raise InputError("machines: needs root on Linux, and the ip command of iproute2")
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
            f"{1e3 * row['predicted']:.1f} ms",
            f"{1e3 * median(row['measured']):.1f} ms",
            f"{row['ratio']:.2f}",
        )
        for row in rows
    ]
    show("A micro-batch", ("link", "alpha", "forecast", "measured", "measured / forecast"), table)
    if options.only != "forecasts":
        row = disturbed(Cable(1e9, 0.005, 0.002))
        print(row)
        yield row


BENCHMARK = Benchmark(
    "machines", arguments, main, smallest=None, needs="root on Linux, network namespaces and TUN"
)

if __name__ == "__main__":
    measure(sys.argv[1:])
