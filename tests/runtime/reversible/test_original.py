"""The original's attributes and methods on the reversible module, and what they may not do."""

import copy
import inspect
import io
import pickle
from typing import Any

import pytest
import timm
import torch
from helpers import cases, refuses
from nets import PreNorm, module_of
from timm.data import resolve_data_config  # type: ignore[attr-defined]
from timm.optim import create_optimizer_v2  # type: ignore[attr-defined]
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

import revcompile
from revcompile.errors import OriginalMethodError, RevcompileWarning


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scales = {"all": 2.0}

    def total(self) -> float:
        return self.scales["all"]


class Blocks(Base):
    """Methods of many kinds around two residual blocks."""

    kind = "blocks"

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.width = width
        self.stem = nn.Linear(width, width)
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.head = nn.Linear(width, 3)
        self.shown = self.size  # a bound method among the attributes
        self.grad_checkpointing = False

    def features(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.first(x).tanh()
        return x + torch.tanh(x @ self.second.weight.T)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))

    def size(self) -> int:
        return self.width

    def total(self) -> float:
        return super().total() + 1

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @classmethod
    def name(cls) -> str:
        return cls.kind

    @staticmethod
    def twice(value: int) -> int:
        return 2 * value

    def predict(self, x: Tensor) -> Tensor:
        return self(x).argmax(-1)

    def by_weight(self, x: Tensor) -> Tensor:
        return x @ self.second.weight.detach().T

    @property
    def myself(self) -> "Blocks":
        return self

    def get_classifier(self) -> nn.Module:
        return self.head

    def set_width(self, width: int) -> None:
        self.width = width

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.grad_checkpointing = enable


class KeepsEval(Blocks):
    """Holds a layer in eval mode whatever is asked for, as detectors do with batch norms."""

    def train(self, mode: bool = True) -> "KeepsEval":
        super().train(mode)
        self.stem.eval()
        return self


def made(kind: type[nn.Module] = Blocks, policy: str = "same_parameters") -> Any:
    return revcompile.reversify(kind(), torch.randn(3, 4), policy=policy)


# -- attributes and methods that only read ---------------------------------------------------------


def test_attributes_and_methods_see_the_module_itself() -> None:
    net = made()
    assert len(net.rewired.couplings) == 2
    assert (net.width, net.kind, net.scales) == (4, "blocks", {"all": 2.0})
    assert net.device == torch.device("cpu")
    assert (net.name(), net.twice(4), net.myself) == ("blocks", 8, net)
    assert net.get_classifier() is net.head
    assert {"width", "total", "device"} <= set(dir(net))
    assert isinstance(net, revcompile.ReversibleModule) and not hasattr(net, "nowhere")
    with pytest.raises(
        AttributeError, match="'ReversibleModule' object has no attribute 'nowhere'"
    ):
        net.nowhere  # noqa: B018


def test_attributes_that_are_set_are_those_methods_see() -> None:
    net = made(policy="pretrained").eval()
    assert net.total() == 3.0  # calls super()
    assert net.shown() == 4
    net.width = 5
    assert net.size() == 5
    net.set_width(6)
    assert net.width == 6 and vars(net)["width"] == 6
    x = torch.randn(3, 4)
    assert torch.equal(net.predict(x), net(x).argmax(-1))
    torch.testing.assert_close(net.head(net.features(x)), net(x))


def test_copies_and_pickles_keep_them() -> None:
    net = made()
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    read = torch.load(file, weights_only=False)
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net)), read):
        assert twin.myself is twin and twin.get_classifier() is twin.head
        twin.width = 8
        twin.scales["all"] = 5.0
        x = torch.randn(3, 4)
        assert torch.equal(twin(x), net(x))
    assert net.width == 4 and net.scales["all"] == 2.0
    assert net.state_dict().keys() == Blocks().state_dict().keys()


def test_forward_takes_the_arguments_of_the_original_s() -> None:
    wanted = inspect.signature(Blocks().forward)
    net = made()
    kept = io.BytesIO()
    torch.save(net, kept)
    loaded = torch.load(io.BytesIO(kept.getvalue()), weights_only=False)
    stages = revcompile.petrafy(Blocks(), 2, torch.randn(3, 4), policy="same_parameters")
    for module in (net, copy.deepcopy(net), loaded, stages.to_module()):
        assert inspect.signature(module.forward) == wanted
        assert module.forward(x=torch.ones(2, 4)).shape == (2, 3)
    local = module_of(
        lambda self, rows, factor=2.0: rows + factor * self.f(rows), f=nn.Linear(4, 4)
    )
    other = revcompile.reversify(local, torch.randn(3, 4))  # a class that pickle cannot find
    for module in (other, pickle.loads(pickle.dumps(other))):
        assert str(inspect.signature(module.forward)) == "(rows, factor=2.0)"
    net.__class__ = type("Sharded", (FSDPModule, type(net)), {})  # what `fully_shard` does
    assert inspect.signature(net.forward) == wanted


@pytest.mark.filterwarnings("ignore")
def test_dynamo_finds_forward() -> None:
    net, x = made().eval(), torch.randn(2, 4)
    torch.testing.assert_close(torch.compile(net, backend="eager")(x), net(x))


def test_a_mode_of_the_original_is_kept() -> None:
    net = made(KeepsEval)
    assert net.train().training and not net.stem.training and net.first.training
    assert not net.eval().first.training


# -- methods that may run the network by another path ----------------------------------------------


@cases("method, arguments", ("features", 1), ("by_weight", 1), ("shown", 0), ("set_width", 1))
@cases("policy", "same_parameters", "pretrained")
def test_other_methods_say_what_to_call(method: str, arguments: int, policy: str) -> None:
    net, inputs = made(policy=policy).train(), [torch.randn(3, 4)] * arguments
    with pytest.raises(OriginalMethodError, match=f"Blocks.{method} may compute") as raised:
        getattr(net, method)(*inputs)
    said = str(raised.value)
    assert "Call the model as a whole" in said and f"Blocks.{method}(net, ...)" in said
    assert ("or call net.eval() first" in said) == (policy == "pretrained")
    assert isinstance(raised.value, AttributeError)
    assert net.width == 4 and Blocks.size(net) == 4


def test_checkpointing_warns_that_it_has_no_effect() -> None:
    net = made()
    with pytest.warns(RevcompileWarning, match="set_grad_checkpointing has no effect"):
        net.set_grad_checkpointing()
    assert net.grad_checkpointing is False


# -- stages ---------------------------------------------------------------------------------------


def test_stages_show_them_as_well() -> None:
    net: Any = revcompile.petrafy(Blocks(), 2, torch.randn(3, 4))
    assert (net.width, net.name(), net.to_module().name()) == (4, "blocks", "blocks")
    assert net.get_classifier() is net.model.head
    net.width = 6
    assert net.model.width == 6 and net.to_module().width == 6
    net.method = revcompile.petrafy(Blocks(), 2, torch.randn(3, 4)).method
    refuses(AttributeError, r"net\.to_module\(\) is the module", getattr, net, "parameters")
    name = next(iter(net.model._modules))
    refuses(AttributeError, f"layers are those of net.model: net.model.{name}", getattr, net, name)
    with pytest.raises(AttributeError, match="'StagedModel' object has no attribute 'nowhere'"):
        net.nowhere  # noqa: B018
    refuses(OriginalMethodError, r"Blocks\.features may compute", net.features, torch.randn(3, 4))


# -- timm -----------------------------------------------------------------------------------------


def test_timm_reads_what_it_read_of_the_original() -> None:
    model = timm.create_model("test_vit", pretrained_cfg_overlay={"mean": (0.1, 0.2, 0.3)})
    net: Any = revcompile.reversify(model, check="off")
    assert resolve_data_config(model=net) == resolve_data_config(model=model)
    assert resolve_data_config(model=net)["mean"] == (0.1, 0.2, 0.3)
    assert net.num_classes == model.num_classes and net.num_features == model.num_features
    assert net.get_classifier() is net.head
    assert net.group_matcher() == model.group_matcher()
    decayed = {
        id(p)
        for group in create_optimizer_v2(net, weight_decay=0.1).param_groups
        for p in group["params"]
        if group["weight_decay"]
    }
    assert id(net.pos_embed) not in decayed and id(net.blocks[0].attn.qkv.weight) in decayed
    image = torch.randn(1, 3, 160, 160)
    for method in ("forward_features", "forward_intermediates", "get_intermediate_layers"):
        with pytest.raises(OriginalMethodError, match=f"{method} may compute"):
            getattr(net, method)(image)


def test_a_sequential_model_is_one_as_before() -> None:
    """Python looks special methods up in the class."""
    model = nn.Sequential(nn.Linear(4, 8), PreNorm(8, 2, dropout=0.0), nn.Linear(3, 2))
    net = revcompile.reversify(model, torch.randn(2, 4), policy="same_parameters")
    assert len(net) == 3 and net and net[1] is net.get_submodule("1") and net[-1] is net[2]
    assert list(net) == list(net.children()) and net[2] in net
    assert [*net[:2]] == [net[0], net[1]]
    plain = revcompile.reversify(model[1], torch.randn(2, 8), policy="same_parameters")
    assert plain and copy.deepcopy(plain) and copy.deepcopy(net)
    assert not any(hasattr(plain, name) for name in ("__len__", "__iter__", "__getitem__"))
    for use in (len, iter, lambda model: model[0]):
        refuses(TypeError, "'ReversibleModule' object ", use, plain)
