"""What steered Python while a model was traced is checked at each call."""

import copy
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import cases, gradients, refuses, worst
from nets import module_of
from torch import Tensor, nn
from torch.nn import functional as F

import revcompile
from revcompile.compiler.capture import capture
from revcompile.errors import CaptureError, GuardError, InputError

WIDTH = 8


class Blocks(nn.Module):
    """Three residual blocks behind a layer, with a hook for what steers Python."""

    def __init__(self, steer: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.alpha = 0.5
        self.steer = steer

    def forward(self, x: Tensor) -> Tensor:
        h = self.steer(self, x, self.stem(x))
        for layer in self.layers:
            h = h + torch.tanh(layer(h))
        return h


def on_length(self: nn.Module, x: Tensor, h: Tensor) -> Tensor:
    return h * 2 if x.shape[1] > 8 else h


STEERED = [
    on_length,
    lambda self, x, h: h * {"9": 2.0, "11": 3.0}.get(f"{x.shape[1]}", 1.0),
    lambda self, x, h: h * {"[11, 8]": 3.0}.get(str([*x.shape[1:]]), 1.0),
    lambda self, x, h: h.view(x.shape[0], int(x.shape[1]), WIDTH) + int(x.shape[1]),
    lambda self, x, h: h * 2 if torch.arange(h.shape[1]).max() > 7 else h,
    lambda self, x, h: h * (2 if x.size(dim=2) > 9 else 1) * (3 if x.size(dim=1) > 9 else 1),
    lambda self, x, h: torch.cat((h, torch.zeros_like(h)), 1)[:, :6],
    lambda self, x, h: h * sum(part.mean() for part in torch.unsafe_split(h, 2, 1)),
]


def _expected(model: nn.Module, x: Tensor) -> nn.Module:
    return revcompile.reversify(model, x, policy="same_parameters", check="off")


@pytest.mark.parametrize("steer", STEERED)
def test_a_size_that_steers_python_is_captured_anew(steer: Any) -> None:
    model = Blocks(steer).double()
    short, long = (torch.randn(3, n, WIDTH, dtype=torch.float64) for n in (6, 11))
    net = _expected(model, short)
    reference = revcompile.reversify(model, long, policy="same_parameters", check="fast")
    assert worst(gradients(reference, long), gradients(net, long))[0] < 1e-10
    assert torch.equal(net(long), reference(long))
    assert net(short).shape == model(short).shape


class Sums(nn.Module):
    """Sizes of two values steer Python; in messages the values have the same name."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a, b = x.relu(), y.relu()
        return a.sum(1) * sum(range(a.shape[1])) + b.sum(1) * sum(range(b.shape[1]))


class Compared(nn.Module):
    """Two comparisons of the same two values, which messages print alike."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a, b = x.relu(), y.relu()
        total = a.sum(1) + b.sum(1)
        total = total * 2 if a.shape[1] > b.shape[1] else total
        return total * 3 if b.shape[1] > a.shape[1] else total


class TwoInputs(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.head = inner, nn.Linear(1, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z: Tensor = self.inner(x, y)
        return z[:, None] + torch.tanh(self.head(z[:, None]))


@pytest.mark.parametrize("inner", [Sums, Compared])
def test_sizes_of_two_inputs_that_were_equal_are_both_checked(inner: type[nn.Module]) -> None:
    model, x, y = TwoInputs(inner()), torch.rand(2, 5), torch.rand(2, 7)
    net, reference = (
        revcompile.reversify(model, example, policy="same_parameters", check="off")
        for example in ((x, x), (x, y))
    )
    assert torch.equal(net(x, y), reference(x, y))


ON_BATCH = [
    lambda self, x, h: h * 2 if x.shape[0] > 5 else h,
    lambda self, x, h: h * 2 if x.shape[0] in {7, 9} else h,
    lambda self, x, h: h * {"7": 2.0}.get(f"{x.shape[0]}", 1.0),
    lambda self, x, h: h * 2 if "7" in str(list(x.shape)) else h,
    lambda self, x, h: h * {(7, 4): 2.0}.get((x.shape[0], x.shape[1]), 1.0),
    lambda self, x, h: h * {torch.Size((7, 4, WIDTH)): 2.0}.get(x.shape, 1.0),
]


@pytest.mark.parametrize("steer", ON_BATCH)
def test_control_flow_on_the_batch_size_follows_the_batch(steer: Any) -> None:
    model = Blocks(lambda self, x, h: h).double()
    small, large = (torch.randn(n, 4, WIDTH, dtype=torch.float64) for n in (3, 7))
    references = [(small, _expected(model, small)(small))]
    model.steer = lambda self, x, h: h * 2
    references += [(large, _expected(model, large)(large))]
    model.steer = steer
    for example in (small, torch.cat([small, small[:2]])):  # 5: one sample more is another case
        net = _expected(model, example)
        for x, expected in references:
            assert torch.equal(net(x), expected)


class Pooled(nn.Module):
    """Pools with a layer, and compares the size with a number."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.AvgPool1d(2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.pool(x.transpose(1, 2)).transpose(1, 2)
        return h * 2 if h.shape[1] > 3 else h


def _replaced(pooled: Any, kind: Any = nn.AvgPool1d) -> None:
    pooled.pool = kind(4)


def _set_in_place(pooled: Any) -> None:
    pooled.pool.kernel_size = pooled.pool.stride = (4,)


@cases("change", _replaced, _set_in_place)
def test_sizes_are_those_of_the_layers_that_are_there(change: Callable[[Any], None]) -> None:
    x = torch.randn(2, 8, WIDTH)
    model = nn.Sequential(Pooled(), Blocks(lambda self, x, h: h)).eval()
    net: Any = revcompile.reversify(model, x, policy="pretrained").eval()
    net.get_submodule("0").pool.register_forward_hook(_refuse_fakes)
    twin, third = copy.deepcopy(net), copy.deepcopy(net)
    before = model(x)
    for each in (model, net, twin):
        change(each.get_submodule("0"))
    for each in (net, net, twin, copy.deepcopy(net)):
        torch.testing.assert_close(each(x), model(x))
        assert len(each._cases._cases) <= 2
    net.get_submodule("0").pool = nn.AvgPool1d(2)
    torch.testing.assert_close(net(x), before)
    _replaced(third.get_submodule("0"), nn.MaxPool1d)  # captured again, it would be an average
    refuses(GuardError, r"shape\[1\] > 3 was True .* is False now", third, x)


def test_a_trainer_computes_sizes_with_the_settings_of_its_layers() -> None:
    x = torch.randn(2, 8, WIDTH)
    staged = revcompile.petrafy(nn.Sequential(Pooled(), Blocks(lambda self, x, h: h)), 2, x)
    trainer = staged.trainer(lambda p: torch.optim.SGD(p, lr=0.1), lambda out, y: out.mean())
    trainer.step(x, x)
    trainer.flush()
    _set_in_place(staged.model.get_submodule("0"))
    refuses(GuardError, r"shape\[1\] > 3 was True .* is False now", trainer.step, x, x)


def _refuse_fakes(module: nn.Module, given: Any, out: Tensor) -> None:
    assert type(out) is Tensor


def test_a_trainer_refuses_another_case_and_goes_on() -> None:
    model = Blocks(on_length)
    x = torch.randn(3, 6, WIDTH)
    staged = revcompile.petrafy(model, 2, x)
    trainer = staged.trainer(lambda p: torch.optim.SGD(p, lr=0.1), F.mse_loss)
    trainer.step(x, x)
    trainer.step(x[:2], x[:2])
    with pytest.raises(
        GuardError, match=r"x\.shape\[1\] > 8 was False .* is True now .*test_guards"
    ):
        trainer.step(torch.randn(3, 9, WIDTH), torch.randn(3, 9, WIDTH))
    trainer.step(x, x)
    trainer.flush()


def inner() -> nn.Module:
    """A residual block with an attribute, a rate and a flag of its own."""
    forward = lambda self, x: x + self.scale * F.dropout(self.layer(x), self.p, self.training)  # noqa: E731
    return module_of(forward, layer=nn.Linear(WIDTH, WIDTH), scale=1.0, p=0.5)


def test_a_submodule_follows_its_own_mode() -> None:
    x = torch.randn(3, 4, WIDTH)
    model = nn.Sequential(inner(), inner(), inner())
    net = revcompile.reversify(model, x, policy="same_parameters").train()
    first, second, third = net.children()
    first.p = second.p = third.p = 0.5
    for block in (first, second, third):
        block.eval()
    assert torch.equal(net(x), net(x))
    second.train()
    assert not torch.equal(net(x), net(x))


def _norm(self: Any, x: Tensor, h: Tensor) -> Tensor:
    statistics = self.part.running_mean, self.part.running_var
    return F.batch_norm(h.flatten(1), *statistics, training=self.part.training).view(h.shape)


PARTS: list[tuple[nn.Module, Callable[..., Tensor]]] = [
    (nn.Dropout(0.5), lambda self, x, h: F.dropout(h, self.part.p, self.part.training)),
    (inner(), lambda self, x, h: self.part(h) * (2 if self.part.training else 1)),
    (nn.BatchNorm1d(4 * WIDTH), _norm),
]


@pytest.mark.parametrize(("part", "read"), PARTS, ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("first", [True, False])
def test_the_mode_of_a_submodule_is_followed_where_others_read_it(
    part: nn.Module, read: Callable[..., Tensor], first: bool
) -> None:
    x, model = torch.randn(3, 4, WIDTH), Blocks(read)
    model.part = part.train(first)
    net = revcompile.reversify(model, x, policy="same_parameters")
    for mode in (not first, first):
        part.train(mode), net.get_submodule("part").train(mode)
        fresh = revcompile.reversify(model, x, policy="same_parameters", check="off")
        fresh.load_state_dict(net.state_dict())
        results = []
        for each in (net, fresh):
            torch.manual_seed(1)
            results.append(each(x))
        assert torch.equal(*results)
        for mine, expected in zip(net.buffers(), fresh.buffers(), strict=True):
            assert torch.equal(mine, expected)


class Parts(nn.Module):
    """A leaf module, as its control flow depends on data, with a list as its result."""

    def forward(self, x: Tensor) -> list[Tensor]:
        return [part if float(part.detach().sum()) < 1e9 else -part for part in x.split(2, 1)]


def test_the_number_of_results_of_a_leaf_module_is_checked() -> None:
    model = Blocks(lambda self, x, h: h * sum(part.mean() for part in self.parts(h)))
    model.parts = Parts()
    x = torch.randn(3, 6, WIDTH)
    assert torch.equal(_expected(model, x[:, :4])(x), _expected(model, x)(x))


class Counter(nn.Module):
    """Computes something else at every call, and says so nowhere in a graph."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.kind, self.step = kind, 0
        self.history: list[Any] = []
        self.recent: deque[int] = deque()
        self.seen: set[int] = set()
        self.notes = SimpleNamespace(count=0)
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        factor: Any = 1.0
        if self.kind == "number":
            self.step += 1
            factor = self.step
        elif self.kind == "list":
            self.history.append(1)
            factor = len(self.history)
        elif self.kind == "deque":
            self.recent.append(1)
            factor = len(self.recent)
        elif self.kind == "sizes":
            self.history.append(x.shape[0])
            factor = len(self.history)
        elif self.kind == "tensors":
            self.history.append(x.detach().mean())
            factor = len(self.history)
        elif self.kind == "new lists":
            self.history = [*self.history, x.shape[1]]
            factor = len(self.history)
        elif self.kind == "set":
            self.seen.add(x.shape[1])
            factor = len(self.seen)
        elif self.kind == "object":
            self.notes.count += 1
            factor = self.notes.count
        else:
            factor = 1.0 if self.state is None else self.state
            self.state = x.mean()
        return x + self.layer(x) * factor


@pytest.mark.parametrize(
    "kind",
    ["number", "list", "deque", "sizes", "tensors", "new lists", "set", "object", "tensor"],
)
def test_counters_are_refused_at_the_top_and_kept_whole_inside(kind: str) -> None:
    x = torch.randn(3, WIDTH)
    refuses(CaptureError, "counts in its attribute", revcompile.reversify, Counter(kind), x)
    captured = capture(nn.Sequential(inner(), Counter(kind)), x, check="off")
    assert "1" in captured.leaf_modules


def asks(question: Callable[[Tensor], Any]) -> nn.Module:
    """Control flow on what is not a size."""
    forward = lambda self, x: x + self.layer(x) * (2 if self.question(x) else 1)  # noqa: E731
    return module_of(forward, layer=nn.Linear(WIDTH, WIDTH), question=question)


@cases(
    "question, call",
    (lambda x: x.dim() == 3, lambda x: x[0]),
    (lambda x: x.dtype == torch.float64, lambda x: x.double()),
    (lambda x: x.dtype is torch.float64, lambda x: x.double()),
    (lambda x: x.is_contiguous(), lambda x: x.transpose(0, 1)),
)
def test_ranks_types_and_layouts_that_steer(question: Any, call: Any) -> None:
    x = torch.randn(3, 3, WIDTH)
    model, other = asks(question), call(x)
    net = revcompile.reversify(model, x, policy="same_parameters", check="off").to(other.dtype)
    reference = revcompile.reversify(
        model.to(other.dtype), other, policy="same_parameters", check="off"
    )
    assert question(x) != question(other)
    assert torch.equal(net(other), reference(other))


_READS_GRAD = "requires_grad was False.*reads requires_grad of an input cannot.*leaf_modules"


def test_what_an_example_cannot_show_is_refused() -> None:
    x = torch.randn(WIDTH, WIDTH)
    net = revcompile.reversify(asks(lambda x: x.requires_grad), x, check="off")
    net(x)
    refuses(GuardError, _READS_GRAD, net, x.clone().requires_grad_())


def test_requires_grad_of_inputs_is_refused_for_every_example() -> None:
    model, x = asks(lambda x: x.requires_grad), torch.randn(3, WIDTH)
    for example in (x, x.clone().requires_grad_()):
        refuses(GuardError, _READS_GRAD, revcompile.reversify, model, example)


class Chosen(nn.Module):
    """Runs the blocks that a list says."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.runs = [True] * 3

    def forward(self, x: Tensor) -> Tensor:
        for block, runs in zip(self.blocks, self.runs, strict=False):
            x = x + block(x) if runs else x
        return x


@pytest.mark.parametrize("policy", ["pretrained", "same_parameters"])
def test_a_block_added_after_compiling_is_named(policy: Any) -> None:
    x = torch.randn(3, WIDTH)
    net = revcompile.reversify(Chosen(), x, policy=policy)
    net.blocks.append(nn.Linear(WIDTH, WIDTH))
    net.runs.append(True)
    said = r"blocks\.3\.weight has the shape \(.*\), but rewired for this case it does not exist"
    refuses(GuardError, f"{said}; to add, .* compile that\n", net, x)


def test_grad_mode_that_steers_is_refused() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return x + self.layer(x) * (2 if torch.is_grad_enabled() else 1)  # type: ignore[no-any-return]

    model = module_of(forward, layer=nn.Linear(WIDTH, WIDTH))
    net = revcompile.reversify(model, torch.randn(3, WIDTH))
    net(torch.randn(3, WIDTH))
    said = r"torch\.is_grad_enabled\(\) was True.*always captured with gradients.*into a submodule"
    with torch.no_grad(), pytest.raises(GuardError, match=said):
        net(torch.randn(3, WIDTH))


def test_a_graph_without_conditions_has_no_guards_on_sizes() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, norm_first=True, batch_first=True)
    net = revcompile.reversify(layer, torch.randn(2, 5, WIDTH), policy="same_parameters")
    for shape in ((2, 5), (3, 5), (2, 9)):
        net(torch.randn(*shape, WIDTH))
    assert len(net._cases._cases) == 1


class LayerDrop(nn.Module):
    """Layers left out at random, as in OPT, BART and Whisper."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.drop, self.layerdrop = nn.Dropout(0.1), rate

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.training:
                number = torch.rand([])
                if number < self.layerdrop:
                    continue
            x = x + self.drop(layer(x))
        return x


def test_layer_drop_that_is_off_stops_nothing() -> None:
    x = torch.randn(3, WIDTH)
    capture(LayerDrop(0.0), x, check="full")
    with pytest.raises(CaptureError, match=r"LayerDrop with p = 0\.5\); set that probability to 0"):
        capture(LayerDrop(0.5), x)


def test_layer_drop_switched_on_afterwards_is_refused() -> None:
    net = revcompile.reversify(LayerDrop(0.0), torch.randn(3, WIDTH), policy="same_parameters")
    assert len(net.rewired.couplings) == 3
    net.layerdrop = 0.5
    refuses(GuardError, r"layerdrop was 0\.0 .* is 0\.5 now", net, torch.randn(3, WIDTH))


class Arguments(nn.Module):
    """Optional tensors, a flag and whatever else comes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any, mask: Any = None, scale: float = 1.0, **rest: Any) -> Tensor:
        x = x[0] if isinstance(x, tuple) else x
        x = x + self.layer(x) * scale
        return x if mask is None else x * mask


@cases(
    "example, call, message",
    ({}, {"mask": 1}, "argument mask was not in the example; leave it out"),
    ({}, {"labels": 1}, "argument labels was not in the example"),
    ({"labels": 1}, {}, "argument labels was in the example but is missing now"),
    ({}, {"scale": 2.0}, r"argument scale was not in the example; leave it out"),
    ({"scale": 2.0}, {"scale": 3.0}, r"argument scale was 2\.0 in the example and is 3\.0 now"),
    ({}, {"past_key_values": 1}, r"past_key_values was not in the example .*use_cache=False"),
    ({}, {"x": (1, 1)}, r"argument x was a tensor in the example and is a tuple of 2 now"),
)
def test_arguments_that_do_not_match_are_named(example: Any, call: Any, message: str) -> None:
    def given(arguments: Any) -> Any:
        tensors = {
            name: tuple(torch.randn(3, WIDTH) for _ in value)
            if isinstance(value, tuple)
            else torch.randn(3, WIDTH)
            if value == 1
            else value
            for name, value in arguments.items()
        }
        return {"x": torch.randn(3, WIDTH), **tensors}

    net = revcompile.reversify(Arguments(), (), given(example))
    net(**given(example))
    with pytest.raises(InputError, match=message) as caught:
        net(**given(call))
    assert "TreeSpec" not in str(caught.value)


def test_an_optional_tensor_of_the_example_can_be_left_out() -> None:
    """As `net(tokens)` of a GPT that was compiled with targets."""
    x, mask = torch.randn(3, WIDTH), torch.randn(3, WIDTH)
    model = Arguments()
    net = revcompile.reversify(model, (x, mask), policy="pretrained").eval()
    torch.testing.assert_close(net(x), model(x))
    torch.testing.assert_close(net(x, mask), model(x, mask))


# -- fields of objects that modules hold -----------------------------------------------------------


def on_batch_of_one(self: nn.Module, x: Tensor, h: Tensor) -> Tensor:
    always_one = torch.arange(x.shape[1])[None]
    return h * 2 if x.shape[0] != always_one.shape[0] else h


def test_an_example_with_one_sample_serves_one_sample_and_many() -> None:
    model, x = Blocks(on_batch_of_one), torch.randn(4, 6, WIDTH)
    net = revcompile.reversify(model, x[:1], policy="same_parameters")
    for batch in (x[:1], x, x[1:2], x[:3]):
        anew = revcompile.reversify(model, batch.repeat(2, 1, 1), policy="same_parameters")
        if len(batch) > 1:
            assert torch.equal(net(batch), anew(batch))
        else:
            assert not torch.allclose(net(batch), anew(batch.expand(2, -1, -1))[:1])
    assert gradients(net, x[:1])


class Named(nn.Module):
    """A leaf module, as its control flow depends on data, with names for its results."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"y": x if float(x.detach().sum()) < 1e9 else -x}


def test_results_of_leaf_modules_that_need_data_are_no_guards() -> None:
    model = Blocks(lambda self, x, h: self.parts(self.parts(h)["y"])["y"])
    model.parts = Named()
    net = _expected(model, torch.randn(3, 4, WIDTH))
    assert net(torch.randn(5, 6, WIDTH)).shape == (5, 6, WIDTH)
    assert len(net._cases._cases) == 1


def test_a_large_tensor_that_is_read_in_each_call_may_change() -> None:
    model = Blocks(lambda self, x, h: h + self.table[: x.shape[1]])
    model.table = torch.randn(1000, WIDTH)
    x = torch.randn(3, 4, WIDTH)
    net = _expected(model, x)
    for table in (net.table.add_(1), torch.randn(1000, WIDTH)):
        net.table = model.table = table
        assert torch.equal(net(x), _expected(model, x)(x))
    assert len(net._cases._cases) == 1
