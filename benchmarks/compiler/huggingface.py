"""Petrafy 22 Hugging Face architectures (tiny, random) and compare them with the originals.

    python -m benchmarks run huggingface                   # all of them, 4 stages
    python -m benchmarks run huggingface gpt2 llama        # some

For each, in double precision and without dropout: the captured graph gives what the original gives
at two lengths, with padding; three PETRA steps at learning rate 0, the last of another batch size
and length, yield autograd's gradients on `net.module()`; and the share of the forward FLOPs that
is inside reversible blocks. Where Python loops over the length (Mamba), stages refuse another one,
which is asserted; they get another batch size alone, and the net of `reversify`, which captures
anew, gets the other length. `transformers` has to be installed; no weights are fetched.
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib.util
import math
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import revcompile
from benchmarks.compiler.architectures import ARCHITECTURES, LAYERS, Architecture
from benchmarks.compiler.families import Recorder, fixed_randomness, gradient_error, loss
from benchmarks.harness import show
from benchmarks.registry import Benchmark, Row
from revcompile.compiler.capture import capture
from revcompile.compiler.cost import segment_costs
from revcompile.compiler.find import Found
from revcompile.compiler.rewire import rewire
from revcompile.errors import GuardError
from revcompile.ir.types import Coupling
from revcompile.runtime.reversible.module import Reversible

TOLERANCE = 1e-10
EXAMPLE = (2, 8)
"""Samples and length of what a model is captured with."""
OTHER = (3, 11)
"""Another batch size and another length."""

REPORT = """\
# Hugging Face models

Tiny random configurations in 4 stages, float64, no dropout: {title}.
Made by `python -m benchmarks run huggingface --markdown docs/huggingface.md`.

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


def examine(name: str, stages: int = 4, layers: int = LAYERS) -> dict[str, Any]:
    """One row: how the capture compares, how the gradients compare, and what is reversible."""
    torch.manual_seed(0)
    architecture = ARCHITECTURES[name]
    model = architecture.build(layers).double().train()
    fixed_randomness(model)
    start = time.perf_counter()
    row: dict[str, Any] = {"captured_error": compare_capture(model, architecture)}
    net = revcompile.petrafy(
        model, stages, example_kwargs=architecture.inputs(*EXAMPLE), check="off"
    )
    row["seconds"] = round(time.perf_counter() - start, 1)
    try:
        row |= {"lengths": "free", "gradient_error": train(net, architecture, OTHER)}
    except GuardError as refused:
        row |= {"lengths": "anew", "guard": refused.expression}
        same_length = train(net, architecture, (OTHER[0], EXAMPLE[1]))
        row["gradient_error"] = max(same_length, reversified_error(model, architecture))
    return row | shares(net)


def compare_capture(model: nn.Module, architecture: Architecture) -> float:
    """The captured graph beside the original: the example's length and another one, padded."""
    example, other = architecture.inputs(*EXAMPLE), architecture.inputs(*OTHER)
    net = _as_module(model, example)
    error = _difference(model, net, example)
    try:
        return max(error, _difference(model, net, other))
    except GuardError:
        return max(error, _difference(model, _as_module(model, other), other))


def reversified_error(model: nn.Module, architecture: Architecture) -> float:
    """The worst output and gradient at a length for which `reversify`'s net captures anew.

    Beside a net made for that length from the beginning, with stored activations.
    """
    other = architecture.inputs(*OTHER)
    reference: Any = revcompile.reversify(model, None, other, check="off")
    reference.reversible = False
    net = revcompile.reversify(model, None, architecture.inputs(*EXAMPLE), check="off")
    results: list[list[Tensor]] = []
    for each in (reference, net):
        output = each.train()(**other)
        loss(output, torch.tensor([0.1])).backward()
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in each.parameters()]
        results.append([*_tensors(output), *gradients])
    return max(_distance(*pair) for pair in zip(*results, strict=True))


def _as_module(model: nn.Module, example: Mapping[str, Any]) -> nn.Module:
    """The captured graph as a module: no sum is rewired."""
    captured = capture(model, None, example)
    plain = rewire(captured, Found((), ()), revcompile.Policy.named("same_parameters"))
    return Reversible(plain)


def _difference(model: nn.Module, net: nn.Module, inputs: Mapping[str, Any]) -> float:
    worst = 0.0
    for training in (True, False):
        twin = copy.deepcopy(model).train(training)
        with torch.no_grad():
            expected = twin(**inputs)
            got = net.train(training)(**inputs)
        assert type(got) is type(expected), f"{type(got).__name__} is returned"
        pairs = zip(_tensors(expected), _tensors(got), strict=True)
        worst = max([worst, *(_distance(want, have) for want, have in pairs)])
    return worst


def _tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]


def _distance(want: Tensor, have: Tensor) -> float:
    assert want.shape == have.shape, f"{tuple(want.shape)} became {tuple(have.shape)}"
    scale = float(want.abs().max()) or 1.0
    error = float((want - have).abs().max()) / scale
    return error if math.isfinite(error) else math.inf  # max() would pass over a nan


def train(net: Any, architecture: Architecture, last: tuple[int, int]) -> float:
    """The worst gradient of three steps at learning rate 0, the last with a batch of that size."""
    trainer = net.trainer(Recorder, loss)
    batches = [architecture.inputs(*size) for size in (EXAMPLE, EXAMPLE, last)]
    targets = [torch.tensor([0.1 * (i + 1)]) for i in range(len(batches))]
    for x, y in zip(batches, targets, strict=True):
        trainer.step(x, y)
    trainer.flush()
    reference = net.module().train()
    reference.reversible = False
    return max(
        gradient_error(trainer, reference, index, x, y)
        for index, (x, y) in enumerate(zip(batches, targets, strict=True))
    )


def shares(net: Any) -> dict[str, Any]:
    """What became reversible, and the most frequent reason of what did not."""
    rewired = net.model.rewired
    cost = list(zip(rewired.body.segments, segment_costs(rewired), strict=True))
    inside = [c for segment, c in cost if isinstance(segment, Coupling)]
    reasons: dict[str, int] = {}
    for refusal in rewired.refusals:
        reasons[refusal.reason] = reasons.get(refusal.reason, 0) + 1
    return {
        "stages": net.num_stages,
        "couplings": len(inside),
        "flops_share": 100 * sum(c.flops for c in inside) / max(sum(c.flops for _, c in cost), 1),
        "refused": reasons,
    }


def arguments(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    parser.add_argument("names", nargs="*", help=f"of {', '.join(ARCHITECTURES)} (default: all)")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--markdown", type=Path, help="write the table here")


def main(options: argparse.Namespace) -> Iterator[Row]:
    """Print the table."""
    if importlib.util.find_spec("transformers") is None:
        yield {"model": "", "skipped": "transformers is not installed"}
        return
    rows: list[dict[str, Any]] = []
    for name in track(options.names or list(ARCHITECTURES), "petrafying"):
        row: dict[str, Any] = {"model": name}
        try:
            with warnings.catch_warnings(action="ignore"):
                row |= examine(name, options.stages)
            worst = max(row["captured_error"], row["gradient_error"])
            row |= {} if worst <= TOLERANCE else {"failed": f"differs by {worst:.1e}"}
        except Exception as error:  # one that fails is a row like the others
            row["failed"] = f"{type(error).__name__}: {error}"
        rows.append(row)
        gc.collect()
        yield row
    right = sum("failed" not in row for row in rows)
    title = f"{right} of {len(rows)} equal autograd"
    show(title, COLUMNS, [_cells(row) for row in rows])
    if options.markdown:
        options.markdown.write_text(_report(title, rows))


COLUMNS = ("model", "captured", "lengths", "gradients", "blocks", "reversible FLOPs", "s")


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
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


def _report(title: str, rows: list[dict[str, Any]]) -> str:
    lines = [REPORT.format(title=title), _line((*COLUMNS[:-1], "sums that were refused"))]
    lines.append("|---" * len(COLUMNS) + "|")
    for row in rows:
        refused = "; ".join(f"{n}× {why}" for why, n in row.get("refused", {}).items())
        lines.append(_line((*_cells(row)[:-1], refused)))
    return "\n".join(lines) + "\n"


def _line(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


BENCHMARK = Benchmark("huggingface", arguments, main, smallest=("gpt2", "--stages", "2"))
