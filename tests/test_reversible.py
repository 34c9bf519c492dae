"""The spine: gradients without stored activations equal autograd's on the same rewired graph."""

import copy
import re
from typing import Any

import pytest
import timm
import torch
from helpers import (
    assert_exact,
    gradients,
    gradients_in_flight,
    refuses,
    saved_bytes,
    stored,
    worst,
)
from nets import Chain, module_of
from torch import Tensor, nn
from torch.nn import functional as F

import revcompile
from revcompile.errors import InputError

FAMILIES: dict[str, tuple[dict[str, Any], int]] = {
    "resnet18": (
        {"channels": (16, 32, 48, 64), "drop_path_rate": 0.3, "zero_init_last": False}, 64
    ),
    "resnetv2_18": ({"drop_path_rate": 0.3}, 64),
    "vit_tiny_patch16_224": (
        {"img_size": 32, "patch_size": 8, "depth": 4, "drop_path_rate": 0.3, "attn_drop_rate": 0.2,
         "proj_drop_rate": 0.1, "pos_drop_rate": 0.1},
        32,
    ),
    "swin_tiny_patch4_window7_224": (
        {"img_size": 56, "depths": (2, 2), "num_heads": (2, 4), "embed_dim": 24,
         "drop_path_rate": 0.3, "attn_drop_rate": 0.2},
        56,
    ),
    "swinv2_tiny_window8_256": (
        {"img_size": 64, "depths": (2, 2), "num_heads": (2, 4), "embed_dim": 24,
         "drop_path_rate": 0.3},
        64,
    ),
    "convnext_atto": ({"depths": (2, 2, 2, 2), "drop_path_rate": 0.3, "ls_init_value": 0.5}, 32),
    "efficientnet_b0": ({"drop_path_rate": 0.3}, 32),
    "mobilenetv3_small_050": ({"drop_path_rate": 0.3}, 32),
    "regnetx_002": ({"drop_path_rate": 0.3}, 32),
    "cait_xxs24_224": (
        {"img_size": 32, "patch_size": 8, "depth": 2, "drop_path_rate": 0.3, "init_values": 0.5}, 32
    ),
    "xcit_nano_12_p8_224": ({"img_size": 32, "depth": 2, "drop_path_rate": 0.3, "eta": 0.5}, 32),
    "poolformerv2_s12": ({"drop_path_rate": 0.3}, 32),
    "gmlp_ti16_224": ({"img_size": 32, "drop_path_rate": 0.3}, 32),
    "dpn48b": ({"k_sec": (2, 2, 2, 2)}, 32),
    "repvit_m1": ({"depth": (1, 1, 3, 1)}, 64),
    "beit_base_patch16_224": (
        {"img_size": 32, "patch_size": 8, "embed_dim": 24, "num_heads": 2, "depth": 3,
         "drop_path_rate": 0.3, "init_values": 0.5},
        32,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_equal_stored_activations(name: str) -> None:
    options, size = FAMILIES[name]
    if name == "dpn48b" and not hasattr(timm.models.dpn, "CatBnAct"):
        pytest.skip("this timm's DPN has one stream for both paths, which cannot be rewired")
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=7, **options).double()
    if name == "gmlp_ti16_224":
        model.blocks = model.blocks[:4]  # of thirty that are alike; no option says how many
    x = torch.randn(3, 3, size, size, dtype=torch.float64)
    net = revcompile.reversify(model, x, check="off").train()
    assert net.rewired.couplings, "nothing became reversible, so nothing is tested"
    assert_exact(net, x)


def test_the_reference_really_stores_activations_and_the_chain_does_not() -> None:
    net = revcompile.reversify(_stack(8), torch.randn(2, 16)).train()
    x = torch.randn(4, 16)
    assert saved_bytes(net, x) < saved_bytes(stored(net), x) / 3


def _stack(depth: int, dropout: float = 0.3) -> nn.Module:
    """Residual blocks with everything that makes recomputation hard."""
    norms = [(nn.Linear(16, 16), nn.BatchNorm1d(16)) for _ in range(depth)]
    return Chain(*(nn.Sequential(*each, nn.ReLU(), nn.Dropout(dropout)) for each in norms))


def _pair(model: nn.Module, x: Tensor) -> tuple[nn.Module, nn.Module]:
    net = revcompile.reversify(model, x).train()
    return net, stored(net)


def test_batch_norm_statistics_move_once_a_step() -> None:
    net, _ = _pair(_stack(4).double(), torch.randn(2, 16).double())
    x = torch.randn(8, 16).double()
    for _ in range(3):
        assert_exact(net, x)  # buffers, too
    with torch.no_grad():
        net(x)
    assert int(net.get_buffer("blocks.0.1.num_batches_tracked")) == 4


def test_masks_are_replayed_with_several_calls_in_flight() -> None:
    net, reference = _pair(_stack(4).double(), torch.randn(2, 16).double())
    found = [gradients_in_flight(module, *[(5, 16)] * 3) for module in (net, reference)]
    assert worst(found[1], found[0])[0] < 1e-10


def test_random_state_after_a_step_is_that_of_a_plain_step() -> None:
    net, reference = _pair(_stack(4), torch.randn(2, 16))
    states = []
    for module in (net, reference):
        torch.manual_seed(5)
        module(torch.randn(4, 16)).sum().backward()
        states.append(torch.get_rng_state())
    assert torch.equal(states[0], states[1])


def test_eval_mode_is_a_plain_forward_that_can_be_differentiated_twice() -> None:
    net, _ = _pair(_stack(3).double(), torch.randn(2, 16).double())
    net.eval()
    x = torch.randn(2, 16).double().requires_grad_()
    (first,) = torch.autograd.grad((net(x) ** 3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad((first**2).sum(), x)
    assert second.abs().sum() > 0


def test_frozen_parameters_and_inputs_without_gradient() -> None:
    net, _ = _pair(_stack(3).double(), torch.randn(2, 16).double())
    for name, parameter in net.named_parameters():
        parameter.requires_grad_("blocks.1" in name)
    x = torch.randn(4, 16).double()
    assert_exact(net, x)
    assert not any(n.startswith("grad blocks.0") for n in gradients(net, x))


@pytest.mark.parametrize("kind", ["stack", "vit"])
def test_autocast_is_replayed_and_branches_reconstruct_to_the_bit(kind: str) -> None:
    model, x = _stack(6, dropout=0.0), torch.randn(8, 16)
    if kind == "vit":
        sizes = {"img_size": 32, "patch_size": 8, "depth": 2, "num_classes": 5}
        model, x = timm.create_model("vit_tiny_patch16_224", **sizes), torch.randn(4, 3, 32, 32)
    nets, found = _pair(model, x), []
    for module in nets:
        with torch.autocast("cpu", torch.bfloat16):
            output = module(x)
        assert kind == "vit" or output.dtype is torch.float32  # as the streams
        output.float().pow(2).mean().backward()
        found.append({n: p.grad for n, p in module.named_parameters() if p.grad is not None})
    assert worst(found[1], found[0])[0] < 1e-5
    with torch.autocast("cpu", torch.bfloat16):
        report = revcompile.check_invertible(nets[0], x)
    assert len(report.errors) >= 4 and report.worst[1] == 0.0


def test_bfloat16_model_trains_with_float32_streams() -> None:
    model = _stack(6, dropout=0.0).bfloat16()
    x = torch.randn(8, 16).bfloat16()
    net = revcompile.reversify(model, x).train()
    output = net(x)
    assert output.dtype is torch.bfloat16
    output.float().sum().backward()
    assert revcompile.check_invertible(net, x).worst[1] < 1e-5


def test_channels_last_and_non_contiguous_inputs() -> None:
    sizes = {"num_classes": 5, "channels": (16, 32, 48, 64)}
    model = timm.create_model("resnet18", **sizes, zero_init_last=False).double()
    x = torch.randn(4, 3, 32, 32, dtype=torch.float64)
    net, _ = _pair(model, x)
    for view in (x.contiguous(memory_format=torch.channels_last), x[::2], x.transpose(2, 3)):
        assert_exact(net, view)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_torch_compile_gives_the_same_gradients() -> None:
    net, _ = _pair(_stack(3).double(), torch.randn(2, 16).double())
    x = torch.randn(4, 16).double()
    want = gradients(copy.deepcopy(net), x)
    compiled = torch.compile(net, backend="aot_eager")
    torch.manual_seed(0)
    found = gradients(compiled, x)
    found = {name.replace("_orig_mod.", ""): value for name, value in found.items()}
    assert worst(want, found)[0] < 1e-10


class _SideInputs(nn.Module):
    """Cross attention: a mask and a memory travel beside the stream and get their gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.key = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, memory: Tensor, *, scale: Tensor) -> dict[str, Tensor]:
        for query, key in zip(self.query, self.key, strict=True):
            attention = F.softmax(query(x) @ key(memory).transpose(1, 2) * scale, dim=-1)
            x = x + attention @ memory
        return {"x": x, "mean": x.mean()}


def test_side_inputs_receive_their_gradient() -> None:
    shape = (3, 5, 8)
    x, memory = (torch.randn(shape, dtype=torch.float64) for _ in range(2))
    scale = torch.rand(3, 5, 5, dtype=torch.float64)
    net = revcompile.reversify(_SideInputs().double(), (x, memory), {"scale": scale}).train()
    assert len(net.rewired.couplings) == 3
    assert_exact(net, x, memory, scale=scale)
    assert "input 1" in gradients(net, x, memory, scale=scale)
    assert set(net(x, memory, scale=scale)) == {"x", "mean"}


@pytest.mark.parametrize("policy", ["same_parameters", "paper", "pretrained"])
@pytest.mark.parametrize("shape", [(3, 1, 8), (1, 4, 8)])
def test_a_shortcut_that_a_later_call_broadcasts(policy: str, shape: tuple[int, ...]) -> None:
    """It has the shape of the sum in the example, and backward would rebuild it in that shape."""

    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * y
        return x

    def made(x: Tensor) -> Any:
        torch.manual_seed(0)
        model = module_of(forward, layers=nn.ModuleList(nn.Linear(8, 8) for _ in range(3)))
        return revcompile.reversify(model.double(), (x, y), policy=policy).train()

    x, y = torch.randn(shape, dtype=torch.float64), torch.randn(3, 4, 8, dtype=torch.float64)
    net = made(y)
    says = rf"layers\.0 adds \[3, 4, 8\] to its shortcut {re.escape(str(list(shape)))}"
    refuses(InputError, says, net, x, y)
    assert net.eval()(x, y).shape == y.shape
    for sizes in ((x.expand_as(y), y), (y, x)):  # an addend may be broadcast
        assert_exact(net.train(), *(each.clone() for each in sizes))
    assert_exact(made(x), x, y)


def test_a_chain_that_cannot_be_inverted_is_refused_before_training() -> None:
    def exploding(self: Any, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + 1e9 * self.linear(x)
        return x

    model = module_of(exploding, linear=nn.Linear(8, 8))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(revcompile.RevcompileError, match="reconstructs its input only to"):
        revcompile.reversify(model, torch.randn(2, 8))
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_check_invertible_reports_every_block() -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=3)
    report = revcompile.check_invertible(model, torch.randn(2, 3, 32, 32))
    assert [name for name, _ in report.errors] == [
        f"blocks.{i}.{part}" for i in range(3) for part in ("attn", "mlp")
    ]
    assert report.ok and "blocks.2.mlp" in str(report)


def test_deepcopy_and_state_dict_round_trip() -> None:
    net, _ = _pair(_stack(3), torch.randn(2, 16))
    x = torch.randn(4, 16)
    net(x)
    twin = copy.deepcopy(net)
    with torch.no_grad():
        twin.get_parameter("blocks.0.0.weight").zero_()
    net.eval(), twin.eval()
    assert not torch.equal(net(x), twin(x))
    twin.load_state_dict(net.state_dict())
    assert torch.equal(net(x), twin(x))


def test_a_member_with_a_reserved_name_is_a_clear_error() -> None:
    model = module_of(lambda self, x: x + self.rewired(x), rewired=nn.Linear(4, 4))
    with pytest.raises(revcompile.RevcompileError, match="has a member called 'rewired'"):
        revcompile.reversify(model, torch.randn(2, 4))
