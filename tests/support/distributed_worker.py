"""What one rank does in the tests of several: run as a script with arguments."""

import functools
import itertools
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from helpers import refilling
from nets import ResNet, ViT, Words
from torch import Tensor, nn
from torch.nn import functional as F
from training import settings_of

import revcompile
from revcompile import TrainerOptions
from revcompile.errors import InputError, NonFiniteError, RankError, RevcompileError
from revcompile.optim import ErrorFeedback
from revcompile.runtime.distributed import rank_weights
from revcompile.runtime.trainer.trainer import Trainer

STEPS: Final = 20


class Detached(Words):
    """The ends share a parameter that neither differentiates, and one that only the first does."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.full((8,), 1.5))

    def forward(self, words: Tensor) -> Tensor:
        x = self.blocks(self.embed(words) * self.factor.detach())
        return F.linear(x * self.factor.detach(), self.embed.weight.detach()).mean(1)


MODELS: Final[dict[str, Callable[[], nn.Module]]] = {
    "resnet": ResNet,
    "vit": ViT,
    "words": Words,
    "detached": Detached,
    "wide": functools.partial(ViT, 512, 4),
}


# -- a run ----------------------------------------------------------------------------------------


ONE_GPU: Final = {
    "NCCL_HOSTID": "rank{rank}",
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
    "NVIDIA_TF32_OVERRIDE": "0",
    "CUDA_DEVICE_MAX_CONNECTIONS": "8",
}
"""Of NCCL ranks that share a GPU."""


@dataclass(frozen=True)
class Run:
    """One training, the same in one process and in several."""

    model: str = "resnet"
    method: str = "petra"
    stages: int = 4
    accumulation_steps: int = 1
    steps: int = STEPS
    in_flight_per_stage: float | None = None
    clip: float | None = None
    weights: str | None = None
    several: bool = False
    stage_to_rank: tuple[int, ...] | None = None
    device: str = "cpu"


@functools.cache
def compiled(name: str, stages: int, device: str) -> tuple[Any, dict[str, Tensor]]:
    torch.manual_seed(3)
    net = revcompile.petrafy(
        MODELS[name]().train().to(device), stages, inputs(name, 2, device), check="off"
    )
    return net, {key: value.clone() for key, value in net.model.state_dict().items()}


def inputs(name: str, size: int, device: str = "cpu") -> Tensor:
    if name in ("words", "detached"):
        return torch.randint(0, 11, (size, 4)).to(device)
    return torch.randn(size, 3, 8, 8).to(device)


def batches(run: Run, seed: int = 4) -> list[tuple[Tensor, Tensor]]:
    """Micro-batches of three samples; the last has two."""
    torch.manual_seed(seed)
    sizes = [3] * (run.steps - 1) + [2]
    return [(inputs(run.model, size), torch.randint(0, 5, (size,))) for size in sizes]


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-2)


def several(parameters: Any) -> list[torch.optim.Optimizer]:
    """SGD with error feedback for what has two dimensions or more, AdamW for the rest."""
    given = list(parameters)
    matrices, rest = ([p for p in given if (p.ndim > 1) is kind] for kind in (True, False))
    makers = ((matrices, lambda p: ErrorFeedback(optimizer(p))), (rest, torch.optim.AdamW))
    return [make(own) for own, make in makers if own]


def trainer_of(run: Run, *, off: float = 0.0, **options: Any) -> tuple[Any, Any]:
    """A staged model as it started (or `off` by so much), and its trainer."""
    torch.set_num_threads(1)  # as ranks have: sums depend on it
    net, start = compiled(run.model, run.stages, run.device)
    net.model.load_state_dict({name: value + off for name, value in start.items()})
    trainer = net.trainer(
        several if run.several else optimizer,
        F.cross_entropy,
        method=run.method,
        weights=run.weights,
        accumulation_steps=run.accumulation_steps,
        clip_grad_norm=run.clip,
        seed=7,
        **settings_of(
            **options,
            in_flight_per_stage=run.in_flight_per_stage,
            stage_to_rank=run.stage_to_rank,
        ),
    )
    return net, trainer


def fed(trainer: Trainer, batch: tuple[Any, Any]) -> Any:
    """A step; of several ranks only the first of a pipeline is given data."""
    return refilling(trainer.step, *(batch if trainer.is_first else (None, None)))


def trained(run: Run, **options: Any) -> dict[str, Any]:
    """Parameters and buffers after training, and the losses where they are known."""
    net, trainer = trainer_of(run, **options)
    losses = [fed(trainer, batch).loss for batch in batches(run)]
    trainer.flush()
    return {"state": final(net, trainer), "losses": losses}


def differences(expected: dict[str, Tensor], found: dict[str, Tensor]) -> list[str]:
    """Names of tensors that are not equal to the bit."""
    assert expected.keys() == found.keys()
    return [name for name, value in expected.items() if not torch.equal(value, found[name])]


def final(net: Any, trainer: Trainer) -> dict[str, Tensor]:
    """All weights; a trainer of several ranks is closed."""
    found = {name: value.cpu().clone() for name, value in net.to_module().state_dict().items()}
    if trainer._placement.world > 1:
        trainer.close()
    return found


# -- what ranks do --------------------------------------------------------------------------------


def outcome(call: Callable[[], Any]) -> Any:
    """What a call returns, or what is said if it is refused."""
    try:
        return call()
    except RevcompileError as error:
        return str(error)


def train_all(rank: int, options: dict[str, Any]) -> Any:
    return [trained(one, **options.get("trainer", {})) for one in options["runs"]]


def calls(rank: int, options: dict[str, Any]) -> list[Any]:
    """One call after the other: functions, and what they are given."""
    return [call(*given, **how) for call, given, how in options["calls"]]


def copies(rank: int, options: dict[str, Any]) -> Any:
    """Every copy of the pipeline takes every other batch."""
    run = options["run"]
    net, trainer = trainer_of(run)
    for batch in batches(run)[trainer.replica :: trainer.replicas]:
        fed(trainer, batch)
    trainer.flush()
    return final(net, trainer)


def report(rank: int, options: dict[str, Any]) -> Any:
    """Losses of every step, and their mean. Ranks start with other weights.

    Rank 1 changes its model for a flush, and then for a step; returns the errors of that, too.
    """
    net, trainer = trainer_of(Run(steps=5), off=float(rank))
    data = batches(Run(steps=5))
    losses = [fed(trainer, batch).loss for batch in data]
    mean, samples = trainer.pop_mean_loss(), trainer.metrics.samples
    block = net.model.blocks[rank]
    hooked = [block.register_forward_hook(print)] if rank == 1 else []
    in_flush = outcome(trainer.flush)
    for handle in hooked:
        handle.remove()
    trainer.flush()
    if rank == 1:
        block.register_forward_hook(print)
    *_, in_step = [outcome(lambda: fed(trainer, data[0])) for _ in range(4)]
    return {"losses": losses, "mean": mean, "samples": samples, "refused": [in_flush, in_step]}


def differ(rank: int, options: dict[str, Any]) -> Any:
    """Rank 1 wants something else each time; returns the errors of the ranks."""
    odd = rank == 1
    errors: list[Any] = []

    def refused(make: Callable[[], Any]) -> None:
        errors.append(outcome(make))

    refused(lambda: trainer_of(Run(stages=2 + odd)))
    refused(lambda: trainer_of(Run(model="words" if odd else "vit")))
    refused(lambda: trainer_of(Run(accumulation_steps=1 + odd, method="dsp" if odd else "petra")))
    version, revcompile.__version__ = revcompile.__version__, "9.9" if odd else "1.0"
    refused(lambda: trainer_of(Run()))
    revcompile.__version__ = version
    net, _ = compiled("resnet", 2, "cpu")
    if odd:
        net.model.double()
    refused(lambda: net.trainer(optimizer, F.cross_entropy))
    net.model.float()
    refused(lambda: trainer_of(Run(stage_to_rank=(0, 0, 0, 0))))
    refused(lambda: trainer_of(Run(stage_to_rank=(0, 1, 2, 3))))
    refused(lambda: trainer_of(Run(stages=1)))
    net, _ = compiled("resnet", 1, "cpu")
    refused(lambda: net.trainer(lambda p: torch.optim.SGD(p, 0.1 + odd), F.cross_entropy))
    return [*(e for e in errors if isinstance(e, str)), trained(Run(steps=2))["losses"][0]]


def refuse(rank: int, options: dict[str, Any]) -> Any:
    """Rank 1, which has other weights, has no optimizer for its stages; then both train.

    In the middle of that there is no optimizer once more, for stages that are placed otherwise.
    """
    run = Run(weights="predicted", steps=4)
    net, start = compiled(run.model, run.stages, run.device)
    before = {name: value + rank for name, value in start.items()}
    net.model.load_state_dict(before)
    make = optimizer if rank == 0 else len
    error = outcome(lambda: net.trainer(make, F.cross_entropy, weights=run.weights))
    is_same = True
    for module in (net.model, net.to_module()):
        state = module.state_dict()
        is_same &= all(torch.equal(state[name], value) for name, value in before.items())
    net, trainer = trainer_of(run)
    for number, batch in enumerate(batches(run)):
        if number == 2:
            held = list(map(id, net.model.parameters()))
            with pytest.raises(InputError, match="optimizer, stage"):
                net.trainer(
                    make, F.cross_entropy, options=TrainerOptions(stage_to_rank=(0, 1, 1, 1))
                )
            is_same &= held == list(map(id, net.model.parameters()))
        fed(trainer, batch)
    trainer.flush()
    return error, is_same, final(net, trainer)


def drain_bad(rank: int, options: dict[str, Any]) -> Any:
    """In a flush, gradients of the first stage are not finite; then all go on."""
    run = Run(steps=6)
    net, trainer = trainer_of(run)
    data, stage, raised = batches(run), trainer._executors[0].stage, []
    for batch in data[:3]:
        fed(trainer, batch)
    forward, honest = stage._generated

    def infinite(*args: Any) -> Any:
        returned, of_inputs, of_parameters = honest(*args)
        return returned, of_inputs, [g * torch.inf for g in of_parameters]

    stage._generated = [forward, infinite if rank == 0 else honest]
    try:
        trainer.flush()
    except NonFiniteError as error:
        raised = [str(error), error.stage, error.microbatch, error.__notes__[-1]]
    stage._generated = [forward, honest]
    losses = [fed(trainer, batch).loss for batch in data[3:]]
    trainer.flush()
    return raised, losses, final(net, trainer)


def lose(rank: int, options: dict[str, Any]) -> Any:
    """Some micro-batches cannot be used: each in another way."""
    run = options["run"]
    data: list[tuple[Any, Any]] = list(batches(run))
    for number, how in options["bad"]:
        x, y = data[number]
        data[number] = {
            "nan": (torch.full_like(x, torch.nan), y),
            "shape": (x[:, :2], y),
            "type": ("no tensor", y),
            "target": (x, y[:1]),
        }[how]
    net, trainer = trainer_of(run)
    raised, losses = [], []
    for number, batch in enumerate(data):
        try:
            losses.append(fed(trainer, batch).loss)
        except (InputError, NonFiniteError) as error:
            raised.append((number, type(error).__name__))
    trainer.flush()
    return {"state": final(net, trainer), "raised": raised, "losses": losses}


class Fatal(torch.optim.SGD):
    """Its fifth update is the end."""

    end: Callable[[], None]
    count = 0

    def step(self, *args: Any, **kwargs: Any) -> Any:
        Fatal.count += 1
        if Fatal.count == 5:
            Fatal.end()
        return super().step(*args, **kwargs)


def stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def failed(*_: Any) -> None:
    raise ZeroDivisionError("some bug")


def end(rank: int, options: dict[str, Any]) -> Any:
    """One rank ends in the middle of a step; returns another's error."""
    doomed = rank == options["doomed"]
    Fatal.end = staticmethod({"stopped": stopped, "failed": failed}.get(options["how"], killed))
    is_late, in_module = options["how"] == "killed in a late step", "module" in options["how"]
    steps = 20 if is_late else 12
    run = Run(steps=steps, method=options["method"], device=options.get("device", "cpu"))
    net, _ = compiled(run.model, run.stages, run.device)
    made = net.trainer(
        lambda p: (Fatal if doomed and not (is_late or in_module) else torch.optim.SGD)(p, lr=0.01),
        F.cross_entropy,
        method=run.method,
        **settings_of(**options.get("trainer", {}), timeout=options["timeout"]),
    )
    try:
        for number, batch in enumerate(batches(run)):
            fed(made, batch)
            if is_late and doomed and number == 14:
                killed()
            if options["how"] == "killed between steps":
                if doomed:
                    killed()
                made.pop_mean_loss()
        made.flush()
        if in_module:
            if doomed:
                rank_weights._with_values = failed  # type: ignore[assignment]
            net.to_module()
    except RankError as error:
        return str(error)
    except ZeroDivisionError:
        return "this rank failed"
    return "nothing happened"


def trace(rank: int, options: dict[str, Any]) -> Any:
    """A traced training; returns which share of the time each rank computed."""
    run = options["run"]
    _, trainer = trainer_of(run)
    with trainer.trace(options["file"]) as found:
        for batch in batches(run):
            fed(trainer, batch)
        trainer.flush()
    trainer.close()
    return found.busy


# -- ranks ----------------------------------------------------------------------------------------


def rank_main(rank: int, world: int, port: int, scenario: Any, folder: str, options: Any) -> None:
    """One rank's life; its result is a file."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {key: value.format(rank=rank) for key, value in options.get("env", {}).items()}
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(options.get("device", "cpu") == "cpu")
    # As in the process it is compared with: rounded products differ more than captured steps may.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    found = (globals()[scenario] if isinstance(scenario, str) else scenario)(rank, options)
    torch.save(found, Path(folder) / f"rank{rank}.pt")


_PORTS: Final = itertools.islice(itertools.count(10_000 + os.getpid() * 31 % 20_000), 2_000)
"""Other ones in every process, and each only once: a closed port may still be waiting."""


def free_port() -> int:
    """A port that nothing listens on, from below those that systems give to connections."""
    for port in _PORTS:
        with socket.socket() as free:
            try:
                free.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("no free port")


def forkserver() -> Any:
    """Makes processes from a server that has imported everything: that takes longest.

    They see no GPU: what has looked for one cannot be forked.
    """
    context = multiprocessing.get_context("forkserver")
    paths = [str(Path(__file__).parent), str(Path(revcompile.__file__).parents[1])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # the server has no other
    context.set_forkserver_preload(["distributed_preload"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        ensure_running()
    return context


def launch(folder: Path, world: int, scenario: Any, **options: Any) -> list[Any]:
    """Run a scenario on so many ranks, which all end well: what each returned."""
    results, codes = launched(folder, world, scenario, **options)
    assert codes == [0] * world
    return results


def launched(
    folder: Path,
    world: int,
    scenario: str | Callable[[int, dict[str, Any]], Any],
    *,
    start: str = "forkserver",
    limit: float = 120,
    hangs: int | None = None,
    **options: Any,
) -> tuple[list[Any], list[int | None]]:
    """Run a scenario on so many ranks: what each returned (None: nothing), and its exit code.

    Nobody waits for the rank that `hangs`.
    """
    context = forkserver() if start == "forkserver" else multiprocessing.get_context(start)
    shared = (world, free_port(), scenario, str(folder), options)
    ranks = [
        context.Process(target=rank_main, args=(r, *shared), daemon=True) for r in range(world)
    ]
    for process in ranks:
        process.start()
    try:
        end = time.monotonic() + limit
        for rank, process in enumerate(ranks):
            if rank != hangs:
                process.join(max(0.0, end - time.monotonic()))
        codes = [process.exitcode for process in ranks]
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()
                process.join()
    files = [folder / f"rank{rank}.pt" for rank in range(world)]
    return [torch.load(f) if f.exists() else None for f in files], codes
