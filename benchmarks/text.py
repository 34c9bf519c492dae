"""Transformers under delay: a character-level GPT by method, weights and optimizer.

    python -m benchmarks.text --data input.txt --out out/text --table weights --jobs 6
    python -m benchmarks.text --out out/text --table weights --show

The model has twelve pre-norm blocks of width 384 and a context of 256 characters. It trains for
1,200 updates of 64 sequences. The last tenth of the text is for validation, every 50 updates. Rows
with a result in the folder are not trained again. A row shows the best validation loss of a run; if
several learning rates of a setting were trained, it shows the best of them, with its learning rate.

Tables: weights (8 stages, an update every micro-batch), averaged (the same with averaged
couplings), accumulated (micro-batches of 8 and an update every 8), orders (12 stages, and the
paper's order). `--max-drift` trains rows of `DelayAwareMuon` with other limits on how far matrices
move during the delay.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

import revcompile
from benchmarks.harness import parser_of, save, show
from benchmarks.trainings import OutOfTime, Result, add_options, gather, train
from revcompile import TrainerOptions
from revcompile.optim import DelayAwareMuon, ErrorFeedback, muon_groups

MAX_DRIFT = 0.0075
"""The default of `DelayAwareMuon`; names of trainings leave it out."""
SEQUENCES = 64
"""Sequences per update, at any `accumulation_steps`."""
WARM_UP = 0.05
LAST_RATE = 0.1
"""Share of the peak learning rate at the end of the cosine."""
FEEDBACK = "muon-feedback"
"""Name of `DelayAwareMuon` with error feedback; without it, the name is "muon"."""


@dataclass(frozen=True)
class Training:
    """One row: everything that distinguishes a run."""

    method: str
    optimizer: str
    rate: float
    stages: int = 8
    accumulation_steps: int = 1
    in_flight_per_stage: float | None = None
    weights: str | None = None
    updates: int = 1200
    seed: int = 0
    size: str = "char"
    policy: str = "paper"
    max_drift: float | None = MAX_DRIFT
    """The argument of `DelayAwareMuon`."""

    @property
    def setting(self) -> str:
        """The name without learning rate, updates and seed."""
        in_flight_per_stage = f"-{self.in_flight_per_stage}" if self.in_flight_per_stage else ""
        weights = f"-{self.weights}" if self.weights else ""
        where = f"{self.size}-{self.stages}stages-k{self.accumulation_steps}"
        policy = f"-{self.policy}" if self.policy != "paper" else ""
        optimizer = self.optimizer
        if self.max_drift != MAX_DRIFT:
            optimizer += "-unlimited" if self.max_drift is None else f"-drift{self.max_drift:g}"
        return f"{where}{policy}-{self.method}{weights}{in_flight_per_stage}-{optimizer}"

    @property
    def name(self) -> str:
        """The unique name, which is also that of its folder."""
        return f"{self.setting}-lr{self.rate:g}-{self.updates}u-s{self.seed}"


@dataclass(frozen=True)
class Text:
    """Characters as numbers."""

    train: Tensor
    validation: Tensor
    vocabulary: int

    def to(self, device: torch.device) -> Text:
        """The same on another device."""
        return Text(self.train.to(device), self.validation.to(device), self.vocabulary)

    def batches(
        self, count: int, sequences: int, context: int, seed: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches from random places of the text, the same for every row with this seed."""
        device = self.train.device
        generator = torch.Generator().manual_seed(seed)
        along = torch.arange(context + 1, device=device)
        for _ in range(count):
            starts = torch.randint(len(self.train) - context, (sequences, 1), generator=generator)
            window = self.train[starts.to(device) + along]
            yield window[:, :-1].contiguous(), window[:, 1:].contiguous()

    def validation_batches(self, context: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of the held-out text from its beginning, the same for every row.

        Its last 12,000 characters are harder than the rest. Batches of another size would leave
        fewer of them out, and losses would be larger by some hundredths.
        """
        count = (len(self.validation) - 1) // (context * SEQUENCES)
        used = count * SEQUENCES * context
        x = self.validation[:used].view(count, SEQUENCES, context)
        y = self.validation[1 : used + 1].view(count, SEQUENCES, context)
        yield from zip(x, y, strict=True)


def load(file: Path) -> Text:
    """Load a text file."""
    text = file.read_text()
    numbers = {character: number for number, character in enumerate(sorted(set(text)))}
    encoded = torch.tensor([numbers[character] for character in text])
    cut = len(encoded) * 9 // 10
    return Text(encoded[:cut], encoded[cut:], len(numbers))


def run(training: Training, text: Text, folder: Path, deadline: float) -> str:
    """Train to the end; writes the result and returns it as a line of text.

    The folder's `log.json` has the measurements so far at any time.

    Raises:
        OutOfTime: The deadline came first; there is no result then.
    """
    torch.manual_seed(training.seed)
    sizes, device = SIZES[training.size], text.train.device
    sequences = SEQUENCES // training.accumulation_steps
    model = GPT(text.vocabulary, sizes).to(device)
    example = torch.zeros(2, sizes.context, dtype=torch.long, device=device)
    policy: Any = training.policy
    net = revcompile.petrafy(model, training.stages, example, policy=policy, check="off")
    trainer = _trainer(net, model, training, device)
    folder.mkdir(parents=True, exist_ok=True)
    log: list[dict[str, float]] = []
    losses: list[Tensor] = []
    start = time.monotonic()
    count = training.updates * training.accumulation_steps
    every = max(1, training.updates * training.accumulation_steps // 24)
    batches = text.batches(count, sequences, sizes.context, 1 + training.seed)
    for number, (x, y) in enumerate(batches, 1):
        loss = trainer.step(x, y).loss_tensor
        if loss is not None:
            losses.append(loss.detach().clone())
        if number % every:
            continue
        if number == count:
            trainer.flush()
        validation = trainer.evaluate(text.validation_batches(sizes.context)).loss
        trained = torch.stack(losses).mean().item()
        losses.clear()
        log.append(
            {
                "update": number // training.accumulation_steps,
                "train_loss": trained,
                "validation_loss": validation,
                "seconds": round(time.monotonic() - start, 1),
            }
        )
        (folder / "log.json").write_text(json.dumps(log))
        best = min(line["validation_loss"] for line in log)
        if time.monotonic() > deadline and number < count:
            raise OutOfTime(f"after {log[-1]['update']} updates, best so far {best:.3f}")
    result = {"training": asdict(training), "name": training.name, "log": log}
    (folder / "result.json").write_text(json.dumps(result))
    last = log[-1]
    return f"{best:.3f} (train {last['train_loss']:.3f}) in {last['seconds']:.0f} s"


def rate_factor(update: int, updates: int, last: float = LAST_RATE) -> float:
    """The share of the peak learning rate at an update: warm-up, then a cosine."""
    done = update / updates
    if done < WARM_UP:
        return (update + 1) / (WARM_UP * updates)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return last + (1 - last) * cosine


def split_parameters(model: nn.Module) -> Callable[[Any], list[dict[str, Any]]]:
    """`param_groups=` of a GPT for Muon; AdamW trains its output layer and positions."""
    return muon_groups(model, adamw=["head", "positions"])


def _trainer(
    net: revcompile.StagedModel, model: nn.Module, training: Training, device: torch.device
) -> Any:
    is_muon = "muon" in training.optimizer
    on_gpu = device.type == "cuda"
    chosen = {"weights": training.weights} if training.weights else {}
    factor = functools.partial(rate_factor, updates=training.updates)
    return net.trainer(
        lambda params: OPTIMIZERS[training.optimizer](params, training, on_gpu),
        next_character_loss,
        method=training.method,
        accumulation_steps=training.accumulation_steps,
        lr_schedule=lambda optimizer: LambdaLR(optimizer, factor),
        param_groups=split_parameters(model) if is_muon else None,
        autocast=torch.bfloat16 if on_gpu else None,
        seed=training.seed,
        **chosen,
        options=TrainerOptions(
            in_flight_per_stage=training.in_flight_per_stage,
        ),
    )


OPTIMIZERS: dict[str, Callable[[Any, Training, bool], torch.optim.Optimizer]] = {
    "adamw": lambda params, training, on_gpu: torch.optim.AdamW(
        params, lr=training.rate, betas=(0.9, 0.99), capturable=on_gpu
    ),
    "delay-aware-adamw": lambda params, training, on_gpu: ErrorFeedback(
        torch.optim.AdamW(params, lr=training.rate, betas=(0.9, 0.99), capturable=on_gpu)
    ),
    "muon": lambda params, training, on_gpu: DelayAwareMuon(
        params,
        lr=training.rate,
        feedback=0.0,
        max_drift=training.max_drift,
        capturable=on_gpu,
    ),
    FEEDBACK: lambda params, training, on_gpu: DelayAwareMuon(
        params, lr=training.rate, max_drift=training.max_drift, capturable=on_gpu
    ),
}
"""Functions that make an optimizer from parameters, the row and whether it is on a GPU."""


# -- tables ----------------------------------------------------------------------------------------

_RATES = {"adamw": (1e-3, 3e-4), "delay-aware-adamw": (3e-4,)}
_MUON_RATES = (0.02, 0.015, 0.012, 0.01, 0.007, 0.005)


def _rows(*rows: tuple[str, str | None, str], **same: Any) -> Iterator[Training]:
    """Each `(method, weights, optimizer)` at the learning rates of its optimizer."""
    for method, weights, optimizer in rows:
        # Without delay, an update of several micro-batches equals one of a single large one.
        own = same | {"accumulation_steps": 1} if method == "backprop" else same
        for rate in _RATES.get(optimizer, _MUON_RATES):
            yield Training(method, optimizer, rate, weights=weights, **own)


def _weights(updates: int, size: str) -> Iterator[Training]:
    yield from _rows(
        ("petra_stashed", None, FEEDBACK),
        ("petra", None, FEEDBACK),
        ("petra", "predicted", FEEDBACK),
        ("backprop", None, "adamw"),
        ("backprop", None, "muon"),
        ("petra_stashed", None, "muon"),
        ("petra_stashed", None, "adamw"),
        ("petra", None, "adamw"),
        updates=updates,
        size=size,
    )


def _averaged(updates: int, size: str) -> Iterator[Training]:
    yield from _rows(
        ("petra_stashed", None, FEEDBACK),
        ("backprop", None, "muon"),
        updates=updates,
        size=size,
        policy="pretrained",
    )


def _accumulated(updates: int, size: str) -> Iterator[Training]:
    yield from _rows(
        ("petra_stashed", None, FEEDBACK),
        ("petra", None, FEEDBACK),
        ("petra", "predicted", FEEDBACK),
        ("backprop", None, "muon"),
        ("petra", None, "adamw"),
        updates=updates,
        size=size,
        accumulation_steps=8,
    )


def _orders(updates: int, size: str) -> Iterator[Training]:
    for stages, in_flight_per_stage in ((12, None), (8, 2)):
        same = {
            "updates": updates,
            "size": size,
            "stages": stages,
            "in_flight_per_stage": in_flight_per_stage,
        }
        stashed, latest = ("petra_stashed", None, FEEDBACK), ("petra", None, FEEDBACK)
        for accumulation_steps in (1, 8):
            yield from _rows(stashed, latest, accumulation_steps=accumulation_steps, **same)
        yield from _rows(stashed, policy="pretrained", **same)


TABLES: dict[str, Callable[[int, str], Iterator[Training]]] = {
    "weights": _weights,
    "averaged": _averaged,
    "accumulated": _accumulated,
    "orders": _orders,
}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command-line options."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--table", nargs="+", choices=TABLES, default=["weights"])
    add("--data", type=Path, help="a text file", default=Path("data/input.txt"))
    add_options(parser, seeds=1, jobs=6)
    add(
        "--max-drift",
        nargs="+",
        type=lambda given: None if given == "none" else float(given),
        default=[MAX_DRIFT],
        help="train rows of DelayAwareMuon with each of these; none: any distance",
    )
    add("--reach", type=float, metavar="LOSS", help="say when a validation loss was reached")
    add("--updates", type=int, default=1200)
    add("--size", choices=SIZES, default="char")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Train what is missing, show the best of every setting."""
    args = parse_args(argv)
    rows = [
        replace(row, seed=seed, max_drift=limit)
        for seed, table in itertools.product(range(args.seeds), args.table)
        for row in TABLES[table](args.updates, args.size)
        for limit in (args.max_drift if row.optimizer == FEEDBACK else [MAX_DRIFT])
    ]
    trainings = [row for row in rows if any(part in row.name for part in args.only)]
    known = gather(args.out)
    if not args.show:
        missing = [training for training in trainings if training.name not in known]
        text = load(args.data)
        train(run, missing, text, args.device, args.out, args.jobs, 60 * args.minutes)
        known = gather(args.out)
    results = [known[training.name] for training in trainings if training.name in known]
    if not results:
        there = ", ".join(sorted(known)) or "none"
        raise SystemExit(f"{args.out} has no results of these rows; there are: {there}")
    best: dict[str, tuple[float, Result]] = {}
    for result in results:
        loss = min(line["validation_loss"] for line in result["log"])
        setting = Training(**result["training"]).setting
        if setting not in best or loss < best[setting][0]:
            best[setting] = loss, result
    lines = [
        (
            setting,
            f"{result['training']['rate']:g}",
            f"{loss:.3f}",
            f"{result['log'][-1]['train_loss']:.3f}",
            f"{result['log'][-1]['seconds']:.0f}",
            *([updates_to(args.reach, result["log"])] if args.reach else ()),
        )
        for setting, (loss, result) in best.items()
    ]
    columns = ["setting", "learning rate", "validation loss", "last training loss", "seconds"]
    columns += [f"updates to {args.reach:g}"] if args.reach else []
    show(f"character-level GPT, {args.updates} updates", columns, lines)
    save(args, results)


def updates_to(loss: float, log: Sequence[Mapping[str, float]]) -> str:
    """The update that first reached a validation loss, interpolated between evaluations.

    >>> updates_to(1.5, [{"update": n, "validation_loss": 2 - n / 100} for n in (40, 60)])
    '50'
    """
    before: Mapping[str, float] | None = None
    for line in log:
        now = line["validation_loss"]
        if now <= loss:
            if before is None:
                return f"{line['update']:.0f}"
            done = (before["validation_loss"] - loss) / (before["validation_loss"] - now)
            return f"{before['update'] + done * (line['update'] - before['update']):.0f}"
        before = line
    return "never"


# -- the model -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """Sizes of a GPT."""

    blocks: int = 12
    width: int = 384
    heads: int = 6
    context: int = 256


SIZES = {"char": Sizes(), "tiny": Sizes(4, 32, 2, 16)}


class Attention(nn.Module):
    """Causal self-attention after a layer norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map `(batch, tokens, width)` to the same shape."""
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        mixed = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        out: Tensor = self.proj(mixed.transpose(1, 2).flatten(-2))
        return out


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map `(batch, tokens, width)` to the same shape."""
        x = x + self.attention(x)
        out: Tensor = x + self.mlp(x)
        return out


class GPT(nn.Module):
    """A GPT that maps characters to logits of the next ones."""

    def __init__(self, vocabulary: int, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, sizes.width)
        self.positions = nn.Parameter(torch.zeros(sizes.context, sizes.width))
        self.blocks = nn.Sequential(*(Block(sizes.width, sizes.heads) for _ in range(sizes.blocks)))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, vocabulary, bias=False)
        self.apply(self._initialise)
        for block in self.blocks:
            for last in (block.attention.proj, block.mlp[-1]):
                nn.init.normal_(last.weight, std=0.02 / math.sqrt(2 * sizes.blocks))

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """`(batch, tokens)` to `(batch, tokens, vocabulary)`."""
        x = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def next_character_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Cross entropy in nats per character."""
    return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


if __name__ == "__main__":
    main()
