"""What a user may change between two steps: followed by every backend, or refused by name.

The table of docs/captured.md. `Net` has layers of all kinds: some are called by its stages, some
are part of their programs, and one that is called holds others.
"""

import copy
import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import training
from distributed_worker import fed, final, launch, outcome
from helpers import cases, refuses
from nets import Chain
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from training import Batch, drained, feed, fresh, momentum, plain_loop

import revcompile
from revcompile.errors import (
    GuardError,
    InputError,
    NonFiniteError,
    RevcompileError,
)
from revcompile.runtime.trainer.trainer import Trainer

ON_CPU: Final = ("eager", "static")
BACKENDS: Final = (
    *ON_CPU,
    pytest.param("cudagraphs", marks=pytest.mark.gpu),
    pytest.param("inductor", marks=pytest.mark.gpu),
)


class Whole(nn.Module):
    """A layer that is called, with settings of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(6, 6), nn.Dropout(0.0)
        self.register_buffer("mask", torch.ones(6))
        self.scales = [1.0, 0.5]

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.linear(x)) * self.scales[1] * self.mask


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(6), nn.Dropout(0.0)
        self.whole, self.alpha = Whole(), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x + self.alpha * self.drop(torch.tanh(self.whole(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(5, 6), nn.Linear(6, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


Undo = Callable[[], Any]


def set_to(owner: Any, name: str, value: Any) -> Undo:
    before = getattr(owner, name)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, before)


def in_place(values: list[Any], value: float) -> Undo:
    before, values[1] = values[1], value
    return lambda: values.__setitem__(1, before)


def hooked(module: nn.Module) -> Undo:
    return module.register_forward_hook(lambda module, inputs, output: 2 * output).remove


def scaled(weight: Tensor, in_place: bool) -> Undo:
    before = weight.detach().clone()
    if in_place:
        with torch.no_grad():
            weight.mul_(0.5)
    else:
        weight.data = before * 0.5
    return lambda: weight.data.copy_(before)


def groups(optimizers: list[torch.optim.Optimizer], **settings: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group.update(settings)


def loaded(model: Any) -> None:
    model.load_state_dict({name: 0.5 * t for name, t in model.state_dict().items()})


def state_loaded(optimizers: list[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        state = copy.deepcopy(optimizer.state_dict())
        for of_parameter in state["state"].values():
            of_parameter["momentum_buffer"].zero_()
        optimizer.load_state_dict(state)


def scheduled(optimizers: list[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 0.5)


def same(x: Tensor) -> Tensor:
    return x


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def appended(blocks: nn.ModuleList) -> Undo:
    blocks.append(nn.Identity())
    return lambda: blocks.__delitem__(-1)


def parametrized(layer: nn.Module) -> Undo:
    parametrize.register_parametrization(layer, "weight", nn.Identity())
    return lambda: parametrize.remove_parametrizations(layer, "weight")


@dataclass(frozen=True)
class Row:
    """A change, and what becomes of it."""

    change: Callable[[Any, list[torch.optim.Optimizer]], Any] = lambda model, optimizers: None
    refused: str | None = None
    """What the error says, whenever it is made; None: it is followed."""
    refused_in_flight: str | None = None
    """The same, only while micro-batches are in flight."""
    is_final: bool = False
    """It cannot be undone in flight, because to undo it is to write to a weight."""
    inputs: Callable[[Tensor], Tensor] = same
    """What the change makes of later inputs."""
    error: type[RevcompileError] = InputError
    is_left_out: bool = False
    """Refused is the micro-batch, which counts; else the step, which changes nothing."""


IN_FLIGHT: Final = (
    r", but micro-batches are in flight, .* Undo the change, call trainer\.flush\(\), and"
)
WRITTEN: Final = (
    r" was written to, but micro-batches are in flight, .* Call trainer\.flush\(\) before you"
)
TABLE: Final[dict[str, Row]] = {
    "mode of a norm": Row(
        lambda m, o: set_to(m.blocks[1].norm, "training", False),
        refused_in_flight=rf"blocks\.1\.norm\.training was True and is False now{IN_FLIGHT}",
    ),
    "rate of dropout": Row(
        lambda m, o: set_to(m.blocks[0].drop, "p", 1.0),
        refused_in_flight=rf"blocks\.0\.drop\.p was 0\.0 and is 1\.0 now{IN_FLIGHT}",
    ),
    "rate inside a layer": Row(
        lambda m, o: set_to(m.blocks[1].whole.drop, "p", 1.0),
        refused_in_flight=rf"blocks\.1\.whole\.drop\.p was 0\.0 and is 1\.0 now{IN_FLIGHT}",
    ),
    "momentum of a norm": Row(
        lambda m, o: set_to(m.blocks[2].norm, "momentum", 0.5),
        refused_in_flight=rf"blocks\.2\.norm\.momentum was 0\.1 and is 0\.5 now{IN_FLIGHT}",
    ),
    "eps of a norm": Row(
        lambda m, o: set_to(m.blocks[2].norm, "eps", 0.5),
        refused_in_flight=rf"blocks\.2\.norm\.eps was 1e-05 and is 0\.5 now{IN_FLIGHT}",
    ),
    "list of a layer": Row(
        lambda m, o: in_place(m.blocks[0].whole.scales, 0.25),
        refused_in_flight=r"blocks\.0\.whole\.scales was \[1\.0, 0\.5\] and is \[1\.0, 0\.25\]",
    ),
    "buffer of a layer": Row(
        lambda m, o: set_to(m.blocks[1].whole, "mask", 0.5 * m.blocks[1].whole.mask),
        refused_in_flight=rf"blocks\.1\.whole\.mask was replaced{IN_FLIGHT}",
    ),
    "buffer in place": Row(
        lambda m, o: scaled(m.blocks[1].whole.mask, in_place=True),
        refused_in_flight=rf"blocks\.1\.whole\.mask{WRITTEN}",
        is_final=True,
    ),
    "attribute that was traced": Row(
        lambda m, o: set_to(m.blocks[1], "alpha", 0.5),
        "alpha was 1",
        error=GuardError,
        is_left_out=True,
    ),
    "hook on a layer": Row(
        lambda m, o: hooked(m.blocks[1].whole),
        refused_in_flight=rf"a hook of blocks\.1\.whole was registered or removed{IN_FLIGHT}",
    ),
    "hook on a block": Row(
        lambda m, o: hooked(m.blocks[1]), r"a hook of blocks\.1 was registered or removed"
    ),
    "hook on the model": Row(
        lambda m, o: m.register_forward_pre_hook(print).remove,
        "a hook of the model was registered or removed",
    ),
    "backward hook": Row(
        lambda m, o: m.blocks[1].register_full_backward_hook(print).remove,
        r"a hook of blocks\.1 was registered or removed",
    ),
    "gradient hook": Row(
        lambda m, o: m.stem.weight.register_post_accumulate_grad_hook(print).remove,
        r"stem\.weight has a gradient hook",
    ),
    "class": Row(
        lambda m, o: set_to(m.stem, "__class__", Doubled), "stem was a Linear and is a Doubled now"
    ),
    "member": Row(lambda m, o: appended(m.blocks), "blocks was given other members"),
    "parametrized": Row(
        lambda m, o: parametrized(m.stem),
        "stem was a Linear and is a ParametrizedLinear now",
        is_final=True,
    ),
    "requires_grad": Row(
        lambda m, o: set_to(m.head.weight, "requires_grad", False),
        r"requires_grad of head\.weight was changed",
    ),
    "parameter in place": Row(
        lambda m, o: scaled(m.head.weight, in_place=True),
        refused_in_flight=rf"head\.weight{WRITTEN}",
        is_final=True,
    ),
    "parameter's data": Row(
        lambda m, o: scaled(m.head.weight, in_place=False),
        refused_in_flight=rf"head\.weight{WRITTEN}",
        is_final=True,
    ),
    "parameter": Row(
        lambda m, o: set_to(m.head, "weight", nn.Parameter(m.head.weight.detach().clone())),
        r"head\.weight was replaced",
    ),
    "module": Row(
        lambda m, o: set_to(m.blocks[1], "drop", nn.Identity()),
        r"blocks\.1\.drop was a Dropout and is an Identity now",
    ),
    "forward": Row(
        lambda m, o: (setattr(m.head, "forward", print), lambda: delattr(m.head, "forward"))[1],
        "head was given another forward",
    ),
    "learning rate": Row(lambda m, o: groups(o, lr=0.02)),
    "weight decay": Row(lambda m, o: groups(o, weight_decay=0.5)),
    "scheduler": Row(lambda m, o: scheduled(o)),
    "loaded state": Row(lambda m, o: state_loaded(o)),
    "loaded weights": Row(
        lambda m, o: loaded(m), refused_in_flight=rf"{WRITTEN} write to weights", is_final=True
    ),
    "batch size": Row(inputs=lambda x: x[:3]),
    "size": Row(
        inputs=lambda x: F.pad(x, (0, 1)), refused="failed on micro-batch", is_left_out=True
    ),
    "dtype": Row(inputs=lambda x: x.float(), refused="failed on micro-batch", is_left_out=True),
    "memory format": Row(inputs=lambda x: x.t().contiguous().t()),
    "seed": Row(lambda m, o: (torch.manual_seed(7), torch.rand(3))),
}


Run = tuple[revcompile.StagedModel, Trainer, list[torch.optim.Optimizer]]


def made(backend: str, method: str = "backprop", model: nn.Module | None = None) -> Run:
    """A staged model (`model`, if it is given), its trainer, and the optimizers of its stages."""
    device = "cpu" if backend in ON_CPU else "cuda"
    staged = fresh(Net, 2, torch.float64, Whole, model=model)
    optimizers: list[torch.optim.Optimizer] = []

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        optimizers.append(momentum(parameters))
        return optimizers[-1]

    trainer = staged.trainer(
        optimizer, F.cross_entropy, method=method, backend=backend, device=device
    )
    return staged, trainer, optimizers


def data(count: int, inputs: Callable[[Tensor], Tensor] = same) -> list[Batch]:
    generator = torch.Generator().manual_seed(count)
    pairs = [
        (
            inputs(torch.randn(4, 5, generator=generator, dtype=torch.float64)),
            torch.randint(0, 3, (4,), generator=generator),
        )
        for _ in range(count)
    ]
    return [(x, y[: len(x)]) for x, y in pairs]


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}


def assert_same(
    found: dict[str, Tensor], expected: dict[str, Tensor], backend: str = "eager", name: str = ""
) -> None:
    """To 1e-8; fused optimizers on a GPU have learning rates in single precision."""
    rtol, atol = (1e-8, 1e-10) if backend in ON_CPU else (1e-5, 1e-6)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=rtol, atol=atol, msg=f"{name} {key}")


def plainly_trained(row: Row) -> dict[str, Tensor]:
    """Ordinary training of the rewired model, with the change unless it is refused."""
    model: Any = made("eager")[0].to_module()
    model.reversible = False
    optimizer = momentum(model.parameters())

    plain_loop(model, optimizer, data(6))
    if row.refused is None:
        row.change(model, [optimizer])
    return plain_loop(model, optimizer, data(7, row.inputs if row.refused is None else same))


@pytest.mark.filterwarnings("ignore:backend=")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", TABLE)
def test_with_nothing_in_flight(name: str, backend: str) -> None:
    row = TABLE[name]
    net, trainer, optimizers = made(backend)
    feed(trainer, data(6))
    assert trainer._runner.is_active == (backend != "eager")
    undo = row.change(net.model, optimizers)
    if row.refused is not None:
        before = state(net.model)
        refuses(row.error, row.refused, feed, trainer, data(1, row.inputs))
        assert_same(before, state(net.model))
        if undo is not None:
            undo()
    drained(trainer, data(7, row.inputs if row.refused is None else same))
    assert_same(state(net.model), plainly_trained(row), backend)


@functools.cache
def trained(name: str | None, left_out: int = 0) -> dict[str, Tensor]:
    """Action by action; in flight there is a change if one is named, or micro-batches are bad."""
    row = Row() if name is None else TABLE[name]
    net, trainer, optimizers = made("eager", "petra")
    feed(trainer, data(9))
    row.change(net.model, optimizers)
    for _ in range(left_out):
        with pytest.raises(NonFiniteError):
            feed(trainer, data(1, lambda x: x * torch.nan))
    drained(trainer, data(10, row.inputs))
    return state(net.model)


@pytest.mark.filterwarnings("ignore:backend=")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", TABLE)
def test_in_flight(name: str, backend: str) -> None:
    row = TABLE[name]
    net, trainer, optimizers = made(backend, "petra")
    feed(trainer, data(9))
    assert trainer._runner.is_active == (backend != "eager")
    assert any(trainer._schedule.outstanding)
    undo = row.change(net.model, optimizers)
    refusal = row.refused or row.refused_in_flight
    if refusal is None:
        feed(trainer, data(10, row.inputs))
    else:
        before = state(net.model)
        refuses(row.error, refusal, feed, trainer, data(1, row.inputs))
        refuses(row.error, refusal, feed, trainer, data(1, row.inputs))
        if row.refused_in_flight is not None:
            refuses(row.error, refusal, trainer.flush)
        if not row.is_left_out:
            assert_same(before, state(net.model))
        if undo is not None:
            undo()
        if row.is_final:
            for use in (trainer.flush, trainer.state_dict, lambda: feed(trainer, data(1))):
                refuses(InputError, WRITTEN, use)
            return
        trainer.evaluate(data(2))
        feed(trainer, data(10))
    trainer.flush()
    expected = trained(None if refusal else name, 2 if row.is_left_out else 0)
    assert_same(state(net.model), expected, backend)


@pytest.mark.filterwarnings("ignore:backend=")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", [name for name, row in TABLE.items() if row.refused_in_flight])
def test_after_a_flush(name: str, backend: str) -> None:
    """As a trainer that is built after the change, and goes on from the same state."""
    net, trainer, optimizers = made(backend, "petra")
    drained(trainer, data(9))
    checkpoint = trainer.state_dict()
    model = copy.deepcopy(net.model)
    TABLE[name].change(net.model, optimizers)
    TABLE[name].change(model, [])
    other, reference, _ = made("eager", "petra", model.cpu())
    weights = state(model)
    reference.load_state_dict(checkpoint)
    other.model.load_state_dict(weights)
    for each in (trainer, reference):
        drained(each, data(10))
    assert_same(state(net.model), state(other.model), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_puts_the_model_into_train_mode(backend: str) -> None:
    net, trainer, _ = made(backend, "petra")
    feed(trainer, data(9))
    net.model.eval()
    drained(trainer, data(10))
    assert net.model.training
    assert_same(state(net.model), trained(None), backend)


def test_train_mode_ends_the_eval_mode_of_a_layer() -> None:
    net, trainer, _ = made("eager", "petra")
    norm = net.model.get_submodule("blocks.1.norm").eval()
    feed(trainer, data(9))
    net.model.eval()
    refuses(InputError, r"blocks\.1\.norm\.training was False and is True", feed, trainer, data(1))
    norm.eval()
    trainer.flush()
    net.model.eval()
    feed(trainer, data(1))
    assert norm.training


def test_a_rate_of_zero_may_rise() -> None:
    """Masks are drawn again in backward, also where there were none when stages were compiled."""
    found = []
    for rate in (0.0, 0.5):
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Dropout(rate)) for _ in range(4)]
        example = torch.zeros(4, 5, dtype=torch.float64)
        net = revcompile.petrafy(Chain(*layers).double(), 2, example, check="off")
        trainer = net.trainer(momentum, F.cross_entropy, method="reversible_backprop")
        for index in range(4):
            net.model.get_submodule(f"blocks.{index}.2").p = 0.5
        feed(trainer, data(5))
        found.append(state(net.model))
    assert_same(*found)


# -- weights written in place ---------------------------------------------------------------------


class Shared(training.Plain):
    """Stages at both ends, and in the middle, share a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.layers[0]] * 4)


@cases(
    "settings",
    *({"weights": choice} for choice in ("latest", "stashed", "predicted")),
    *({"method": method} for method in ("backprop", "1f1b", "pipedream")),
    {"backend": "static"},
    {"accumulation_steps": 3, "weights": "predicted"},
    ids=str,
)
@pytest.mark.parametrize("in_place", [True, False])
def test_all_stages_compute_with_what_was_written(settings: Any, in_place: bool) -> None:
    """So do those of a trainer that continues from a state saved before the next step."""
    net = fresh(Shared, 4)
    trainer, other = training.trainer_of(net, **settings), training.trainer_of(fresh(Shared, 4))
    drained(trainer, data(9))
    for name in ("layers.0.weight", "stem.weight"):
        scaled(net.model.get_parameter(name), in_place)
    (x, y), *_ = data(1)
    expected = F.cross_entropy(net.to_module()(x), y).item()
    other.load_state_dict(trainer.state_dict())
    for each in (trainer, other):
        assert each.step(x, y).loss == pytest.approx(expected, rel=1e-12)


@cases(
    "settings, change",
    *(({"weights": choice}, "stem.weight") for choice in ("latest", "stashed", "predicted")),
    ({"method": "1f1b", "accumulation_steps": 8}, "head.bias"),
    ({"method": "backprop"}, "layers.0.weight"),  # its last update is on its way to other stages
    ({"backend": "static"}, "stem.bias"),
    ids=str,
)
def test_after_a_write_in_flight_a_trainer_goes_on_from_a_state(settings: Any, change: str) -> None:
    net = fresh(Shared, 4)
    trainer = training.trainer_of(net, **settings)
    drained(trainer, data(9))
    state = trainer.state_dict()
    feed(trainer, data(5))
    scaled(net.model.get_parameter(change), in_place=True)
    for use in (lambda: feed(trainer, data(1)), trainer.flush, lambda: trainer.evaluate(data(1))):
        refuses(InputError, f"{change}{WRITTEN}", use)
    trainer.load_state_dict(state)
    drained(trainer, data(9))


@cases("settings", {}, {"weights": "stashed"}, {"method": "backprop"}, ids=str)
def test_hooks_of_optimizers_may_write(settings: Any) -> None:
    """A write is part of the update: shared weights arrive as written."""

    def clamped(parameters: Any) -> torch.optim.Optimizer:
        optimizer, own = momentum(parameters), list(parameters)

        def clamp(*_: Any) -> None:
            with torch.no_grad():
                torch._foreach_clamp_max_(own, 0.2)

        optimizer.register_step_post_hook(clamp)
        return optimizer

    net = fresh(Shared, 4)
    trainer = training.trainer_of(net, clamped, **settings)
    drained(trainer, data(9))
    (x, y), *_ = data(1)
    assert max(p.max().item() for p in net.model.parameters()) <= 0.2
    expected = F.cross_entropy(net.to_module()(x), y).item()
    assert trainer.step(x, y).loss == pytest.approx(expected, rel=1e-12)


def test_without_delay_weights_may_be_written_between_two_steps() -> None:
    net = fresh(training.Plain, 4)
    trainer = training.trainer_of(net, method="backprop", accumulation_steps=4)
    for batch in data(6):
        trainer.step(*batch)
        with torch.no_grad():
            for parameter in net.model.parameters():
                parameter.clamp_(-0.2, 0.2)
    trainer.flush()


# -- ranks ----------------------------------------------------------------------------------------


def written_between(rank: int, options: dict[str, Any]) -> list[Any]:
    """After a flush it is followed: the weights in the end. In flight it is refused: the text."""
    settings = ({}, {"method": "1f1b"}, {"backend": "static"}, {"weights": "predicted"})
    return [after_writing(each, flushes) for each in settings for flushes in (True, False)]


def after_writing(settings: dict[str, Any], flushes: bool) -> Any:
    net = fresh(Shared, 4)
    trainer = training.trainer_of(net, **settings)

    def write() -> None:
        for batch in data(9):
            fed(trainer, batch)
        if flushes:
            trainer.flush()
        for _, parameter in trainer.named_parameters():
            scaled(parameter, in_place=True)
        for batch in data(9):
            fed(trainer, batch)

    said = outcome(write)  # a rank that is ahead may be refused while the other still steps
    if not flushes:
        return said
    trainer.flush()
    return final(net, trainer)


def course(row: Row, backend: str) -> dict[str, Any]:
    """A change in flight, or after a flush if it is refused then; what was refused, the weights."""
    told: list[Any] = []

    def begun() -> Run:
        run = made(backend, "petra")
        for batch in data(9):
            fed(run[1], batch)
        return run

    net, trainer, optimizers = begun()
    if row.refused_in_flight is not None:
        undo = row.change(net.model, optimizers)
        told.append(outcome(trainer.flush))
        if row.is_final:
            net, trainer, optimizers = begun()
        elif undo is not None:
            undo()
    if row.refused is not None or row.refused_in_flight is not None:
        trainer.flush()
    undo = row.change(net.model, optimizers)
    if row.refused is not None:
        told.append(outcome(lambda: fed(trainer, data(1, row.inputs)[0])))
        if not row.is_left_out:  # ranks have stopped
            net, trainer, optimizers = begun()
            trainer.flush()
        elif undo is not None:
            undo()
    for batch in data(10, row.inputs if row.refused is None else same):
        fed(trainer, batch)
    trainer.flush()
    said = [text for text in told if isinstance(text, str)]
    return {"told": said, "state": final(net, trainer)}


@pytest.mark.filterwarnings("ignore:backend=")
def test_weights_written_on_two_ranks(tmp_path: Path) -> None:
    """As in one process: stages 0 and 1 are on one rank, 2 and 3 on the other."""
    expected = written_between(0, {})
    for found in launch(tmp_path, 2, written_between):
        for one, other in zip(found, expected, strict=True):
            assert type(one) is type(other) in (str, dict)
            if isinstance(one, dict):
                assert_same(one, other)


ON_RANKS: Final = [name for name in TABLE if name != "loaded weights"]


def changed(rank: int, options: dict[str, Any]) -> dict[str, Any]:
    courses = {name: course(TABLE[name], options["backend"]) for name in ON_RANKS}
    return courses | {"in a step": changed_in_a_step()}


def changed_in_a_step() -> list[Any]:
    """What two steps say in flight after a change of a layer that only the second rank has."""
    net, trainer, _ = made("eager", "petra")
    for batch in data(9):
        fed(trainer, batch)
    net.model.get_submodule("blocks.2.norm").eval()
    found = [outcome(lambda: fed(trainer, data(1)[0])) for _ in range(4)]
    return [text for text in found if isinstance(text, str)]


@pytest.mark.filterwarnings("ignore:backend=")
@pytest.mark.parametrize("backend", ON_CPU)
def test_on_two_ranks(backend: str, tmp_path: Path) -> None:
    """As in one process; what is in flight when a change is refused goes back as it was."""
    results = launch(tmp_path, 2, changed, backend=backend)
    first, second = results
    for name in ON_RANKS:
        row, expected = TABLE[name], course(TABLE[name], "eager")
        assert_same(first[name]["state"], expected["state"], name=name)
        said = [*first[name]["told"], *second[name]["told"]]
        refusal = row.refused or row.refused_in_flight
        assert bool(said) == (refusal is not None), name
        assert all(re.search(refusal or "", text) for text in said), name
        assert row.refused_in_flight is None or len(said) == 2, name
    change = rf"blocks\.2\.norm\.training was True and is False now{IN_FLIGHT}"
    for found in results:  # all stop: the first rank as soon as it waits for the other
        assert re.search(change, found["in a step"][-1]), found["in a step"]
