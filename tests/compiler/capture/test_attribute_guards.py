"""What Python read of a model's attributes while tracing it is a condition on later calls."""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import functools
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import revcompile
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
        return x + self.steer(self, self.layer(x))


def model_of(setup: Callable[[Any], Any], steer: Callable[[Any, Tensor], Tensor]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(setup, steer), nn.Linear(WIDTH, WIDTH))


class Slots:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


class Computed:
    """Its fields come from `__getattr__`."""

    def __init__(self) -> None:
        self.data = {"scale": 1.0}

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["data"][name]
        except KeyError:
            raise AttributeError(name) from None


@dataclasses.dataclass
class Config:
    """Fields, a property, and a call."""

    scale: float = 1.0

    @property
    def twice(self) -> float:
        return 2 * self.scale

    def __call__(self, h: Tensor) -> Tensor:
        return h * self.scale


class Kind(enum.Enum):
    PLAIN, SCALED = 1, 2


Pair = collections.namedtuple("Pair", "scale other")


def put(name: str, make: Callable[[], Any]) -> Callable[[Any], None]:
    return lambda block: setattr(block, name, make())


def nothing(block: Any) -> None:
    pass


def double(yes: Any, h: Tensor) -> Tensor:
    return h * 2 if yes else h


def in_turn(block: Any, h: Tensor) -> Tensor:
    for module in block.late:
        h = module(h)
    return h


def scale_of(find: Callable[[Any], Any]) -> Callable[[Any, Tensor], Tensor]:
    return lambda block, h: h * find(block)


def set_two(find: Callable[[Any], Any]) -> Callable[[Any], None]:
    return lambda block: setattr(find(block), "scale", 2.0)


late = put("late", lambda: 2.0)
late_module = put("late", nn.Tanh)
late_tensor = put("late", lambda: torch.ones(WIDTH))
late_parameter = put("late", lambda: nn.Parameter(torch.ones(WIDTH)))

# What the row shows: the attributes, what reads them, the change, and how the condition begins.
ROWS: dict[str, tuple[Any, Any, Any, str]] = {
    # attributes that are absent or None
    "hasattr": (nothing, lambda b, h: double(hasattr(b, "late"), h), late, "1.late was absent"),
    "default": (nothing, lambda b, h: h * getattr(b, "late", 1.0), late, "1.late was absent"),
    "none": (
        put("late", lambda: None),
        lambda b, h: double(b.late is None, h),
        late_module,
        "1.late was None",
    ),
    "no module": (
        lambda b: b.register_module("late", None),
        lambda b, h: double(b.late is None, h),
        late_module,
        "1.late was None when the model was captured and is a Tanh now",
    ),
    "no parameter": (
        lambda b: b.register_parameter("late", None),
        lambda b, h: double(b.late is None, h),
        late_parameter,
        "1.late was None",
    ),
    "no buffer": (
        lambda b: b.register_buffer("late", None),
        lambda b, h: double(b.late is None, h),
        late_tensor,
        "1.late was None",
    ),
    "parameter removed": (
        late_parameter,
        lambda b, h: double(b.late is None, h),
        put("late", lambda: None),
        "1.late was set",
    ),
    "deleted": (late, lambda b, h: h * b.late, lambda b: delattr(b, "late"), "1.late was 2.0"),
    # children
    "in": (
        put("late", lambda: nn.ModuleDict({"b": nn.Identity()})),
        lambda b, h: double("a" in b.late, h),
        lambda b: b.late.update({"a": nn.Tanh()}),
        "1.late was children ('b',)",
    ),
    "len": (
        put("late", nn.ModuleList),
        lambda b, h: double(len(b.late), h),
        lambda b: b.late.append(nn.Tanh()),
        "1.late was children ()",
    ),
    "for": (
        put("late", nn.ModuleList),
        in_turn,
        lambda b: b.late.append(nn.Tanh()),
        "1.late was children ()",
    ),
    "children()": (
        nothing,
        lambda b, h: h * len(list(b.children())),
        late_module,
        "1 was children ('layer',)",
    ),
    "isinstance": (
        put("late", nn.Identity),
        lambda b, h: double(isinstance(b.late, nn.Identity), h),
        late_module,
        "1.late was an Identity",
    ),
    "identity": (
        put("late", nn.Identity),
        lambda b, h: b.late(h),
        late_module,
        "1.late was an Identity",
    ),
    # configurations
    "slots": (
        put("config", Slots),
        scale_of(lambda b: b.config.scale),
        set_two(lambda b: b.config),
        "1.config.scale was 1.0",
    ),
    "__getattr__": (
        put("config", Computed),
        scale_of(lambda b: b.config.scale),
        lambda b: b.config.data.update(scale=2.0),
        "1.config.",
    ),
    "property": (
        put("config", Config),
        scale_of(lambda b: b.config.twice),
        set_two(lambda b: b.config),
        "1.config.scale was 1.0",
    ),
    "called": (
        put("config", Config),
        lambda b, h: b.config(h),
        set_two(lambda b: b.config),
        "1.config.scale was 1.0",
    ),
    "vars": (
        put("config", Config),
        scale_of(lambda b: vars(b.config)["scale"]),
        set_two(lambda b: b.config),
        "1.config.scale was 1.0",
    ),
    "absent field": (
        put("config", Config),
        scale_of(lambda b: getattr(b.config, "late", 1.0)),
        lambda b: setattr(b.config, "late", 2.0),
        "1.config.late was absent",
    ),
    "named tuple": (
        put("config", lambda: Pair(1.0, None)),
        scale_of(lambda b: b.config.scale),
        put("config", lambda: Pair(2.0, None)),
        "1.config[0] was 1.0",
    ),
    "list of objects": (
        put("config", lambda: [Config()]),
        scale_of(lambda b: b.config[0].scale),
        set_two(lambda b: b.config[0]),
        "1.config[0].scale was 1.0",
    ),
    "list grows": (
        put("config", lambda: [Config()]),
        scale_of(lambda b: len(b.config)),
        lambda b: b.config.append(Config()),
        "1.config was a list of 1",
    ),
    "list of numbers": (
        put("config", lambda: [1.0]),
        scale_of(lambda b: b.config[0]),
        lambda b: b.config.insert(0, 2.0),
        "1.config was [1.0]",
    ),
    "dict of objects": (
        put("config", lambda: {"a": Slots()}),
        scale_of(lambda b: b.config["a"].scale),
        set_two(lambda b: b.config["a"]),
        "1.config['a'].scale was 1.0",
    ),
    "ordered dict": (
        put("config", lambda: collections.OrderedDict(a=1.0)),
        scale_of(lambda b: b.config["a"]),
        lambda b: b.config.update(a=2.0),
        "1.config['a'] was 1.0",
    ),
    "class as namespace": (
        put("config", lambda: type("Namespace", (), {"scale": 1.0})),
        scale_of(lambda b: b.config.scale),
        set_two(lambda b: b.config),
        "1.config.scale was 1.0",
    ),
    "bound method": (
        put("config", lambda: Config().__call__),
        lambda b, h: b.config(h),
        set_two(lambda b: b.config.__self__),
        "1.config.__self__.scale was 1.0",
    ),
    "partial": (
        put("config", lambda: functools.partial(F.leaky_relu, negative_slope=0.1)),
        lambda b, h: b.config(h),
        put("config", lambda: functools.partial(F.leaky_relu, negative_slope=0.9)),
        "1.config was functools.partial",
    ),
    "enum": (
        put("config", lambda: Kind.PLAIN),
        lambda b, h: double(b.config is Kind.SCALED, h),
        put("config", lambda: Kind.SCALED),
        "1.config was <Kind.PLAIN",
    ),
    "numpy number": (
        put("config", lambda: np.float64(1.0)),
        scale_of(lambda b: float(b.config)),
        put("config", lambda: np.float64(2.0)),
        "1.config was ",
    ),
    "numpy array": (
        put("config", lambda: np.ones(2)),
        scale_of(lambda b: float(b.config[0])),
        lambda b: b.config.fill(2.0),
        "1.config was array",
    ),
    "module in a list": (
        put("config", lambda: [nn.LeakyReLU(0.1)]),
        lambda b, h: b.config[0](h),
        lambda b: setattr(b.config[0], "negative_slope", 0.9),
        "1.config[0].negative_slope was 0.1",
    ),
    "vars(self)": (late, scale_of(lambda b: vars(b)["late"]), put("late", int), "1.late was 2.0"),
    "class attribute": (
        nothing,
        scale_of(lambda b: b.factor),
        lambda b: setattr(type(b), "factor", 2.0),
        "1.factor was 1.0",
    ),
    # tensors that are no buffers, and what is read of parameters
    "tensor in a list": (
        put("t", lambda: [torch.ones(WIDTH)]),
        scale_of(lambda b: b.t[0]),
        lambda b: b.t[0].fill_(2.0),
        "1.t[0] was tensor",
    ),
    "tensor in a field": (
        put("t", lambda: types.SimpleNamespace(scale=torch.ones(WIDTH))),
        scale_of(lambda b: b.t.scale),
        lambda b: setattr(b.t, "scale", torch.zeros(WIDTH)),
        "1.t.scale was tensor",
    ),
    "item()": (
        put("t", lambda: torch.ones(())),
        scale_of(lambda b: b.t.item()),
        lambda b: b.t.fill_(2.0),
        "1.t was tensor(1.)",
    ),
    "comparison": (
        put("t", lambda: torch.ones(())),
        lambda b, h: double(b.t > 1, h),
        lambda b: b.t.fill_(2.0),
        "1.t was tensor(1.)",
    ),
    "shape of a tensor": (
        put("t", lambda: torch.ones(2)),
        scale_of(lambda b: b.t.shape[0]),
        put("t", lambda: torch.ones(3)),
        "1.t was a tensor (2,)",
    ),
    "requires_grad": (
        nothing,
        lambda b, h: double(b.layer.weight.requires_grad, h),
        lambda b: b.layer.weight.requires_grad_(False),
        "1.layer.weight.requires_grad was True",
    ),
}


@pytest.mark.parametrize("row", ROWS)
def test_what_python_read_is_a_condition(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Block, "factor", 1.0)
    setup, steer, change, expected = ROWS[row]
    x = torch.randn(3, WIDTH)
    captured = revcompile.capture(model_of(setup, steer), x, check="off")
    checker = GuardChecker(captured.guards.rebased(captured.root))
    assert "1" not in captured.leaf_modules
    assert checker.changed(captured.root) is None
    change(captured.root.get_submodule("1"))
    for _ in range(2):  # the answer does not depend on what was found before
        assert str(checker.changed(captured.root)).startswith(expected)


ANEW, REFUSED = ("partial", "tensor in a list"), ("no parameter", "for")


@pytest.mark.parametrize("row", (*ANEW, *REFUSED))
def test_a_change_is_captured_anew_or_refused(row: str) -> None:
    setup, steer, change, _ = ROWS[row]
    x, model = torch.randn(3, WIDTH), model_of(setup, steer)
    net = revcompile.reversify(model, x, policy="same_parameters", check="off")
    net(x)
    change(net.get_submodule("1"))
    if row in REFUSED:
        with pytest.raises(GuardError, match="new or missing modules and parameters"):
            net(x)
        return
    change(model[1])
    again = revcompile.reversify(model, x, policy="same_parameters", check="off")
    assert torch.equal(net(x), again(x))
    assert torch.equal(copy.deepcopy(net)(x), again(x))


def test_stages_refuse_a_change() -> None:
    setup, steer, change, _ = ROWS["list of objects"]
    x = torch.randn(3, WIDTH)
    staged = revcompile.petrafy(model_of(setup, steer), 2, x, policy="same_parameters")
    trainer = staged.trainer(lambda p: torch.optim.SGD(p, lr=0.1), F.mse_loss)
    trainer.step(x, x)
    change(trainer.model.get_submodule("1"))
    with pytest.raises(GuardError, match=r"1\.config\[0\]\.scale was 1\.0"):
        trainer.step(x, x)


def test_types_inside_follow_autocast() -> None:
    x = torch.randn(3, WIDTH)
    model = model_of(nothing, lambda b, h: double(h.dtype == torch.bfloat16, h))
    net = revcompile.reversify(model, x, policy="same_parameters", check="off")
    before = net(x)
    with torch.autocast("cpu", torch.bfloat16):
        anew = revcompile.reversify(model, x, policy="same_parameters", check="off")
        assert torch.equal(net(x), anew(x))
    assert torch.equal(net(x), before)


def test_hooks_of_parameters_are_refused() -> None:
    model = model_of(nothing, lambda b, h: h)
    handle = model[0].weight.register_hook(lambda gradient: gradient)
    with pytest.raises(InputError, match=r"0\.weight has a hook"):
        revcompile.reversify(model, torch.randn(3, WIDTH))
    handle.remove()
    revcompile.reversify(model, torch.randn(3, WIDTH), check="off")
