"""PETRA's Table 3 from our own compiler: the memory of RevNet-50 under each choice of buffers.

    python -m benchmarks.accounting
    python -m benchmarks.accounting --batch 32

`tests/support/accounting.py` says how the paper's figures are read.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict

from benchmarks.harness import parser_of, save, show
from tests.support.accounting import BATCH, STAGES, Row, revnet50, table3


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command-line options."""
    parser = parser_of(__doc__)
    parser.add_argument("--batch", type=int, default=BATCH)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    args = parse_args(argv)
    rows = list(table3(revnet50(), args.batch))
    columns = (
        "input buffers",
        "parameter buffers",
        "in_flight_per_stage",
        "GB",
        "saving",
        "expected",
    )
    title = f"RevNet-50, {STAGES} stages, batch {args.batch}, 224 x 224"
    show(title, columns, [_cells(row, rows[0].total, args.batch) for row in rows])
    save(args, [asdict(row) for row in rows])


def _cells(row: Row, most: int, batch: int) -> tuple[str, ...]:
    kind = str(row.buffer_dtype).removeprefix("torch.") if row.buffer_dtype else "float32"
    return (
        f"all, {kind}" if row.inputs else f"where not reversible, {kind}",
        "yes" if row.parameters else "no",
        row.in_flight_per_stage,
        f"{row.total / 1e9:.2f}",
        f"{100 * (1 - row.total / most):.1f} %",
        f"{row.expected:.1f}" if batch == BATCH else "",
    )


if __name__ == "__main__":
    main()
