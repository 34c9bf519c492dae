"""What a rank does in the tests of targets that go from rank to rank."""

import functools
from collections.abc import Callable
from typing import Any, Final

import torch
from distributed_worker import final
from helpers import refilling
from nets import Residuals
from torch import Tensor
from torch.nn import functional as F
from training import settings_of

import revcompile

IGNORED: Final = (object(), {"no": "data"})
"""What other ranks pass to a step."""


class Rows(Residuals):
    """Five numbers for each row."""

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.chain(self.stem(x)))
        return logits


def of_tree(output: Tensor, target: Any) -> Tensor:
    """A loss that reads every leaf of a nested target."""
    mask, (weight, nothing) = target["of rows"]
    assert nothing is None and target["reduction"] == "sum" and weight.dtype is torch.float16
    losses = F.cross_entropy(output, target["label"], reduction="none")
    shift = target["shift"].real * target["factor"]
    others = (output @ target["transposed"]).square().mean()
    loss: Tensor = (losses * weight * mask + shift).sum() + others
    return loss


def of_parts(output: Tensor, target: Any) -> Tensor:
    """Of a target with one tensor of its own length for each row."""
    rows = zip(output, target, strict=True)
    return torch.stack([(row.sum() - part.sum()).square() for row, part in rows]).mean()


def tree(count: int) -> Any:
    return {
        "label": torch.randint(0, 5, (count,)),
        "of rows": [torch.rand(count) > 0.3, (torch.rand(count).half(), None)],
        "shift": torch.randn((), dtype=torch.complex64),
        "transposed": torch.randn(2, 5).t(),
        "reduction": "sum",
        "factor": 0.5,
    }


TARGETS: Final[dict[str, tuple[Callable[[int], Any], Callable[[Any, Any], Tensor]]]] = {
    "integers": (lambda n: torch.randint(0, 5, (n,)), F.cross_entropy),
    "floats": (lambda n: torch.randn(n, 5, dtype=torch.float64), F.mse_loss),
    "none": (lambda n: None, lambda output, _: output.square().mean()),
    "one row for all": (lambda n: torch.randn(1, 5).expand(n, 5), F.mse_loss),
    "tree": (tree, of_tree),
    "another form each time": (
        lambda n: [torch.randn(int(torch.randint(0, 4, ()))) for _ in range(n)],
        of_parts,
    ),
}


def net_of(stages: int, device: str = "cpu") -> Any:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Rows(3).to(device)
    return revcompile.petrafy(model, stages, torch.randn(2, 7, device=device), check="off")


def data_of(kind: str, steps: int) -> list[tuple[Tensor, Any]]:
    """Micro-batches of three samples; one of them, and the last, have two."""
    torch.manual_seed(1)
    sizes = [2 if number in (5, steps - 1) else 3 for number in range(steps)]
    return [(torch.randn(size, 7), TARGETS[kind][0](size)) for size in sizes]


def trained_on(kind: str, stages: int, device: str = "cpu", **settings: Any) -> Any:
    """Losses, samples and which steps were captured; an evaluation; and the weights."""
    net, loss = net_of(stages, device), TARGETS[kind][1]
    sgd = functools.partial(torch.optim.SGD, lr=1e-3)
    trainer = net.trainer(sgd, loss, **settings_of(**settings, timeout=60.0))
    data, losses, samples, captured = data_of(kind, 16), [], [], []
    for batch in data:
        given = batch if trainer.is_first else IGNORED
        metrics = refilling(trainer.step, *given)
        losses.append(metrics.loss)
        samples.append(metrics.samples)
        captured.append(trainer._runner.is_active)
    trainer.flush()
    evaluated = trainer.evaluate(data[-3:] if trainer.is_first else None)
    found = {"losses": losses, "samples": samples, "captured": captured}
    return {**found, "evaluated": evaluated.loss, "state": final(net, trainer)}
