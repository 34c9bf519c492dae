"""Fine-tuning reversibly (policy="pretrained") against plain fine-tuning of the same weights.

    python -m benchmarks run finetune --device cuda --images data/cifar10 --text data/input.txt
    python -m benchmarks run finetune gpt2 --steps 20 --text README.md

A small model is trained on one part of its data, and then fine-tuned on another part by both means,
with the same batches in the same order, for each seed. What counts is the test accuracy in percent
(CIFAR-10) or the loss in nats a character, in eval mode: before fine-tuning, where both must be
the same, and after. Each model has a process of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import functools
import itertools
import math
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Final

import torch
from torch import Tensor, multiprocessing, nn
from torch.nn import functional as F

import revcompile
from benchmarks.harness import autocast, show
from benchmarks.learning import cifar
from benchmarks.registry import Benchmark, Row

VISION: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "vit": (
        "vit_tiny_patch16_224",
        {"img_size": 32, "patch_size": 4, "depth": 4},
    ),
    "deit": (
        "deit_tiny_distilled_patch16_224",
        {"img_size": 32, "patch_size": 4, "depth": 4},
    ),
    "convnext": (
        "convnext_atto",
        # By default branches are scaled by 1e-6 at first: too little to be seen in short training.
        {"patch_size": 2, "depths": (2, 2, 2, 2), "dims": (32, 64, 128, 256), "ls_init_value": 0.1},
    ),
    "swin": (
        "swin_tiny_patch4_window7_224",
        {
            "img_size": 32,
            "patch_size": 2,
            "window_size": 4,
            "depths": (2, 2, 2),
            "num_heads": (2, 4, 8),
            "embed_dim": 48,
        },
    ),
    "mixer": (
        "MlpMixer",
        {"img_size": 32, "patch_size": 4, "num_blocks": 4, "embed_dim": 192},
    ),
}
DECODER: Final[dict[str, Any]] = {
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
LANGUAGE: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "gpt2": (
        "GPT2",
        {"n_embd": 192, "n_layer": 4, "n_head": 6, "n_positions": 256, "attn_pdrop": 0.0}
        | {"resid_pdrop": 0.0, "embd_pdrop": 0.0},
    ),
    "llama": ("Llama", DECODER),
    "qwen3": ("Qwen3", DECODER),
    "gemma": ("Gemma2", DECODER | {"query_pre_attn_scalar": 32}),
}
LENGTH: Final = 128


class Images:
    """CIFAR-10: what to train, on which batches, and how good it is."""

    def __init__(self, name: str, folder: Path, device: torch.device) -> None:
        import timm

        architecture, options = VISION[name]
        create = getattr(timm.models.mlp_mixer, architecture, None)  # sizes are not free elsewhere
        model = create or functools.partial(timm.create_model, architecture)
        self.model = model(num_classes=10, **options).to(device)
        self.data = cifar.load(folder).to(device)
        self.unit, self.rate = "points", 1e-3

    def part(self, which: int, batch: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Endless batches of the first or the second half."""
        half = len(self.data.train) // 2
        slices = slice(half) if which == 0 else slice(half, None)
        data = cifar.Cifar(
            self.data.train[slices],
            self.data.train_labels[slices],
            self.data.test,
            self.data.test_labels,
        )
        for epoch in itertools.count():
            yield from data.epoch(batch, seed, epoch)

    def example(self) -> dict[str, Any]:
        return {"example_inputs": cifar.normalised(self.data.test[:4])}

    def loss(self, net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(net(batch[0]), batch[1])

    @torch.no_grad()
    def quality(self, net: nn.Module) -> float:
        """Percent right."""
        right = [(net(x).argmax(1) == y).float() for x, y in self.data.tests()]
        return 100 * float(torch.cat(right).mean())


class Characters:
    """Text by its characters."""

    def __init__(self, name: str, file: Path, device: torch.device) -> None:
        import transformers

        text = file.read_text(encoding="utf-8")
        letters = sorted(set(text))
        number = {letter: i for i, letter in enumerate(letters)}
        self.text = torch.tensor([number[letter] for letter in text], device=device)
        family, options = LANGUAGE[name]
        config = getattr(transformers, f"{family}Config")(vocab_size=len(letters), **options)
        config.use_cache, config.bos_token_id, config.eos_token_id = False, 0, 0
        kind = getattr(
            transformers, "GPT2LMHeadModel" if name == "gpt2" else f"{family}ForCausalLM"
        )
        self.model = kind(config).to(device)
        self.unit, self.rate = "nats", 1e-3

    def part(self, which: int, batch: int, seed: int) -> Iterator[Tensor]:
        """Random places of the first half of the text, or of what is between that and the tests."""
        end = len(self.text)
        first, last = (0, end // 2) if which == 0 else (end // 2, end * 9 // 10)
        generator = torch.Generator(self.text.device).manual_seed(seed)
        offsets = torch.arange(LENGTH, device=self.text.device)
        while True:
            starts = torch.randint(
                first, last - LENGTH, (batch, 1), generator=generator, device=self.text.device
            )
            yield self.text[starts + offsets]

    def example(self) -> dict[str, Any]:
        ids = self.text[: 2 * LENGTH].view(2, LENGTH)
        return {"example_kwargs": {"input_ids": ids, "labels": ids}}

    def loss(self, net: nn.Module, batch: Tensor) -> Tensor:
        loss: Tensor = net(input_ids=batch, labels=batch).loss
        return loss

    @torch.no_grad()
    def quality(self, net: nn.Module) -> float:
        """Nats a character, of the last tenth of the text."""
        tests = self.text[len(self.text) * 9 // 10 :]
        rows = tests[: len(tests) // LENGTH * LENGTH].view(-1, LENGTH)
        parts = rows.split(128)
        losses = [float(self.loss(net, part)) * len(part) for part in parts]
        return sum(losses) / len(rows)


def train(
    task: Any, net: nn.Module, which: int, steps: int, seed: int, rate: float, o: Any
) -> tuple[float, list[float]]:
    """A warmup and a cosine; returns the seconds it took and the loss of each batch."""
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW(net.parameters(), lr=rate, weight_decay=0.05)
    warmup = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda i: min((i + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * i / steps)),
    )
    net.train()
    start, losses = time.perf_counter(), []
    for batch in itertools.islice(task.part(which, o.batch, seed), steps):
        optimizer.zero_grad()
        with autocast(torch.device(o.device), o.dtype):
            loss = task.loss(net, batch)
        loss.backward()
        losses.append(loss.detach())
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    net.eval()
    return time.perf_counter() - start, [float(loss) for loss in losses]


def run(name: str, o: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Train a model, then fine-tune it by both means for each seed."""
    warnings.simplefilter("ignore")
    device = torch.device(o.device)
    torch.manual_seed(0)
    task: Any = (
        Images(name, o.images, device) if name in VISION else Characters(name, o.text, device)
    )
    train(task, task.model, 0, o.steps * 2, 100, task.rate, o)
    policy = dataclasses.replace(revcompile.Policy.named("pretrained"), kept_bits=o.kept_bits)
    net = revcompile.reversify(task.model, policy=policy, **task.example())
    before = task.quality(task.model), task.quality(net.eval())
    weights = copy.deepcopy(net.state_dict())
    row = {"model": name, "unit": task.unit, "plain_before": before[0], "before": before[1]}
    for seed in o.seeds:
        found = dict(row, seed=seed)
        for key, variant in (("plain", copy.deepcopy(task.model)), ("reversible", net)):
            variant.load_state_dict(weights)
            seconds, losses = train(task, variant, 1, o.steps, seed, task.rate / 3, o)
            found |= {key: task.quality(variant), f"{key}_seconds": seconds}
            found[f"{key}_train"] = mean(losses[-20:])
        yield found


def work(name: str, options: argparse.Namespace, done: Any) -> None:
    """One model in a process of its own."""
    try:
        for row in run(name, options):
            done.put(row)
    except Exception:
        done.put({"model": name, "skipped": traceback.format_exc().strip().splitlines()[-1]})
    done.put(None)


def main(options: argparse.Namespace) -> Iterator[Row]:
    """All models side by side, and their table."""
    rows: list[dict[str, Any]] = []
    if len(options.models) == 1:
        rows = list(run(options.models[0], options))
    else:
        context: Any = multiprocessing.get_context("spawn")
        done = context.Queue()
        workers = [
            context.Process(target=work, args=(name, options, done)) for name in options.models
        ]
        for worker in workers:
            worker.start()
        deadline, running = time.monotonic() + options.seconds, len(workers)
        while running and time.monotonic() < deadline:
            with contextlib.suppress(Exception):
                row = done.get(timeout=1.0)
                running -= row is None
                if row is not None:
                    rows.append(row)
                    print(row, flush=True)
        for worker in workers:
            worker.kill()
    report(rows, options)
    yield from rows


def report(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Means over the seeds."""
    lines = []
    for name in options.models:
        mine = [r for r in rows if r["model"] == name and "plain" in r]
        if not mine:
            continue
        gaps = [r["reversible"] - r["plain"] for r in mine]
        spread = f" ± {stdev(gaps):.3f}" if len(gaps) > 1 else ""
        lines.append(
            (
                name,
                mine[0]["unit"],
                f"{mine[0]['plain_before']:.4f}",
                f"{mine[0]['before']:.4f}",
                f"{mean(r['plain'] for r in mine):.3f}",
                f"{mean(r['reversible'] for r in mine):.3f}",
                f"{mean(gaps):+.3f}{spread}",
                f"{mean(r['plain_train'] for r in mine):.3f}",
                f"{mean(r['reversible_train'] for r in mine):.3f}",
            )
        )
    columns = ("model", "unit", "before", "rewired", "plain", "reversible", "difference")
    columns += "plain, training loss", "reversible"
    show(f"fine-tuning, {len(options.seeds)} seeds", columns, lines)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    add = parser.add_argument
    names = [*VISION, *LANGUAGE]
    add("models", nargs="*", default=names, metavar="MODEL", help=", ".join(names))
    add("--images", type=Path, default=Path("data/cifar10"), help="folder with CIFAR-10")
    add("--text", type=Path, default=Path("data/input.txt"), help="a file")
    add("--steps", type=int, default=150, help="of fine-tuning; of training twice as many")
    add("--batch", type=int, default=128)
    add("--seeds", type=int, nargs="+", default=[1, 2, 3])
    add("--kept-bits", type=int, default=4, choices=(1, 2, 4), help="more for less noise")
    add("--device", default="cpu")
    add("--dtype", choices=("fp32", "bf16"), default="fp32", help="bf16: autocast")
    add("--seconds", type=float, default=3600.0, help="stop after this time")


BENCHMARK = Benchmark(
    "finetune",
    arguments,
    main,
    smallest=("gpt2", "--text", "README.md", "--steps", "2", "--batch", "2", "--seeds", "1"),
)
