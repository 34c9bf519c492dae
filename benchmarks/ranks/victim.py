"""The ranks of `benchmarks.ranks.kills`: they train, save, and write down every step.

After each step a rank adds a line to a file of its own: the loss, and for each of its stages a
digest of all that training has come to. Two runs that went the same way have the same lines. On a
GPU they compute in float64, and lines have numbers to be compared instead of digests.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import multiprocessing
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import revcompile
from revcompile.arguments import member_of
from revcompile.runtime.checkpoint.tree import encode_tree
from revcompile.runtime.distributed.rank_weights import owning_stages
from revcompile.runtime.executor.capturable import Backend
from revcompile.runtime.stage.tensors import detach_tree
from revcompile.runtime.trainer.trainer import Trainer
from revcompile.staged import StagedModel

__all__ = [
    "EVERY",
    "STEPS",
    "Agent",
    "Plain",
    "RankProcess",
    "Run",
    "Torchrun",
    "at_every_touch",
    "checkpoints",
    "compiled",
    "digests",
    "hide_gpus",
    "server",
    "train",
    "use_gpu",
]

STAGES: Final = 4
STEPS: Final = 40
EVERY: Final = 7
"""Steps between two checkpoints."""
SLOWER: Final = 0.01
"""Seconds that everything done to a checkpoint's files takes longer."""

Note = Callable[[dict[str, Any]], None]

_PHASES: Final = {"loading": "restore", "saving": "save", "done": "end"}
"""What a rank does after it has noted a line, by the line's first entry."""


class Net(nn.Module):
    """A few blocks with batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 5)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Dropout(0.1))
            for _ in range(6)
        )

    def forward(self, x: Tensor) -> Any:
        """Logits."""
        x = self.stem(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x.mean((2, 3)))


@dataclass(frozen=True)
class Run:
    """A training: the same on any number of ranks."""

    method: str = "petra"
    accumulate: int = 1
    backend: str = "eager"
    timeout: float = 30.0
    """The trainer's, in seconds."""

    @property
    def device(self) -> str:
        """All ranks on one GPU, if their steps are captured."""
        return "cuda" if self.backend == "cudagraphs" else "cpu"


def checkpoints(folder: Path) -> Path:
    """Where the ranks save."""
    return folder / "checkpoints"


def compiled(device: str = "cpu") -> StagedModel:
    """The same weights each time."""
    torch.manual_seed(0)
    net, example = Net(), torch.randn(2, 3, 8, 8)
    if device == "cuda":
        net, example = net.double().to(device), example.double().to(device)
    return revcompile.petrafy(net, STAGES, example, check="off")


def train(run: Run, folder: Path, note: Note) -> None:
    """Go on from the last checkpoint, if there is one, to the last step.

    Batches come from the generators of the process: they too must go on where they were.
    """
    torch.backends.cudnn.deterministic = True
    trainer = compiled(run.device).trainer(
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        nn.functional.cross_entropy,
        method=run.method,
        accumulate=run.accumulate,
        backend=member_of("victim", "backend", run.backend, Backend),
        lr_schedule=lambda o: torch.optim.lr_scheduler.OneCycleLR(
            o, 0.02, total_steps=STEPS + 1, cycle_momentum=run.backend == "eager"
        ),
        timeout=run.timeout,
    )
    summary = numbers if run.device == "cuda" else digest
    state = functools.partial(digests, trainer, summary, gradients=run.backend == "eager")
    torch.manual_seed(1)
    random.seed(1)
    saved = checkpoints(folder)
    if saved.exists() and any(path.name[-1].isdigit() for path in saved.glob("step_*")):
        note({"loading": True})
        trainer.load(saved)
    note({"from": trainer.schedule.injected})
    for step in range(trainer.schedule.injected, STEPS):
        size = random.choice((6, 8) if run.backend == "eager" else (*(8,) * 15, 6))
        x, y = torch.randn(size, 3, 8, 8), torch.randint(0, 5, (size,))
        loss = trainer.step(x.double() if run.device == "cuda" else x, y).loss
        known = None if math.isnan(loss) else loss
        note({"step": step, "loss": known, "digests": state()})
        if (step + 1) % EVERY == 0 or step + 1 == STEPS:
            note({"saving": step + 1})
            # Steps over static buffers need a full pipeline of equal batches.
            trainer.save(saved, drain=run.backend == "eager" or step + 1 == STEPS)
            note({"saved": step + 1})
    note({"step": STEPS, "loss": None, "digests": state()})
    trainer.close()
    note({"done": True})


def digest(settings: str, tensors: Mapping[str, Tensor]) -> str:
    """The same if everything is, to the bit."""
    total = hashlib.sha256(settings.encode())
    for name in sorted(tensors):
        total.update(name.encode() + tensors[name].detach().cpu().numpy().tobytes())
    return total.hexdigest()[:16]


def numbers(settings: str, tensors: Mapping[str, Tensor]) -> list[float]:
    """About the same if everything is: random projections, which are about as large as 1."""
    generator = torch.Generator().manual_seed(0)
    found = [float(int(hashlib.sha256(settings.encode()).hexdigest()[:6], 16))]
    for name in sorted(tensors):
        values = tensors[name].detach().double().cpu().reshape(-1)
        weights = torch.randn(values.numel(), generator=generator, dtype=torch.double)
        found.append(float(values @ weights) / max(float(values.norm()), 1e-12))
    return found


def digests(
    trainer: Trainer,
    summary: Callable[[str, Mapping[str, Tensor]], Any] = digest,
    *,
    gradients: bool = True,
) -> dict[str, Any]:
    """For each stage that is here: parameters, buffers, gradients and its optimizer's state.

    Args:
        trainer: between two steps.
        summary: Of settings and tensors.
        gradients: those gathered for the next update too. Not where steps may run over static
            buffers, which hold them then: when such steps begin depends on restarts.
    """
    state, found = trainer.model.state_dict(), {}
    owners = owning_stages(trainer.model, trainer.programs)
    for executor in trainer.executors:
        own = {n: state[n] for n, owner in owners.items() if owner == executor.index and n in state}
        updater = executor.updater.state_dict(detach_tree)
        settings = [updater["groups"], updater["lr_schedule"], trainer.schedule.injected]
        gathered = executor.stage.gradients if gradients else {}
        tree = {"model": own, "optimizer": updater["state"], "gradients": gathered}
        tensors = encode_tree(tree)[1]
        found[str(executor.index)] = summary(json.dumps(settings), tensors)
    return found


_GPUS: Final = "BENCHMARK_GPUS"


def hide_gpus() -> None:
    """From the server, and all that it forks: CUDA cannot be used on both sides of a fork."""
    os.environ[_GPUS] = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


def gpus_are_hidden() -> bool:
    """In the server, if the processes that it forks train on a GPU."""
    return _GPUS in os.environ


def use_gpu() -> None:
    """In a forked process that trains on one."""
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ[_GPUS].split(",")[0]


# -- one rank ------------------------------------------------------------------------------------


def run_rank(run: Run, folder: Path) -> None:
    """One rank's life: its steps and its last words go to files named after rank and process."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    if run.device == "cuda":
        use_gpu()
        # NCCL wants a GPU for each rank, unless the ranks claim to be on different machines.
        os.environ |= {"NCCL_HOSTID": f"rank{os.environ['RANK']}", "NCCL_SOCKET_IFNAME": "lo"}
    place = folder / "ranks"
    place.mkdir(parents=True, exist_ok=True)
    name = f"{os.environ['RANK']}_{os.getpid()}"
    words = os.open(place / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(words, stream.fileno())
    steps = os.open(place / f"{name}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    at_every_touch(checkpoints(folder), lambda name: time.sleep(SLOWER))

    def note(line: dict[str, Any]) -> None:
        os.write(steps, json.dumps(line).encode() + b"\n")  # one call: never half a line

    train(run, folder, note)


def at_every_touch(folder: Path, act: Callable[[str], None]) -> None:
    """From now on, before this process does anything to a file there, with the file's name."""

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        touches = event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")
        if touches and str(arguments[0]).startswith(str(folder)):
            act(Path(arguments[0]).name)

    sys.addaudithook(watch)


# -- several ranks -------------------------------------------------------------------------------


class Plain:
    """Ranks as processes of their own, forked from a server that has imported everything."""

    def __init__(self, run: Run, ranks: int, folder: Path, restarts: int = 0) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        shared = (ranks, port, run, folder)
        self.processes = [forked(_rank, r, *shared) for r in range(ranks)]

    def wait(self, seconds: float) -> int | None:
        """The first exit status that is not 0; None if a rank is still there."""
        end = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))
        codes = [process.exitcode for process in self.processes]
        return None if None in codes else next((code for code in codes if code), 0)


def forked(target: Callable[..., None], *args: Any) -> Any:
    """A process forked from the server; whatever it starts this way comes from the same server."""
    process = server().Process(target=target, args=args)
    process.start()
    return process


def server() -> Any:
    """Starts processes that have imported everything."""
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.ranks.preloaded"])
    return context


def _rank(rank: int, world: int, port: int, run: Run, folder: Path) -> None:
    os.environ |= {"RANK": f"{rank}", "WORLD_SIZE": f"{world}", "LOCAL_RANK": f"{rank}"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
    run_rank(run, folder)


class Torchrun:
    """Ranks that torchrun starts, and starts again."""

    def __init__(self, run: Run, ranks: int, folder: Path, restarts: int = 3) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"]
        command += ["--monitor-interval=0.2", __file__, str(folder), *map(str, astuple(run))]
        environment = os.environ | {"PYTHONPATH": f"{Path(__file__).parents[2]}"}
        with (folder / "log").open("ab") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def wait(self, seconds: float) -> int | None:
        """Its exit status; None if it had to be ended."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()  # else it starts them again
            return None


class Agent:
    """The agent of torchrun, by the function that it calls, with ranks from the server."""

    def __init__(self, run: Run, ranks: int, folder: Path, restarts: int = 3) -> None:
        self.process = forked(_agent, run, ranks, folder, restarts)

    def wait(self, seconds: float) -> int | None:
        """Its exit status; None if it had to be ended."""
        self.process.join(seconds)
        if self.process.exitcode is None:
            self.process.kill()
            return None
        code: int = self.process.exitcode
        return code


def _agent(run: Run, ranks: int, folder: Path, restarts: int) -> None:
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    # Python starts one more server for a child of a server; this one serves it too.
    forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]
    os.dup2(log, 1)
    os.dup2(log, 2)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=folder.name,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=restarts,
        monitor_interval=0.2,
        start_method="forkserver",
    )
    elastic_launch(config, run_rank)(run, folder)


@dataclass(frozen=True)
class RankProcess:
    """A rank's process, by the files it has written."""

    rank: int
    pid: int
    file: Path

    @classmethod
    def all(cls, folder: Path) -> list[RankProcess]:
        """Every process there has been."""
        files = [(file, file.stem.split("_")) for file in (folder / "ranks").glob("*.jsonl")]
        return [cls(int(rank), int(pid), file) for file, (rank, pid) in files]

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The lines it wrote."""
        return [json.loads(line) for line in self.file.read_text().splitlines()]

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Of these, the steps."""
        return [line for line in self.lines if "step" in line]

    @property
    def began(self) -> int | None:
        """The step it started from; None if it did not get that far."""
        return next((line["from"] for line in self.lines if "from" in line), None)

    @property
    def phase(self) -> str:
        """What it does, or was doing when it ended."""
        lines = self.lines
        if not lines:
            return "start-up"
        return _PHASES.get(next(iter(lines[-1])), "step")

    @property
    def output(self) -> str:
        """What it printed."""
        return self.file.with_suffix(".log").read_text()

    @property
    def is_running(self) -> bool:
        """Is it running, and no zombie?"""
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            return False
        return state != "Z"


def main() -> None:
    """As a script: what torchrun starts."""
    folder, method, accumulate, backend, timeout = sys.argv[1:]
    run_rank(Run(method, int(accumulate), backend, float(timeout)), Path(folder))


if __name__ == "__main__":
    main()
