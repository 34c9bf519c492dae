"""Deep pipelines with late gradients: settings trained side by side, simulated.

    python -m benchmarks.late --data FOLDER --json out/late.json
    python -m benchmarks.late --data input.txt --trainer --only stages=32
    python -m benchmarks.late --check

In a full pipeline, a stage with a delay of t updates runs the forward pass of a micro-batch with
the weights of t updates ago, and the backward pass with the latest weights (PETRA, Eq. 5). So
micro-batches can be computed one after the other, with a ring buffer of past weights, and many
settings as one batch of matrix products. `--check` compares the losses with those of `net.trainer`;
`--trainer` trains the settings with `net.trainer` instead, one after the other.

The model is the GPT of `benchmarks.text` in two streams, one block per stage or several, with token
embeddings of standard deviation 0.5. Muon updates matrices, AdamW everything else, with a cosine
schedule to zero. `--data` is a text or a folder of Python files; its last twentieth is for
validation.

    loss           on validation data, after the last update
    updates to ..  the update that first reached this loss, interpolated between evaluations
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from rich.progress import track
from torch import Tensor
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

import revcompile
from benchmarks.harness import parser_of, save, show
from benchmarks.text import (
    GPT,
    Sizes,
    Text,
    next_character_loss,
    rate_factor,
    split_parameters,
    updates_to,
)
from revcompile.optim import DelayAwareMuon


@dataclass(frozen=True)
class Setting:
    """One training."""

    updates: int
    stages: int = 1
    """Number of stages; 1 is backprop."""
    accumulation_steps: int = 1
    rate: float = 0.01
    """Learning rate of matrices."""
    adamw_rate: float = 1e-3
    embedding_rate: float = 1.5e-2
    """Learning rate of token and position embeddings."""
    full_rate_within: float = math.inf
    """All learning rates are multiplied by min(1, full_rate_within / (1 + delay))."""
    momentum: float = 0.9
    """Momentum of Muon."""
    adamw_momentum: float = 0.9
    feedback: float = 0.0
    max_drift: float = math.inf
    weights: str = "latest"

    def delays(self, blocks: int) -> list[int]:
        """The delay of each block, in updates."""
        per_stage = blocks // self.stages
        later = [self.stages - 1 - block // per_stage for block in range(blocks)]
        return [round(count / self.accumulation_steps) for count in later]

    def __str__(self) -> str:
        given = [(f.name, getattr(self, f.name)) for f in fields(self) if f.name != "updates"]
        changed = [f"{name}={value}" for name, value in given if value != getattr(_PLAIN, name)]
        return " ".join(changed) or "backprop"


_PLAIN: Final = Setting(0)


def table(updates: int) -> Iterator[Setting]:
    """The settings in docs/results.md."""
    late: dict[str, Any] = {"momentum": 0.8, "adamw_momentum": 0.8}
    doubled: dict[str, Any] = {"adamw_rate": 2e-3, "embedding_rate": 3e-2}
    yield Setting(updates)
    yield Setting(updates // 2)
    yield Setting(updates, 32, accumulation_steps=32, feedback=1.0)
    yield Setting(updates, 32, rate=0.02, full_rate_within=1.0, **doubled, **late)
    for stages in (32, 16):
        yield Setting(updates, stages, full_rate_within=2.0, **doubled, **late)
    less: dict[str, Any] = {"adamw_rate": 5e-4, "embedding_rate": 5e-3}
    yield Setting(updates, 32, rate=0.02, max_drift=0.015, **less, **late)


# -- weights ---------------------------------------------------------------------------------------

Weights = dict[str, Tensor]
"""Weights of blocks have the shape `(blocks, settings, ...)`, all others `(settings, ...)`."""

MATRICES: Final = {"qkv": (1, 3), "proj": (1, 1), "up": (1, 4), "down": (4, 1)}
"""Inputs and outputs of a block's linear layers, in multiples of the width."""
EMBEDDINGS: Final = ("tokens", "positions")
OUTPUT: Final = ("norm", "norm_bias", "head")
BRANCHES: Final = (
    ("attention", ("norm1", "norm1_bias", "qkv", "qkv_bias", "proj", "proj_bias")),
    ("mlp", ("norm2", "norm2_bias", "up", "up_bias", "down", "down_bias")),
)
"""The branches of a block, each with its weights in the order of its arguments."""
IN_BLOCKS: Final = {name for _, names in BRANCHES for name in names}


def initial(sizes: Sizes, vocabulary: int) -> Weights:
    """Initial weights of one setting, as in `benchmarks.text.GPT` except for the embeddings."""
    generator = torch.Generator().manual_seed(0)
    blocks, width = sizes.blocks, sizes.width
    weights = {
        "tokens": 0.5 * torch.randn(vocabulary, width, generator=generator),
        "positions": torch.zeros(sizes.context, width),
        "norm": torch.ones(width),
        "norm_bias": torch.zeros(width),
        "head": 0.02 * torch.randn(width, vocabulary, generator=generator),
    }
    for name in ("norm1", "norm2"):
        weights |= {name: torch.ones(blocks, width), f"{name}_bias": torch.zeros(blocks, width)}
    for name, (inputs, outputs) in MATRICES.items():
        std = 0.02 / math.sqrt(2 * blocks) if name in ("proj", "down") else 0.02
        shape = blocks, inputs * width, outputs * width
        weights[name] = std * torch.randn(shape, generator=generator)
        weights[f"{name}_bias"] = torch.zeros(blocks, outputs * width)
    return weights


def _linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.baddbmm(bias.to(weight.dtype).unsqueeze(1), x.to(weight.dtype), weight)


def _norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:]) * weight.unsqueeze(1) + bias.unsqueeze(1)


def attention(x: Tensor, *weights: Tensor, sizes: Sizes) -> Tensor:
    """Map `(settings, tokens, width)` to the same shape."""
    norm, norm_bias, qkv, qkv_bias, proj, proj_bias = weights
    mixed = _linear(_norm(x, norm, norm_bias), qkv, qkv_bias)
    q, k, v = mixed.view(-1, sizes.context, 3, sizes.heads, sizes.width // sizes.heads).permute(
        2, 0, 3, 1, 4
    )
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return _linear(out.transpose(1, 2).reshape(x.shape), proj, proj_bias).float()


def mlp(x: Tensor, *weights: Tensor) -> Tensor:
    """Map `(settings, tokens, width)` to the same shape."""
    norm, norm_bias, up, up_bias, down, down_bias = weights
    hidden = F.gelu(_linear(_norm(x, norm, norm_bias), up, up_bias))
    return _linear(hidden, down, down_bias).float()


def head(target: Tensor, a: Tensor, b: Tensor, *weights: Tensor) -> Tensor:
    """The loss of each setting."""
    norm, norm_bias, out = weights
    logits = torch.bmm(_norm((a + b) / 2, norm, norm_bias).to(out.dtype), out).float()
    targets = target.expand(len(a), -1).flatten()
    losses = F.cross_entropy(logits.flatten(0, 1), targets, reduction="none")
    return losses.view(len(a), -1).mean(1)


# -- all settings of a table -----------------------------------------------------------------------


class Simulation:
    """Trains all settings at once; all state is on the device: a CUDA graph can capture a step."""

    def __init__(
        self, settings: Sequence[Setting], sizes: Sizes, vocabulary: int, device: torch.device
    ) -> None:
        self.settings, self.sizes, self.vocabulary = settings, sizes, vocabulary
        self._low = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._delays = torch.tensor([s.delays(sizes.blocks) for s in settings], device=device).T
        self._versions = int(self._delays.max()) + 1
        self.weights = {
            name: torch.stack([w.to(device)] * len(settings), int(name in IN_BLOCKS))
            for name, w in initial(sizes, vocabulary).items()
        }
        self._means, self._last, self._squares = (
            {name: torch.zeros_like(w) for name, w in self.weights.items()} for _ in range(3)
        )
        low = {name: self._cast(name, weight) for name, weight in self.weights.items()}
        self._gradients = {n: torch.empty_like(w) for n, w in low.items()}
        self._past = {
            n: torch.empty((self._versions, *w.shape), dtype=w.dtype, device=device)
            for n, w in low.items()
            if n not in OUTPUT
        }
        self.number = torch.zeros((), dtype=torch.long, device=device)
        """Updates so far."""
        self.losses = torch.zeros(len(settings), device=device)
        """The loss of each setting for the last micro-batch."""
        numbers = [f.name for f in fields(Setting) if f.name != "weights"]
        self._numbers = {
            field: torch.tensor([float(getattr(s, field)) for s in settings], device=device)
            for field in numbers
        }
        for kind in ("stashed", "predicted"):
            chosen = [float(s.weights == kind) for s in settings]
            self._numbers[kind] = torch.tensor(chosen, device=device)
        functions = {"attention": partial(attention, sizes=sizes), "mlp": mlp, "head": head}
        functions |= {"nesterov": nesterov, "apply": apply}
        is_compiled = device.type == "cuda"
        self._functions: dict[str, Callable[..., Any]] = {
            n: torch.compile(f, dynamic=False) if is_compiled else f for n, f in functions.items()
        }

    @torch.no_grad()
    def reset(self) -> None:
        """Start again from the initial weights."""
        for name, weight in initial(self.sizes, self.vocabulary).items():
            self.weights[name].copy_(weight.unsqueeze(int(name in IN_BLOCKS)))
        for state in (self._means, self._last, self._squares):
            for tensor in state.values():
                tensor.zero_()
        self.number.zero_()

    def _given(self, name: str, field: str) -> Tensor:
        """A field of all settings, shaped to multiply weights of this name."""
        return self._of(name, self._numbers[field])

    def _of(self, name: str, values: Tensor) -> Tensor:
        """A number for each setting, shaped to multiply weights of this name."""
        lead = int(name in IN_BLOCKS)
        return values.view(*[1] * lead, -1, *[1] * (self.weights[name].ndim - lead - 1))

    def _late(self, name: str) -> Tensor:
        """Delays, shaped to multiply weights of this name."""
        if name in IN_BLOCKS:
            return self._delays.reshape(*self._delays.shape, *[1] * (self.weights[name].ndim - 2))
        return self._of(name, self._delays[0] * int(name in EMBEDDINGS))

    def _cast(self, name: str, weight: Tensor) -> Tensor:
        """Cast a weight as autocast does."""
        return weight.to(self._low) if name in MATRICES or name == "head" else weight

    # -- passes

    @torch.no_grad()
    def step(self, x: Tensor, y: Tensor) -> None:
        """Run the passes and the update of one micro-batch of `(sequences, context)`."""
        now = {n: self._cast(n, w) for n, w in self.weights.items()}
        before = now | self._before()
        a, b = self._forward(*self._enter(before, x), before)
        used = {
            n: torch.lerp(w, before[n], self._given(n, "stashed").to(w)) for n, w in now.items()
        }
        self._backward(a, b, x, y, used)
        self._update()
        self.number += 1

    def _before(self) -> Weights:
        """The weights for forward passes; also stores the current weights in the ring buffer."""
        rows = torch.arange(len(self.settings), device=self.number.device)
        blocks = torch.arange(self.sizes.blocks, device=self.number.device).view(-1, 1)
        version = (self.number - self._delays).clamp(min=0) % self._versions
        weights = {}
        for name, past in self._past.items():
            ahead = self._given(name, "predicted") * self._late(name) * self._last[name]
            kept = (self.weights[name] - ahead).to(past.dtype)
            past.index_copy_(0, (self.number % self._versions).view(1), kept.unsqueeze(0))
            at = (version, blocks, rows) if name in IN_BLOCKS else (version[0], rows)
            weights[name] = past[at]
        return weights

    def _enter(self, weights: Weights, x: Tensor) -> tuple[Tensor, Tensor]:
        embedded = (weights["tokens"][:, x] + weights["positions"].unsqueeze(1)).flatten(1, 2)
        return embedded, embedded

    def _forward(self, a: Tensor, b: Tensor, weights: Weights) -> tuple[Tensor, Tensor]:
        for block in range(self.sizes.blocks):
            for kind, names in BRANCHES:
                a, b = b, a + self._functions[kind](b, *(weights[n][block] for n in names))
        return a, b

    def _backward(self, a: Tensor, b: Tensor, x: Tensor, y: Tensor, weights: Weights) -> None:
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in (a, b, *(weights[n] for n in OUTPUT))]
            losses = self._functions["head"](y.reshape(1, -1), *leaves)
            da, db, *gradients = torch.autograd.grad(losses.sum(), leaves)
        self.losses.copy_(losses.detach())
        for name, gradient in zip(OUTPUT, gradients, strict=True):
            self._gradients[name].copy_(gradient)
        for block in reversed(range(self.sizes.blocks)):
            for kind, names in reversed(BRANCHES):
                with torch.enable_grad():
                    inputs = (a, *(weights[n][block] for n in names))
                    leaves = [t.detach().requires_grad_() for t in inputs]
                    f = self._functions[kind](*leaves)
                    through, *gradients = torch.autograd.grad(f, leaves, db)
                a, b = b - f.detach(), a
                da, db = db, da + through
                for name, gradient in zip(names, gradients, strict=True):
                    self._gradients[name][block].copy_(gradient)
        into = da + db
        index = x.reshape(1, -1, 1).expand_as(into)
        self._gradients["tokens"].zero_().scatter_add_(1, index, into)
        self._gradients["positions"].copy_(into.unflatten(1, x.shape).sum(1))

    @torch.no_grad()
    def validation_losses(self, batches: Sequence[tuple[Tensor, Tensor]]) -> list[float]:
        """The validation loss of each setting, with its latest weights."""
        now = {n: self._cast(n, w) for n, w in self.weights.items()}
        total = torch.zeros_like(self.losses)
        for x, y in batches:
            streams = self._forward(*self._enter(now, x), now)
            total += self._functions["head"](y.reshape(1, -1), *streams, *map(now.get, OUTPUT))
        return (total / len(batches)).tolist()

    # -- the update

    def _update(self) -> None:
        done = self.number / self._numbers["updates"]
        warm_up = (self.number + 1) / (WARM_UP * self._numbers["updates"])
        cosine = 0.5 * (1 + torch.cos(math.pi * done.clamp(max=1.0)))
        factor = torch.where(done < WARM_UP, warm_up, cosine)
        for name, weight in self.weights.items():
            late, given = self._late(name), partial(self._given, name)
            kind = "embedding_rate" if name in EMBEDDINGS else "adamw_rate"
            kind = "rate" if name in MATRICES else kind
            share = (given("full_rate_within") / (1 + late)).clamp(max=1.0)
            rate = self._of(name, factor) * given(kind) * share
            direction = self._muon(name) if name in MATRICES else self._adam(name)
            drift = given("max_drift") if name in MATRICES else None
            state = self._last[name], late, given("feedback"), drift
            self._functions["apply"](weight, direction, rate, *state)

    def _muon(self, name: str) -> Tensor:
        momentum, chunks = self._given(name, "momentum"), 3 if name == "qkv" else 1
        gradient, mean = self._gradients[name], self._means[name]
        matrices = self._functions["nesterov"](gradient, mean, momentum, chunks, self._low)
        result = _newton_schulz(matrices.flatten(0, 2), 5).view(matrices.shape)
        result = result * math.sqrt(max(1.0, result.shape[-2] / result.shape[-1]))
        return result.permute(0, 1, 4, 2, 3).flatten(-2)

    def _adam(self, name: str) -> Tensor:
        gradient, mean = self._gradients[name].float(), self._means[name]
        square, step = self._squares[name], self.number + 1
        momentum = self._given(name, "adamw_momentum")
        mean.copy_(torch.lerp(gradient, mean, momentum))
        square.mul_(0.99).addcmul_(gradient, gradient, value=0.01)
        return (mean / (1 - momentum**step)) / ((square / (1 - 0.99**step)).sqrt() + 1e-8)


def _newton_schulz(x: Tensor, steps: int) -> Tensor:
    """The iteration of `torch.optim.Muon` for a batch of matrices."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    is_tall = x.shape[-2] > x.shape[-1]
    for _ in range(steps):
        gram = x.mT @ x if is_tall else x @ x.mT
        powers = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, *((x, powers) if is_tall else (powers, x)), beta=a)
    return x


def nesterov(
    gradient: Tensor, mean: Tensor, momentum: Tensor, chunks: int, low: torch.dtype
) -> Tensor:
    """Nesterov momentum of matrices, `(blocks, settings, chunks, outputs, inputs)`."""
    wide = gradient.float()
    mean.copy_(torch.lerp(wide, mean, momentum))
    ahead = torch.lerp(wide, mean, momentum)
    return ahead.to(low).unflatten(-1, (chunks, -1)).permute(0, 1, 3, 4, 2).contiguous()


def apply(
    weight: Tensor,
    direction: Tensor,
    rate: Tensor,
    last: Tensor,
    late: Tensor,
    feedback: Tensor,
    max_drift: Tensor | None,
) -> None:
    """Update weights along a direction; keeps the update in `last`."""
    update = rate * direction.float()
    if max_drift is not None:
        norm = weight.norm(dim=(-2, -1), keepdim=True)
        most = max_drift * norm.clamp(min=0.1 * math.sqrt(min(weight.shape[-2:]))) / late
        scale = (most / update.norm(dim=(-2, -1), keepdim=True)).nan_to_num(1.0).clamp(max=1.0)
        update = torch.where(late > 0, update * scale, update)
    weight.sub_(update + feedback * late * (update - last))
    last.copy_(update)


# -- trainings -------------------------------------------------------------------------------------

WARM_UP: Final = 0.05
REACHED: Final = (2.05, 1.6, 1.3)
"""Losses for which the table shows when they were first reached."""
Log = list[dict[str, float]]


def load(path: Path, size: int = 24_000_000) -> Text:
    """Bytes of a file, or of the Python files of a folder in a random order."""
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    random.Random(0).shuffle(files)
    text = bytearray()
    for file in files:
        text += file.read_bytes()
        if len(text) > size:
            break
    numbers = torch.frombuffer(text[:size], dtype=torch.uint8).long()
    cut = len(numbers) * 19 // 20
    return Text(numbers[:cut], numbers[cut:], 256)


def validation(text: Text, sequences: int, context: int) -> Sequence[tuple[Tensor, Tensor]]:
    """Eight batches, evenly spread over the held-out text."""
    last = len(text.validation) - context - 2
    starts = torch.linspace(0, last, 8 * sequences).long().unsqueeze(1)
    windows = text.validation[(starts + torch.arange(context + 1)).to(text.validation.device)]
    return [(part[:, :-1], part[:, 1:]) for part in windows.split(sequences)]


def simulate(
    settings: Sequence[Setting], sizes: Sizes, text: Text, sequences: int, evaluations: int
) -> list[Log]:
    """Train all settings side by side; returns the validation losses of each."""
    device = text.train.device
    simulation = Simulation(settings, sizes, text.vocabulary, device)
    updates = max(setting.updates for setting in settings)
    every, batches = max(1, updates // evaluations), validation(text, sequences, sizes.context)
    x, y = next(text.batches(1, sequences, sizes.context, seed=1))
    step = partial(simulation.step, x, y)
    advance = step
    if device.type == "cuda":
        advance = captured(step)
        simulation.reset()
    logs: list[Log] = [[] for _ in settings]
    data = track(text.batches(updates, sequences, sizes.context, seed=1), "updates", updates)
    for number, batch in enumerate(data, 1):
        x.copy_(batch[0])
        y.copy_(batch[1])
        advance()
        if number % every == 0 or number == updates:
            losses = simulation.validation_losses(batches)
            for setting, log, loss in zip(settings, logs, losses, strict=True):
                if number < setting.updates + every:
                    log.append({"update": number, "validation_loss": loss})
    return logs


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """Capture a step as a CUDA graph; returns a function that replays it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def trainer_of(setting: Setting, sizes: Sizes, vocabulary: int, device: torch.device) -> Any:
    """The trainer that the simulation reproduces."""
    model, start = GPT(vocabulary, sizes), initial(sizes, vocabulary)
    with torch.no_grad():
        model.tokens.weight.copy_(start["tokens"])
        model.head.weight.copy_(start["head"].T)
        for index, block in enumerate(model.blocks):
            layers = (block.attention.qkv, block.attention.proj, block.mlp[1], block.mlp[3])
            for layer, name in zip(layers, MATRICES, strict=True):
                layer.weight.copy_(start[name][index].T)
    model.to(device)
    example = torch.zeros(2, sizes.context, dtype=torch.long, device=device)
    net = revcompile.petrafy(model, setting.stages, example)

    def groups(named: Sequence[tuple[str, Any]]) -> list[dict[str, Any]]:
        names = {id(p): name for name, p in named}
        split = []
        for group in split_parameters(model)(named):
            embeddings = [p for p in group["params"] if names[id(p)].startswith(EMBEDDINGS)]
            others = [p for p in group["params"] if not names[id(p)].startswith(EMBEDDINGS)]
            rate = setting.rate if group["use_muon"] else setting.adamw_rate
            split.append({**group, "params": others, "lr": rate})
            split.append({**group, "params": embeddings, "lr": setting.embedding_rate})
        return [group for group in split if group["params"]]

    def schedule(optimizer: Any) -> LambdaLR:
        delay = optimizer.delay or optimizer.predicted_delay
        share = min(1.0, setting.full_rate_within / (1 + delay))
        factor = partial(rate_factor, updates=setting.updates, last=0.0)
        return LambdaLR(optimizer, lambda update: share * factor(update))

    return net.trainer(
        lambda params: DelayAwareMuon(
            params,
            momentum=setting.momentum,
            betas=(setting.adamw_momentum, 0.99),
            feedback=setting.feedback,
            max_drift=setting.max_drift if setting.max_drift < math.inf else None,
            capturable=device.type == "cuda",
        ),
        next_character_loss,
        method="petra" if setting.stages > 1 else "backprop",
        weights=setting.weights if setting.stages > 1 else None,
        accumulation_steps=setting.accumulation_steps,
        param_groups=groups,
        lr_schedule=schedule,
        autocast=torch.bfloat16 if device.type == "cuda" else None,
    )


def train(setting: Setting, sizes: Sizes, text: Text, sequences: int, evaluations: int) -> Log:
    """Train one setting with stages; returns its validation losses."""
    trainer = trainer_of(setting, sizes, text.vocabulary, text.train.device)
    count = setting.updates * setting.accumulation_steps
    every, batches = max(1, count // evaluations), validation(text, sequences, sizes.context)
    log: Log = []
    data = track(text.batches(count, sequences, sizes.context, seed=1), str(setting), count)
    for number, batch in enumerate(data, 1):
        trainer.step(*batch)
        if number == count:
            trainer.flush()
        if number % every == 0 or number == count:
            update = number // setting.accumulation_steps
            loss = trainer.evaluate(batches).loss
            log.append({"update": update, "validation_loss": loss})
    return log


def check() -> float:
    """The largest difference between losses of trainers and simulated losses, in float32."""
    sizes, vocabulary = Sizes(8, 32, 2, 16), 16
    late: dict[str, Any] = {"rate": 0.02, "momentum": 0.8}
    settings = [
        Setting(40, **late),
        Setting(40, 8, full_rate_within=2.0, **late),
        Setting(40, 4, feedback=1.0, max_drift=0.0075, **late),
        Setting(40, 4, weights="stashed", **late),
        Setting(40, 8, weights="predicted", **late),
    ]
    simulation = Simulation(settings, sizes, vocabulary, torch.device("cpu"))
    trainers = [trainer_of(s, sizes, vocabulary, torch.device("cpu")) for s in settings]
    generator = torch.Generator().manual_seed(0)
    simulated, trained = [], [list[float]() for _ in settings]
    for _ in range(40):
        window = torch.randint(vocabulary, (3, sizes.context + 1), generator=generator)
        x, y = window[:, :-1], window[:, 1:]
        simulation.step(x, y)
        simulated.append(simulation.losses.tolist())
        for losses, trainer in zip(trained, trainers, strict=True):
            loss = trainer.step(x, y).loss
            losses += [] if loss is None else [loss]
    return max(
        abs(ours - theirs[index])
        for index, losses in enumerate(trained)
        for ours, theirs in zip(losses, simulated, strict=False)
    )


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command-line options."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--data", type=Path, help="a text, or a folder of Python files", default=Path("."))
    add("--only", default="", help="settings with this in their name")
    add("--updates", type=int, default=8000)
    add("--sequences", type=int, default=2, help="per micro-batch")
    add("--blocks", type=int, default=32)
    add("--width", type=int, default=128)
    add("--context", type=int, default=256)
    add("--evaluations", type=int, default=40)
    add("--trainer", action="store_true", help="train with stages, not simulated")
    add("--check", action="store_true", help="compare both, on a CPU")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Train a table and show it."""
    args = parse_args(argv)
    if args.check:
        difference = check()
        print(f"largest difference between losses: {difference:.1e}")
        return save(args, [{"difference": difference}])
    text = load(args.data).to(torch.device(args.device))
    sizes = Sizes(args.blocks, args.width, 4, args.context)
    settings = [s for s in table(args.updates) if args.only in str(s)]
    given = sizes, text, args.sequences, args.evaluations
    by_trainer = (train(setting, *given) for setting in settings)
    logs = list(by_trainer) if args.trainer else simulate(settings, *given)
    columns = ("setting", "updates", "loss", *(f"updates to {loss:g}" for loss in REACHED))
    lines = [
        (
            str(setting),
            setting.updates,
            f"{log[-1]['validation_loss']:.3f}",
            *(updates_to(loss, log) for loss in REACHED),
        )
        for setting, log in zip(settings, logs, strict=True)
    ]
    show(f"GPT of {sizes.blocks} blocks x {sizes.width}", columns, lines)
    save(args, [{**asdict(s), "log": log} for s, log in zip(settings, logs, strict=True)])


if __name__ == "__main__":
    main()
