"""Stages that rebuild what they were given wrongly say so."""

from __future__ import annotations

import pytest
import torch
from nets import Residual
from torch import nn
from torch.nn import functional as F
from training import settings_of

import revcompile
from revcompile import TrainerOptions
from revcompile.errors import InversionError


def _staged(stages: int) -> revcompile.StagedModel:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 8), *(Residual(nn.Linear(8, 8)) for _ in range(6)), nn.Linear(8, 2)
    )
    return revcompile.petrafy(model, stages, torch.randn(3, 4))


def _train(net: revcompile.StagedModel, method: str, scale: float, **settings: object) -> None:
    trainer = net.trainer(
        lambda p: torch.optim.SGD(p, lr=0.01),
        F.cross_entropy,
        method=method,
        **settings_of(**settings),
    )
    with torch.no_grad():  # after compilation, which has compared gradients on its example
        for name, parameter in net.model.named_parameters():
            if "branch" in name:
                parameter.mul_(scale)
    for _ in range(4):
        trainer.step(torch.randn(3, 4), torch.tensor([0, 1, 0]))
    trainer.flush()


@pytest.mark.parametrize("method", ["petra", "petra_stashed", "reversible_backprop"])
@pytest.mark.parametrize("stages", [1, 3])
def test_streams_that_are_rebuilt_wrongly_are_refused(stages: int, method: str) -> None:
    net = _staged(stages)
    with pytest.raises(InversionError, match=r"stage \d reconstructs its input only"):
        _train(net, method, 1000.0)


def test_rounded_buffers_are_no_error() -> None:
    """An opaque layer between two chains: its input is kept in bfloat16, and sent back."""
    torch.manual_seed(0)
    chains = [[Residual(nn.Linear(8, 8)) for _ in range(3)] for _ in range(2)]
    model = nn.Sequential(*chains[0], nn.Linear(8, 8), nn.Tanh(), *chains[1])
    net = revcompile.petrafy(model, 4, torch.randn(3, 8))
    trainer = net.trainer(
        lambda p: torch.optim.SGD(p, lr=0.0),
        F.cross_entropy,
        method="petra_stashed",
        options=TrainerOptions(kept_input_dtype=torch.bfloat16),
    )
    for _ in range(6):
        trainer.step(torch.randn(3, 8), torch.tensor([0, 1, 0]))
    trainer.flush()


def test_small_inputs_that_averaged_couplings_round_are_no_error(
    recwarn: pytest.WarningsRecorder,
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(9, 8), *(Residual(nn.Linear(8, 8)) for _ in range(4)), nn.Linear(8, 2)
    )
    with torch.no_grad():
        model[0].weight.mul_(0.01)  # to multiples of 2 ** -13
    tokens = torch.randint(9, (16,))
    net = revcompile.petrafy(model, 3, tokens, policy="pretrained")
    trainer = net.trainer(
        lambda p: torch.optim.SGD(p, lr=0.01), F.cross_entropy, method="petra_stashed"
    )
    for _ in range(6):
        trainer.step(tokens, tokens % 2)
    trainer.flush()
    assert not [w for w in recwarn if "reconstructs" in str(w.message)]
