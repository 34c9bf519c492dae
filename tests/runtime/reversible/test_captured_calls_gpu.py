"""Captured calls on a GPU: the same training as without, and what cannot be captured."""

import copy

import pytest
import timm
import torch
from torch import nn
from torch.nn import functional as F

import revcompile
from revcompile.errors import RevcompileWarning

pytestmark = pytest.mark.gpu


def trained(net, steps=8, autocast=True):
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    losses = []
    for step in range(steps):
        x = torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(step)).cuda()
        for part in x.chunk(2):
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                loss = F.cross_entropy(net(part), torch.arange(2, device="cuda"))
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses)


def both(model):
    model = model.cuda().train().to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 64, 64, device="cuda")
    eager = revcompile.reversify(model, x, check="off")
    captured = revcompile.reversify(model, x, check="off", backend="cudagraphs")
    captured.load_state_dict(eager.state_dict())
    return eager, captured


@pytest.mark.parametrize("autocast", [False, True])
def test_the_same_training(autocast):
    torch.manual_seed(0)
    eager, captured = both(timm.create_model("resnet26", num_classes=10))
    expected, found = trained(eager, autocast=autocast), trained(captured, autocast=autocast)
    assert len(captured._captured_calls._captured) == 1
    torch.testing.assert_close(found, expected, rtol=0.03, atol=0.03)
    assert torch.equal(captured.bn1.num_batches_tracked, eager.bn1.num_batches_tracked)
    torch.testing.assert_close(
        captured.bn1.running_mean, eager.bn1.running_mean, rtol=0.02, atol=0.02
    )


def test_stochastic_depth_draws_anew_in_each_call():
    torch.manual_seed(0)
    _, net = both(timm.create_model("resnet26", num_classes=10, drop_path_rate=0.5))
    trained(net, 3)
    assert net._captured_calls._captured
    x, found = torch.randn(2, 3, 64, 64, device="cuda"), []
    with torch.autocast("cuda", torch.bfloat16):
        for _ in range(4):
            y = net(x)
            y.float().square().sum().backward()
            found.append(y.detach())
    assert len({float(y.sum()) for y in found}) > 1


def test_dropout_inside_a_branch_is_left_as_it_is():
    class Dropped(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)

        def forward(self, x):
            x = x + F.dropout(self.first(x), 0.5, self.training)
            return (x + self.second(x)).mean((2, 3))

    _, net = both(Dropped())
    with pytest.warns(RevcompileWarning, match="dropout"):
        trained(net, 3)
    before = copy.deepcopy(net.state_dict())
    trained(net, 2)  # random numbers and streams are as they were
    assert not torch.equal(before["first.weight"], net.first.weight)
