"""Couplings that keep their graphs: the same training to the last bit, within a budget."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import timm
import torch
from helpers import cases
from torch import Tensor, nn

import revcompile
from revcompile.errors import InputError, ModifiedError
from revcompile.runtime.reversible.keeping import Measurement, _bytes, plan_for
from tests.support.measuring import autocast, measure_memory

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.*")
Net = revcompile.api.ReversibleModule


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.drop, self.down = nn.Dropout(dropout), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(nn.functional.gelu(self.up(self.norm(x)))))


class Stack(nn.Module):
    """Blocks, of which the first have more elements than the last."""

    def __init__(self, depth: int = 8, dropout: float = 0.1, width: int = 16) -> None:
        super().__init__()
        self.stem, self.middle = nn.Linear(8, width), nn.Linear(width, 2 * width)
        self.wide = nn.Sequential(*(Block(width, dropout) for _ in range(depth)))
        self.deep = nn.Sequential(*(Block(2 * width, dropout) for _ in range(depth)))
        self.head = nn.Linear(2 * width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(self.wide(self.stem(x)))
        return self.head(self.deep(x[:, ::8]))


def reversified(model: nn.Module, x: Tensor, policy: str = "paper", budget: Any = "least") -> Net:
    torch.manual_seed(0)
    return revcompile.reversify(model, x, policy=policy, check="off", memory_budget=budget).train()


def trained(net: nn.Module, x: Tensor, state: Any, **backward: Any) -> list[Tensor]:
    """Gradients and buffers after a step from this state in bfloat16."""
    net.load_state_dict(state)
    net.zero_grad()
    torch.manual_seed(1)
    with torch.autocast(x.device.type, torch.bfloat16):
        loss = net(x).float().square().mean()
    loss.backward(**backward)
    if backward:
        loss.backward()
    return [p.grad.clone() for p in net.parameters()] + [b.clone() for b in net.buffers()]


def extremes(net: Net, x: Tensor, state: Any) -> tuple[int, int]:
    """The activations if everything is rebuilt, and if nothing is."""
    net.memory_budget = 1 << 50
    trained(net, x, state)
    (plan,) = net._memory.plans.values()
    ((measured, _),) = next(iter(net._memory._measured.values())).values()
    return measured.least, plan.peak


def vit() -> tuple[nn.Module, Tensor]:
    small: Any = {"img_size": 32, "patch_size": 8, "depth": 3, "num_classes": 4}
    rates: Any = {"proj_drop_rate": 0.1, "drop_path_rate": 0.2, "drop_rate": 0.1}
    return timm.create_model("vit_tiny_patch16_224", **small, **rates), torch.randn(4, 3, 32, 32)


def resnet() -> tuple[nn.Module, Tensor]:
    small: Any = {"layers": (9, 1, 1, 1), "channels": (16, 16, 16, 16), "num_classes": 4}
    return timm.models.resnet.ResNet(timm.models.resnet.BasicBlock, **small), torch.randn(
        4, 3, 64, 64
    )


def stack() -> tuple[nn.Module, Tensor]:
    return Stack(), torch.randn(4, 32, 8)


MODELS = {"vit": vit, "resnet": resnet, "stack": stack}


@cases(
    "name, policy, backend",
    ("vit", "paper", None),
    ("vit", "pretrained", None),
    ("resnet", "paper", None),
    ("stack", "same_parameters", None),
    ("stack", "same_parameters", "aot_eager"),
    ("stack", "pretrained", "eager"),
    ids=["vit", "averaged", "norms", "chains", "compiled", "averaged, compiled"],
)
def test_gradients_have_the_same_bits_with_every_budget(
    name: str, policy: str, backend: str | None
) -> None:
    torch.manual_seed(0)
    model, x = MODELS[name]()
    net = reversified(model, x, policy)
    if backend is not None:
        net.compile(backend=backend)
    state = copy.deepcopy(net.state_dict())
    want = trained(net, x, state)
    least, most = extremes(net, x, state)
    times = []
    for budget in (least, (2 * least + most) // 3, (least + 2 * most) // 3, most):
        net.memory_budget = budget
        for _ in range(2):
            assert all(map(torch.equal, want, trained(net, x, state)))
        (plan,) = net._memory.plans.values()
        assert plan.peak <= budget
        times.append(plan.time)
    assert times == sorted(times, reverse=True) and times[0] > times[-1] == 1.0
    assert "couplings keep their graphs" in net.summary()


def test_two_backward_passes_through_one_graph() -> None:
    net = reversified(Stack(dropout=0.0), x := torch.randn(4, 32, 8))
    state = copy.deepcopy(net.state_dict())
    want = trained(net, x, state, retain_graph=True)
    least, most = extremes(net, x, state)
    for budget in ((least + most) // 2, most):
        net.memory_budget = budget
        assert all(map(torch.equal, want, trained(net, x, state, retain_graph=True)))


def test_a_plan_holds_for_smaller_inputs_and_larger_ones_are_planned() -> None:
    net = reversified(Stack(), x := torch.randn(4, 32, 8), budget="1GiB")
    state = copy.deepcopy(net.state_dict())
    for size, plans in ((4, 1), (3, 1), (6, 2), (5, 2)):
        trained(net, x.new_ones(size, 32, 8), state)
        assert len(net._memory.plans) == plans
    with torch.no_grad():
        net(x.new_ones(9, 32, 8))
    assert len(net._memory.plans) == 2


def test_a_budget_that_cannot_be_met_says_what_would() -> None:
    net = reversified(Stack(), x := torch.randn(4, 32, 8), budget="1KiB")
    state = copy.deepcopy(net.state_dict())
    with pytest.raises(InputError, match=r"memory_budget=1.0 KiB.*needs .* KiB.*Give at least"):
        trained(net, x, state)
    net.memory_budget = "1GiB"
    trained(net, x, state)
    net.memory_budget = 1000
    with pytest.raises(InputError, match="Give at least that"):
        trained(net, x, state)
    for wrong in ("much", 0, -1, 1.5, True):
        with pytest.raises(InputError, match="expected bytes"):
            net.memory_budget = wrong
    with pytest.raises(InputError, match=r"reversify: .*expected bytes"):
        revcompile.reversify(Stack(), x, memory_budget="8 apples")
    net.memory_budget = "auto"
    with pytest.raises(InputError, match="needs a CUDA device"):
        trained(net, x, state)


def test_copies_have_the_budget_and_plans_of_their_own() -> None:
    net = reversified(Stack(), x := torch.randn(4, 32, 8), budget="1GiB")
    state = copy.deepcopy(net.state_dict())
    want = trained(net, x, state)
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert twin.memory_budget == 1 << 30 and not twin._memory.plans
        assert all(map(torch.equal, want, trained(twin, x, state)))
        assert twin._memory.plans


def test_weights_written_before_backward_are_an_error() -> None:
    net = reversified(Stack(), x := torch.randn(4, 32, 8), budget="1GiB")
    net(x).sum().backward()
    loss = net(x).sum()
    with torch.no_grad():
        net.deep[1].up.weight.mul_(2)
    with pytest.raises(ModifiedError, match="modified by an inplace"):
        loss.backward()


def test_hooks_frozen_blocks_and_offloading() -> None:
    model, x = Stack(dropout=0.0), torch.randn(4, 32, 8)
    for parameter in (*model.stem.parameters(), *model.wide[:2].parameters()):
        parameter.requires_grad_(False)
    results, seen = [], list[str]()
    for budget in ("least", "1GiB"):
        net = reversified(model, x, budget=budget)
        net.deep[2].up.register_forward_hook(lambda *_: seen.append("forward"))
        net.deep[2].up.weight.register_hook(lambda grad: 2 * grad)
        for _ in range(2):
            net.zero_grad()
            with torch.autograd.graph.save_on_cpu():
                net(x).square().mean().backward()
        results.append({name: p.grad for name, p in net.named_parameters()})
    assert len(seen) == 4 + 3  # the hook runs in both runs of a rebuilt block
    torch.testing.assert_close(*results)


def test_activations_stay_within_the_budget() -> None:
    """On a CPU, where the peak is an estimate."""
    net = reversified(Stack(8, 0.0, width=32), x := torch.randn(16, 64, 8))
    state = copy.deepcopy(net.state_dict())
    least, most = extremes(net, x, state)

    def forward() -> Tensor:
        with autocast(x.device, "bf16"):
            return net(x).float().square().mean()

    peaks = []
    for part in range(5):
        net.memory_budget = least + part * (most - least) // 4
        peaks.append(measure_memory(forward, x.device).peak)
        assert peaks[-1] <= 1.05 * net.memory_budget
    assert peaks == sorted(peaks) and peaks[-1] > 2 * peaks[0]


def test_short_chains_that_keep_inputs_are_not_measured_again() -> None:
    net = reversified(Stack(2), x := torch.randn(4, 32, 8), budget="1GiB")
    state = copy.deepcopy(net.state_dict())
    for _ in range(2):
        trained(net, x, state)
        (plan,) = net._memory.plans.values()
        assert not plan.kept and not plan.count


def test_late_couplings_are_kept_first_unless_others_save_more() -> None:
    graphs, phases = dict.fromkeys(range(6), 10), [(i, 40) for i in range(7)]
    measured = Measurement(graphs, dict.fromkeys(range(6), 2), phases)
    alike = plan_for(measured, [1.0] * 7, frozenset({0}), 62)
    assert sorted(alike.kept) == [4, 5] and alike.peak == 61 and alike.count == 6
    uneven = plan_for(measured, [9.0, 9.0, *[1.0] * 5], frozenset({0}), 62)
    assert sorted(uneven.kept) == [0, 1] and uneven.peak == 60
    free = Measurement(graphs, {}, [(0, 90), *((i, 40) for i in range(1, 7))])
    assert sorted(plan_for(free, [1.0] * 7, frozenset({0}), None).kept) == [1, 2, 3, 4, 5]


def test_bytes_of_gradients() -> None:
    dense, sparse = torch.ones(3, 4), torch.eye(3).to_sparse()
    assert [_bytes(dense), _bytes(sparse)] == [48, 3 * 4 + 2 * 3 * 8]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [None, "inductor"])
@pytest.mark.parametrize("policy", ["same_parameters", "pretrained"])
def test_activations_stay_within_the_budget_on_a_gpu(policy: str, backend: str | None) -> None:
    small: Any = {"img_size": 128, "embed_dim": 384, "num_heads": 6, "depth": 6}
    model = timm.create_model("vit_tiny_patch16_224", proj_drop_rate=0.1, **small).cuda()
    net = reversified(model, x := torch.randn(64, 3, 128, 128, device="cuda"), policy)
    if backend is not None:
        net.compile(backend=backend)
    state = copy.deepcopy(net.state_dict())
    want = trained(net, x, state)
    least, most = extremes(net, x, state)

    def forward() -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return net(x).float().square().mean()

    for part in range(5):
        net.memory_budget = budget = least + part * (most - least) // 4
        found = trained(net, x, state)
        assert all(map(torch.equal, want, found))
        assert measure_memory(forward, x.device).peak <= 1.03 * budget
    net.memory_budget = None
    trained(net, x, state)
    trained(net, x, state)
    assert measure_memory(forward, x.device).peak <= 1.03 * least
    net.memory_budget = "auto"
    trained(net, x, state)
    (plan,) = net._memory.plans.values()
    assert len(plan.kept) == plan.count
