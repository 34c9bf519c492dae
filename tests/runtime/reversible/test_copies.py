"""Copies and pickles of a module run, and train, their own weights."""

import copy
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
import torch
from helpers import gradients, worst
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

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


# -- what nets hold that pickle does not take by itself --------------------------------------------


class Locked(nn.Linear):
    """Holds something that it does not save."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.lock = threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        with self.lock:
            return F.linear(x, self.weight, self.bias)


class Unusual(nn.Module):
    """Weak references, a lock, and functions that pickle does not find."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(8, 8, batch_first=True)
        self.stem, self.blocks = Locked(6, 8), nn.Sequential(Block(), Block())

    def forward(self, x: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        h = self.stem(x)
        h = h if mask is None else h.masked_fill(mask[..., None], 0.0)
        h = checkpoint(self.blocks, self.recurrent(h)[0], use_reentrant=False)
        h = torch.ops.aten.sin.default(h) * int(x.shape[1])
        return {"pooled": F.max_pool1d(h.transpose(1, 2), 2), "all": h}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_copies_of_unusual_nets_compute_the_same(copied: Callable[[nn.Module], nn.Module]) -> None:
    x, mask = torch.randn(3, 4, 6), torch.zeros(3, 4, dtype=torch.bool)
    net = reversify(Unusual(), x, {"mask": mask}, check="off")
    net(torch.randn(3, 7, 6), mask=torch.zeros(3, 7, dtype=torch.bool))
    twin = copied(net)
    for length in (4, 9):
        given = {"x": torch.randn(3, length, 6), "mask": torch.rand(3, length) > 0.5}
        assert worst(gradients(net, **given), gradients(twin, **given))[0] == 0.0


@pytest.mark.parametrize("how", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_a_changed_copy_is_noticed(how: Callable[[nn.Module], nn.Module]) -> None:
    """What modules do not save with themselves is not compared; the rest is."""
    x = torch.randn(3, 4, 6)
    twin = how(reversify(Unusual(), x, check="off"))
    twin.blocks[0].norm.eps = 0.5  # type: ignore[union-attr, index]
    other = reversify(Unusual(), x, check="off")
    other.load_state_dict(twin.state_dict())
    other.blocks[0].norm.eps = 0.5  # type: ignore[union-attr, index]
    assert worst(gradients(twin, x), gradients(other, x))[0] == 0.0


class Long(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(300):
            x = x.sin()
        return x


def test_a_long_graph_is_stored_without_recursion() -> None:
    x = torch.randn(2, 8)
    net = reversify(nn.Sequential(Long(), Block()), x, check="off")
    assert torch.equal(pickle.loads(pickle.dumps(net))(x), net(x))


def test_no_structure_of_torch_is_pickled() -> None:
    """Some versions of torch warn of that."""
    net = reversify(Unusual(), torch.randn(3, 4, 6), {"mask": torch.zeros(3, 4, dtype=torch.bool)})
    stored = pickle.dumps(net)
    assert b"torch.utils._pytree" not in stored
    own, read = net.rewired.signature, pickle.loads(stored).rewired.signature
    assert (read.in_spec, read.out_spec) == (own.in_spec, own.out_spec)
    assert read == own
