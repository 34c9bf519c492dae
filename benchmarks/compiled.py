"""Compiled couplings against compiled plain and checkpointed training: time, memory, start, error.

    python -m benchmarks.compiled --json compiled.json
    python -m benchmarks.compiled --graphed --models resnet152 --batch 64
    python -m benchmarks.compiled --device cpu --tiny --batch 2 --backend eager

A step is forward and backward in bfloat16 autocast; the variants of a model take turns. Activations
are the peak of a step without parameters, gradients and batch, on a GPU. Start lasts from the plain
model to the end of the first step; compilers use what earlier runs have left on disk, unless
TORCHINDUCTOR_FORCE_DISABLE_CACHES=1. The error is the largest relative one of a rebuilt input.
"""

from __future__ import annotations

import argparse
import copy
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

import timm
import torch
from timm.models import checkpoint_seq
from torch import Tensor, nn
from torch.nn import functional as F

import revcompile
from benchmarks.harness import Row, interleave, parser_of, ratio, save, show, synchronize
from benchmarks.text import GPT, Sizes
from benchmarks.whole import GIB, batch_for, has_convolutions
from revcompile.cli.baselines import checkpointed, compile_blocks
from tests.support.measuring import autocast, capture_step, measure_memory

LARGE_GPT, TINY_GPT, VOCABULARY = Sizes(32, 1024, 16, 2048), Sizes(4, 32, 2, 16), 512
SMALL_SWIN = {"embed_dim": 16, "depths": (1, 1), "num_heads": (1, 2)}
TIMM: dict[str, tuple[str, str, dict[str, Any]]] = {
    "vit": ("vit_large_patch16_224", "test_vit", {}),
    "swin": ("swin_base_patch4_window7_224", "swin_tiny_patch4_window7_224", SMALL_SWIN),
    "convnext": ("convnext_base", "test_convnext", {}),
    "resnet50": ("resnet50", "test_resnet", {}),
    "resnet152": ("resnet152", "test_resnet", {}),
}
"""The model, its small stand-in, and the stand-in's options."""
MODELS = ["vit", "swin", "convnext", "resnet152", "gpt"]
COLUMNS = {"variant": "{}", "step": "{:.1f} ms", "time / plain": "{}", "activations": "{:.2f} GiB"}
COLUMNS |= {"start": "{:.1f} s", "artifacts": "{}", "error": "{:.1e}", "loss": "{:.4f}"}
POLICIES = dict.fromkeys(("reversible", "reversible compiled"), "same_parameters")
POLICIES["pretrained compiled"] = "pretrained"


def model_of(
    name: str, args: argparse.Namespace, **settings: Any
) -> tuple[nn.Module, Tensor, Tensor]:
    """The plain model, inputs and labels; convolutions in channels_last.

    `settings` go to timm.
    """
    device = torch.device(args.device)
    if name == "gpt":
        sizes = TINY_GPT if args.tiny else LARGE_GPT
        tokens = torch.randint(VOCABULARY, (min(args.batch, 8), sizes.context + 1), device=device)
        return GPT(VOCABULARY, sizes).to(device), tokens[:, :-1], tokens[:, 1:]
    large, small, options = TIMM[name]
    with device:
        name, options = (small, options) if args.tiny else (large, {})
        net = timm.create_model(name, **options, **settings)
    layout = torch.channels_last if has_convolutions(net) else torch.preserve_format
    return net.to(memory_format=layout), *batch_for(net, args.batch, device)


def checkpoint_blocks(net: nn.Module) -> None:
    """Switch checkpointing on."""
    if isinstance(net, GPT):
        net.blocks.forward = partial(checkpoint_seq, list(net.blocks))  # type: ignore[method-assign]
    else:
        checkpointed(net)


def variant_of(variant: str, plain: nn.Module, x: Tensor, backend: str) -> Any:
    """A copy of the model that trains in this way."""
    net: Any = copy.deepcopy(plain)
    if variant in POLICIES:
        net = revcompile.reversify(net, x[:2], policy=POLICIES[variant], check="off")
    if variant == "checkpointing":
        compile_blocks(net, backend)
        checkpoint_blocks(net)
    elif variant != "reversible":
        net.compile(backend=backend)
    return net.train()


def started(
    variant: str, plain: nn.Module, x: Tensor, y: Tensor, args: argparse.Namespace
) -> tuple[Callable[[], None], Row]:
    """A step that is ready to run, and what is measured before the rounds."""

    def forward() -> Tensor:
        with autocast(x.device, "bf16"):
            return F.cross_entropy(net(x).flatten(0, -2), y.flatten())

    def step() -> None:
        net.zero_grad()
        forward().backward()

    begin = time.perf_counter()
    net = variant_of(variant, plain, x, args.backend)
    step()
    synchronize(x.device)
    row: Row = {"variant": variant, "start": time.perf_counter() - begin, "loss": forward().item()}
    if x.device.type == "cuda":
        row["activations"] = measure_memory(forward, x.device).peak / GIB
    if variant in POLICIES:
        if net.compiler is not None:
            row |= {"artifacts": len(net.compiler.artifacts), "failed": net.compiler.failures}
        with autocast(x.device, "bf16"):
            row["error"] = max(error for _, error in net._inversion_errors(x))
    return capture_step(step, net) if args.graphed else step, row


def measured(name: str, args: argparse.Namespace) -> Iterator[Row]:
    """A row for each way to train a model."""
    plain, x, y = model_of(name, args)
    variants = ["plain", "checkpointing", *POLICIES]
    if name != "gpt":
        variants.remove("pretrained compiled")
    if args.graphed:
        variants.remove("checkpointing")  # it reads the generator's state: no capture
    steps, rows = dict[str, Callable[[], None]](), list[Row]()
    for variant in variants:
        try:
            steps[variant], row = started(variant, plain, x, y, args)
        except Exception as error:  # the others are worth their time
            row = {"variant": variant, "failed": f"{type(error).__name__}: {error}"}
        rows.append(row)
        gc.collect()
    seconds = interleave(steps, args.rounds, 1, x.device) if steps else {}
    for row in rows:
        if times := seconds.get(row["variant"]):
            row |= {"step": median(times) * 1e3, "seconds": times}
            if "plain" in seconds:
                row["time / plain"] = ratio(times, seconds["plain"])
        yield {"model": name, "batch": len(x), **row}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--models", nargs="+", choices=(*TIMM, "gpt"), default=MODELS)
    add("--batch", type=int, default=256, help="images; the GPT takes 8 sequences at most")
    add("--rounds", type=int, default=10)
    add("--device", default="cuda")
    add("--backend", default="inductor", help="of torch.compile")
    add("--tiny", action="store_true", help="small models of the same kinds")
    add("--graphed", action="store_true", help="steps as CUDA graphs")
    args = parser.parse_args(argv)
    # Blocks that differ in a number, such as a rate of stochastic depth, are compiled one by one.
    torch._dynamo.config.recompile_limit = 64
    first = nn.Linear(1, 1, device=args.device)
    first.compile(backend=args.backend)
    first(torch.ones(1, 1, device=args.device)).sum().backward()  # imports are not part of a start
    rows: list[Row] = []
    for name in args.models:
        torch.manual_seed(0)
        torch._dynamo.reset()
        found = list(measured(name, args))
        rows += found
        save(args, rows)
        cells = [[f.format(r[c]) if c in r else "" for c, f in COLUMNS.items()] for r in found]
        title = f"{name}, batch {found[0]['batch']}, bf16{', graphed' * args.graphed}"
        show(title, list(COLUMNS), cells)
        for row in found:
            if row.get("failed"):
                print(f"{row['variant']} has failed, or runs eagerly in parts: {row['failed']}")


if __name__ == "__main__":
    main()
