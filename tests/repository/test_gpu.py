"""The reversible module on CUDA. Run with `pytest -m gpu`."""

import copy

import pytest
import timm
import torch
from helpers import ON_GPU, assert_exact, gradients, worst

import revcompile
from tests.test_reversible import FAMILIES

pytestmark = ON_GPU


def _vit(**options: object) -> torch.nn.Module:
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=64, patch_size=8, depth=6, num_classes=10, **options
    )


@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize(
    "name", ["vit_tiny_patch16_224", "resnet18", "swin_tiny_patch4_window7_224"]
)
def test_gradients_equal_stored_activations_with_dropout(name: str, overlap: str) -> None:
    torch.manual_seed(0)
    options, size = FAMILIES[name]
    model = timm.create_model(name, num_classes=10, **options).double().cuda()
    x = torch.randn(4, 3, size, size, dtype=torch.float64, device="cuda")
    net = revcompile.reversify(model, x, check="full", overlap=overlap).train()
    for _ in range(3):
        assert_exact(net, x)


def test_a_model_captured_on_the_cpu_moves_to_the_gpu() -> None:
    net = revcompile.reversify(_vit(), torch.randn(2, 3, 64, 64)).cuda().train()
    net(torch.randn(4, 3, 64, 64, device="cuda")).sum().backward()
    assert net.get_parameter("head.weight").grad.is_cuda


@pytest.mark.filterwarnings(
    "ignore:TensorFloat32 tensor cores:UserWarning", "ignore:The .grad attribute:UserWarning"
)
def test_compiled_training_step() -> None:
    net = revcompile.reversify(_vit(), torch.randn(2, 3, 64, 64)).cuda().train()
    x = torch.randn(4, 3, 64, 64, device="cuda")
    want = gradients(copy.deepcopy(net), x)
    found = gradients(torch.compile(net), x)
    found = {name.replace("_orig_mod.", ""): value for name, value in found.items()}
    assert worst(want, found)[0] < 1e-2
