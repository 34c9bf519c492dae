"""One training step, plain, checkpointed, reversible and in stages: time and memory.

    python -m benchmarks.peers                                  # a stack of transformer blocks
    python -m benchmarks.peers --model conv-6x32
    python -m benchmarks.peers --model vit_tiny_patch16_224 --size 96 --batch 4
    python -m benchmarks.peers --device cuda --dtype bf16 --backends eager cudagraphs inductor

All variants start from the same weights; a step is forward, backward and SGD's update for one
micro-batch. Variants take turns, and a ratio is the median of the ratios of all rounds. PETRA runs
on each of `--backends` with `--stages` stages, all in this process (an update every micro-batch,
with a full pipeline); torch's GPipe and 1F1B run the same stages and drain every `--microbatches`.
`ranks` compares them on several ranks, and `engine` compares backends in detail.

Memory is the peak beyond parameters, optimizer state and lasting gradients. PETRA's stages make new
gradients for each micro-batch, so the gradients of one stage count.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import pipelining
from torch.nn import functional as F
from torch.utils.checkpoint import set_checkpoint_early_stop

import revcompile
from benchmarks.harness import Row, interleave, measure_peak, mib, parser_of, ratio, save, show
from benchmarks.models import Case, sgd
from revcompile.staged import StagedModel
from tests.support.measuring import autocast, measure_memory
from tests.support.stacks import Stack

PLAIN = "plain"


@dataclass(frozen=True)
class Setting:
    """What all variants train, and how."""

    case: Case
    stages: int
    microbatches: int
    device: torch.device
    dtype: str

    def model(self) -> nn.Module:
        """The model, with the same weights each time."""
        return self.case.create().to(self.device).train()

    def data(self) -> tuple[Tensor, Tensor]:
        """The same micro-batch each time."""
        return self.case.data(self.device)

    def staged(self) -> StagedModel:
        """The model in stages, with the same weights each time."""
        x, _ = replace(self.case, batch=2).data(self.device)
        return revcompile.petrafy(
            self.model(), self.stages, x, policy="same_parameters", check="off"
        )


class Missing(Exception):
    """Why a peer cannot take part."""


@dataclass(frozen=True)
class Peer:
    """One way to train: a function that runs some steps, their memory, the loss of the first."""

    turn: Callable[[], object]
    bytes: int
    loss: float
    steps: int = 1


Make = Callable[[Setting], Peer]


# -- modules ---------------------------------------------------------------------------------------


def module_peer(
    net: nn.Module,
    setting: Setting,
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Peer:
    """A module trained in an ordinary loop."""
    x, y = setting.data()
    optimizer = sgd(net.parameters())

    def forward() -> Tensor:
        with context(), autocast(setting.device, setting.dtype):
            return F.cross_entropy(net(x), y)

    def turn() -> None:
        optimizer.zero_grad(set_to_none=False)
        forward().backward()
        optimizer.step()

    loss = float(forward().detach())
    return Peer(turn, measure_memory(forward, setting.device).peak, loss)


def plain(setting: Setting) -> Peer:
    """Plain backpropagation."""
    return module_peer(setting.model(), setting)


def checkpointed(setting: Setting, early_stop: bool = True) -> Peer:
    """torch.utils.checkpoint around every block."""
    net: Any = setting.model()
    if isinstance(net, Stack):
        net.checkpointed = True
    elif hasattr(net, "set_grad_checkpointing"):
        net.set_grad_checkpointing(True)
    else:
        raise Missing(f"{setting.case.model} does not say where it can be checkpointed")
    return module_peer(net, setting, lambda: set_checkpoint_early_stop(early_stop))


def checkpointed_whole(setting: Setting) -> Peer:
    """The same, but recomputing whole blocks, as reversible blocks must."""
    return checkpointed(setting, early_stop=False)


def reversified(setting: Setting) -> Peer:
    """`revcompile.reversify`."""
    x, _ = replace(setting.case, batch=2).data(setting.device)
    net = revcompile.reversify(setting.model(), x, policy="same_parameters", check="off")
    return module_peer(net, setting)


# -- stages ----------------------------------------------------------------------------------------


def petra(backend: str) -> Make:
    """The trainer of revcompile."""

    def make(setting: Setting) -> Peer:
        if backend in ("cudagraphs", "inductor") and setting.device.type != "cuda":
            raise Missing("needs a GPU")
        x, y = setting.data()
        trainer = setting.staged().trainer(
            sgd,
            F.cross_entropy,
            autocast=torch.bfloat16 if setting.dtype == "bf16" else None,
            backend=backend,
        )
        losses = []

        def fill() -> None:
            for _ in range(2 * setting.stages + 2):
                losses.append(trainer.step(x, y).loss)

        peak = measure_peak(fill, setting.device)
        momentum = sum(p.nbytes for p in trainer.model.parameters() if p.requires_grad)
        first = next(loss for loss in losses if loss is not None)
        return Peer(lambda: trainer.step(x, y), peak - momentum, first)

    return make


def torch_schedule(kind: str) -> Make:
    """torch.distributed.pipelining on the same stages, all on this rank."""

    def make(setting: Setting) -> Peer:
        x, y = setting.data()
        modules = setting.staged().to_pipeline_stages()
        stages = [
            pipelining.PipelineStage(module.train(), index, setting.stages, setting.device)
            for index, module in enumerate(modules)
        ]
        schedule = getattr(pipelining, kind)(stages, setting.microbatches, loss_fn=F.cross_entropy)
        optimizer = sgd([p for m in modules for p in m.parameters() if p.requires_grad])
        many = [torch.cat([tensor] * setting.microbatches) for tensor in (x, y)]

        def turn() -> float:
            losses: list[Tensor] = []
            optimizer.zero_grad(set_to_none=False)
            with autocast(setting.device, setting.dtype):
                schedule.step(many[0], target=many[1], losses=losses)
            optimizer.step()
            return float(losses[0].detach())

        try:
            loss = turn()
        except RuntimeError as error:
            # torch 2.11 announces shapes from a rank to itself, which gloo cannot do
            if "Pair is not connected" not in str(error):
                raise
            why = f"torch {torch.__version__} cannot send to its own rank by gloo"
            raise Missing(why) from error
        return Peer(turn, measure_peak(turn, setting.device), loss, setting.microbatches)

    return make


@contextlib.contextmanager
def group_of_one() -> Iterator[None]:
    """A process group of one process: torch's schedules require a group."""
    store = distributed.HashStore()  # type: ignore[attr-defined]
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


# -- all of them -----------------------------------------------------------------------------------


def makers(backends: Sequence[str]) -> dict[str, Make]:
    """Every peer by name."""
    return {
        PLAIN: plain,
        "checkpoint": checkpointed,
        "checkpoint, all": checkpointed_whole,
        "reversify": reversified,
        **{f"petra, {backend}": petra(backend) for backend in backends},
        "torch GPipe": torch_schedule("ScheduleLoopedBFS"),
        "torch 1F1B": torch_schedule("ScheduleInterleaved1F1B"),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Make every peer, measure, print the table."""
    args = parse_args(argv)
    torch.set_num_threads(args.threads)
    case, device = Case(args.model, args.size, args.batch), torch.device(args.device)
    setting = Setting(case, args.stages, args.microbatches, device, args.dtype)
    ready, skipped = {}, {}
    with group_of_one():
        for name, make in makers(args.backends).items():
            try:
                ready[name] = make(setting)
            except Missing as why:
                skipped[name] = str(why)
        turns = {name: peer.turn for name, peer in ready.items()}
        timed = interleave(turns, args.rounds, args.warmup, device)
    seconds = {name: [s / ready[name].steps for s in rounds] for name, rounds in timed.items()}
    report(f"{case}, {args.stages} stages, {args.dtype}", ready, seconds, skipped)
    rows: list[Row] = [
        {"variant": name, "seconds": seconds[name], "bytes": peer.bytes, "loss": peer.loss}
        for name, peer in ready.items()
    ]
    save(args, rows + [{"variant": name, "skipped": why} for name, why in skipped.items()])


def report(
    title: str,
    ready: dict[str, Peer],
    seconds: dict[str, list[float]],
    skipped: dict[str, str],
) -> None:
    """Print the table, and the peers that are left out, with the reasons."""
    rows = []
    for name, peer in ready.items():
        less = f"{ready[PLAIN].bytes / peer.bytes:.2f}x"
        time = f"{1e3 * median(seconds[name]):.2f}"
        against = ratio(seconds[name], seconds[PLAIN])
        rows.append((name, time, against, mib(peer.bytes), less, f"{peer.loss:.5f}"))
    columns = ("variant", "ms per micro-batch", "time / plain", "memory", "less", "first loss")
    show(title, columns, rows)
    for name, why in skipped.items():
        print(f"{name} is left out: {why}")


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command-line options."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--model", default="transformer-6x128", help="timm's name, or a stack: conv-6x32")
    add("--size", type=int, default=64, help="pixels")
    add("--batch", type=int, default=8, help="samples per micro-batch")
    add("--stages", type=int, default=4)
    add("--microbatches", type=int, default=4, help="of torch's schedules")
    add("--backends", nargs="+", default=["eager", "cudagraphs"], help="of PETRA")
    add("--device", default="cpu")
    add("--dtype", choices=("fp32", "bf16"), default="fp32", help="bf16: autocast")
    add("--rounds", type=int, default=11)
    add("--warmup", type=int, default=2)
    add("--threads", type=int, default=1, help="of the CPU")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
