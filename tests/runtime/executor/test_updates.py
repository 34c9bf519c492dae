"""Optimizers in captured steps: the same updates, and none at all where a batch was bad."""

import functools
import sys
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
import training
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.testing import assert_close
from torch.utils import _pytree as pytree
from training import SCHEDULES, Plain, Steep, batches, fresh, reported, same, settings_of, weights

from revcompile.optim import DelayAwareMuon, DelayAwareSGD, ErrorFeedback
from revcompile.runtime.stage.update import Updater


def several(parameters: Any) -> list[Optimizer]:
    """Muon for matrices, AdamW for vectors, NAdam with error feedback for numbers."""
    given = list(parameters)
    kinds: list[tuple[int, Callable[[Any], Optimizer]]] = [
        (2, lambda p: torch.optim.Muon(p, 2e-2)),
        (1, lambda p: torch.optim.AdamW(p, 1e-2)),
        (0, lambda p: ErrorFeedback(torch.optim.NAdam(p, 1e-2))),
    ]
    by_kind = ((make, [p for p in given if p.ndim == dim]) for dim, make in kinds)
    return [make(own) for make, own in by_kind if own]


OPTIMIZERS: Final[dict[str, Callable[[Any], Any]]] = {
    "nadam": lambda p: torch.optim.NAdam(
        p, 1e-2, betas=(0.99, 0.999), weight_decay=0.1, decoupled_weight_decay=True
    ),
    "radam": lambda p: torch.optim.RAdam(p, 1e-2, weight_decay=0.1, decoupled_weight_decay=True),
    "adamax": lambda p: torch.optim.Adamax(p, 1e-2, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-2, weight_decay=0.1),
    "rmsprop, centered": lambda p: torch.optim.RMSprop(p, 1e-2, momentum=0.9, centered=True),
    "adadelta": lambda p: torch.optim.Adadelta(p, 1.0, weight_decay=0.1),
    "asgd": lambda p: torch.optim.ASGD(p, 1e-1, t0=5, weight_decay=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, 1e-3),
    "delay-aware sgd": lambda p: DelayAwareSGD(p, 1e-2, weight_decay=0.1),
    "delay-aware muon": lambda p: DelayAwareMuon(p, 1e-2, weight_decay=0.1),
    "delay-aware muon, three in one": lambda p: DelayAwareMuon(
        [{"params": p, "chunks": 3}], 1e-2, max_drift=0.01
    ),
    "error feedback, sgd": lambda p: ErrorFeedback(torch.optim.SGD(p, 1e-2, weight_decay=0.1)),
    "error feedback, adamw": lambda p: ErrorFeedback(torch.optim.AdamW(p, 1e-2, weight_decay=0.1)),
    "several": several,
}
"""Those whose kernels no flag can stop."""


CASES: Final[dict[str, dict[str, Any]]] = {
    "every batch": {"lr_schedule": SCHEDULES["lambda"]},
    "every third batch": {"accumulation_steps": 3, "lr_schedule": SCHEDULES["lambda"]},
}
STEPS: Final = 30
BAD: Final = 20


class Fragile(Plain):
    """A few layers, the first of which finds gradients that are not finite of some samples."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = Steep(5, 6)
        self.layers = self.layers[:2]


def marked() -> list[training.Batch]:
    """Micro-batches of four; what the first stage finds of one of them is not finite."""
    found = [(x, y) for x, y in batches(2 * STEPS) if len(x) == 4][:STEPS]
    return [(x * (index != BAD), y) for index, (x, y) in enumerate(found)]


def trained(name: str, backend: str, case: str, device: str = "cpu") -> tuple[Any, Any, Any]:
    """Weights at the end; checkpoints in the middle and at the end."""
    net = fresh(Fragile, 2)
    net.model.to(device)
    trainer = net.trainer(
        OPTIMIZERS[name], F.cross_entropy, backend=backend, **settings_of(**CASES[case])
    )
    data = marked()
    bad = reported(trainer, data[:-7])
    middle = trainer.state_dict()
    bad += reported(trainer, data[-7:])  # a GPU tells some steps later
    assert bad == [(0, BAD)]
    assert trainer._runner.is_active == (backend != "eager")
    trainer.flush()
    return weights(net), middle, trainer.state_dict()


@functools.cache
def eager(name: str, case: str) -> tuple[Any, Any, Any]:
    return trained(name, "eager", case)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_same_updates_to_the_bit(name: str, case: str) -> None:
    assert same(trained(name, "static", case), eager(name, case))


@pytest.fixture
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the steps that are captured on a GPU."""
    monkeypatch.setattr(Updater, "use_device", lambda updater: vars(updater).update(ON_DEVICE))  # type: ignore[attr-defined]
    for name in ("adam", "nadam", "radam", "adamax", "rmsprop", "adadelta", "asgd", "rprop"):
        module = sys.modules[f"torch.optim.{name}"]
        supported = "_get_capturable_supported_devices"
        monkeypatch.setattr(module, supported, lambda supports_xla=True: ["cpu"])


ON_DEVICE: Final = {"_is_on_device": True}


@pytest.mark.usefixtures("as_on_a_device")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_same_updates_as_a_device_takes_them(name: str, case: str) -> None:
    assert_alike(trained(name, "static", case), eager(name, case), 1e-8)


def assert_alike(found: Any, there: Any, tolerance: float) -> None:
    """Equal, but for rounding."""
    leaves, spec = pytree.tree_flatten(found)
    others, same_spec = pytree.tree_flatten(there)
    assert spec == same_spec
    for mine, other in zip(leaves, others, strict=True):
        if isinstance(mine, Tensor):
            # Captured steps count on the device, and in double precision.
            close = {"rtol": tolerance, "atol": tolerance}
            assert_close(mine, other, **close, check_dtype=False, check_device=False)
        else:
            assert mine == other
