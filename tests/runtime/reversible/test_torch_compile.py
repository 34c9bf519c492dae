"""`torch.compile(net)` and `net.compile()` change nothing but the time that a call takes."""

import copy
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any, NamedTuple

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import revcompile

pytestmark = pytest.mark.filterwarnings("ignore")
"""Of torch's compiler and its backends, not of the package."""
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, width = x.shape
        q, k, v = self.qkv(x).view(samples, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(samples, length, width))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), Attention(width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.emb, self.pos = nn.Embedding(50, width), nn.Parameter(torch.randn(1, 16, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 50)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids) + self.pos[:, : ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Case(NamedTuple):
    model: Callable[[], nn.Module]
    inputs: Callable[[int, int], tuple[Tensor, ...]]
    """By the batch size, and the length where the model takes several."""


def vit() -> nn.Module:
    small: Any = {"img_size": 64, "patch_size": 16, "depth": 2, "embed_dim": 48}
    return timm.create_model("vit_tiny_patch16_224", num_classes=4, **small)


def resnet() -> nn.Module:
    return timm.create_model("resnet18", num_classes=4)


def llama() -> nn.Module:
    import transformers

    small: Any = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads: Any = {"num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0}
    config = transformers.LlamaConfig(vocab_size=50, **small, **heads)
    return transformers.LlamaForCausalLM(config)


def images(size: int, length: int) -> tuple[Tensor, ...]:
    # Maps of 1 × 1 have two layouts at once, of which inductor and cuDNN take different ones.
    return (torch.randn(size, 3, 64, 64, dtype=torch.float64),)


def words(size: int, length: int) -> tuple[Tensor, ...]:
    return (torch.randint(3, 50, (size, length)),)


CASES = {
    "gpt": Case(GPT, words),
    "vit": Case(vit, lambda size, length: tuple(x.float() for x in images(size, length))),
    "resnet": Case(resnet, images),
    "llama": Case(llama, words),
}
TRAIN, EVALUATE, NO_GRAD = (True, True), (False, True), (False, False)
"""Whether the net is in training mode, and whether gradients are on."""
CALLS = (
    (TRAIN, 4, 8),
    (TRAIN, 4, 8),
    (TRAIN, 3, 8),  # the last batch of an epoch
    (EVALUATE, 4, 8),
    (NO_GRAD, 4, 8),
    (NO_GRAD, 3, 8),
    (TRAIN, 4, 8),
    (TRAIN, 4, 11),
    (TRAIN, 2, 5),
    (TRAIN, 4, 8),
)


@pytest.fixture(autouse=True)
def strict_dynamo() -> Iterator[None]:
    """Compiling again for ever is an error, and so is what dynamo would otherwise leave out.

    Convolutions round to 24 bits, so that a difference is one of the compiled code.
    """
    torch._dynamo.reset()
    with (
        torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, suppress_errors=False),
        torch.backends.cudnn.flags(allow_tf32=False),
    ):
        yield
    torch._dynamo.reset()


def tensors_of(output: Any) -> list[Tensor]:
    values = output.values() if isinstance(output, dict) else pytree.tree_leaves(output)
    return [value for value in values if isinstance(value, Tensor)]


def called(run: Any, net: Any, inputs: tuple[Tensor, ...], mode: tuple[bool, bool]) -> list[Tensor]:
    """Outputs and gradients of a call, then the net's buffers."""
    training, with_gradients = mode
    net.train(training)
    net.zero_grad()
    torch.manual_seed(1)
    with torch.set_grad_enabled(with_gradients):
        outputs = tensors_of(run(*inputs))
    assert outputs
    if with_gradients:
        sum(output.float().square().mean() for output in outputs).backward()
    gradients = [p.grad for p in net.parameters() if p.grad is not None]
    assert len(gradients) >= 10 * with_gradients
    return [t.detach().clone() for t in (*outputs, *gradients, *net.buffers())]


def compare(name: str, way: str, backend: str, device: str, policy: str = "paper") -> None:
    case = CASES[name]
    torch.manual_seed(0)
    model = case.model()
    kwargs: Any = {"policy": policy, "check": "off"}
    if name == "resnet":  # norms of three samples multiply roundings
        model.double()
    plain = revcompile.reversify(model, case.inputs(4, 8), **kwargs).to(device)
    net = copy.deepcopy(plain)
    if way == "function":
        run: Any = torch.compile(net, backend=backend)
    else:
        run = net
        net.compile(backend=backend)
    tolerance: Any = {"rtol": 1e-4, "atol": 1e-4 if backend == "inductor" else 1e-5}
    for index, (mode, size, length) in enumerate(CALLS):
        torch.manual_seed(index)
        inputs = tuple(value.to(device) for value in case.inputs(size, length))
        want = called(plain, plain, inputs, mode)
        found = called(run, net, inputs, mode)
        torch.testing.assert_close(found, want, **tolerance, msg=lambda m: f"call {index}: {m}")  # noqa: B023


@pytest.mark.nightly
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", ["function", "method"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("policy", ["paper", "pretrained"])
@pytest.mark.parametrize("name", CASES)
def test_compiled(name: str, policy: str, backend: str, way: str, device: str) -> None:
    if name == "llama" and find_spec("transformers") is None:
        pytest.skip("needs transformers")
    compare(name, way, backend, device, policy)
