"""Captured steps: the same training as action by action, whatever comes in between."""

import functools
import re
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Final, cast

import pytest
import timm
import torch
import training
from helpers import cases
from torch import Tensor, nn
from torch.nn import functional as F
from training import SCHEDULES, Batch, adam, batches, feed, fresh, momentum, reported, same, weights

import revcompile
from revcompile import TrainerOptions
from revcompile.compiler.lower.fusion import Fusion
from revcompile.compiler.lower.fusion_regions import find_regions
from revcompile.errors import InputError, NonFiniteError, RevcompileWarning
from revcompile.runtime.executor import captured_steps, runner
from revcompile.runtime.executor.captured_steps import CapturedSteps
from revcompile.runtime.executor.graphs import CaptureUnsupported, EagerReplay
from revcompile.runtime.executor.messages import Message, MessageKind, MessageSlots, Transport
from revcompile.runtime.stage import stage
from revcompile.runtime.trainer.trainer import Trainer
from revcompile.staged import StagedModel

FULL: Final = 8
"""Steps after which steps are captured, with three stages in any order tested here."""


class Loose(training.Net):
    """Dropout, batch norms, couplings, opaque ends; nothing shared between stages."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[3].up = nn.Linear(6, 12)


def even(count: int) -> list[Batch]:
    """Micro-batches of one size."""
    return [batch for batch in batches(2 * count) if len(batch[0]) == 4][:count]


def odd() -> Batch:
    """One with fewer samples."""
    return next(batch for batch in batches(5) if len(batch[0]) == 3)


def made(
    backend: str, make: type[nn.Module] = Loose, dtype: torch.dtype = torch.float64, **settings: Any
) -> tuple[StagedModel, Trainer]:
    net = fresh(make, 3, dtype)
    settings = {"optimizer": momentum, "loss": F.cross_entropy, **settings}
    return net, net.trainer(backend=backend, **training.settings_of(**settings))


def is_active(trainer: Trainer) -> bool:
    return trainer._runner.is_active


def losses_on(data: list[Batch]) -> Callable[[Trainer], list[float]]:
    return lambda trainer: [trainer.step(*batch).loss for batch in data]


def both(
    run: Callable[[Trainer], Any],
    make: type[nn.Module] = Loose,
    look: Callable[[Any], Any] = lambda stages: None,
    is_captured: bool = True,
    **settings: Any,
) -> tuple[Any, dict[str, Tensor], set[float | None], Any]:
    """What a run tells, the weights and learning rates it ends with: the same in captured steps.

    So is what `look` sees of the stages in a checkpoint. In the end steps are captured, or are not.
    """
    found = []
    for backend in ("eager", "static"):
        net, trainer = made(backend, make, **settings)
        told = run(trainer)
        assert is_active(trainer) == (backend == "static" and is_captured)
        # Graphs in flight cannot be saved.
        is_saved = "memory_budget" not in settings
        seen = look(list(trainer.state_dict()["stages"].values())) if is_saved else None
        trainer.flush()
        found.append((told, weights(net), {e.updater.lr for e in trainer._executors}, seen))
    assert same(*found)
    return found[0]


SETTINGS: Final[dict[str, dict[str, Any]]] = {
    "sgd": {},
    "adam": {"optimizer": adam},
    "accumulation_steps": {"accumulation_steps": 3},
    "paper order": {"in_flight_per_stage": 2},
    "in between": {"in_flight_per_stage": 1.5, "accumulation_steps": 2},
    "schedule": {"lr_schedule": SCHEDULES["cosine"]},
    "clipped": {"clip_grad_norm": 0.1},
    "inputs kept": {"method": "dsp"},
    "weights kept": {"method": "petra_stashed"},
    "weights kept, adam": {"method": "petra_stashed", "accumulation_steps": 2, "optimizer": adam},
    "both kept": {"method": "delayed", "accumulation_steps": 3},
    "backprop": {"method": "backprop"},
    "reversible": {"method": "reversible_backprop", "clip_grad_norm": 0.1},
    "predicted": {"weights": "predicted", "accumulation_steps": 4},
    "graphs kept": {"memory_budget": "1GiB"},
    "graphs kept, accumulated": {
        **{"memory_budget": "1GiB", "in_flight_per_stage": 2, "accumulation_steps": 3}
    },
    "inputs in float16": {"dtype": torch.float32, "kept_input_dtype": torch.float16},
    "inputs in bfloat16, accumulated": {
        **{"dtype": torch.float32, "kept_input_dtype": torch.bfloat16, "accumulation_steps": 3}
    },
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_same_training_to_the_bit(name: str) -> None:
    dtype = SETTINGS[name].get("dtype", torch.float64)
    data = [(x.to(dtype), y) for x, y in even(FULL + 8)]
    both(losses_on(data), **SETTINGS[name])


@cases("settings", {}, {"method": "petra_stashed"}, {"memory_budget": "1GiB"}, ids=str)
@pytest.mark.parametrize("accumulation_steps", [1, 3])
def test_an_odd_batch_goes_the_ordinary_way(accumulation_steps: int, settings: Any) -> None:
    data, active = even(3 * FULL), list[bool]()

    def run(trainer: Trainer) -> None:
        for batch in [*data[:FULL], odd(), *data[FULL : FULL + 3], odd(), *data[FULL + 3 :]]:
            trainer.step(*batch)
            active.append(is_active(trainer))

    both(run, accumulation_steps=accumulation_steps, **settings)
    active = active[len(active) // 2 :]
    assert [active[i] for i in (FULL - 1, FULL, FULL + 4, -1)] == [True, False, False, True]


LEFT_OUT: Final[dict[str, dict[str, Any]]] = {
    "petra": {},
    "accumulation_steps": {"accumulation_steps": 3, "lr_schedule": SCHEDULES["cosine"]},
    "schedule": {"lr_schedule": SCHEDULES["cosine"], "optimizer": adam},
    "stashed": {"method": "petra_stashed", "accumulation_steps": 2},
    "backprop": {"method": "backprop", "accumulation_steps": 2, "clip_grad_norm": 0.1},
    "recomputed": {"method": "pipedream"},
    "graphs kept": {"memory_budget": "1GiB"},
}


@pytest.mark.parametrize("bad", [0.0, torch.nan])
@pytest.mark.parametrize("name", LEFT_OUT)
def test_a_bad_batch_is_left_out_everywhere(name: str, bad: float) -> None:
    """Captured or not: it counts, moves no statistics, and is in no mean."""
    data = even(2 * FULL)
    data[FULL + 2] = data[FULL + 2][0].index_fill(1, torch.tensor(0), bad), data[FULL + 2][1]

    def run(trainer: Trainer) -> Any:
        assert [microbatch for _, microbatch in reported(trainer, data)] == [FULL + 2]
        return trainer.microbatches_seen, trainer._schedule.updates, trainer.pop_mean_loss()

    _, end, *_ = both(run, stem(training.Steep, is_normed=True), **LEFT_OUT[name])
    assert all(bool(tensor.isfinite().all()) for tensor in end.values())


@pytest.mark.parametrize("is_target", [False, True])
@cases(
    "change, said",
    (lambda t: t.to("meta"), "on the meta device, which has no values"),
    (Tensor.to_sparse, r"of layout torch.sparse_coo, .* feed tensor.to_dense\(\)"),
)
def test_data_that_static_buffers_cannot_hold_is_left_out(
    change: Callable[[Tensor], Tensor], said: str, is_target: bool
) -> None:
    """Before steps are captured, and when they are. As data that does not fit, elsewhere."""
    found = []
    for backend in ("eager", "static"):
        net, trainer = made(backend)
        spoil = change if backend == "static" else (lambda t: t[:, :2])
        for index, (x, y) in enumerate(even(2 * FULL + 2)):
            y = F.one_hot(y, 3).double()
            if index in (1, FULL + 1):
                with pytest.raises(InputError) as raised:
                    trainer.step(*((x, spoil(y)) if is_target else (spoil(x), y)))
                expected = f"trainer.step: got a tensor {said}" if backend == "static" else ""
                assert re.match(expected, str(raised.value))
            trainer.step(x, y)
            assert index != FULL or is_active(trainer) == (backend == "static")
        assert is_active(trainer) == (backend == "static")
        found.append(weights(net))
    assert all(
        torch.equal(found[0][name], found[1][name]) for name in dict(trainer.named_parameters())
    )


@pytest.mark.parametrize("bad", range(4))
def test_a_bad_loss_before_steps_are_captured_is_reported_once(bad: int) -> None:
    data = [(x, F.one_hot(y, 3).double()) for x, y in even(FULL)]
    data[bad] = data[bad][0], data[bad][1] * torch.nan
    _, trainer = made("static", loss=F.mse_loss)
    assert reported(trainer, data) == [(2, bad)]
    assert is_active(trainer)


class Masked(Loose):
    """A buffer that nothing changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.mask)


def test_steps_are_captured_after_a_state_was_loaded() -> None:
    """Whether buffers change is known once a step has run, not before."""
    data = even(2 * FULL)
    first, trainer = (made("static", Masked)[1] for _ in range(2))
    feed(first, data[:FULL])
    trainer.load_state_dict(first.state_dict())
    for batch in data[FULL:]:
        assert trainer.step(*batch).loss == first.step(*batch).loss
    assert is_active(trainer)


def test_an_error_in_a_captured_step_says_that_the_trainer_has_stopped() -> None:
    _, trainer = made("static")
    feed(trainer, even(FULL))
    assert is_active(trainer)
    x, y = even(1)[0]
    with pytest.raises(InputError, match="check that the target fits") as raised:
        trainer.step(x, y + 100)
    assert raised.value.__notes__ == [
        "This trainer cannot go on; build a new one and load its last state."
    ]


def test_bad_batches_are_reported_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where the host reads the flags of several steps at once."""
    monkeypatch.setattr(captured_steps, "steps_at_once", lambda _: 3)
    net, trainer = made("static")
    told, bad = dict[int | None, int](), (FULL + 2, FULL + 3, FULL + 8)
    for index, (x, y) in enumerate([*even(FULL + 11), odd()]):
        try:
            trainer.step(x * torch.inf if index in bad else x, y)
        except NonFiniteError as error:
            told[error.microbatch] = index
    assert tuple(told) == bad
    assert all(microbatch <= step < microbatch + 6 for microbatch, step in told.items())
    assert len(set(told.values())) == 3
    assert all(bool(tensor.isfinite().all()) for tensor in weights(net).values())


def test_what_a_step_returned_stays_as_it_was() -> None:
    _, trainer = made("static")
    held, read = [], []
    for batch in even(2 * FULL):
        metrics = trainer.step(*batch)
        held.append((metrics.loss_tensor, metrics.output))
        read.append((float(metrics.loss_tensor), metrics.output.clone()))
    assert same([float(loss) for loss, _ in held], [loss for loss, _ in read])
    assert same([output for _, output in held], [output for _, output in read])


# -- which backend --------------------------------------------------------------------------------


def test_auto_is_eager_on_the_cpu_and_says_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, trainer = made("auto")
        feed(trainer, even(FULL + 1))
    assert not is_active(trainer)


class Own(torch.optim.NAdam):
    """Somebody's own, of which nothing is known."""


differentiable = functools.partial(torch.optim.NAdam, differentiable=True)


@cases(
    "backend, settings, why",
    ("cudagraphs", {}, "not on a CUDA device"),
    ("static", {"optimizer": lambda p: torch.optim.Adagrad(p, lr=0.01)}, "Adagrad has no step"),
    ("static", {"optimizer": Own}, "Own has no step .* use SGD, .* of torch.optim or"),
    ("static", {"optimizer": differentiable}, "differentiable=True"),
    ("static", {"method": "gpipe"}, "differ from each other"),
    ("static", {"method": "ddg"}, "keeps graphs of micro-batches in flight, as 'ddg' does"),
    ("static", {"accumulation_steps": 17}, "at most 16"),
)
def test_what_cannot_be_captured_says_why(backend: str, settings: Any, why: str) -> None:
    with pytest.warns(UserWarning, match=why):
        made(backend, **settings)


class Refusing(EagerReplay):
    """Captures four steps, and no more."""

    def __init__(self) -> None:
        self.steps = 0

    def plan(self, kind: Any, sections: Any, keys: Any) -> Any:
        self.steps += 1
        if self.steps > 4:
            raise CaptureUnsupported("it waits for the device")
        return super().plan(kind, sections, keys)


class _Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.x = x.clone()  # and not by save_for_backward
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * ctx.x * gradient


class Squared(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, _Kept.apply(super().forward(x)))


class Chosen(nn.Linear):
    """Saves an index for backward that depends on the data."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.bias.take((x.sum() > 0).long())


def test_an_integer_that_a_graph_has_saved_is_that_of_its_micro_batch() -> None:
    data = even(2 * FULL)
    assert len({bool(x.sum() > 0) for x, _ in data}) == 2
    both(losses_on(data), stem(Chosen, is_normed=True), memory_budget="1GiB")


@functools.cache
def stem(layer: type[nn.Module], is_normed: bool = False) -> type[nn.Module]:
    """A model that begins with a layer of this type, and perhaps a batch norm."""

    class Model(Loose):
        def __init__(self) -> None:
            super().__init__()
            self.stem = layer(5, 6)
            if is_normed:
                self.stem = nn.Sequential(self.stem, nn.BatchNorm1d(6))

    return Model


class Captures(EagerReplay):
    """Calls steps, and has stages take them for captured ones, but for the first few."""

    is_capturing = False

    def __init__(self, monkeypatch: pytest.MonkeyPatch, warm_up: int = 2) -> None:
        self.warm_up = warm_up
        monkeypatch.setattr(stage, "is_capturing", lambda device: Captures.is_capturing)
        monkeypatch.setattr(runner, "EagerReplay", lambda: self)

    def plan(self, kind: Any, sections: Any, keys: Any) -> Any:
        found = super().plan(kind, sections, keys)
        self.warm_up -= 1
        return [functools.partial(self._run, each) for each in found] if self.warm_up < 0 else found

    def _run(self, section: Callable[[], None]) -> None:
        Captures.is_capturing = True
        try:
            section()
        finally:
            Captures.is_capturing = False


class Fails(Captures):
    """Captures that fail."""

    def plan(self, kind: Any, sections: Any, keys: Any) -> Any:
        found = super().plan(kind, sections, keys)
        try:
            if self.warm_up < 0:
                found[0]()
        except (InputError, RuntimeError) as error:
            raise CaptureUnsupported(str(error)) from error
        return found


def test_the_graph_of_a_captured_step_serves_all_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    Captures(monkeypatch)
    both(losses_on([*even(2 * FULL), odd(), *even(2 * FULL)]), memory_budget="1GiB")


class Scaled(nn.Linear):
    """Saves something in the layout of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward((x * self.bias[: x.shape[1]]).tanh())


def test_a_captured_graph_reads_nothing_that_is_laid_out_differently(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Captures(monkeypatch, warm_up=0)
    data = even(4 * FULL)
    mixed = [(x.t().contiguous().t() if i % 2 else x, y) for i, (x, y) in enumerate(data)]
    run = losses_on([*mixed[: 2 * FULL], *data[2 * FULL :]])
    both(run, stem(Scaled), memory_budget="1GiB")


class Branching(nn.Linear):
    """Two graphs that save the same."""

    def forward(self, x: Tensor) -> Tensor:
        if Captures.is_capturing:
            raise RuntimeError("stage 0 waits for the device")
        y = super().forward(x)
        return y.tanh() if x.sum() > 0 else y.sigmoid()


class Selecting(nn.Linear):
    """Two graphs that do not save the same."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y.tanh() if x.sum() > 0 else y.sigmoid().exp()


class Referring(nn.Linear):
    """Reads a parameter where no other can be put in its place."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.all = [self.weight]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.all[0], self.bias)


@cases("layer, why", (Branching, "waits"), (Selecting, None), (Referring, "stage 0 keeps graphs"))
def test_after_a_capture_that_fails_each_micro_batch_has_its_graph(
    monkeypatch: pytest.MonkeyPatch, layer: type[nn.Linear], why: str | None
) -> None:
    if why is not None:
        Fails(monkeypatch)
    found = []
    for backend in ("eager", "static"):
        net, trainer = made(backend, stem(layer), memory_budget="1GiB")
        warned = pytest.warns(RevcompileWarning, match=why) if why else nullcontext()
        with warned if backend == "static" else nullcontext():
            losses = losses_on(even(3 * FULL))(trainer)
        trainer.flush()
        # Without CUDA graphs a capture that fails has moved running statistics.
        trained = {name: p.detach().clone() for name, p in net.model.named_parameters()}
        found.append((losses, trained))
    assert same(*found)


class Alone:
    """The average over the only replica."""

    is_reduced = False

    def fill(self, gradients: Any, count: Tensor) -> None:
        self._given = {name: gradient.clone() for name, gradient in gradients.items()}
        self._count = count.clone()

    def start(self) -> None:
        self.is_reduced = True

    def reduce(self) -> None:
        pass

    def read(self, gradients: dict[str, Tensor], adds: bool) -> Tensor:
        self.is_reduced = False
        for name, gradient in gradients.items():
            gradient.copy_(self._given[name] / self._count.clamp(min=1))
        return self._count


class FailsBetween(EagerReplay):
    """The first capture fails between two sections: a capture runs no kernels."""

    has_failed = False
    trainer: Trainer

    def plan(self, kind: Any, sections: Any, keys: Any) -> Any:
        found = sections()
        if not self.has_failed:
            self.has_failed = True
            counts = [executor.updates.count for executor in self.trainer._executors]
            before = [count.clone() for count in counts]
            captured = self.trainer._runner._captured
            assert len(found) == 2 and captured is not None and captured._inputs is not None
            for static in captured._inputs.tensors:
                static.zero_()  # they are written after the capture
            found[0]()
            for count, was in zip(counts, before, strict=True):
                count.copy_(was)
            raise CaptureUnsupported("unjoined work")
        return found


def test_after_a_capture_that_fails_between_its_sections_steps_are_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replay, found = FailsBetween(), []
    monkeypatch.setattr(runner, "EagerReplay", lambda: replay)
    for backend in ("eager", "static"):
        net, trainer = made(backend, training.Plain, method="backprop")
        replay.trainer, trainer._transport.averages = trainer, {i: Alone() for i in range(3)}
        losses = losses_on(even(FULL))(trainer)
        found.append((losses, weights(net)))
        assert is_active(trainer) == replay.has_failed == (backend == "static")
    assert same(*found)


def test_a_graph_with_tensors_that_no_hook_sees_is_not_captured() -> None:
    with pytest.warns(RevcompileWarning, match="stage 0 keeps graphs that save more"):
        both(
            losses_on(even(2 * FULL)),
            stem(Squared, is_normed=True),
            is_captured=False,
            memory_budget="1GiB",
        )


def test_the_warning_points_to_where_the_trainer_is_made() -> None:
    net = fresh(training.Net)
    with pytest.warns(RevcompileWarning, match="not on a CUDA device") as seen:
        net.trainer(momentum, F.cross_entropy, backend="cudagraphs")
    assert [warning.filename for warning in seen] == [__file__]


def test_a_warning_that_is_an_error_comes_after_a_whole_step() -> None:
    data, found = even(FULL), []
    for backend in ("eager", "static"):
        net, trainer = made(backend)
        raised = 0
        net.model.get_submodule("stem").register_forward_hook(lambda *_: None)
        for batch in data:
            try:
                trainer.step(*batch)
            except RevcompileWarning:  # pytest makes them errors
                raised += 1
        trainer.flush()
        found.append(weights(net))
        assert raised == (backend == "static")
    assert same(*found)


def test_what_cannot_be_captured_goes_on_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "EagerReplay", Refusing)
    with pytest.warns(RevcompileWarning, match="waits for the device") as warned:
        both(losses_on(even(2 * FULL)), is_captured=False, accumulation_steps=2)
    assert len(warned) == 1


def test_without_memory_nothing_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured_steps, "missing_memory", lambda *_: "9 bytes missing")
    with pytest.warns(UserWarning, match=r"because \d+ bytes missing"):
        both(losses_on(even(FULL + 2)), is_captured=False)


# -- compiled regions -----------------------------------------------------------------------------


def uncompiled(*args: Any, **options: Any) -> CapturedSteps:
    """With fusion regions that are called as they are."""
    return CapturedSteps(*args, **{**options, "fuse": Fusion(lambda function: function).fuse})


@cases(
    "settings",
    {},
    {"kept_input_dtype": torch.bfloat16, "gradient_message_dtype": torch.bfloat16},
    *({"method": method, "accumulation_steps": 2} for method in ("backprop", "petra_stashed")),
    ids=str,
)
def test_fusion_is_exact(monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]) -> None:
    monkeypatch.setattr(runner, "CapturedSteps", uncompiled)
    data = [(x.float(), y) for x, y in even(2 * FULL)]
    both(losses_on(data), dtype=torch.float32, autocast=torch.bfloat16, **settings)


@pytest.mark.parametrize("kept_input_dtype", [None, torch.bfloat16], ids=str)
def test_fused_stages_return_gradients_in_the_dtype_of_their_inputs(
    monkeypatch: pytest.MonkeyPatch, kept_input_dtype: torch.dtype | None
) -> None:
    """A stage that begins with a block that is not reversible, and only convolutions read it."""
    monkeypatch.setattr(runner, "CapturedSteps", uncompiled)
    losses, options = [], TrainerOptions(kept_input_dtype=kept_input_dtype)
    for backend in ("eager", "static"):
        torch.manual_seed(0)
        model = timm.create_model("resnet18", num_classes=4, channels=(8, 16, 16, 16), stem_width=8)
        x, y = torch.randn(2, 3, 32, 32), torch.tensor([0, 3])
        trainer = revcompile.petrafy(model, 10, x, check="off").trainer(
            functools.partial(torch.optim.SGD, lr=0.01),
            F.cross_entropy,
            backend=backend,
            autocast=torch.bfloat16,
            options=options,
        )
        losses.append([trainer.step(x, y).loss for _ in range(24)])
    assert is_active(trainer)
    assert losses[0] == losses[1]


def test_blocks_of_one_shape_share_a_function() -> None:
    net = fresh(Loose, 3)
    found = [r for p in net._programs(net.method) for r in find_regions(p.backward, net.model)]
    ups = [r for r in found if any(path.endswith("up.weight") for path in r.reads)]
    assert len(ups) == 4
    assert len({region.signature for region in ups}) == 1


# -- parts ----------------------------------------------------------------------------------------


DY: Final = MessageKind.DY


def test_a_message_never_overwrites_one_that_is_not_read() -> None:
    transport, route = Transport(2), (1, 0, DY)
    transport.slots[route] = MessageSlots(1, torch.device("cpu"))
    for number in range(2):
        transport.send(route, Message(number, {}, {"g": torch.full((2,), number)}))
    found = [transport.receive(route) for _ in range(2)]
    assert [(m.index, m.is_in_slot, m.gradients["g"].tolist()) for m in found] == [
        (0, True, [0, 0]),
        (1, False, [1, 1]),
    ]
