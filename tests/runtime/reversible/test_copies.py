"""Copies and pickles of a module run, and train, their own weights."""

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from revcompile import petrafy, reversify


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x)).tanh()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Linear(6, 8), nn.Sequential(Block(), Block())

    def forward(self, x: Tensor) -> Any:
        return self.blocks(self.stem(x))


def saved(net: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    return torch.load(file, weights_only=False)  # type: ignore[no-any-return]


COPIES: Final[dict[str, Callable[[nn.Module], nn.Module]]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda net: pickle.loads(pickle.dumps(net)),
    "torch.save": saved,
    "average": lambda net: AveragedModel(net).module,
}


# -- compiled modules ------------------------------------------------------------------------------

eagerly = pytest.mark.usefixtures("without_dynamo")


@pytest.fixture
def without_dynamo() -> Iterator[None]:
    """What `compile` has set is called, but compiles nothing: that takes seconds."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


@eagerly
@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_copy_of_a_compiled_module_runs_and_trains_its_own_weights(
    copied: Callable[[nn.Module], nn.Module],
) -> None:
    x, torch_net = torch.randn(4, 6), Net()
    net = reversify(torch_net, x)
    net.compile()
    twin, alike = copied(net), reversify(torch_net, x)
    with torch.no_grad():
        for parameter in (*twin.parameters(), *alike.parameters()):
            parameter.mul_(0.5)
    out, expected = twin(x), alike(x)
    assert torch.equal(out, expected)
    out.sum().backward()
    expected.sum().backward()
    for own, other in zip(twin.parameters(), alike.parameters(), strict=True):
        assert own.grad is not None and other.grad is not None
        assert torch.equal(own.grad, other.grad)
    assert all(parameter.grad is None for parameter in net.parameters())


@eagerly
def test_an_average_of_a_compiled_module_is_what_runs() -> None:
    net = reversify(Net(), torch.randn(4, 6))
    net.compile()
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for _ in range(3):
        net(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
        average.update_parameters(net)
    x = torch.randn(4, 6)
    loaded = reversify(Net(), x)
    loaded.load_state_dict(average.module.state_dict())
    assert torch.equal(average(x), loaded(x)) and not torch.equal(average(x), net(x))


@eagerly
def test_to_module_of_a_compiled_model_is_a_snapshot() -> None:
    x, y = torch.randn(4, 6), torch.randn(4, 8)
    net = petrafy(Net(), 2, x)
    net.model.compile()
    trainer = net.trainer(lambda p: torch.optim.SGD(p, lr=0.5), F.mse_loss)
    snapshot = net.to_module()
    before = snapshot(x)
    trainer.step(x, y)
    trainer.flush()
    assert torch.equal(snapshot(x), before) and not torch.equal(net.model(x), before)
