"""Stages read rebuilt streams with the strides of forward: dropout draws in memory order."""

import torch
from helpers import cases, worst
from nets import Dropped
from torch import Tensor
from torch.nn import functional as F
from training import trained, weights

import revcompile

LAST = torch.channels_last
IMAGES = torch.randn(4, 3, 5, 5, dtype=torch.float64)
LAYOUTS = {"contiguous": IMAGES, "channels last": IMAGES.to(memory_format=LAST)}


def weights_after(
    data: list[Tensor], policy: str, stages: int, convs: int, layout: str, **options: str
) -> dict[str, Tensor]:
    """The weights of a net that was compiled with an example of this layout."""
    torch.manual_seed(0)
    net = revcompile.petrafy(Dropped(convs).double(), stages, LAYOUTS[layout], policy=policy)
    batches = [(x, torch.zeros(len(x), 25, 4).double()) for x in data]
    trained(net, batches, loss=F.mse_loss, seed=3, **options)
    return weights(net)


@cases(
    "policy, stages, convs, layout",
    *(("pretrained", 1, 0, "channels last"), ("pretrained", 3, 3, "contiguous")),
    ("paper", 2, 3, "contiguous"),
)
def test_dropout_is_replayed_in_every_layout(
    policy: str, stages: int, convs: int, layout: str
) -> None:
    data = [x[:count] for x in LAYOUTS.values() for count in (4, 1)]
    for reference, method in (("backprop", "reversible_backprop"), ("pipedream", "petra_stashed")):
        want = weights_after(data, policy, stages, convs, layout, method=reference)
        found = weights_after(data, policy, stages, convs, layout, method=method)
        assert worst(want, found)[0] < 1e-10


@cases("convs", 0, 3)
def test_captured_steps_replay_dropout(convs: int) -> None:
    made = list(torch.randn(8, 4, 3, 5, 5).double()), "pretrained", 2, convs, "channels last"
    want = weights_after(*made, method="backprop")
    found = weights_after(*made, method="reversible_backprop", backend="static")
    assert worst(want, found)[0] < 1e-10
