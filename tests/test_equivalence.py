"""The spine: the engine against autograd, and against the papers' equations written out.

float64, every parameter, 1e-10. `transcription` is the other side of the comparison for methods
with a delay; autograd on `net.to_module()` for those without.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import pytest
import torch
from helpers import cases, worst
from nets import Arranged, GatedWords, Mlp, Offsets, ResNet, Skips, images, rows, words
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F
from training import settings_of
from transcription import ROWS, Transcription

import revcompile
from revcompile import TrainerOptions
from revcompile.runtime.trainer.trainer import Trainer
from tests.recorded import standing_still, with_gradients

EXACT: Final = 1e-10
STAGES: Final = 4
MICROBATCHES: Final = 12
NO_DELAY: Final = ("backprop", "reversible_backprop", "gpipe", "1f1b")
DELAYED: Final = tuple(method for method in ROWS if method != "dni")
ORDERS: Final = (1, 2)
SAME_CHOICES: Final = ("pipedream", "features_replay")
"""In either order their three choices are those of `delayed` and `dsp`: one model is enough."""
DISTINCT: Final = tuple(method for method in DELAYED if method not in SAME_CHOICES)

Batch = tuple[tuple[Tensor, ...], Tensor]
Gradients = Mapping[str, Tensor]


# -- models ---------------------------------------------------------------------------------------


def vit() -> nn.Module:
    return VisionTransformer(8, 4, num_classes=5, embed_dim=24, depth=4, num_heads=2, mlp_ratio=2)


MODELS: Final[dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, ...]]]]] = {
    "resnet": (functools.partial(ResNet, (4, 4, 4, 8, 8, 8), normed=True), images),
    "vit": (vit, images),
    "skips": (Skips, rows),
    "words": (GatedWords, words),
    "arranged": (Arranged, images),
    "offsets": (Offsets, rows),
}
EVERY: Final = tuple(name for name in MODELS if name != "offsets")
RUNS: Final = [
    (name, method, in_flight_per_stage)
    for name, method, in_flight_per_stage in itertools.product(EVERY, DELAYED, ORDERS)
    if method in DISTINCT or name == "skips"
]


# -- both sides -----------------------------------------------------------------------------------


@functools.cache
def compiled(name: str) -> tuple[revcompile.StagedModel, dict[str, Tensor]]:
    """A staged model, and the weights it starts with."""
    make, inputs = MODELS[name]
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = make().double().train()
        with torch.no_grad():
            for parameter in model.parameters():  # no layer starts at zero, or without effect
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        net = revcompile.petrafy(model, STAGES, inputs(2), policy="paper", check="off")
    return net, {key: value.clone() for key, value in net.to_module().state_dict().items()}


def fresh(name: str) -> revcompile.StagedModel:
    """The staged model with the weights it started with."""
    net, start = compiled(name)
    net.model.load_state_dict(start)
    return net


@functools.cache
def batches(name: str, count: int = MICROBATCHES) -> list[Batch]:
    """Micro-batches of three samples; the last has fewer."""
    with torch.random.fork_rng():
        torch.manual_seed(4)
        sizes = [3] * (count - 1) + [2]
        return [(MODELS[name][1](size), torch.randint(0, 5, (size,))) for size in sizes]


def momentum(parameters: Any) -> torch.optim.SGD:
    return torch.optim.SGD(
        parameters, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-2, foreach=False
    )


def engine(
    name: str,
    method: str,
    fed: Sequence[Batch],
    *,
    make: Callable[[Any], torch.optim.Optimizer] = momentum,
    **settings: Any,
) -> tuple[Trainer, list[dict[str, Tensor]]]:
    """The engine's trainer after all micro-batches, and the gradients of all updates."""
    settings = settings_of(**settings, method=method)
    return with_gradients(fresh(name), fed, F.cross_entropy, make, **settings)


def autograd(
    module: nn.Module,
    fed: Sequence[Batch],
    optimizer: torch.optim.Optimizer,
    accumulation_steps: int = 1,
) -> Iterator[dict[str, Tensor]]:
    """A plain training loop; yields the gradient of every update."""
    module.train()
    setattr(module, "reversible", False)  # noqa: B010 - a flag of the compiled module only
    for start in range(0, len(fed), accumulation_steps):
        group = fed[start : start + accumulation_steps]
        optimizer.zero_grad()
        for inputs, target in group:
            (F.cross_entropy(module(*inputs), target) / len(group)).backward()
        yield {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
        optimizer.step()


def copied(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in parameters.items()}


def assert_same(
    expected: Sequence[Gradients], actual: Sequence[Gradients], where: Callable[[str], int]
) -> None:
    """Name the first update at which the two part ways, and the stage."""
    assert len(expected) == len(actual)
    for update, (want, have) in enumerate(zip(expected, actual, strict=True)):
        error, name = worst(want, have)
        assert error <= EXACT, f"update {update}, stage {where(name)}, {name}: {error:.1e}"


def assert_parameters(expected: Mapping[str, Tensor], trainer: Trainer) -> None:
    error, where = worst(expected, copied(dict(trainer.named_parameters())))
    assert error <= EXACT, where


def assert_buffers(expected: nn.Module, actual: nn.Module) -> None:
    found = ({n: b.double() for n, b in each.named_buffers()} for each in (expected, actual))
    error, where = worst(*found)
    assert error <= EXACT, where


def paper(
    name: str, method: str, fed: Sequence[Batch] | None = None, **settings: Any
) -> Transcription:
    """The papers' training on these micro-batches, or on all."""
    other = Transcription(fresh(name)._partition, method, momentum, F.cross_entropy, **settings)
    other.run(batches(name) if fed is None else fed)
    return other


def stage_of(name: str) -> Callable[[str], int]:
    """From a parameter's name to the first stage that reads it."""

    def find(parameter: str) -> int:
        net = compiled(name)[0]
        return next(s.part.index for s in net.stages if parameter in s.generated.parameters)

    return find


@functools.cache
def plain(name: str, accumulation_steps: int) -> tuple[list[dict[str, Tensor]], nn.Module]:
    """Plain training: the gradients of all updates, and the module afterwards."""
    module = fresh(name).to_module()
    optimizer = momentum(module.parameters())
    return list(autograd(module, batches(name), optimizer, accumulation_steps)), module


@functools.cache
def still(name: str) -> list[dict[str, Tensor]]:
    """Autograd's gradient of every micro-batch at the parameters all start with."""
    module = fresh(name).to_module()
    return list(autograd(module, batches(name), standing_still(module.parameters())))


@functools.cache
def transcribed(
    name: str, row: str, in_flight_per_stage: float | None, accumulation_steps: int
) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """The papers' parameters after all micro-batches, and the gradients of all updates."""
    method = next(m for m in ROWS if ROWS[m][0].name == row)
    order = {"in_flight_per_stage": in_flight_per_stage}
    other = paper(name, method, **order, accumulation_steps=accumulation_steps)
    return other.parameters(), other.gradients()


# -- 1. no delay ----------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulation_steps", [1, 3])
@pytest.mark.parametrize("method", NO_DELAY)
@pytest.mark.parametrize("name", EVERY)
def test_without_delay_it_is_autograd(name: str, method: str, accumulation_steps: int) -> None:
    expected, module = plain(name, accumulation_steps)
    trainer, actual = engine(name, method, batches(name), accumulation_steps=accumulation_steps)
    assert_same(expected, actual, stage_of(name))
    assert_parameters(copied(dict(module.named_parameters())), trainer)


@pytest.mark.parametrize("method", NO_DELAY)
def test_an_incomplete_group_is_the_mean_of_what_is_there(method: str) -> None:
    expected, _ = plain("words", 5)
    _, actual = engine("words", method, batches("words"), accumulation_steps=5)
    assert len(actual) == 3
    assert_same(expected, actual, stage_of("words"))


@pytest.mark.parametrize("method", NO_DELAY)
def test_without_delay_running_statistics_are_plain_training_s(method: str) -> None:
    _, module = plain("resnet", 1)
    trainer, _ = engine("resnet", method, batches("resnet"))
    assert any("running_var" in n for n, _ in module.named_buffers())
    assert_buffers(module, trainer.model)


@pytest.mark.parametrize("accumulation_steps", [1, 3])
@pytest.mark.parametrize("method", [*NO_DELAY, *ROWS])
def test_statistics_move_once_a_microbatch(method: str, accumulation_steps: int) -> None:
    trainer, _ = engine("resnet", method, batches("resnet"), accumulation_steps=accumulation_steps)
    counts = {n: int(b) for n, b in trainer.model.named_buffers() if "num_batches" in n}
    assert counts and set(counts.values()) == {MICROBATCHES}


# -- 2. parameters that stand still ---------------------------------------------------------------


@pytest.mark.parametrize(("name", "method", "in_flight_per_stage"), RUNS)
def test_with_still_parameters_every_gradient_is_autograd_s(
    name: str, method: str, in_flight_per_stage: float
) -> None:
    _, actual = engine(
        name, method, batches(name), make=standing_still, in_flight_per_stage=in_flight_per_stage
    )
    assert_same(still(name), actual, stage_of(name))


# -- 3. parameters that move ----------------------------------------------------------------------


@pytest.mark.parametrize("accumulation_steps", [1, 3])
@cases("name, method, in_flight_per_stage", *RUNS, *((name, "dni", None) for name in EVERY))
def test_engine_is_the_paper_s(
    name: str, method: str, in_flight_per_stage: float | None, accumulation_steps: int
) -> None:
    expected, expected_gradients = transcribed(
        name, ROWS[method][0].name, in_flight_per_stage, accumulation_steps
    )
    order = {"in_flight_per_stage": in_flight_per_stage}
    trainer, gradients = engine(
        name, method, batches(name), **order, accumulation_steps=accumulation_steps
    )
    assert_same(expected_gradients, gradients, stage_of(name))
    assert_parameters(expected, trainer)


@pytest.mark.parametrize("method", DELAYED)
def test_the_default_order_is_the_published_one(method: str) -> None:
    row, in_flight_per_stage = ROWS[method]
    expected, _ = transcribed("skips", row.name, in_flight_per_stage, 1)  # both use one model
    assert_parameters(expected, engine("skips", method, batches("skips"))[0])


@pytest.mark.parametrize("accumulation_steps", [1, 3])
@pytest.mark.parametrize("name", EVERY)
def test_the_rows_of_the_table_differ(name: str, accumulation_steps: int) -> None:
    """Or the comparisons above would compare nothing."""
    found = {
        f"{row} {in_flight_per_stage}": transcribed(
            name, row, in_flight_per_stage, accumulation_steps
        )[0]
        for row in ("RECONSTRUCT", "REPLAY", "STASH")
        for in_flight_per_stage in ORDERS
    }
    found["dni"] = transcribed(name, "SYNTHETIC", None, accumulation_steps)[0]
    found["backprop"] = copied(dict(plain(name, accumulation_steps)[1].named_parameters()))
    for one, other in itertools.combinations(found, 2):
        assert worst(found[one], found[other])[0] > 1e-6, (one, other)


@pytest.mark.parametrize("method", [*DISTINCT, "dni"])
@pytest.mark.parametrize("name", ["skips", "words"])
def test_training_goes_on_after_a_flush(name: str, method: str) -> None:
    first, rest = batches(name)[:5], batches(name)[5:]
    other = paper(name, method, [], accumulation_steps=2)
    trainer = compiled(name)[0].trainer(
        momentum, F.cross_entropy, method=method, accumulation_steps=2
    )
    for fed in (first, rest):
        other.run(fed)
        for inputs, target in fed:
            trainer.step(inputs, target)
        trainer.flush()
        assert_parameters(other.parameters(), trainer)


@pytest.mark.parametrize("method", ["petra", "delayed", "dsp", "backprop"])
def test_gradients_that_share_memory_stay_apart(method: str) -> None:
    """With one sample, the gradient of a sum is the very tensor that came from above."""
    fed = [((x[:1],), target[:1]) for (x,), target in batches("offsets")]
    _, gradients = engine("offsets", method, fed, accumulation_steps=3)
    if method == "backprop":
        module = fresh("offsets").to_module()
        expected = list(autograd(module, fed, momentum(module.parameters()), 3))
    else:
        expected = paper("offsets", method, fed, accumulation_steps=3).gradients()
    assert_same(expected, gradients, stage_of("offsets"))


def test_clipping_a_stage_leaves_the_gradient_on_its_way_alone() -> None:
    fed = [((x[:1],), target[:1]) for (x,), target in batches("offsets")]
    _, gradients = engine("offsets", "petra", fed, make=standing_still, clip_grad_norm=1e-3)
    module, where = fresh("offsets").to_module(), stage_of("offsets")
    expected = list(autograd(module, fed, standing_still(module.parameters())))

    lengths: list[float] = []

    def directions(gradient: Gradients) -> dict[str, Tensor]:
        """Each stage's own, at length one."""
        found: dict[str, Tensor] = {}
        for stage in range(STAGES):
            mine = {n: g for n, g in gradient.items() if where(n) == stage}
            length = torch.stack([g.norm() for g in mine.values()]).norm()
            lengths.append(float(length))
            found |= {n: g / length for n, g in mine.items()}
        return found

    assert_same(list(map(directions, expected)), list(map(directions, gradients)), where)
    clipped = lengths[len(lengths) // 2 :]
    assert clipped == pytest.approx([1e-3] * len(clipped), rel=1e-2)


# -- 4. randomness --------------------------------------------------------------------------------


class Tape:
    """Masks that were drawn, by the place that drew them; or those to use instead."""

    def __init__(self) -> None:
        self.drawn: dict[str, list[tuple[bool, Tensor]]] = {}
        self.given: dict[str, Tensor] | None = None

    def __deepcopy__(self, memo: Any) -> "Tape":
        return self

    def forward_masks(self) -> list[dict[str, Tensor]]:
        """Of every micro-batch in turn, as its forward pass drew them.

        A place that computes twice does so unrecorded first; one that keeps its graph, once.
        """
        found = {}
        for place, drawn in self.drawn.items():
            first = [mask for recorded, mask in drawn if not recorded]
            found[place] = first or [mask for _, mask in drawn]
        return [dict(zip(found, masks, strict=True)) for masks in zip(*found.values(), strict=True)]


class Noise(nn.Module):
    """Dropout that can be watched, and told what to drop."""

    def __init__(self, tape: Tape, place: str) -> None:
        super().__init__()
        self.tape, self.place = tape, place

    def forward(self, x: Tensor) -> Any:
        if self.tape.given is not None:
            return x * self.tape.given[self.place]
        mask = (torch.rand_like(x) < 0.7) / 0.7
        self.tape.drawn.setdefault(self.place, []).append((torch.is_grad_enabled(), mask))
        return x * mask


class Noisy(nn.Module):
    """Noise before, within and behind a chain, several times in a stage."""

    def __init__(self, make: Callable[[str], nn.Module]) -> None:
        super().__init__()
        self.stem, self.early = nn.Linear(7, 6), make("early")
        self.mlps = nn.ModuleList(Mlp() for _ in range(6))
        self.noises = nn.ModuleList(make(f"branch {i}") for i in range(6))
        self.mid, self.late = make("mid"), make("late")
        self.merge, self.head = nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Any:
        x = self.early(self.stem(x))
        for i, (mlp, noise) in enumerate(zip(self.mlps, self.noises, strict=True)):
            if i == 3:
                x = torch.tanh(self.merge(self.mid(x)))
            x = x + noise(mlp(x))
        return self.head(self.late(x))


@functools.cache
def noisy(watched: bool) -> tuple[revcompile.StagedModel, Tape]:
    """A model with noise, and the tape it writes to if it is watched."""
    tape = Tape()
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = Noisy(lambda place: Noise(tape, place) if watched else nn.Dropout(0.3)).double()
        net = revcompile.petrafy(model, STAGES, rows(2), check="off", leaf_modules=[Noise])
    return net, tape


def noisy_gradients(
    watched: bool,
    method: str,
    in_flight_per_stage: float | None,
    *,
    seed: int = 7,
    accumulation_steps: int = 1,
) -> list[dict[str, Tensor]]:
    """What the engine finds at parameters that stand still."""
    settings = {"method": method, "seed": seed, "accumulation_steps": accumulation_steps}
    options = TrainerOptions(in_flight_per_stage=in_flight_per_stage)

    def drawing() -> Iterator[Batch]:
        for batch in batches("skips"):
            torch.rand(3)  # what others draw in between does not matter
            yield batch

    return with_gradients(
        noisy(watched)[0], drawing(), F.cross_entropy, **settings, options=options
    )[1]


@cases(
    "method, in_flight_per_stage",
    *((method, None) for method in NO_DELAY),
    *itertools.product(DISTINCT, ORDERS),
)
def test_backward_sees_its_own_mask(method: str, in_flight_per_stage: float | None) -> None:
    net, tape = noisy(True)
    tape.drawn, tape.given = {}, None
    k = 3 if method in ("gpipe", "1f1b") else 1
    actual = noisy_gradients(True, method, in_flight_per_stage, accumulation_steps=k)
    masks, module = tape.forward_masks(), net.to_module()
    assert len(masks) == MICROBATCHES and len(masks[0]) == 9
    drawn = [mask for of_one in masks for mask in of_one.values() if mask.numel() > 12]
    assert not any(one.equal(other) for one, other in itertools.combinations(drawn, 2))
    each: list[dict[str, Tensor]] = []
    for batch, tape.given in zip(batches("skips"), masks, strict=True):
        each += autograd(module, [batch], standing_still(module.parameters()))
    groups = [each[i : i + k] for i in range(0, MICROBATCHES, k)]
    expected = [
        {n: torch.stack([g[n] for g in group]).mean(0) for n in group[0]} for group in groups
    ]
    assert_same(expected, actual, lambda name: -1)


@pytest.mark.parametrize(
    ("method", "in_flight_per_stage"), list(itertools.product(DISTINCT, ORDERS))
)
def test_masks_depend_on_seed_and_place_only(method: str, in_flight_per_stage: float) -> None:
    expected = noisy_gradients(False, "backprop", None)
    assert_same(expected, noisy_gradients(False, method, in_flight_per_stage), lambda name: -1)


def test_another_seed_gives_other_masks() -> None:
    one, other = (noisy_gradients(False, "petra", None, seed=seed) for seed in (7, 8))
    assert worst(one[0], other[0])[0] > 1e-3
