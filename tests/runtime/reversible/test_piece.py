"""Opaque segments and branches that backward computes again."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import timm
import torch
from timm.models.resnet import Bottleneck, ResNet
from torch import Tensor, nn
from torch.nn import functional as F

import revcompile
from revcompile.errors import ModifiedError
from revcompile.runtime.reversible.coupling import Chain
from revcompile.runtime.reversible.piece import Piece
from tests.support.measuring import autocast, step_memory

CPU = torch.device("cpu")


def _resnet(*depths: int) -> nn.Module:
    """A ResNet whose layers have a quarter of the usual widths."""
    torch.manual_seed(0)
    stem: dict[str, Any] = {"stem_type": "deep", "stem_width": 8}
    widths = (16, 32, 64, 128)
    return ResNet(Bottleneck, depths or (2, 3, 1, 2), num_classes=4, channels=widths, **stem)


def _batch(samples: int = 4, size: int = 64) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(samples, 3, size, size), torch.randint(4, (samples,))


def _reversible(model: nn.Module | None = None) -> Any:
    return revcompile.reversify(model or _resnet(), _batch()[0][:2], check="off").train()


def _step(net: nn.Module, dtype: str = "bf16") -> dict[str, Tensor]:
    """The loss, gradients and buffers of one step."""
    x, y = _batch()
    with autocast(CPU, dtype):
        loss = F.cross_entropy(net(x), y)
    loss.backward()
    gradients = {n: p.grad for n, p in net.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients, **dict(net.named_buffers())}


@contextmanager
def _keeping_graphs(patch: pytest.MonkeyPatch) -> Iterator[None]:
    with patch.context() as patched:
        original: Any = Piece.__init__

        def keeping(piece: Piece, *given: Any) -> None:
            original(piece, *given[:-1], False)

        patched.setattr(Piece, "__init__", keeping)
        yield


def _segments(net: Any) -> dict[str, bool]:
    steps = net._plan(net.rewired.body)
    return {s.run.name: s.run._recomputes for s in steps if isinstance(s.run, Piece)}


@pytest.mark.parametrize("depths", [(3, 4, 6, 3), (3, 8, 12, 3)], ids=str)
def test_a_step_takes_less_memory_than_with_checkpointing(depths: tuple[int, ...]) -> None:
    x, y = _batch(8, 128)
    model = _resnet(*depths)
    net = _reversible(copy.deepcopy(model))
    plain = step_memory(model, x, y, CPU, "bf16").peak
    model.set_grad_checkpointing(True)  # type: ignore[operator]
    checkpointed = step_memory(model, x, y, CPU, "bf16").peak
    ours = step_memory(net, x, y, CPU, "bf16").peak
    assert ours < checkpointed < plain, (ours / checkpointed, checkpointed / plain)


def test_large_segments_before_the_last_chain_are_computed_again() -> None:
    found = _segments(_reversible())
    assert found["stem"] and found["layer1.0"] and found["layer2.0"]
    assert not found["layer4.0"] and not found["head"]


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_step_is_the_same_as_with_graphs_kept(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batch norms move their statistics once."""
    net = _reversible()
    with _keeping_graphs(monkeypatch):
        kept = copy.deepcopy(net)
        expected = _step(kept, dtype)
    assert not any(_segments(kept).values()) and any(_segments(net).values())
    torch.testing.assert_close(_step(net, dtype), expected, rtol=0, atol=0)


def test_dropout_is_the_same_in_both_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _resnet()
    model.act1 = nn.Sequential(nn.ReLU(), nn.Dropout(0.5))
    net = _reversible(model)
    assert _segments(net)["stem"]
    with _keeping_graphs(monkeypatch):
        kept = copy.deepcopy(net)
        torch.manual_seed(2)
        expected = _step(kept)
    torch.manual_seed(2)
    torch.testing.assert_close(_step(net), expected, rtol=0, atol=0)


class _FunctionalNorm(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("variance", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.mean, self.variance, training=self.training)


def test_norms_that_are_functions_move_their_statistics_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = _resnet()
    model.bn1 = _FunctionalNorm(16)
    net = _reversible(model)
    assert _segments(net)["stem"]
    with _keeping_graphs(monkeypatch):
        kept = copy.deepcopy(net)
        expected = _step(kept)
    torch.testing.assert_close(_step(net), expected, rtol=0, atol=0)


def test_short_chains_keep_the_dtype_of_the_original_under_autocast() -> None:
    net, x = _reversible(), _batch()[0]
    chains = [s.run for s in net._plan(net.rewired.body) if isinstance(s.run, Chain)]
    a = torch.ones(1, dtype=torch.bfloat16)
    assert all(chain.keeps_inputs(a, a) for chain in chains)
    assert not any(chain.keeps_inputs(a.float(), a.float()) for chain in chains)
    with autocast(CPU, "bf16"):
        assert {error for _, error in net._inversion_errors(x)} == {0.0}


def test_short_chains_equal_chains_that_store_activations() -> None:
    net = _reversible()
    plain = copy.deepcopy(net)
    plain.reversible = False
    torch.testing.assert_close(_step(net), _step(plain), rtol=0, atol=0)


def test_hooks_run_once() -> None:
    net, calls = _reversible(), list[str]()
    net.bn1.register_forward_hook(lambda *_: calls.append("stem"))
    net.layer2[1].bn2.register_forward_hook(lambda *_: calls.append("branch"))
    _step(net)
    assert calls == ["stem", "branch"]


def test_parameters_of_a_functional_call_are_those_of_both_runs() -> None:
    net, (x, y) = _reversible(), _batch()
    doubled = {n: (2 * p).detach().requires_grad_() for n, p in net.named_parameters()}
    with autocast(CPU, "bf16"):
        F.cross_entropy(torch.func.functional_call(net, doubled, (x,)), y).backward()
    other = copy.deepcopy(net)
    other.load_state_dict({**other.state_dict(), **doubled})
    expected = _step(other)
    for name, parameter in doubled.items():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=0, atol=0)


def test_a_retained_graph_is_differentiated_twice() -> None:
    net, (x, y) = _reversible(), _batch()
    with autocast(CPU, "bf16"):
        loss = F.cross_entropy(net(x), y)
    loss.backward(retain_graph=True)
    first = {name: parameter.grad.clone() for name, parameter in net.named_parameters()}
    loss.backward()
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(parameter.grad, 2 * first[name], rtol=0, atol=0)


def test_weights_written_before_backward_are_an_error() -> None:
    net, (x, y) = _reversible(), _batch()
    loss = F.cross_entropy(net(x), y)
    with torch.no_grad():
        net.bn1.bias += 1
    with pytest.raises(ModifiedError, match=r"bn1\.bias"):
        loss.backward()


# Dynamo looks at the gradients of its inputs, which are results of other pieces here.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_compiled_pieces_are_one_artifact_in_both_runs() -> None:
    net, (x, y), graphs = _reversible(), _batch(), []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    expected = _step(copy.deepcopy(net), "fp32")
    net.compile(backend=backend)
    loss = F.cross_entropy(net(x), y)
    in_forward = len(graphs)
    loss.backward()
    assert len(graphs) == in_forward > 0 and not net.compiler.failures
    for name, buffer in net.named_buffers():
        torch.testing.assert_close(buffer, expected[name])
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-3, atol=1e-4)
    graphs.clear()
    with autocast(CPU, "bf16"):
        loss = F.cross_entropy(net(x), y)
    in_forward = len(graphs)
    loss.backward()
    assert len(graphs) == in_forward > 0


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::UserWarning:torch.*", "ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", ["resnet50", "resnet152"])
def test_resnets_take_less_memory_than_with_checkpointing(name: str, compiles: bool) -> None:
    cuda = torch.device("cuda")
    plain: Any = timm.create_model(name, num_classes=10).to(cuda, memory_format=torch.channels_last)
    x, y = torch.randn(64, 3, 224, 224, device=cuda), torch.randint(10, (64,), device=cuda)
    net = revcompile.reversify(copy.deepcopy(plain), x[:2], check="off")
    plain.set_grad_checkpointing(True)
    for block in (m for m in plain.modules() if compiles and isinstance(m, Bottleneck)):
        block.compile()
    if compiles:
        net.compile()
    checkpointed, ours = (step_memory(each, x, y, cuda, "bf16").peak for each in (plain, net))
    assert ours < checkpointed, ours / checkpointed
