"""Stages as plain modules: in a row they are the model, and torch's schedules train them like ours.

float64, every parameter, 1e-10. All schedules run in one launch of two gloo ranks.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from helpers import worst
from torch import Tensor, distributed, nn
from torch.distributed import pipelining
from torch.multiprocessing.spawn import spawn
from torch.nn import functional as F

import revcompile
from revcompile.errors import InputError

EXACT: Final = 1e-10
MICROBATCHES: Final = 4
BATCH: Final = 3
"""Samples a micro-batch; models are compiled with two."""

# -- models ---------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, before: int, width: int) -> None:
        super().__init__()
        stride = width // before
        self.conv, self.bn = nn.Conv2d(before, width, 3, stride, 1), nn.BatchNorm2d(width)
        self.short = nn.Conv2d(before, width, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Any:
        return F.relu(self.short(x) + self.bn(self.conv(x)))


class ResNet(nn.Module):
    """Batch norms, and a transition in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        widths = itertools.pairwise((4, 4, 4, 8, 8, 8))
        self.blocks = nn.Sequential(*(Block(a, b) for a, b in widths))
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Any:
        return self.fc(self.blocks(F.relu(self.bn(self.conv(x)))).mean((2, 3)))


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Any:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4).unbind()
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Any:
        return self.down(torch.tanh(self.up(x)))


class ViT(nn.Module):
    def __init__(self, width: int = 8, depth: int = 3) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.place = nn.Parameter(torch.randn(1, 5, width))
        self.attention = nn.ModuleList(Attention(width) for _ in range(depth))
        self.mlp = nn.ModuleList(Mlp(width) for _ in range(depth))
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Any:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(x.shape[0], -1, -1), x), 1) + self.place
        for attention, mlp in zip(self.attention, self.mlp, strict=True):
            x = x + attention(x)
            x = x + mlp(x)
        return self.head(x[:, 0])


class Skips(nn.Module):
    """A value of the first stage, a mask and plain data are read at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.down = nn.Embedding(11, 6), nn.Linear(6, 6)
        self.first = nn.ModuleList(Mlp(6) for _ in range(4))
        self.merge = nn.Linear(12, 6)
        self.second = nn.ModuleList(Mlp(6) for _ in range(2))
        self.head = nn.Linear(6, 5)

    def forward(self, words: Tensor, weight: Tensor) -> Any:
        skip = torch.sin(self.embed(words))
        x = self.down(skip)
        for mlp in self.first:
            x = x + mlp(x)
        x = torch.tanh(self.merge(torch.cat((x, skip), dim=-1)))
        for mlp in self.second:
            x = x + mlp(x)
        return self.head(((x + skip) * weight * (words != 3).unsqueeze(-1)).mean(1))


class Windows(nn.Module):
    """Sizes of the first stage, the batch size among them, are read by later ones."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, 1, 1)
        self.mlps = nn.ModuleList(Mlp(6) for _ in range(3))
        self.convs = nn.ModuleList(nn.Conv2d(6, 6, 3, padding=1) for _ in range(3))
        self.head = nn.Linear(6 * 16, 5)

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        batch, width, height, _ = x.shape
        x = x.flatten(2).transpose(1, 2)
        for mlp, conv in zip(self.mlps, self.convs, strict=True):
            windows = x.reshape(batch * 4, 16, width)
            x = x + mlp(windows).reshape(batch, height * 8, width)
            image = x.transpose(1, 2).reshape(batch, width, height, 8)
            x = x + torch.tanh(conv(image)).flatten(2).transpose(1, 2)
        return self.head(x.reshape(batch * 4, -1)).reshape(batch, 4, -1).mean(1)


class Returning(nn.Module):
    """Several outputs while it trains, one otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(7, 6), nn.Linear(6, 5)
        self.mlps = nn.ModuleList(Mlp(6) for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        for mlp in self.mlps:
            x = x + mlp(x)
        return {"logits": self.head(x), "hidden": x} if self.training else self.head(x)


class Tied(nn.Module):
    """The embedding is the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.mlps = nn.ModuleList(Mlp(6) for _ in range(4))

    def forward(self, words: Tensor) -> Any:
        x = self.embed(words)
        for mlp in self.mlps:
            x = x + mlp(x)
        return F.linear(x, self.embed.weight)


class Uneven(nn.Module):
    """A later stage reads a size that does not grow evenly with the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(7, 6), nn.Linear(6, 5)
        self.mlps = nn.ModuleList(Mlp(6) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        pairs = torch.cat([x] * len(x.shape)).unsqueeze(0).expand(x.shape[0], -1, -1).flatten(0, 1)
        squared = pairs.shape[0]
        for mlp in self.mlps:
            x = x + mlp(x)
        return self.head(x) / squared


def images(size: int) -> tuple[Tensor, ...]:
    return (torch.randn(size, 3, 8, 8, dtype=torch.float64),)


def rows(size: int) -> tuple[Tensor, ...]:
    return (torch.randn(size, 7, dtype=torch.float64),)


def words(size: int) -> tuple[Tensor, ...]:
    return torch.randint(0, 11, (size, 4)), torch.rand(size, 1, 1, dtype=torch.float64)


Inputs = Callable[[int], tuple[Tensor, ...]]
MODELS: Final[dict[str, tuple[Callable[[], nn.Module], Inputs, int]]] = {
    "resnet": (ResNet, images, 2),
    "vit": (ViT, images, 4),
    "skips": (Skips, words, 4),
    "windows": (Windows, images, 2),
}
"""Each with a maker of its inputs, and a number of stages: one or two for each of two ranks."""


@functools.cache
def compiled(name: str) -> revcompile.StagedModel:
    make, inputs, stages = MODELS[name]
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return revcompile.petrafy(make().double().train(), stages, inputs(2), check="off")


@functools.cache
def data(name: str) -> tuple[tuple[Tensor, ...], Tensor]:
    size = BATCH * MICROBATCHES
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return MODELS[name][1](size), torch.randint(0, 5, (size,))


# -- in a row -------------------------------------------------------------------------------------


def in_a_row(stages: Sequence[nn.Module], inputs: Sequence[Tensor]) -> Any:
    values: Any = tuple(inputs)
    for stage in stages:
        values = stage(*values)
    return values


def after_a_step(modules: Sequence[nn.Module], output: Tensor, target: Tensor) -> dict[str, Tensor]:
    """The output, all gradients, and buffers."""
    F.cross_entropy(output, target).backward()
    found = {"output": output.detach()}
    for module in modules:
        found |= {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
        found |= {f"buffer {n}": b for n, b in module.named_buffers() if b.is_floating_point()}
    return found


@pytest.mark.parametrize("reversible", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_modules_in_a_row_are_the_model(name: str, reversible: bool) -> None:
    net, (inputs, target) = compiled(name), data(name)
    module = net.module()
    setattr(module, "reversible", False)  # noqa: B010 - a flag of the compiled module only
    expected = after_a_step([module], module(*inputs), target)
    stages = net.to_pipeline_stages(reversible=reversible)
    assert len(stages) == net.num_stages
    error, where = worst(expected, after_a_step(stages, in_a_row(stages, inputs), target))
    assert error <= EXACT, f"{where}: {error:.1e}"


@pytest.mark.parametrize("name", MODELS)
def test_only_tensors_cross(name: str) -> None:
    stages, (inputs, _) = compiled(name).to_pipeline_stages(), data(name)
    values = inputs
    for stage in stages[:-1]:
        values = stage(*values)
        assert isinstance(values, tuple)
        for value in values:
            assert isinstance(value, Tensor) and value.is_contiguous() and not value._is_view()
    assert isinstance(stages[-1](*values), Tensor)


def test_sizes_are_worked_out_where_they_are_read() -> None:
    readers = [
        segment.outputs
        for stage in compiled("windows").to_pipeline_stages()
        for segment in stage.rewired.body.segments
        if segment.name == "sizes"
    ]
    assert readers, "no size crosses: the model tests nothing"


def test_masks_and_data_cross_without_gradient() -> None:
    first, second, *_ = compiled("skips").to_pipeline_stages()
    inputs, _ = data("skips")
    assert {(value.dtype, value.requires_grad) for value in first(*inputs)} == {
        (torch.float64, True),
        (torch.float64, False),
        (torch.bool, False),
    }
    assert "bool[B, 4, 1]" in second.extra_repr()


def saved_bytes(stage: nn.Module, inputs: Sequence[Tensor]) -> int:
    """What autograd holds after one forward pass, parameters left out."""
    held: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in stage.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = stage(*inputs)
    assert kept
    return sum(held.values())


def test_a_reversible_stage_keeps_nothing_but_its_output() -> None:
    net, inputs = compiled("vit"), data("vit")[0]
    (first, plain, *_), (_, lean, *_) = (net.to_pipeline_stages(reversible=r) for r in (0, 1))
    received = [t.detach().requires_grad_() for t in first(*inputs)]
    output = sum(t.untyped_storage().nbytes() for t in lean(*received))
    assert saved_bytes(lean, received) == output
    assert saved_bytes(plain, received) > 4 * output


def test_a_reversible_stage_refuses_gradients_in_two_passes() -> None:
    stages, (inputs, _) = compiled("vit").to_pipeline_stages(reversible=True), data("vit")
    received = [t.detach().requires_grad_() for t in in_a_row(stages[:-1], inputs)]
    loss = stages[-1](*received).sum()
    torch.autograd.grad(loss, received, retain_graph=True)
    with pytest.raises(InputError, match="reversible=False"):
        torch.autograd.grad(loss, list(stages[-1].parameters()))


# -- weights --------------------------------------------------------------------------------------


def joined(stages: Sequence[nn.Module]) -> dict[str, Tensor]:
    return {name: value for stage in stages for name, value in stage.state_dict().items()}


def test_every_weight_has_its_name_and_one_home() -> None:
    net = compiled("resnet")
    stages = net.to_pipeline_stages()
    state, whole = joined(stages), net.module().state_dict()
    assert state.keys() == whole.keys()
    assert sum(len(stage.state_dict()) for stage in stages) == len(whole)
    assert all(torch.equal(state[name], whole[name]) for name in whole)


def test_weights_are_copies_and_go_back_by_name() -> None:
    net = revcompile.petrafy(ResNet().double().train(), 3, images(2), check="off")
    before = net.module().state_dict()
    stages = net.to_pipeline_stages()
    with torch.no_grad():
        for parameter in itertools.chain(*(stage.parameters() for stage in stages)):
            parameter.add_(1.0)
    assert all(torch.equal(before[n], p) for n, p in net.model.named_parameters())
    net.model.load_state_dict(joined(stages))
    assert all(torch.equal(before[n] + 1.0, p) for n, p in net.model.named_parameters())


def test_a_checkpoint_of_the_original_loads_into_every_stage() -> None:
    net, original = compiled("resnet"), ResNet().double()
    module = net.module()
    module.load_state_dict(original.state_dict())
    stages = net.to_pipeline_stages()
    for stage in stages:
        stage.load_state_dict(original.state_dict(), strict=False)
    state = joined(stages)
    assert all(torch.equal(state[name], value) for name, value in module.state_dict().items())


# -- refusals -------------------------------------------------------------------------------------


def test_a_parameter_of_two_stages_is_refused_by_name() -> None:
    model, inputs = Tied().double(), words(2)[:1]
    net = revcompile.petrafy(model, 4, inputs, check="off")
    with pytest.raises(InputError, match=r"stages 0 and 3 share the parameter 'embed.weight'"):
        net.to_pipeline_stages()


def test_a_frozen_parameter_of_two_stages_is_copied() -> None:
    model, inputs = Tied().double(), words(2)[:1]
    model.embed.weight.requires_grad_(False)
    net = revcompile.petrafy(model, 4, inputs, check="off")
    stages = net.to_pipeline_stages()
    assert torch.equal(in_a_row(stages, inputs), net.module()(*inputs))


def test_a_size_that_grows_unevenly_stops_the_stage_that_makes_it() -> None:
    net = revcompile.petrafy(Uneven().double(), 3, rows(2), check="off")
    stages = net.to_pipeline_stages()
    in_a_row(stages, rows(3))  # the two sizes it was compiled with
    with pytest.raises(InputError, match="is 50 here, but later stages work out 38"):
        in_a_row(stages, rows(5))


def test_several_outputs_come_in_order_and_only_in_training() -> None:
    model = Returning().double().train()
    net = revcompile.petrafy(model, 3, rows(2), check="off", policy="pretrained")
    stages, (x,) = net.to_pipeline_stages(), rows(3)
    expected = net.module()(x)
    found = in_a_row(stages, (x,))
    assert [t.shape for t in found] == [(3, 5), (3, 6)]
    assert torch.equal(found[0], expected["logits"]) and torch.equal(found[1], expected["hidden"])
    with pytest.raises(InputError, match=r"evaluate net\.module\(\)"):
        stages[0].eval()(x)


def test_a_stage_says_what_it_takes_and_gives() -> None:
    first = compiled("vit").to_pipeline_stages()[0]
    assert first.extra_repr().startswith("stage 0 of 4: (x: float64[B, 3, 8, 8]) -> (")


# -- schedules ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A model under one of torch's schedules, and the method of ours it must equal."""

    model: str
    schedule: str
    method: str
    reversible: bool = False

    @property
    def stages(self) -> int:
        return MODELS[self.model][2]

    def mine(self, rank: int) -> tuple[int, ...]:
        """A rank's stages: every other one, or there and back again."""
        if "ZBV" in self.schedule:
            return (rank, self.stages - 1 - rank)
        return tuple(range(rank, self.stages, 2))

    def __str__(self) -> str:
        return f"{self.model}-{self.schedule}" + "-reversible" * self.reversible


CASES: Final = (
    Case("resnet", "ScheduleGPipe", "gpipe"),
    Case("resnet", "Schedule1F1B", "1f1b"),
    Case("resnet", "Schedule1F1B", "1f1b", reversible=True),
    Case("windows", "ScheduleGPipe", "gpipe", reversible=True),
    Case("windows", "Schedule1F1B", "1f1b"),
    Case("vit", "ScheduleInterleaved1F1B", "1f1b"),
    Case("vit", "ScheduleInterleaved1F1B", "1f1b", reversible=True),
    Case("vit", "ScheduleInterleavedZeroBubble", "1f1b"),
    Case("skips", "ScheduleLoopedBFS", "gpipe"),
    Case("skips", "ScheduleInterleavedZeroBubble", "1f1b"),
    Case("skips", "ScheduleZBVZeroBubble", "1f1b"),
)


def by_torch(case: Case, rank: int) -> dict[str, Any]:
    """One step of a schedule: this rank's losses, gradients and buffers."""
    inputs, target = data(case.model)
    modules = compiled(case.model).to_pipeline_stages(reversible=case.reversible)
    mine = [modules[index] for index in case.mine(rank)]
    device = torch.device("cpu")
    stages = [
        pipelining.PipelineStage(modules[index], index, case.stages, device)
        for index in case.mine(rank)
    ]
    is_single = case.stages == 2
    make = getattr(pipelining, case.schedule)
    schedule = make(stages[0] if is_single else stages, MICROBATCHES, loss_fn=F.cross_entropy)
    losses: list[Tensor] = []
    is_last = case.stages - 1 in case.mine(rank)
    fed = inputs if 0 in case.mine(rank) else ()
    schedule.step(*fed, target=target if is_last else None, losses=losses)
    return {"losses": [float(loss) for loss in losses], "state": state_of(mine)}


def state_of(modules: Sequence[nn.Module]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for module in modules:
        found |= {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
        found |= {f"buffer {n}": b for n, b in module.named_buffers() if b.is_floating_point()}
    return found


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
    )
    torch.save({str(case): by_torch(case, rank) for case in CASES}, f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found, for every case."""
    folder: Path = tmp_path_factory.mktemp("pipelining")
    spawn(_rank, (str(folder),), nprocs=2)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@functools.cache
def by_us(model: str, method: str) -> tuple[list[float], dict[str, Tensor]]:
    """The same step with our engine: losses, gradients and buffers."""
    net, (inputs, target) = compiled(model), data(model)
    start = net.module().state_dict()
    gradients: dict[int, Tensor] = {}

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        made = torch.optim.SGD(list(parameters), lr=0.0)

        def note(*_: Any) -> None:
            group = made.param_groups[0]["params"]
            gradients.update({id(p): p.grad.clone() for p in group if p.grad is not None})

        made.register_step_pre_hook(note)
        return made

    trainer = net.trainer(optimizer, F.cross_entropy, method=method, accumulate=MICROBATCHES)
    losses: dict[int, float] = {}
    chunks = zip(*(t.chunk(MICROBATCHES) for t in (*inputs, target)), strict=True)
    for *fed, wanted in chunks:
        metrics = trainer.step(tuple(fed), wanted)
        losses[metrics.microbatch] = metrics.loss
    trainer.flush()
    state = {n: gradients[id(p)] for n, p in trainer.parameters().items() if id(p) in gradients}
    buffers = net.model.named_buffers()
    state |= {f"buffer {n}": b.clone() for n, b in buffers if b.is_floating_point()}
    net.model.load_state_dict(start)
    return [losses[index] for index in sorted(losses)], state


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_schedule_of_torch_trains_as_ours(launched: list[dict[str, Any]], case: Case) -> None:
    losses, expected = by_us(case.model, case.method)
    ranks = [found[str(case)] for found in launched]
    (found,) = (rank["losses"] for rank in ranks if rank["losses"])
    assert len(losses) == MICROBATCHES
    assert found == pytest.approx(losses, abs=EXACT)
    error, where = worst(expected, ranks[0]["state"] | ranks[1]["state"])
    assert error <= EXACT, f"{where}: {error:.1e}"
