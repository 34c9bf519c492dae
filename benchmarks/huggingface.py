"""Petrafy 22 Hugging Face architectures (tiny, random) and compare them with the originals.

    python -m benchmarks.huggingface                   # all of them, 4 stages
    python -m benchmarks.huggingface gpt2 llama        # some

For each, in double precision and without dropout: the captured graph gives what the original gives
at two lengths, with padding; three PETRA steps at learning rate 0, the last of another batch size
and length, yield autograd's gradients on `net.to_module()`; and the share of the forward FLOPs that
is inside reversible blocks. Where Python loops over the length (Mamba), stages refuse another one,
which is asserted; they get another batch size alone, and the net of `reversify`, which captures
anew, gets the other length. `transformers` has to be installed; no weights are fetched.
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

Tiny random configurations in 4 stages, float64, no dropout: {title}.
`python -m benchmarks.huggingface --markdown docs/huggingface.md` makes this page.

- **lengths**: `free`: stages compiled for length 8 take length 11. `fixed`: Python loops over the
  length, so stages raise a `GuardError` at another one, and `reversify` captures the model again.
- **gradients**: the largest difference of any parameter's gradient from autograd's, over three
  steps at learning rate 0.
- **reversible FLOPs**: the share of the forward FLOPs inside reversible blocks.

The captured graph was compared with the original in training and evaluation, at two lengths with
padding. Mamba has `residual_in_fp32=False` (with its default, 19 % are reversible), Mixtral
`experts_implementation="eager"`.

These parts are not reversible:

- the output layer of language models, which is large beside blocks of width 16. In a real model it
  is 2 to 25 % of the FLOPs, by the vocabulary; `chunk_loss` keeps its logits small.
- the stem and the head of ViT, CLIP, DeiT and Whisper.
- the experts of Mixtral: top-k routing could decide a tie differently on a rebuilt input, so these
  blocks keep their input.
- with `policy="pretrained"`, the blocks of BERT, RoBERTa, DistilBERT and BART, because their norms
  follow the sums. They keep their input, as with checkpointing.
"""


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Its options."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("names", nargs="*", help=f"of {', '.join(ARCHITECTURES)}; all if there are none")
    add("--stages", type=int, default=4)
    add("--markdown", type=Path, help="write the table here")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; 1 if something differs."""
    args = parse_args(argv)
    rows: list[Row] = []
    for name in track(args.names or list(ARCHITECTURES), "petrafying"):
        row: Row = {"model": name}
        try:
            with warnings.catch_warnings(action="ignore"):
                row |= examine_transformer(name, args.stages)
            worst = max(row["captured_error"], row["gradient_error"])
            row |= {} if worst <= TOLERANCE else {"failed": f"differs by {worst:.1e}"}
        except Exception as error:  # one that fails is a row like the others
            row["failed"] = f"{type(error).__name__}: {error}"
        rows.append(row)
        save(args, rows)
        gc.collect()
    right = sum("failed" not in row for row in rows)
    title = f"{right} of {len(rows)} equal autograd"
    show(title, COLUMNS, [_cells(row) for row in rows])
    if args.markdown:
        args.markdown.write_text(_report(title, rows))
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


def _report(title: str, rows: list[Row]) -> str:
    chosen = [(name, *rest[1:-1]) for name, *rest in (COLUMNS, *map(_cells, rows))]
    head, *lines = [f"| {' | '.join(cells)} |" for cells in chosen]
    return "\n".join([REPORT.format(title=title), head, "|---" * len(chosen[0]) + "|", *lines, ""])


if __name__ == "__main__":
    sys.exit(main())
