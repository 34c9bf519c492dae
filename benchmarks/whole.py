"""Step time and activation memory of whole timm models, and the largest batch that fits.

    python -m benchmarks.whole --model vit_tiny_patch16_224 --batch 2       # on the CPU
    python -m benchmarks.whole --device cuda --dtype bf16 --batch 16 256 \
        --model swin_base_patch4_window7_224 [--captured]
    python -m benchmarks.whole --device cuda --dtype bf16 --model vit_large_patch16_224 --fit 16

`--captured` runs every variant's step as a CUDA graph. Kernel launches then cost nothing, and only
the time of the GPU itself remains.
"""

from __future__ import annotations

import argparse
import copy
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import revcompile
from benchmarks.harness import Row, interleave, parser_of, ratio, save, show
from revcompile.runtime.reversible.overlap import Overlap
from tests.support.measuring import autocast, capture_step, step_memory

OFF, ON = "reversify, overlap off", "reversify, overlap on"
PLAIN_BAR, SMALL_BAR, CHECKPOINT_BAR, FIT_BAR = 1.33, 1.15, 1.0, 5.0
GIB = 2**30


@dataclass(frozen=True)
class Setting:
    """How models are run."""

    device: torch.device
    dtype: str
    rounds: int
    warmup: int
    captured: bool = False


def variants(name: str, device: torch.device) -> dict[str, nn.Module]:
    """The same model for each way to train; convolutions in channels_last."""
    with device:
        plain: nn.Module = timm.create_model(name)  # as it comes, stochastic depth included
    nets = {"plain": plain}
    if hasattr(plain, "set_grad_checkpointing"):
        nets["checkpoint"] = copy.deepcopy(plain)
        nets["checkpoint"].set_grad_checkpointing(True)  # type: ignore[operator]
    ours = revcompile.reversify(plain, policy="same_parameters", check="off")
    for variant, overlap in ((OFF, Overlap.OFF), (ON, Overlap.ON)):
        nets[variant] = copy.deepcopy(ours)
        nets[variant].overlap = overlap  # type: ignore[assignment]
    layout = torch.channels_last if has_convolutions(plain) else torch.preserve_format
    return {variant: net.train().to(memory_format=layout) for variant, net in nets.items()}


def has_convolutions(net: nn.Module) -> bool:
    """Whether a model has more than one convolution; a ViT has one, for its patches."""
    return sum(isinstance(module, nn.Conv2d) for module in net.modules()) > 1


def batch_for(plain: nn.Module, batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Images of the size that a timm model takes, and labels."""
    size = tuple(getattr(plain, "pretrained_cfg", {}).get("input_size", (3, 224, 224)))
    x = torch.randn(batch, *size, device=device)
    if has_convolutions(plain):
        x = x.to(memory_format=torch.channels_last)
    return x, torch.zeros(batch, device=device).long()


# -- time ------------------------------------------------------------------------------------------


def step_of(net: nn.Module, x: Tensor, y: Tensor, setting: Setting) -> Callable[[], None]:
    """A step: forward and backward."""

    def step() -> None:
        net.zero_grad()
        with autocast(setting.device, setting.dtype):
            loss = F.cross_entropy(net(x), y)
        loss.backward()

    return step


def timed(
    nets: Mapping[str, nn.Module], batch: int, setting: Setting
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """For every variant, the seconds of each round and the peak of activation memory."""
    x, y = batch_for(nets["plain"], batch, setting.device)
    peaks = {}
    steps: dict[str, Callable[[], None]] = {}
    for name, net in nets.items():
        if name == "checkpoint" and setting.captured:
            continue  # it reads the generator's state, which a capture forbids
        peaks[name] = step_memory(net, x, y, setting.device, setting.dtype).peak
        steps[name] = step_of(net, x, y, setting)
        if setting.captured:
            steps[name] = capture_step(steps[name], net)
    return interleave(steps, setting.rounds, setting.warmup, setting.device), peaks


def report(
    title: str,
    seconds: Mapping[str, Sequence[float]],
    peaks: Mapping[str, int],
    captured: bool = False,
) -> dict[str, Any]:
    """Print one table and whether it meets the bars; returns the measurements."""
    of_plain = {name: ratio(times, seconds["plain"]) for name, times in seconds.items()}
    rows = [
        (name, f"{median(times) * 1e3:.2f} ms", f"{peaks[name] / GIB:.2f} GiB", of_plain[name])
        for name, times in seconds.items()
    ]
    show(title, ("training", "step", "activations", "time / plain"), rows)
    best = min((OFF, ON), key=lambda n: of_plain[n].median)
    bar = SMALL_BAR if captured else PLAIN_BAR
    said = [f"{verdict(of_plain[best].median, bar)} of plain"]
    if "checkpoint" in seconds:
        of_checkpoint = ratio(seconds[best], seconds["checkpoint"]).median
        said.append(f"{verdict(of_checkpoint, CHECKPOINT_BAR)} of checkpoint")
    print(f"{best}: {', '.join(said)}; overlap on / off {ratio(seconds[ON], seconds[OFF])}\n")
    return {"seconds": seconds, "peaks": peaks}


def verdict(share: float, bar: float) -> str:
    """A figure and whether it is low enough.

    >>> verdict(1.3, 1.33)
    '1.300 (meets the bar of 1.33)'
    """
    return f"{share:.3f} ({'meets' if share <= bar else 'MISSES'} the bar of {bar})"


def time_models(
    names: Sequence[str], batches: Sequence[int], setting: Setting
) -> Iterator[dict[str, Any]]:
    """One table for every model and batch."""
    how = ", captured" if setting.captured else ""
    for name in names:
        nets = variants(name, setting.device)
        for batch in batches:
            title = f"{name}, batch {batch}, {setting.dtype}{how}"
            figures = report(title, *timed(nets, batch, setting), setting.captured)
            yield {"model": name, "batch": batch, **figures}


# -- size ------------------------------------------------------------------------------------------


def largest_batch(net: nn.Module, plain: nn.Module, setting: Setting, step: int = 8) -> int:
    """About the largest batch that fits, a multiple of `step`; `plain` defines the image size."""
    low, high = 0, step
    while fits(net, plain, high, setting):
        low, high = high, 2 * high
    while high - low > max(step, low // 16):
        middle = (low + high) // 2 // step * step
        low, high = (middle, high) if fits(net, plain, middle, setting) else (low, middle)
    return low


def fits(net: nn.Module, plain: nn.Module, batch: int, setting: Setting) -> bool:
    """Whether one step fits into the memory."""
    gc.collect()
    torch.cuda.empty_cache()
    try:
        step_of(net, *batch_for(plain, batch, setting.device), setting)()
        torch.cuda.synchronize(setting.device)
    except torch.OutOfMemoryError:
        return False
    finally:
        net.zero_grad()
    return True


def fit_models(names: Sequence[str], gib: float, setting: Setting) -> Iterator[dict[str, Any]]:
    """The largest batch of plain and of reversible training on a device of `gib`."""
    is_current = setting.device.index is None
    place = torch.cuda.current_device() if is_current else setting.device.index
    total = torch.cuda.get_device_properties(place).total_memory
    torch.cuda.set_per_process_memory_fraction(gib * GIB / total, place)
    for name in names:
        largest: dict[str, int] = {}
        nets = variants(name, torch.device("cpu"))
        for variant in ("plain", OFF, ON):
            net = nets[variant].to(setting.device)
            largest[variant] = largest_batch(net, nets["plain"], setting)
            net.to("cpu")
        times = largest[OFF] / max(1, largest["plain"])
        enough = "meets" if times >= FIT_BAR else "MISSES"
        columns = ("training", "largest batch")
        show(f"{name} in {gib:g} GiB, {setting.dtype}", columns, list(largest.items()))
        print(f"{times:.1f} times plain's ({enough} the bar of {FIT_BAR:.0f})\n")
        yield {"model": name, "gib": gib, "largest": largest}
    torch.cuda.set_per_process_memory_fraction(1.0, place)


# -- the command -----------------------------------------------------------------------------------


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command-line options."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--model", nargs="+", default=["vit_tiny_patch16_224"], help="of timm's")
    add("--batch", type=int, nargs="+", default=[8])
    add("--device", default="cpu")
    add("--dtype", choices=("fp32", "bf16"), default="fp32", help="bf16: autocast")
    add("--captured", action="store_true", help="steps as CUDA graphs")
    add("--fit", type=float, metavar="GIB", help="find the largest batch in this memory instead")
    add("--rounds", type=int, default=10)
    add("--warmup", type=int, default=3)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    args = parse_args(argv)
    torch.manual_seed(0)
    device = torch.device(args.device)
    setting = Setting(device, args.dtype, args.rounds, args.warmup, args.captured)
    if args.fit is not None:
        found = fit_models(args.model, args.fit, setting)
    else:
        found = time_models(args.model, args.batch, setting)
    rows: list[Row] = []
    for row in found:
        rows.append(row)
        save(args, rows)


if __name__ == "__main__":
    main()
