"""Stages as plain modules: in a row they are the model, and torch's schedules train them like ours.

float64, every parameter, 1e-10. All schedules run in one launch of two gloo ranks.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import nets
import pytest
import torch
from distributed_worker import launch
from helpers import refuses, saved_bytes, worst
from nets import GatedWords, Residuals, ResNet, Returning, SharedLayer, ViT, images, rows, words
from torch import Tensor, distributed, nn
from torch.distributed import pipelining
from torch.nn import functional as F

import revcompile
from revcompile.errors import InputError
from tests.recorded import Recorded

MICROBATCHES: Final = 4
BATCH: Final = 3
"""Samples a micro-batch; models are compiled with two."""

# -- models ---------------------------------------------------------------------------------------


class Windows(nn.Module):
    """Sizes of the first stage, the batch size among them, are read by later ones."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, 1, 1)
        self.mlps = nn.ModuleList(nets.Mlp() for _ in range(3))
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


class Scaled(Residuals):
    """A later stage reads a size that grows with the square of the batch, or its inverse."""

    def __init__(self, inverse: bool) -> None:
        super().__init__(3)
        self.inverse = inverse

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        pairs = (x.unsqueeze(0) + x.unsqueeze(1)).flatten(0, 1).shape[0]
        scale = 1.0 / pairs if self.inverse else pairs
        return self.head(self.chain(x)) * scale


Inputs = Callable[[int], tuple[Tensor, ...]]
MODELS: Final[dict[str, tuple[Callable[[], nn.Module], Inputs, int]]] = {
    "resnet": (ResNet, images, 2),
    "vit": (functools.partial(ViT, drop=0.0), images, 4),
    "skips": (nets.MaskedSkips, words, 4),
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


NO_INTEGERS: Final = "only Tensors of floating point dtype can require gradients"
"""What the schedules of older torch say of integers that pass between stages."""


def run_rank(rank: int, options: dict[str, Any]) -> dict[str, Any] | str:
    """What this rank found, for every case; or why torch cannot run them."""
    distributed.init_process_group("gloo")
    try:
        return {str(case): by_torch(case, rank) for case in CASES}
    except RuntimeError as error:
        if NO_INTEGERS not in str(error):
            raise
        return NO_INTEGERS
    finally:
        distributed.destroy_process_group()


EXACT: Final = 1e-10


# -- in a row -------------------------------------------------------------------------------------


def run_in_sequence(stages: Sequence[nn.Module], inputs: Sequence[Tensor]) -> Any:
    values: Any = tuple(inputs)
    for stage in stages:
        values = stage(*values)
    return values


def after_a_step(modules: Sequence[nn.Module], output: Tensor, target: Tensor) -> dict[str, Tensor]:
    """The output, all gradients, and buffers."""
    F.cross_entropy(output, target).backward()
    return {"output": output.detach(), **state_of(modules)}


@pytest.mark.parametrize("reversible", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_modules_in_sequence_are_the_model(name: str, reversible: bool) -> None:
    net, (inputs, target) = compiled(name), data(name)
    module = net.to_module()
    setattr(module, "reversible", False)  # noqa: B010 - a flag of the compiled module only
    expected = after_a_step([module], module(*inputs), target)
    stages = net.to_pipeline_stages(reversible=reversible)
    assert len(stages) == net.num_stages
    error, where = worst(expected, after_a_step(stages, run_in_sequence(stages, inputs), target))
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


def test_gradients_come_back_as_they_can_be_sent() -> None:
    net = revcompile.petrafy(nets.Arranged().double(), 6, images(2), check="off")
    values: Sequence[Tensor] = images(BATCH)
    for stage in net.to_pipeline_stages()[:-1]:
        outputs = stage(*values)
        if values[0].requires_grad:
            back = torch.autograd.grad(outputs, values, [torch.ones_like(t) for t in outputs])
            assert all(gradient.is_contiguous() for gradient in back)
        values = [t.detach().requires_grad_() for t in outputs]


def test_a_reversible_stage_keeps_nothing_but_its_output() -> None:
    net, inputs = compiled("vit"), data("vit")[0]
    (first, plain, *_), (_, lean, *_) = (
        net.to_pipeline_stages(reversible=r) for r in (False, True)
    )
    received = [t.detach().requires_grad_() for t in first(*inputs)]
    output = sum(t.untyped_storage().nbytes() for t in lean(*received))
    assert saved_bytes(lean, *received) == output
    assert saved_bytes(plain, *received) > 4 * output


def test_a_reversible_stage_refuses_to_be_differentiated_in_parts() -> None:
    stages, (inputs, _) = compiled("vit").to_pipeline_stages(reversible=True), data("vit")
    received = [t.detach().requires_grad_() for t in run_in_sequence(stages[:1], inputs)]
    outputs, weights = stages[1](*received), list(stages[1].parameters())
    loss = sum(output.sum() for output in outputs)
    expected = torch.autograd.grad(loss, weights, retain_graph=True)
    torch.autograd.grad(loss, received, retain_graph=True)
    again = torch.autograd.grad(loss, weights, retain_graph=True)
    for first, second in zip(expected, again, strict=True):
        assert torch.equal(first, second)  # in two passes, each from the end
    node: Any = outputs[0].grad_fn
    while getattr(node, "index", None) != 1:
        node = node.next_functions[0][0]
    middle = torch.autograd.graph.GradientEdge(node.next_functions[0][0], 0)
    with pytest.raises(InputError, match=r"differentiated in parts.*reversible=False"):
        torch.autograd.grad([middle], weights, [torch.ones_like(received[0])], allow_unused=True)


# -- weights --------------------------------------------------------------------------------------


def test_a_checkpoint_of_the_original_loads_into_every_stage() -> None:
    net, original = compiled("resnet"), ResNet().double()
    module = net.to_module()
    module.load_state_dict(original.state_dict())
    stages = net.to_pipeline_stages()
    for stage in stages:
        stage.load_state_dict(original.state_dict(), strict=False)
    state = {n: value for stage in stages for n, value in stage.state_dict().items()}
    assert all(torch.equal(state[name], value) for name, value in module.state_dict().items())


# -- refusals -------------------------------------------------------------------------------------


def test_a_parameter_of_two_stages_is_refused_by_name() -> None:
    net = revcompile.petrafy(GatedWords().double(), 4, words(2), check="off")
    with pytest.raises(InputError, match=r"stages 0 and 3 share the parameter 'embed.weight'"):
        net.to_pipeline_stages()


def test_a_frozen_parameter_of_two_stages_is_copied() -> None:
    model, inputs = GatedWords().double(), words(2)
    for shared in (model.embed, model.blocks[1].mlp.up):
        shared.requires_grad_(False)
    net = revcompile.petrafy(model, 4, inputs, check="off")
    stages = net.to_pipeline_stages()
    assert torch.equal(run_in_sequence(stages, inputs), net.to_module()(*inputs))


def test_running_statistics_of_two_stages_are_refused_by_name() -> None:
    norm = nn.BatchNorm1d(6, affine=False)
    net = revcompile.petrafy(SharedLayer(norm), 2, torch.randn(2, 6), check="off")
    with pytest.raises(InputError, match=r"stages 0 and 1 share the running statistics of 'layer'"):
        net.to_pipeline_stages()


def test_a_size_that_grows_unevenly_stops_the_stage_that_makes_it() -> None:
    net = revcompile.petrafy(Scaled(inverse=False).double(), 3, rows(2), check="off")
    stages = net.to_pipeline_stages()
    run_in_sequence(stages, rows(3))  # sizes are known at the example's batch size and at one more
    refuses(InputError, "is 25 here, but later stages compute 19", run_in_sequence, stages, rows(5))


def test_a_number_that_is_no_size_is_refused_by_name() -> None:
    net = revcompile.petrafy(Scaled(inverse=True).double(), 3, rows(2), check="off")
    refuses(InputError, "stage 2 reads 'truediv' of an earlier stage", net.to_pipeline_stages)


def test_several_outputs_come_in_order_and_only_in_training() -> None:
    model = Returning().double().train()
    net = revcompile.petrafy(model, 3, rows(2), check="off", policy="same_parameters")
    stages, (x,) = net.to_pipeline_stages(), rows(3)
    expected = net.to_module()(x)
    found = run_in_sequence(stages, (x,))
    assert [t.shape for t in found] == [(3, 5), (3, 6)]
    assert torch.equal(found[0], expected["logits"]) and torch.equal(found[1], expected["hidden"])
    refuses(InputError, r"evaluate net\.to_module\(\)", stages[0].eval(), x)


# -- schedules ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found, for every case."""
    folder: Path = tmp_path_factory.mktemp("pipelining")
    results = launch(folder, 2, run_rank)
    if NO_INTEGERS in results:
        pytest.skip(f"torch {torch.__version__}: its schedules pass no integers between stages")
    return results


@functools.cache
def by_us(model: str, method: str) -> tuple[list[float], dict[str, Tensor]]:
    """The same step with our engine: losses, gradients and buffers."""
    net, (inputs, target) = compiled(model), data(model)
    start = net.to_module().state_dict()
    record = Recorded()
    trainer = net.trainer(record, F.cross_entropy, method=method, accumulation_steps=MICROBATCHES)
    losses: dict[int, float] = {}
    chunks = zip(*(t.chunk(MICROBATCHES) for t in (*inputs, target)), strict=True)
    for *fed, wanted in chunks:
        metrics = trainer.step(tuple(fed), wanted)
        losses[metrics.microbatch] = metrics.loss
    trainer.flush()
    (state,) = record.gradients({id(p): n for n, p in trainer.named_parameters()})
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
