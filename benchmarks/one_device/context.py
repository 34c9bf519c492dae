"""How long a sequence a language model can be fine-tuned on: memory and time by every means.

    python -m benchmarks run context --device cuda                       # Qwen3-like, 0.6B and 1.7B
    python -m benchmarks run context --models tiny --lengths 32 64       # on a CPU

Random weights, all of them trained by AdamW with its state in the weights' type (bf16 on a GPU), a
batch of one sequence. Peak memory is all that is allocated: weights, gradients, optimizer and
activations. `longest` is the length at which a straight line through the two longest sequences that
ran reaches `--limit` GiB; where a step of that length takes less than `--probe` seconds, one of
0.95 times that length is run within the limit, which is then `held` or not.

Each method has a process of its own. Some are prepared side by side, and then measured one after
the other, while nothing else runs on the device (what is prepared and waits does take memory).
"""

from __future__ import annotations

import argparse
import contextlib
import math
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor, multiprocessing, nn
from torch.utils.checkpoint import checkpoint

import revcompile
from benchmarks.harness import measure_peak, show, synchronize
from benchmarks.registry import Benchmark, Row
from revcompile.interop.huggingface import chunk_loss

GIB: Final = 2**30
QWEN3: Final[dict[str, Any]] = {
    "vocab_size": 151936,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 1 << 20,
    "tie_word_embeddings": True,
    "use_cache": False,
}
SMALL: Final = {"vocab_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
MODELS: Final[dict[str, dict[str, Any]]] = {
    "0.6B": QWEN3 | {"hidden_size": 1024, "intermediate_size": 3072},
    "1.7B": QWEN3 | {"hidden_size": 2048, "intermediate_size": 6144},
    "tiny": QWEN3
    | SMALL
    | {"num_key_value_heads": 1, "head_dim": 8, "hidden_size": 16, "intermediate_size": 32},
}


# -- methods ---------------------------------------------------------------------------------------


def plain(model: Any) -> nn.Module:
    return model


def checkpointed(model: Any) -> nn.Module:
    """torch.utils.checkpoint around every layer, as transformers does it."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def offloaded(model: Any) -> nn.Module:
    """The same, with the layers' inputs in pinned memory of the host."""

    def on_host(function: Callable[..., Any], *args: Any) -> Any:
        with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
            return checkpoint(function, *args, use_reentrant=False)

    model = checkpointed(model)
    for module in model.modules():
        if hasattr(module, "_gradient_checkpointing_func"):
            module._gradient_checkpointing_func = on_host
    return model


def budgeted(model: Any) -> nn.Module:
    """torch.compile of every layer, which keeps half of what it would keep."""
    import torch._functorch.config as settings

    settings.activation_memory_budget = 0.5
    torch._dynamo.config.recompile_limit = 64
    for layer in model.model.layers:
        layer.compile()
    return model


def reversified(model: Any) -> nn.Module:
    """`reversify` with policy="pretrained"."""
    ids = torch.arange(32, device=model.device).view(2, 16)
    example = {"input_ids": ids, "labels": ids}
    return revcompile.reversify(model, None, example, policy="pretrained", check="off")


def reversified_on_host(model: Any) -> nn.Module:
    """The same, with all that backward needs of it in pinned memory of the host."""
    net: Any = reversified(model)
    forward = net.forward

    def on_host(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
            return forward(*args, **kwargs)

    net.forward = on_host
    return net  # type: ignore[no-any-return]


def chunked(method: Callable[[Any], nn.Module]) -> Callable[[Any], nn.Module]:
    """A method with the loss in chunks."""
    return lambda model: method(chunk_loss(model))


METHODS: Final[dict[str, Callable[[Any], nn.Module]]] = {
    "plain": plain,
    "checkpoint": checkpointed,
    "checkpoint + offload": offloaded,
    "memory budget 0.5": budgeted,
    "reversify": reversified,
    "plain, chunked loss": chunked(plain),
    "checkpoint, chunked loss": chunked(checkpointed),
    "checkpoint + offload, chunked loss": chunked(offloaded),
    "memory budget 0.5, chunked loss": chunked(budgeted),
    "reversify, chunked loss": chunked(reversified),
    "reversify + offload, chunked loss": chunked(reversified_on_host),
}


# -- one method ------------------------------------------------------------------------------------


class Training:
    """A model ready to be trained by one method."""

    def __init__(self, name: str, method: str, device: torch.device) -> None:
        from transformers import Qwen3Config, Qwen3ForCausalLM

        torch.manual_seed(0)
        self.device = device
        with torch.device(device):
            model = Qwen3ForCausalLM(Qwen3Config(**MODELS[name]))
        if device.type == "cuda":
            model = model.to(torch.bfloat16)
        self.net = METHODS[method](model.train())
        del model
        on_gpu = device.type == "cuda"
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-5, fused=on_gpu)
        for length in (16, 24):  # what is compiled for a batch of one, and for any length
            self.step(length)

    def step(self, length: int) -> Tensor:
        """Forward, backward and update for one sequence."""
        ids = torch.arange(length, device=self.device)[None] % self.net.config.vocab_size
        self.optimizer.zero_grad(set_to_none=True)
        loss: Tensor = self.net(input_ids=ids, labels=ids).loss
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def measure(self, length: int, rounds: int) -> dict[str, Any]:
        """Peak memory and the fastest of some steps, after one that is timed only if alone."""
        try:
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
                start = time.perf_counter()
                loss = float(self.step(length))
                first = time.perf_counter() - start
                peak = torch.cuda.max_memory_allocated()
            else:
                loss, first = float(self.step(length)), math.nan
                peak = measure_peak(lambda: self.step(length), self.device)
            seconds = [self._timed(length) for _ in range(rounds)] or [first]
        except torch.OutOfMemoryError:
            self.optimizer.zero_grad(set_to_none=True)
            return {"length": length, "skipped": "out of memory"}
        return {"length": length, "bytes": peak, "seconds": seconds, "loss": loss}

    def _timed(self, length: int) -> float:
        synchronize(self.device)
        start = time.perf_counter()
        self.step(length)
        synchronize(self.device)
        return time.perf_counter() - start

    def holds(self, length: int, limit: int) -> bool:
        """Does a step of this length run within so many bytes?"""
        torch.cuda.empty_cache()
        whole = torch.cuda.get_device_properties(self.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / whole))
        with contextlib.suppress(torch.OutOfMemoryError):
            self.step(length)
            synchronize(self.device)
            return True
        return False


def longest(rows: list[dict[str, Any]], limit: int) -> int | None:
    """Where a line through the two longest sequences that ran reaches the limit."""
    ran = [row for row in rows if "bytes" in row][-2:]
    if len(ran) < 2 or ran[1]["bytes"] <= ran[0]["bytes"]:
        return None
    slope = (ran[1]["bytes"] - ran[0]["bytes"]) / (ran[1]["length"] - ran[0]["length"])
    return int(ran[1]["length"] + (limit - ran[1]["bytes"]) / slope)


def run(training: Training, row: Row, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """All lengths of one method, which `row` names."""
    found: list[dict[str, Any]] = []
    for length in options.lengths:
        most = 1 if length <= 1 << 16 or options.device == "cpu" else 0
        rounds = options.rounds if length < 1 << 16 else min(most, options.rounds)
        found.append(row | training.measure(length, rounds))
        yield found[-1]
    limit = options.limit * GIB
    length = longest(found, limit)
    if length is None:
        return
    last = row | {"longest": length}
    ran = [r for r in found if "seconds" in r][-1]
    # Attention grows with the square of the length.
    if min(ran["seconds"]) * (length / ran["length"]) ** 2 < options.probe:
        last["held"] = training.holds(int(0.95 * length), limit)
    yield last


# -- all of them -----------------------------------------------------------------------------------


def main(options: argparse.Namespace) -> Iterator[Row]:
    """Measure every method, print a table for each model."""
    if options.device == "cpu":
        torch.set_num_threads(1)
    wanted = [(name, method) for name in options.models for method in options.methods]
    found: list[dict[str, Any]] = []
    if options.jobs == 0:
        warnings.simplefilter("ignore")
        for name, method in wanted:
            training = Training(name, method, torch.device(options.device))
            found += run(training, {"model": name, "variant": method}, options)
    else:
        found = in_processes(wanted, options)
    for name in options.models:
        report(name, [row for row in found if row["model"] == name], options)
    yield from found


def in_processes(
    wanted: list[tuple[str, str]], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """A process for each method, some at a time, until the time is over."""
    deadline = time.monotonic() + options.seconds
    found: list[dict[str, Any]] = []
    for start in range(0, len(wanted), options.jobs):
        workers = [Worker(todo, options) for todo in wanted[start : start + options.jobs]]
        for worker in workers:
            worker.wait(deadline)
        for worker in workers:
            for row in worker.rows(deadline):
                print(row, flush=True)
                found.append(row)
    return found


class Worker:
    """The process of one method."""

    def __init__(self, todo: tuple[str, str], options: argparse.Namespace) -> None:
        context: Any = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(todo, options, theirs))
        self._process.start()
        theirs.close()

    def wait(self, deadline: float) -> Any:
        """What it has to say: a row; None when it is prepared, and at its end."""
        if self._pipe.poll(max(0.0, deadline - time.monotonic())):
            with contextlib.suppress(EOFError):
                return self._pipe.recv()
        return None

    def rows(self, deadline: float) -> Iterator[dict[str, Any]]:
        """Let it measure."""
        with contextlib.suppress(BrokenPipeError):
            self._pipe.send(None)
            while (row := self.wait(deadline)) is not None:
                yield row
        self._process.kill()
        self._process.join()  # its memory is free then


def _work(todo: tuple[str, str], options: argparse.Namespace, pipe: Any) -> None:
    warnings.simplefilter("ignore")
    row, failed = {"model": todo[0], "variant": todo[1]}, None
    try:
        training = Training(*todo, torch.device(options.device))
    except Exception:
        failed = traceback.format_exc().strip().splitlines()[-1]
    pipe.send(None)
    pipe.recv()
    try:
        if failed is None:
            for found in run(training, row, options):
                pipe.send(found)
    except Exception:
        failed = traceback.format_exc().strip().splitlines()[-1]
    if failed is not None:
        pipe.send(row | {"skipped": failed})
    pipe.send(None)


def report(name: str, rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """A line for each method: memory and time at every length, and the longest."""
    lines = []
    for method in options.methods:
        mine = [row for row in rows if row["variant"] == method]
        cells = []
        for length in options.lengths:
            row = next((r for r in mine if r.get("length") == length), None)
            cells.append(_cell(row))
        last = next((r for r in mine if "longest" in r), {})
        held = {True: " (held)", False: " (not held)"}.get(last.get("held"), "")
        lines.append((method, *cells, f"{last['longest']:,}{held}" if last else "–"))
    columns = ("method", *(f"{n:,} tokens" for n in options.lengths), f"in {options.limit} GiB")
    show(f"{name}: peak memory and time of a step", columns, lines)


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "–"
    if "skipped" in row:
        return str(row["skipped"])
    return f"{row['bytes'] / GIB:.2f} GiB, {min(row['seconds']):.3f} s"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    add = parser.add_argument
    add("--models", nargs="+", default=["0.6B", "1.7B"], choices=list(MODELS))
    add("--methods", nargs="+", default=list(METHODS), choices=list(METHODS), metavar="METHOD")
    add("--lengths", nargs="+", type=int, default=[4096, 16384, 32768, 65536], help="tokens")
    add("--device", default="cpu")
    add(
        "--rounds",
        type=int,
        default=3,
        help="timed steps; of 65,536 tokens one",
    )
    add("--limit", type=int, default=80, help="GiB")
    add("--probe", type=float, default=10.0, help="seconds that a step may take")
    add("--jobs", type=int, default=4, help="processes prepared at a time; 0: all in this one")
    add("--seconds", type=float, default=600.0, help="stop after this time")


SMALLEST = ("--models", "tiny", "--lengths", "16", "32", "--rounds", "1", "--jobs", "0")
BENCHMARK = Benchmark(
    "context",
    arguments,
    main,
    smallest=(*SMALLEST, "--probe", "0", "--methods", "checkpoint", "reversify, chunked loss"),
)
