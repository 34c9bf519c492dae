"""Layer norms that give the precision they are read in: which ones do, and what they give."""

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import timm
import torch
from helpers import cases, noting
from nets import module_of
from paths import ROOT
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook
from training import same, trained

import revcompile
from revcompile.ir.precision_rewrites import cast_down
from revcompile.kernels import layer_norm as norms
from revcompile.kernels.autocast import is_autocasting
from revcompile.kernels.layer_norm import call_layer_norm, is_layer_norm, layer_norm


def test_the_kernels_equal_torch() -> None:
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-W", "error::RuntimeWarning", "-m", "tests.support.interpreted"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode == 77:
        pytest.skip("this version of triton interprets kernels only beside a GPU")
    assert done.returncode == 0, done.stderr


# -- with stand-ins for the kernels, on the CPU ----------------------------------------------------


def _layer_norm_forward(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    assert x.data_ptr() % 16 == 0, "another kernel might sum up in another order"
    out, mean, scale = torch.native_layer_norm(x, x.shape[-1:], weight, bias, eps)
    return out.to(dtype), mean, scale


def _layer_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    means: Tensor,
    scales: Tensor,
    own: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    given = grad.float(), x, x.shape[-1:], means, scales, weight, torch.zeros_like(weight)
    of_x, *rest = torch.ops.aten.native_layer_norm_backward(*given, [True] * 3)
    of_x = of_x if own is None else own + of_x
    return of_x, None if dtype is None else of_x.to(dtype), *rest


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of the kernels, which are torch's own functions here."""
    asked: list[str] = []
    stand_in = SimpleNamespace(
        layer_norm_forward=noting(asked, _layer_norm_forward),
        layer_norm_backward=noting(asked, _layer_norm_backward, " added"),
        supports_layer_norm=lambda device, columns, dtype: True,
    )
    monkeypatch.setattr(norms, "_kernels", lambda: stand_in)
    monkeypatch.setattr(norms, "_pays", lambda x: is_autocasting(x.device))
    return asked


def _vit(**options: Any) -> nn.Module:
    sizes = {"img_size": 16, "patch_size": 8, "depth": 2, "embed_dim": 12, "num_heads": 2}
    model: nn.Module = timm.create_model("vit_tiny_patch16_224", **sizes, **options)
    return model


def test_stages_in_both_directions(kernels: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = torch.randn(2, 3, 16, 16), torch.zeros(2).long()
    net = revcompile.petrafy(_vit(num_classes=3), num_stages=2, example_inputs=x, check="off")
    settings: dict[str, Any] = {"loss": F.cross_entropy, "autocast": torch.bfloat16}
    found = []
    for is_on in (True, False):
        monkeypatch.setattr(norms, "_pays", lambda x, is_on=is_on: is_on)
        found.append(trained(copy.deepcopy(net), [(x, y)] * 6, **settings).model.state_dict())
    assert kernels.count("layer_norm_forward") == 2 * 6 * 4
    assert kernels.count("layer_norm_backward added") == 6 * 4
    assert same(*found)


@cases(
    "layer, x",
    (nn.LayerNorm(4), torch.randn(3, 4, dtype=torch.bfloat16)),
    (nn.LayerNorm(4), torch.randn(3, 8)[:, ::2]),
    (nn.LayerNorm((3, 4)), torch.randn(2, 3, 4)),
    (nn.LayerNorm(4, bias=False), torch.randn(3, 4)),
    (nn.LayerNorm(4, elementwise_affine=False), torch.randn(3, 4)),
    ids=["of bfloat16", "gaps", "two dimensions", "no bias", "no weight"],
)
def test_what_there_is_no_kernel_for(layer: nn.LayerNorm, x: Tensor, kernels: list[str]) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(call_layer_norm(layer, x), layer(x))
        given = layer.normalized_shape, layer.weight, layer.bias, layer.eps
        assert torch.equal(layer_norm(x, *given), layer(x))
    assert not kernels


@cases(
    "register",
    nn.Module.register_forward_pre_hook,
    nn.Module.register_forward_hook,
    nn.Module.register_full_backward_pre_hook,
    nn.Module.register_full_backward_hook,
    lambda layer, hook: register_module_forward_hook(hook),
)
def test_hooks_of_a_norm_run(register: Callable[..., Any], kernels: list[str]) -> None:
    layer, x, ran = nn.LayerNorm(4), torch.randn(3, 4, requires_grad=True), list[str]()
    handle = register(layer, lambda *_: ran.append("hook"))
    with torch.autocast("cpu", torch.bfloat16):
        call_layer_norm(layer, x).sum().backward()
    handle.remove()
    assert ran and not kernels


# -- which norms -----------------------------------------------------------------------------------


def _branch(read: Callable[..., Tensor]) -> nn.Module:
    """`x + read(norm(x))`."""
    members = {"norm": nn.LayerNorm(8), "layer": nn.Linear(8, 8), "read": read}
    weight = nn.Parameter(torch.randn(8, 8))
    return module_of(lambda self, x: x + self.read(self, self.norm(x)), **members, weight=weight)


class _Named(nn.LayerNorm):
    pass


class _Doubled(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def _reshaped(x: Tensor) -> Tensor:
    return torch.reshape(input=x, shape=(2, 4, 8))


sdpa = F.scaled_dot_product_attention
READERS: list[tuple[str, Callable[..., Tensor], bool]] = [
    ("linear", lambda self, x: self.layer(x), True),
    ("three linears", lambda self, x: self.layer(x) + self.layer(x) * self.layer(x), True),
    ("F.linear", lambda self, x: F.linear(x, self.weight), True),
    ("matmul", lambda self, x: x @ self.weight, True),
    ("a method", lambda self, x: x.matmul(self.weight), True),
    ("bmm", lambda self, x: torch.bmm(x, self.weight.expand(2, 8, 8)), True),
    ("conv", lambda self, x: F.conv1d(x, self.weight[:4, :4, None]), True),
    ("attention", lambda self, x: sdpa(x, self.layer(x), self.layer(x)), True),
    ("itself", lambda self, x: sdpa(x, x, x), False),
    ("its shape too", lambda self, x: self.layer(x).view(x.shape[0], x.size(1), -1), True),
    ("rearranged", lambda self, x: self.layer(x.view(-1, 8)).view(2, 4, 8), True),
    ("rearranged, by keywords", lambda self, x: self.layer(_reshaped(x)), False),
    ("computed with", lambda self, x: self.layer(x.exp()), False),
    ("read in both ways", lambda self, x: self.layer(x) * x, False),
    ("given back", lambda self, x: x, False),
]


def _replaced(model: nn.Module, x: Tensor) -> list[bool]:
    net = revcompile.reversify(model, x, check="off")
    branches = [cast_down(coupling.branch, net) for coupling in net.rewired.couplings]
    return [
        any(n.target in (call_layer_norm, layer_norm) for n in branch.nodes) for branch in branches
    ]


@pytest.mark.parametrize(
    ("read", "expected"), [case[1:] for case in READERS], ids=[case[0] for case in READERS]
)
def test_only_norms_whose_readers_all_cast(read: Callable[..., Tensor], expected: bool) -> None:
    assert _replaced(_branch(read), torch.randn(2, 4, 8)) == [expected]


def test_which_layers_are_layer_norms() -> None:
    from timm.layers import LayerNorm, LayerNorm2d  # type: ignore[attr-defined]

    fast = LayerNorm(8)
    fast._fast_norm = True
    patched = nn.LayerNorm(8)
    patched.forward = lambda x: x  # type: ignore[method-assign]
    assert all(map(is_layer_norm, (nn.LayerNorm(8), LayerNorm(8), _Named(8))))
    assert not any(map(is_layer_norm, (fast, patched, LayerNorm2d(8), _Doubled(8), nn.RMSNorm(8))))
