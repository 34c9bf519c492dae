"""Petrafy 22 Hugging Face architectures (tiny, random) and compare them with the originals.

    python -m benchmarks.huggingface                   # all of them, 4 stages
    python -m benchmarks.huggingface gpt2 llama        # some

Each model runs in double precision and without dropout. The captured graph must give the original's
outputs at two lengths, with padding. Three PETRA steps at learning rate 0, the last with another
batch size and length, must give autograd's gradients on `net.to_module()`. The table also has the
share of the forward FLOPs inside reversible blocks. If Python loops over the length (Mamba), stages
refuse another length: they get another batch size only, and the other length goes to the net of
`reversify`, which captures again. `transformers` has to be installed; no weights are downloaded.
"""

from __future__ import annotations

import argparse
import gc
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from rich.progress import track

from benchmarks.harness import Row, parser_of, save, show
from tests.support.architectures import ARCHITECTURES
from tests.support.comparing import TOLERANCE, examine_transformer

REPORT = """\
# Hugging Face models

This table shows the share of forward FLOPs inside reversible blocks, for tiny random configurations
and `policy="paper"`, the default. `policy="pretrained"` gives the same shares. Mamba and Mixtral
are set as the [guide](guides/transformers.md) says. `python -m benchmarks.huggingface --markdown
docs/huggingface.md` makes this page.

{table}

In {stages} stages, gradients of {title} models equal autograd's to {tolerance:.0e} (float64,
no dropout, two lengths, with padding). Mamba's stages take one length only, because Python loops
over it.

- **Output layers** of language models are not reversible. They are large here beside blocks of
  width 16. In a real model they have 2 to 25 % of the FLOPs, depending on the vocabulary.
- **Mixtral**: top-k routing could decide a tie differently on a rebuilt input, so its experts keep
  their input. Only its attention blocks are reversible.
- **BERT, RoBERTa, DistilBERT, BART** (norms follow the sums) and **Mixtral** (experts in between):
  every block is a chain by itself, so each keeps a tensor, as with checkpointing.
"""


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command-line options."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("names", nargs="*", help=f"of {', '.join(ARCHITECTURES)}; all if there are none")
    add("--stages", type=int, default=4)
    add("--markdown", type=Path, help="write the table here")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; returns 1 if something differs."""
    args = parse_args(argv)
    rows: list[Row] = []
    for name in track(args.names or list(ARCHITECTURES), "petrafying"):
        row: Row = {"model": name}
        try:
            with warnings.catch_warnings(action="ignore"):
                row |= examine_transformer(name, args.stages)
            worst = max(row["captured_error"], row["gradient_error"])
            row |= {} if worst <= TOLERANCE else {"failed": f"differs by {worst:.1e}"}
        except Exception as error:  # a failure becomes a row, too
            row["failed"] = f"{type(error).__name__}: {error}"
        rows.append(row)
        save(args, rows)
        gc.collect()
    right = sum("failed" not in row for row in rows)
    title = f"{right} of {len(rows)}"
    show(f"{title} equal autograd", COLUMNS, [_cells(row) for row in rows])
    if args.markdown:
        args.markdown.write_text(_report(title, args.stages, rows))
    return int(right < len(rows))


COLUMNS = ("model", "captured", "lengths", "gradients", "blocks", "reversible FLOPs", "s")


def _cells(row: Row) -> tuple[str, ...]:
    if "gradient_error" not in row:
        return row["model"], "", "", "", "", row["failed"][:60], ""
    return (
        row["model"],
        f"{row['captured_error']:.0e}",
        row["lengths"],
        f"{row['gradient_error']:.0e}",
        f"{row['couplings']}",
        f"{row['flops_share']:.1f} %",
        f"{row['seconds']}",
    )


def _report(title: str, stages: int, rows: list[Row]) -> str:
    groups: dict[str, list[str]] = {}
    for row in sorted(rows, key=lambda row: -row.get("flops_share", 0.0)):
        share = row.get("failed") or f"{row['flops_share']:.0f} %"
        groups.setdefault(share, []).append(row["model"])
    lines = [f"| {share} | {', '.join(models)} |" for share, models in groups.items()]
    table = "\n".join(["| reversible FLOPs | models |", "|---|---|", *lines])
    return REPORT.format(title=title, stages=stages, tolerance=TOLERANCE, table=table)


if __name__ == "__main__":
    sys.exit(main())
