"""Stages that rebuild what they were given wrongly say so."""

import pytest
import torch
from nets import Residual
from torch import nn
from torch.nn import functional as F
from training import trained

import revcompile
from revcompile.errors import InversionError
from tests.recorded import standing_still


@pytest.mark.parametrize("method", ["petra", "petra_stashed", "reversible_backprop"])
@pytest.mark.parametrize("stages", [1, 3])
def test_streams_that_are_rebuilt_wrongly_are_refused(stages: int, method: str) -> None:
    blocks = [Residual(nn.Linear(8, 8)) for _ in range(6)]
    model = nn.Sequential(nn.Linear(4, 8), *blocks, nn.Linear(8, 2))
    net = revcompile.petrafy(model, stages, torch.randn(3, 4))
    with torch.no_grad():  # after compilation, which has compared gradients on its example
        for name, parameter in net.model.named_parameters():
            if "branch" in name:
                parameter.mul_(1000.0)
    data = [(torch.randn(3, 4), torch.tensor([0, 1, 0])) for _ in range(4)]
    with pytest.raises(InversionError, match=r"stage \d reconstructs its input only"):
        trained(net, data, method=method, loss=F.cross_entropy)


def test_rounded_buffers_are_no_error() -> None:
    """An opaque layer between two chains: its input is kept in bfloat16, and sent back."""
    chains = [[Residual(nn.Linear(8, 8)) for _ in range(3)] for _ in range(2)]
    model = nn.Sequential(*chains[0], nn.Linear(8, 8), nn.Tanh(), *chains[1])
    net = revcompile.petrafy(model, 4, torch.randn(3, 8))
    data = [(torch.randn(3, 8), torch.tensor([0, 1, 0])) for _ in range(6)]
    settings = {"loss": F.cross_entropy, "kept_input_dtype": torch.bfloat16}
    trained(net, data, standing_still, method="petra_stashed", **settings)


def test_rounded_small_inputs_are_no_error(recwarn: pytest.WarningsRecorder) -> None:
    model = nn.Sequential(
        nn.Embedding(9, 8), *(Residual(nn.Linear(8, 8)) for _ in range(4)), nn.Linear(8, 2)
    )
    with torch.no_grad():
        model[0].weight.mul_(0.01)  # to multiples of 2 ** -13
    tokens = torch.randint(9, (16,))
    net = revcompile.petrafy(model, 3, tokens, policy="pretrained")
    trained(net, [(tokens, tokens % 2)] * 6, method="petra_stashed", loss=F.cross_entropy)
    assert not [w for w in recwarn if "reconstructs" in str(w.message)]
