"""Plain attributes of a model, as they were when it was traced, are conditions on later calls."""

import collections
import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from helpers import cases, refuses
from torch import Tensor, nn
from torch.nn import functional as F

import revcompile
from revcompile.compiler.capture import capture
from revcompile.errors import GuardError, InputError
from revcompile.runtime.reversible.guards import GuardChecker

WIDTH = 4


class Block(nn.Module):
    """A residual block with attributes from `setup`, which `steer` reads."""

    factor = 1.0

    def __init__(self, setup: Callable[[Any], Any], steer: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.steer = nn.Linear(WIDTH, WIDTH), steer
        setup(self)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.steered(self.layer(x))

    def steered(self, h: Tensor) -> Tensor:
        return self.steer(self, h)


def model_of(setup: Callable[[Any], Any], steer: Callable[[Any, Tensor], Tensor]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(setup, steer), nn.Linear(WIDTH, WIDTH))


class Slots:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


@dataclasses.dataclass
class Config:
    """Fields, a property, and a call."""

    scale: float = 1.0

    @property
    def twice(self) -> float:
        return 2 * self.scale

    def __call__(self, h: Tensor) -> Tensor:
        return h * self.scale


class Defaults:
    scale = 1.0


class Renamed(Config):
    """Like a configuration of transformers, which has several names for a field."""

    announced: ClassVar[list[type]] = []

    def __init_subclass__(cls) -> None:
        Renamed.announced.append(cls)

    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__("scale" if name == "factor" else name)


Pair = collections.namedtuple("Pair", "scale other")


def put(name: str, make: Callable[[], Any]) -> Callable[[Any], None]:
    return lambda block: setattr(block, name, make())


def nothing(block: Any) -> None:
    pass


def double(yes: Any, h: Tensor) -> Tensor:
    return h * 2 if yes else h


def scale_of(find: Callable[[Any], Any]) -> Callable[[Any, Tensor], Tensor]:
    return lambda block, h: h * find(block)


def set_two(find: Callable[[Any], Any]) -> Callable[[Any], None]:
    return lambda block: setattr(find(block), "scale", 2.0)


late = put("late", lambda: 2.0)
late_module = put("late", nn.Tanh)
late_parameter = put("late", lambda: nn.Parameter(torch.ones(WIDTH)))

# What the row shows: the attributes, what reads them, the change, and how the condition begins.
ROWS: dict[str, tuple[Any, Any, Any, str]] = {
    # attributes that are absent or None
    "hasattr": (nothing, lambda b, h: double(hasattr(b, "late"), h), late, "1.late was absent"),
    "none": (
        put("late", lambda: None), lambda b, h: double(b.late is None, h), late_module,
        "1.late was None",
    ),
    "no parameter": (
        lambda b: b.register_parameter("late", None), lambda b, h: double(b.late is None, h),
        late_parameter, "1.late was None",
    ),
    "parameter removed": (
        late_parameter, lambda b, h: double(b.late is None, h), put("late", lambda: None),
        "1.late was set",
    ),
    "none, then a tensor": (
        put("late", lambda: None), lambda b, h: h if b.late is None else h * b.late,
        put("late", lambda: torch.full((WIDTH,), 2.0)), "1.late was None",
    ),
    "method": (
        nothing, scale_of(lambda b: 1.0), put("steered", lambda: lambda h: h * 2),
        "1.steered was absent",
    ),
    # configurations
    "slots": (
        put("config", Slots), scale_of(lambda b: b.config.scale), set_two(lambda b: b.config),
        "1.config.scale was 1.0",
    ),
    "called": (
        put("config", Config), lambda b, h: b.config(h), set_two(lambda b: b.config),
        "1.config.scale was 1.0",
    ),
    "named tuple": (
        put("config", lambda: Pair(1.0, None)), scale_of(lambda b: b.config.scale),
        put("config", lambda: Pair(2.0, None)), "1.config was Pair(scale=1.0",
    ),
    "list of objects": (
        put("config", lambda: [Config()]), scale_of(lambda b: b.config[0].scale),
        set_two(lambda b: b.config[0]), "1.config[0].scale was 1.0",
    ),
    "list grows": (
        put("config", lambda: [Config()]), scale_of(lambda b: len(b.config)),
        lambda b: b.config.append(Config()), "1.config was [Config(scale=1.0)]",
    ),
    "partial": (
        put("config", lambda: functools.partial(F.leaky_relu, negative_slope=0.1)),
        lambda b, h: b.config(h),
        put("config", lambda: functools.partial(F.leaky_relu, negative_slope=0.9)),
        "1.config was functools.partial",
    ),
    "numpy array": (
        put("config", lambda: np.ones(2)), scale_of(lambda b: float(b.config[0])),
        lambda b: b.config.fill(2.0), "1.config was array",
    ),
    "class attribute": (
        nothing, scale_of(lambda b: b.factor), lambda b: setattr(type(b), "factor", 2.0),
        "1.factor was 1.0",
    ),
    "class attribute, set on the instance": (
        nothing, scale_of(lambda b: b.factor), put("factor", lambda: 2.0), "1.factor was 1.0",
    ),
    "default of a class of fields": (
        put("config", Defaults), scale_of(lambda b: b.config.scale),
        set_two(lambda b: b.config), "1.config.scale was absent",
    ),
    "all fields": (
        put("config", Config), scale_of(lambda b: vars(b.config)["scale"]),
        set_two(lambda b: b.config), "1.config.scale was 1.0",
    ),
    "another name": (
        put("config", Renamed), scale_of(lambda b: b.config.factor), set_two(lambda b: b.config),
        "1.config.scale was 1.0",
    ),
    # tensors that are no buffers, and what is read of parameters
    "tensor in a list": (
        put("t", lambda: [torch.ones(WIDTH)]), scale_of(lambda b: b.t[0]),
        lambda b: b.t[0].fill_(2.0), "1.t[0] was tensor",
    ),
    "item and operand": (
        put("t", lambda: torch.ones(())), lambda b, h: double(b.t > 1, h * b.t),
        lambda b: b.t.fill_(2.0), "1.t was tensor(1.)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("row", ROWS)
def test_what_python_read_is_a_condition(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Block, "factor", 1.0)
    setup, steer, change, expected = ROWS[row]
    x = torch.randn(3, WIDTH)
    captured = capture(model_of(setup, steer), x, check="off")
    checker = GuardChecker(captured.guards, captured.root)
    assert "1" not in captured.leaf_modules
    assert checker.failing(captured.root, {}) is None
    change(captured.root.get_submodule("1"))
    for _ in range(2):  # the answer does not depend on what was found before
        assert str(checker.failing(captured.root, {})).startswith(expected)


def bookkeeping(block: Any) -> None:
    block.config = Renamed()
    block.config.other, block.unread = 1, object()


def test_what_forward_does_not_read_is_no_condition() -> None:
    model = model_of(bookkeeping, scale_of(lambda b: b.config.scale))
    config: Any = model[1].config
    x = torch.randn(3, WIDTH)
    captured = capture(model, x, check="off")
    checker = GuardChecker(captured.guards, captured.root)
    assert type(model[1]) is Block and type(config) is Renamed and not Renamed.announced
    block: Any = captured.root.get_submodule("1")
    block.config.other, block.config.new, block.unread, block.wrapped = 2, 3, 4, block.forward
    assert checker.failing(captured.root, {}) is None
    block.config.scale = 2.0
    assert str(checker.failing(captured.root, {})).startswith("1.config.scale was 1.0")


def test_a_forward_may_ask_for_the_type_of_its_parts() -> None:
    def scale(block: Any) -> float:
        return block.config.scale if type(block.config) is Config else 3.0

    class Asking(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (2.0 if type(self) is Asking else 1.0)

    torch.manual_seed(0)
    model = nn.Sequential(Asking(put("config", Config), scale_of(scale)))
    x = torch.randn(3, WIDTH)
    captured = capture(model, x, check="full")
    checker = GuardChecker(captured.guards, captured.root)
    captured.root.get_submodule("0").config.scale = 2.0  # type: ignore[union-attr]
    assert str(checker.failing(captured.root, {})).startswith("0.config.scale was 1.0")


ANEW, REFUSED = ("partial", "tensor in a list", "item and operand"), ("no parameter",)


@pytest.mark.parametrize("row", (*ANEW, *REFUSED))
def test_a_change_is_captured_anew_or_refused(row: str) -> None:
    setup, steer, change, _ = ROWS[row]
    x, model = torch.randn(3, WIDTH), model_of(setup, steer)
    net = revcompile.reversify(model, x, policy="same_parameters", check="off")
    net(x)
    change(net.get_submodule("1"))
    if row in REFUSED:
        refuses(GuardError, "new or missing modules and parameters", net, x)
        return
    change(model[1])
    again = revcompile.reversify(model, x, policy="same_parameters", check="off")
    assert torch.equal(net(x), again(x))
    assert torch.equal(copy.deepcopy(net)(x), again(x))


@cases(
    "find",
    lambda b: b.late,  # called nowhere
    lambda b: b.tanh,  # left out of the graph,
)
def test_a_module_that_is_not_called_is_not_replaced(find: Callable[[Any], Any]) -> None:
    def setup(block: Any) -> None:
        block.late, block.tanh = nn.Identity(), nn.Identity()

    def steer(block: Any, h: Tensor) -> Tensor:
        return double(isinstance(find(block), nn.Identity), block.tanh(h))

    x, model = torch.randn(3, WIDTH), model_of(setup, steer)
    net = revcompile.reversify(model, x, policy="same_parameters", check="off")
    block: Any = net.get_submodule("1")
    name = next(name for name in ("late", "tanh") if getattr(block, name) is find(block))
    setattr(block, name, nn.Tanh())
    refuses(InputError, f"1.{name} was replaced", net, x)


@pytest.mark.parametrize("change", [lambda b: b.late.update({"a": nn.Tanh()}), late_module])
def test_members_of_containers_are_conditions(change: Callable[[Any], Any]) -> None:
    def setup(block: Any) -> None:
        block.late = nn.ModuleDict({"b": nn.Identity()})

    x, model = torch.randn(3, WIDTH), model_of(setup, lambda b, h: double(len(b.late) > 1, h))
    net = revcompile.reversify(model, x, policy="same_parameters", check="off")
    net(x)
    change(net.get_submodule("1"))
    refuses(InputError, r"1\.late was (given members|replaced)", net, x)


def test_a_new_attribute_that_no_forward_asks_for_is_free() -> None:
    x, model = torch.randn(3, WIDTH), model_of(late, lambda b, h: h)
    net: Any = revcompile.reversify(model, x, policy="same_parameters", check="off")
    staged = revcompile.petrafy(model, 2, x, policy="same_parameters")
    trainer = staged.trainer(lambda p: torch.optim.SGD(p, lr=0.1), F.mse_loss)
    for step in range(3):
        net.step = net.get_submodule("1").step = staged.model.get_submodule("1").step = step
        net(x)
        trainer.step(x, x)
    assert len(net._cases._cases) == 1


class ReadsItsLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0)
        self.layers = nn.Sequential(nn.Softplus(beta=1.0))

    def forward(self, x: Tensor) -> Tensor:
        h = self.layers(self.drop(self.fc(x)))
        h = h * 2 if self.drop.inplace else h
        return x + sum(layer.beta for layer in self.layers) * h


@pytest.mark.parametrize("change", [("drop", "inplace", True), ("layers.0", "beta", 3.0)])
def test_code_that_reads_a_layer_it_calls(change: tuple[str, str, Any]) -> None:
    layer, name, value = change
    x, model = torch.randn(3, WIDTH), nn.Sequential(ReadsItsLayers(), ReadsItsLayers())
    net = revcompile.reversify(model, x, policy="same_parameters", check="off")
    net(x)
    for each in (model, net):
        setattr(each.get_submodule(f"1.{layer}"), name, value)
    again = revcompile.reversify(model, x, policy="same_parameters", check="off")
    assert torch.equal(net(x), again(x))


def test_hooks_of_parameters_are_refused() -> None:
    model = model_of(nothing, lambda b, h: h)
    handle = model[0].weight.register_hook(lambda gradient: gradient)
    refuses(InputError, r"0\.weight has a hook", revcompile.reversify, model, torch.randn(3, WIDTH))
    handle.remove()
    revcompile.reversify(model, torch.randn(3, WIDTH), check="off")


LARGE: dict[str, tuple[Callable[[Any], Any], int]] = {
    "another": (lambda net: setattr(net, "table", torch.full((2000,), 2.0)), 2),
    "in place": (lambda net: net.table.mul_(2.0), 2),
    "equal": (lambda net: setattr(net, "table", torch.ones(2000)), 2),
    "moved": (lambda net: net._apply(torch.clone), 1),  # as `to("cuda")` does
}


@pytest.mark.parametrize("change", LARGE)
@pytest.mark.parametrize("read", [lambda table: table[:WIDTH], lambda table: table.sum()])
def test_a_large_tensor_of_the_model_itself(change: str, read: Callable[[Tensor], Tensor]) -> None:
    class Root(nn.Sequential):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x) * read(self.table)

    model, x = Root(model_of(nothing, lambda b, h: h)), torch.randn(3, WIDTH)
    model.table = torch.ones(2000)
    net: Any = revcompile.reversify(model, x, policy="pretrained").eval()
    net(x)
    changed, cases = LARGE[change]
    for each in (net, model.eval()):
        changed(each)
    for _ in range(2):
        torch.testing.assert_close(net(x), model(x))
        assert len(net._cases._cases) == cases


def test_an_attribute_that_was_none_becomes_a_tensor() -> None:
    model = model_of(put("late", lambda: None), lambda b, h: h if b.late is None else h * b.late)
    x = torch.randn(3, WIDTH)
    net = revcompile.reversify(model, x, policy="pretrained").eval()
    late = torch.full((WIDTH,), 2.0)
    for each in (model.eval(), net):
        each.get_submodule("1").late = late
    torch.testing.assert_close(net(x), model(x))


class Special(Block):
    factor = 2.0


@pytest.mark.parametrize("where", ["instance", "class"])
def test_attributes_with_a_default_on_a_class(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    block = Special(
        put("factor", lambda: 3.0) if where == "instance" else nothing, lambda b, h: h * b.factor
    )
    model, x = nn.Sequential(block), torch.randn(3, WIDTH)
    net: Any = revcompile.reversify(model, x, policy="pretrained").eval()
    owners = (block, net.get_submodule("0")) if where == "instance" else (Special,)
    for owner in owners:
        monkeypatch.setattr(owner, "factor", 4.0)
    torch.testing.assert_close(net(x), model.eval()(x))


class Masked(Block):
    """Has a default on the class for a tensor that its instances set."""

    late: Any = None


@pytest.mark.parametrize("is_inside", [True, False])
def test_a_tensor_with_a_default_on_the_class(is_inside: bool) -> None:
    block = Masked(put("late", lambda: torch.full((WIDTH,), 0.5)), lambda b, h: h * b.late)
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), block), torch.randn(3, WIDTH)
    original: Any = model if is_inside else block
    net = revcompile.reversify(original, x, policy="pretrained", check="full").eval()
    assert net.rewired.couplings
    for value in (0.5, 2.0):
        for each in (original.eval(), net):
            owner = each.get_submodule("1" if is_inside else "")
            owner.late = torch.full((WIDTH,), value)
        torch.testing.assert_close(net(x), original(x))
