"""Fine-tuning a language model: the largest batch and tokens per second in a given memory.

    python -m benchmarks.finetune --json benchmarks/results/finetune.json
    python -m benchmarks.finetune --json benchmarks/results/finetune.json --table
    python -m benchmarks.finetune --device cpu --tiny

Llama with random weights, in the sizes of Llama 3.2 with 1B and 3B parameters, 4,096 tokens, fused
AdamW. `--precision bf16` has weights, gradients and optimizer state in bfloat16, `autocast` in
float32. Causal attention, no padding; all methods compute head and loss for 1,024 tokens at a time.
Checkpointing is that of transformers, with blocks compiled one by one; offload keeps the inputs of
blocks in pinned memory of the host (`torch.autograd.graph.save_on_cpu`). `reversify` has
`policy="pretrained"` and compiled couplings.

Memory is what the caching allocator may reserve (`torch.cuda.set_per_process_memory_fraction`), all
but the context of CUDA. The batch is estimated from the peaks of two small ones, and lowered until
a whole update fits. Time is that of one update after a first. On a CPU the limit is compared with
the peak of activations.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaModel

import revcompile
from benchmarks.harness import Row, markdown, parser_of, save, show, synchronize
from benchmarks.whole import GIB
from revcompile.cli.baselines import checkpointed, compile_blocks
from tests.support.measuring import memory_of_step

SIZES: dict[str, dict[str, int]] = {
    "1B": {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32},
    "3B": {"hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24},
}
COMMON = {"num_key_value_heads": 8, "intermediate_size": 8192, "vocab_size": 128_256}
TINY = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
TINY |= {"num_key_value_heads": 2, "intermediate_size": 64, "vocab_size": 128}
METHODS = ("checkpointing", "checkpointing, offload", "reversify")
CHUNK = 1024
COLUMNS = ["model", "memory", "method", "largest batch", "tokens/s", "time / update", "peak"]


@dataclass
class Training:
    """A model, its optimizer and updates of any batch size."""

    name: str
    method: str
    args: argparse.Namespace

    @cached_property
    def device(self) -> torch.device:
        return torch.device(self.args.device)

    @cached_property
    def net(self) -> Any:
        args = self.args
        config = LlamaConfig(**(TINY if args.tiny else COMMON | SIZES[self.name]), use_cache=False)
        with self.device:
            model = LlamaModel(config)
        if args.precision == "bf16":
            model.bfloat16()
        if self.method == "reversify":
            ids = {"input_ids": self.batch(2)}
            net: Any = revcompile.reversify(
                model.train(), None, ids, policy="pretrained", check="off"
            )
            net.compile(backend=args.backend, dynamic=True)
            return net
        compile_blocks(model, args.backend, dynamic=True)
        return checkpointed(model.train())

    @cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        fused = self.device.type == "cuda"
        return torch.optim.AdamW(self.net.parameters(), lr=1e-5, fused=fused)

    def batch(self, size: int) -> Tensor:
        vocabulary = (TINY if self.args.tiny else COMMON)["vocab_size"]
        return torch.randint(vocabulary, (size, self.args.tokens), device=self.device)

    def forward(self, ids: Tensor) -> Tensor:
        """The mean loss of the next tokens; the head is the embedding, as in Llama 3.2."""
        kept: AbstractContextManager[Any] = nullcontext()
        if self.method == "checkpointing, offload":
            pinned = self.device.type == "cuda"
            kept = torch.autograd.graph.save_on_cpu(pin_memory=pinned)
        low = self.args.precision == "autocast"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=low):
            with kept:
                hidden = self.net(input_ids=ids).last_hidden_state
            head = self.net.get_input_embeddings().weight
            rows = hidden[:, :-1].flatten(0, 1).split(CHUNK)
            labels = ids[:, 1:].flatten().split(CHUNK)
            losses = [
                checkpoint(loss_of, row, head, label, use_reentrant=False)
                for row, label in zip(rows, labels, strict=True)
            ]
        return torch.stack(losses).sum() / ids[:, 1:].numel()

    def update(self, ids: Tensor) -> float:
        self.forward(ids).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        synchronize(self.device)
        return 0.0

    def attempt(self, size: int, limit: float) -> Row | None:
        """Two updates; None if they need more memory."""
        clean()
        try:
            ids = self.batch(size)
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self.device)
                self.update(ids)
                peak = torch.cuda.max_memory_allocated(self.device)
            else:
                peak = memory_of_step(lambda: self.forward(ids), self.device).peak
                if peak > limit:
                    return None
            begin = time.perf_counter()
            self.update(ids)
            seconds = time.perf_counter() - begin
        except torch.OutOfMemoryError:
            return None
        finally:
            self.optimizer.zero_grad()
        return {"batch": size, "seconds": seconds, "tokens": ids.numel() / seconds, "peak": peak}


def loss_of(rows: Tensor, head: nn.Parameter, labels: Tensor) -> Tensor:
    """The sum of some rows' losses."""
    return F.cross_entropy((rows @ head.T).float(), labels, reduction="sum")


def clean() -> None:
    """Free what earlier trials have left."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def limit_memory(device: torch.device, limit: float) -> None:
    """Refuse the allocator more than `limit` bytes."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device.index)


def largest(training: Training, limit: float, two: Sequence[Row]) -> Row | None:
    """What the largest batch reached in `limit` bytes, from two small batches' peaks."""
    limit_memory(training.device, limit)
    first, second = two
    slope = (second["peak"] - first["peak"]) / (second["batch"] - first["batch"])
    size = first["batch"] + int((limit - first["peak"]) / slope)
    for _ in range(8):
        if size < 1:
            break
        if (row := training.attempt(size, limit)) is not None:
            return row
        size = min(size - 1, int(0.97 * size))
    return None


def measured(name: str, method: str, args: argparse.Namespace) -> Iterator[Row]:
    """A row for each limit, the largest first."""
    about = {"model": name, "method": method, "precision": args.precision}
    device = torch.device(args.device)
    unit = GIB / 1024 if args.tiny else GIB
    limit_memory(device, 2.0**60)
    try:
        training = Training(name, method, args)
        begin = time.perf_counter()
        training.attempt(2, 2.0**60)
        start = time.perf_counter() - begin
        two = [row for size in (2, 6) if (row := training.attempt(size, 2.0**60)) is not None]
        for gib in sorted(args.gib, reverse=True):
            row = largest(training, gib * unit, two)
            yield about | {"gib": gib, "start": start} | (row or {"batch": 0})
    except Exception as error:  # the others are worth their time
        yield about | {"failed": f"{type(error).__name__}: {error}"}
    limit_memory(device, 2.0**60)


def cells_of(row: Row, tiny: bool) -> list[str]:
    """A row of the table."""
    memory = f"{row['gib']:g} {'MiB' if tiny else 'GiB'}" if "gib" in row else ""
    named = [row["model"], memory, row["method"]]
    if not row.get("batch"):
        return [*named, row.get("failed", "does not fit"), "", "", ""]
    time_of, peak = f"{row['seconds']:.2f} s", f"{row['peak'] / GIB:.1f} GiB"
    return [*named, str(row["batch"]), f"{row['tokens']:,.0f}", time_of, peak]


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command-line options."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--models", nargs="+", choices=tuple(SIZES), default=list(SIZES))
    add("--methods", nargs="+", choices=METHODS, default=METHODS)
    add("--gib", nargs="+", type=float, default=[24, 48, 80], help="with --tiny in MiB")
    add("--tokens", type=int, default=4096)
    add("--precision", choices=("bf16", "autocast"), default="bf16", help="of weights; see above")
    add("--device", default="cuda")
    add("--backend", default="inductor", help="of torch.compile")
    add("--tiny", action="store_true", help="a small model")
    add(
        "--table", action="store_true", help="print the file of --json as Markdown; measure nothing"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    args = parse_args(argv)
    if args.table:
        rows = json.loads(args.json.read_text())["rows"]
        print(markdown(COLUMNS, [cells_of(row, args.tiny) for row in rows]))
        return
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 64
    rows = []
    for name in args.models:
        for method in args.methods:
            torch.manual_seed(0)
            torch._dynamo.reset()
            for row in measured(name, method, args):
                rows.append(row)
                save(args, rows)
            clean()
    rows.sort(key=lambda row: (row["model"], row.get("gib", 0)))
    save(args, rows)
    title = f"{args.tokens} tokens, {args.precision}, AdamW"
    show(title, COLUMNS, [cells_of(row, args.tiny) for row in rows])


if __name__ == "__main__":
    main()
