"""Compare the memory model of stages with bytes counted while they train in one process.

    python -m benchmarks.stage_memory --model resnet18 --stages 10 --batch 4 --size 64
    python -m benchmarks.stage_memory --device cuda --model resnet50 --stages 18 --batch 64

Each stage is measured as if it had a device of its own. The peak of the whole process is measured,
too. The bar: within 15 %.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

import revcompile
from benchmarks.harness import Row, mib, parser_of, save, show
from benchmarks.models import create
from tests.support.stage_memory import BAR, OPTIMIZERS, Measured, Setting, images, measure

BUFFERS = {"bf16": torch.bfloat16, "fp16": torch.float16}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command-line options."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--device", default="cpu")
    add("--model", default="resnet18", help="a timm model")
    add("--stages", type=int, default=5)
    add("--batch", type=int, default=16)
    add("--size", type=int, default=64, help="of the images")
    add("--method", default="petra")
    add("--in-flight-per-stage", nargs="+", type=float, help="one run for each")
    add("--optimizer", choices=tuple(OPTIMIZERS), default="sgd")
    add("--accumulation-steps", type=int, default=1)
    add("--buffers", choices=tuple(BUFFERS))
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    args = parse_args(argv)
    device = torch.device(args.device)
    torch.manual_seed(0)
    base = allocated(device)
    model = create(args.model, args.size, 1000).to(device)
    example = torch.zeros(2, 3, args.size, args.size, device=device)
    net = revcompile.petrafy(model, args.stages, example, check="off")
    rows: list[Row] = []
    for in_flight_per_stage in args.in_flight_per_stage or [None]:
        how = (
            args.batch,
            args.method,
            in_flight_per_stage,
            args.optimizer,
            args.accumulation_steps,
        )
        setting = Setting(*how, BUFFERS.get(args.buffers))
        found = measure(net, setting, images(args.batch, args.size, device), base=base)
        name = f"{args.method}, {in_flight_per_stage}" if in_flight_per_stage else args.method
        title = f"{args.model}, {args.stages} stages, batch {args.batch}, {name}, {args.optimizer}"
        title += f", buffers {args.buffers}" if args.buffers else ""
        report(f"{title}, {device}", found)
        rows.append({"title": title, "measured": found, "ratio": found.ratio, "worst": found.worst})
        save(args, rows)


def report(title: str, found: Measured) -> None:
    """Print the stages and the process."""
    rows: list[list[object]] = []
    for index, row in enumerate(found.rows):
        figures = (row.accounted.buffers, row.held.buffers, row.expected, row.peak)
        rows.append([index, *map(mib, figures), f"{row.ratio:.3f}"])
    rows.append(["process", "", "", mib(found.accounted), mib(found.peak), f"{found.ratio:.3f}"])
    columns = ("stage", "kept: accounted", "kept: held", "peak: accounted", "peak: measured")
    show(title, (*columns, "ratio"), rows)
    verdict = "meets" if abs(found.ratio - 1) <= BAR else "MISSES"
    print(
        f"the process takes {found.ratio:.3f} of what is accounted ({verdict} the bar of {BAR:.0%})"
        f"; the stage furthest off {found.worst:.3f}\n"
    )


def allocated(device: torch.device) -> int:
    """Bytes allocated on a GPU now, including the libraries' workspaces."""
    if device.type != "cuda":
        return 0
    square = torch.ones(64, 64, device=device)
    (square @ square).sum().item()
    del square
    return torch.cuda.memory_allocated(device)


if __name__ == "__main__":
    main()
