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
Made by `python -m benchmarks.huggingface --markdown docs/huggingface.md`.

- **captured**: the largest relative difference between the captured graph and the original, in
  training and evaluation, for 2 samples of length 8 and 3 of length 11, padded.
- **lengths**: `free`: stages compiled for length 8 take length 11. `anew`: Python loops over the
  length; `reversify` captures such a model once more, stages refuse the batch with a `GuardError`.
- **gradients**: the largest difference of any parameter's gradient from autograd's, over three
  steps at learning rate 0. It is 0 where norms are computed in float32 whatever the model's type:
  branches then read the same float32 numbers. DeiT's is large since its class token starts at 0,
  where a layer norm has a slope of 1e6.
- **reversible FLOPs**: the share of the forward FLOPs that is inside reversible blocks.

Mamba has `residual_in_fp32=False`; with its default, the shortcut is a cast, which is not taken for
the identity, and 19 % are reversible. Mixtral has `experts_implementation="eager"`.

What is missing to 100 % of the FLOPs is outside any shortcut, or refused for a reason:

- decoders, OPT, MPT and Mamba: the output layer, which beside blocks of width 16 is large. At the
  size of a real model it is 2 to 25 %, by the vocabulary; `chunk_loss` keeps its logits small.
- ViT, CLIP, DeiT: the patches' convolution and the head; Whisper: its convolutions and the output.
- BERT and RoBERTa: the head (0.3 %). Their norms follow the sums, which `policy="paper"` and
  `"same_parameters"` can couple. `policy="pretrained"` cannot: the norm of a sum of two streams is
  not the sum of norms, so each block is one that keeps its input (as checkpointing does).
- Mixtral: the experts. Top-k routing decides at ties by the last bit, and two copies of a block
  that decide differently have different gradients, so these blocks keep their input.
- T5: the output layer. Encoder-decoders are two chains; the decoder's blocks read the encoder's
  output as a side value, which is kept once, and T5's first blocks hand their position bias on.
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
    lines = [REPORT.format(title=title), _line((*COLUMNS[:-1], "sums that were refused"))]
    lines.append("|---" * len(COLUMNS) + "|")
    for row in rows:
        refused = "; ".join(f"{n}× {why}" for why, n in row.get("refused", {}).items())
        lines.append(_line((*_cells(row)[:-1], refused)))
    return "\n".join(lines) + "\n"


def _line(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
