"""Programs made by `torch.export`, ONNX and `torch.jit.trace` compute what the net computes."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from helpers import refuses
from torch import Tensor, nn
from torch.export import Dim, export

import revcompile
from revcompile.errors import GuardError, InputError

SIZES = (1, 2, 5)
TRACED = pytest.mark.filterwarnings(
    "ignore:.*torch.jit.trace:FutureWarning",
    "ignore:.*torch.jit.trace:DeprecationWarning",
    "ignore::torch.jit.TracerWarning",
)


def nightly(value: Any) -> Any:
    return pytest.param(value, marks=pytest.mark.nightly)


def vit(**options: Any) -> nn.Module:
    options = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 48} | options
    return timm.create_model("vit_tiny_patch16_224", num_classes=4, **options)


def resnet() -> nn.Module:
    return timm.create_model("resnet18", num_classes=4)


def swin() -> nn.Module:
    """Rearranges its streams into windows."""
    small: Any = {"embed_dim": 12, "depths": (2, 2), "num_heads": (1, 2), "window_size": 4}
    small |= {"drop_path_rate": 0.0}
    return timm.create_model("swin_tiny_patch4_window7_224", img_size=32, num_classes=4, **small)


def made(build: Callable[[], nn.Module], policy: str = "paper") -> Any:
    torch.manual_seed(0)
    x = torch.randn(4, 3, 32, 32)
    return revcompile.reversify(build(), x, policy=policy, check="off").eval()


def images(size: int) -> Tensor:
    torch.manual_seed(size)
    return torch.randn(size, 3, 32, 32)


def worst(program: Callable[..., Tensor], net: Callable[..., Tensor]) -> float:
    """The largest error over batches of several sizes."""
    with torch.no_grad():
        errors = [(program(x) - net(x)).abs().max().item() for x in map(images, SIZES)]
    return max(errors)


def any_batch(net: nn.Module) -> Any:
    return export(net, (images(4),), dynamic_shapes=({0: Dim("batch")},)).module()


@pytest.mark.parametrize("policy", [nightly("paper"), nightly("same_parameters"), "pretrained"])
@pytest.mark.parametrize("build", [vit, nightly(resnet), nightly(swin)])
def test_a_program_for_any_batch_size(build: Callable[[], nn.Module], policy: str) -> None:
    net = made(build, policy)
    assert worst(any_batch(net), net) <= 1e-6
    assert worst(any_batch(nn.Sequential(net, nn.Flatten())), net) <= 1e-6  # and a second time


def test_a_program_for_one_batch_size_or_a_single_sample_has_the_original_s_inputs() -> None:
    net = made(vit)
    for size in (1, 4):
        program = export(net, (images(size),))
        torch.testing.assert_close(program.module()(images(size)), net(images(size)))
        nodes = program.graph.find_nodes(op="placeholder")
        assert [node.name for node in nodes][-1] == "x"


@pytest.mark.parametrize("build", [nightly(vit), resnet])
def test_a_program_of_the_training_mode(build: Callable[[], nn.Module]) -> None:
    net = made(build).train()
    program = any_batch(net)
    x = images(3)
    found, want = program(x), net(x)
    torch.testing.assert_close(found, want)
    names = [name for name, _ in net.named_parameters()]
    members = dict(program.named_parameters())
    gradients = torch.autograd.grad(found.square().sum(), [members[name] for name in names])
    expected = torch.autograd.grad(want.square().sum(), list(net.parameters()))
    for name, gradient, value in zip(names, gradients, expected, strict=True):
        torch.testing.assert_close(gradient, value, msg=name, rtol=1e-4, atol=1e-4)


@TRACED
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("build", [vit, nightly(resnet), nightly(swin)])
def test_torch_jit_trace(build: Callable[[], nn.Module], training: bool) -> None:
    net = made(build).train(training)
    traced = torch.jit.trace(net, (images(4),), check_trace=False)
    x = images(5)
    torch.testing.assert_close(traced(x), net(x))


class Padded(nn.Module):
    """Computes something else for batches of more than eight samples, and for long rows."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.g = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.f(x).tanh()
        scale = 2.0 if x.shape[0] > 8 else 1.0
        if x.shape[1] > 6:
            return x - self.g(x)
        return x + scale * self.g(x).tanh()


def test_a_program_covers_no_size_that_python_treats_otherwise() -> None:
    net = revcompile.reversify(Padded(), torch.randn(3, 5, 4)).eval()
    x = torch.randn(4, 5, 4)
    with pytest.raises(Exception, match="max=8"):
        export(net, (x,), dynamic_shapes=({0: Dim("batch")},))
    program = export(net, (x,), dynamic_shapes=({0: Dim("batch", max=8)},)).module()
    torch.testing.assert_close(program(x[:2]), net(x[:2]))


@pytest.mark.filterwarnings("ignore:Padded was captured again")
def test_another_capture_is_not_made_while_a_tracer_runs() -> None:
    net = revcompile.reversify(Padded(), torch.randn(3, 5, 4)).eval()
    long = torch.randn(4, 9, 4)
    refuses(GuardError, "call it once with inputs like these", export, net, (long,))
    want = net(long)
    torch.testing.assert_close(export(net, (long,)).module()(long), want)


def test_scripting_says_what_to_do() -> None:
    net = made(vit)
    for module in (net, nn.Sequential(net)):
        refuses(InputError, "torch.export.export", torch.jit.script, module)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
@pytest.mark.nightly
@pytest.mark.parametrize("policy", ["pretrained", "paper"])
def test_a_language_model_for_any_batch_size_and_length(policy: str) -> None:
    import transformers

    torch.manual_seed(0)
    small: Any = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads: Any = {"num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=50, **small, **heads))

    def call(samples: int, length: int) -> dict[str, Tensor]:
        mask = torch.ones(samples, length, dtype=torch.long)
        mask[0, :2] = 0
        return {"input_ids": torch.randint(3, 50, (samples, length)), "attention_mask": mask}

    net = revcompile.reversify(model, None, call(3, 8), policy=policy, check="off").eval()
    sizes = {0: Dim("batch"), 1: Dim("length", max=64)}
    shapes = {"input_ids": sizes, "attention_mask": sizes}
    program = export(net, (), call(3, 8), dynamic_shapes=shapes).module()
    for samples, length in ((1, 5), (2, 8), (5, 13)):
        given = call(samples, length)
        error = program(**given).logits - net(**given).logits
        assert error.abs().max().item() <= 1e-6


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(
    any(find_spec(name) is None for name in ("onnx", "onnxscript", "onnxruntime")),
    reason="needs onnx, onnxscript and onnxruntime",
)
@pytest.mark.parametrize("build", [vit, resnet])
def test_onnx_for_any_batch_size(build: Callable[[], nn.Module], tmp_path: Path) -> None:
    import onnxruntime  # type: ignore[import-not-found]

    net, file = made(build), tmp_path / "net.onnx"
    torch.onnx.export(net, (images(4),), file, dynamo=True, dynamic_shapes=({0: Dim("batch")},))
    session = onnxruntime.InferenceSession(file)
    (name,) = (each.name for each in session.get_inputs())
    assert name == "x"

    def run(x: Tensor) -> Tensor:
        return torch.from_numpy(session.run(None, {name: x.numpy()})[0])

    assert worst(run, net) <= 1e-5
