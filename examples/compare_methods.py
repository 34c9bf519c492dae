"""The methods' table as curves: the same model, data and recipe, trained by several methods.

They differ in delay: `petra` has half that of `petra:2` (the paper's), `delayed` keeps a copy of
its parameters for every micro-batch in flight, `1f1b` has no delay and idles between updates.

    python examples/compare_methods.py
    python examples/compare_methods.py --methods petra petra:2 dsp --accumulation-steps 4 --epochs 6
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import train_compiled
from report import Log, draw_curves, read_log
from rich.console import Console
from rich.table import Table

METHODS = ("backprop", "petra", "petra:2", "pipedream", "delayed")


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Train with each method; returns their test accuracies."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog="All other options are those of train_compiled.py.",
    )
    add = parser.add_argument
    add("--methods", nargs="+", default=METHODS, help="name, or name:in_flight_per_stage")
    add("--out", type=Path, default=Path("runs/compare"))
    args, others = parser.parse_known_args(argv)

    logs: dict[str, Log] = {}
    table = Table("method", "test accuracy", "images per second", title="after the last epoch")
    for name in args.methods:
        method, _, in_flight = name.partition(":")
        folder = args.out / name.replace(":", "-")
        options = ["--method", method, "--out", str(folder)]
        options += ["--in-flight-per-stage", in_flight] if in_flight else []
        train_compiled.main(["--stages", "8", *others, *options])
        logs[name] = read_log(folder)
        last = logs[name][-1]
        table.add_row(name, f"{last['test_accuracy']:.1%}", f"{last['images_per_second']:,.0f}")
    Console(force_jupyter=False).print(table)
    draw_curves(logs, args.out / "curves.svg")
    print(f"curves: {args.out / 'curves.svg'}")
    return {name: log[-1]["test_accuracy"] for name, log in logs.items()}


if __name__ == "__main__":
    main()
