"""A reversible module as a graphed callable of torch: the same training."""

import copy

import pytest
import timm
import torch
from torch.nn import functional as F

import revcompile

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match"),
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),
]


def trained(net, steps=8, autocast=True):
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    losses = []
    for step in range(steps):
        x = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(step)).cuda()
        with cast(autocast):
            loss = F.cross_entropy(net(x), torch.arange(2, device="cuda"))
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses)


def cast(on=True):
    return torch.autocast("cuda", torch.bfloat16, enabled=on, cache_enabled=False)


def reversified(model):
    model = model.cuda().train().to(memory_format=torch.channels_last)
    return revcompile.reversify(model, torch.randn(2, 3, 64, 64, device="cuda"), check="off")


def graphed(net, autocast=True):
    state = copy.deepcopy(net.state_dict())
    with cast(autocast):
        net = torch.cuda.make_graphed_callables(net, (torch.randn(2, 3, 64, 64, device="cuda"),))
    net.load_state_dict(state)  # warming up has moved the running statistics
    return net


@pytest.mark.parametrize("autocast", [False, True])
def test_the_same_training(autocast, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)  # rounding would grow
    torch.manual_seed(0)
    eager = reversified(timm.create_model("resnet26", num_classes=10))
    captured = graphed(copy.deepcopy(eager), autocast)
    expected, found = trained(eager, autocast=autocast), trained(captured, autocast=autocast)
    torch.testing.assert_close(found, expected, rtol=0.03, atol=0.03)
    assert torch.equal(captured.bn1.num_batches_tracked, eager.bn1.num_batches_tracked)
    torch.testing.assert_close(
        captured.bn1.running_mean, eager.bn1.running_mean, rtol=0.02, atol=0.02
    )
