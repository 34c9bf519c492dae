"""The forms of a batch that `step`, `steps` and `evaluate` take; all give the same numbers."""

from collections import UserDict
from collections.abc import Callable
from typing import Any

import torch
from helpers import cases, refuses
from nets import module_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from training import Plain, batches, feed, fresh, plain_sgd, same, trainer_of, weights

import revcompile
from revcompile.errors import InputError
from revcompile.runtime.trainer.trainer import Trainer

X, Y = batches(1)[0]
MASK = torch.linspace(0, 1, 5, dtype=torch.float64)


def masked(loss: Any) -> revcompile.StagedModel:
    """Takes `x` and `mask`; returns its own loss if there is no other."""

    def forward(self: Any, x: Tensor, mask: Tensor) -> Tensor:
        y = self.net(x * mask)
        return y if loss else y.square().mean()

    torch.manual_seed(0)
    model = module_of(forward, net=Plain()).double()
    return revcompile.petrafy(model, 2, (X, MASK), check="off")


ALONE: list[Any] = [
    (X, MASK),
    [X, MASK],
    ((X, MASK), None),
    {"x": X, "mask": MASK},
    UserDict(x=X, mask=MASK),  # as tokenizers and their collators return
    (UserDict(x=X, mask=MASK), None),
]
PAIRS: list[Any] = [
    ((X, MASK), Y),
    [X, MASK, Y],
    (X, MASK, Y),
    ({"x": X, "mask": MASK}, Y),
    (UserDict(x=X, mask=MASK), Y),
]


@cases("loss, forms", (None, ALONE), (F.cross_entropy, PAIRS), ids=["own loss", "loss"])
def test_all_forms_are_the_same_batch(loss: Any, forms: list[Any]) -> None:
    net, expected = masked(loss), None
    start = weights(net)
    for batch in forms:
        net.model.load_state_dict(start)
        trainer = trainer_of(net, plain_sgd, loss)
        before = trainer.evaluate([batch]).loss
        losses = [metrics.loss for metrics in trainer.steps([batch] * 3)]
        trainer.flush()
        found = before, losses, trainer.evaluate(iter([batch])).loss, weights(net)
        expected = expected or found
        assert same(found, expected), batch


def test_step_copies_what_a_mapping_holds() -> None:
    expected, trainer = (trainer_of(masked(None), plain_sgd, None) for _ in range(2))
    data = [(X + i, MASK) for i in range(4)]
    losses = [metrics.loss for metrics in expected.steps(data)]
    x = X.clone()
    found = []
    for given, _ in data:
        found.append(trainer.step(UserDict(x=x.copy_(given), mask=MASK)).loss)
        x.fill_(torch.nan)
    assert found == losses


def test_tensors_alone_and_a_loader_of_them() -> None:
    model = module_of(lambda self, x: self.net(x).square().mean(), net=Plain()).double()
    trainer = revcompile.petrafy(model, 2, X, check="off").trainer(plain_sgd, None)
    want = [trainer.evaluate([x]).loss for x in (X, X[:2])]
    loader = DataLoader(TensorDataset(X), 2)
    assert [metrics.samples for metrics in trainer.steps([X, (X,), *loader])] == [4, 4, 2, 2]
    assert len(want) == 2 and trainer.evaluate(loader).samples == 4


@cases(
    "name, call",
    ("trainer.steps", lambda t, batch: next(t.steps([batch]))),
    ("trainer.evaluate", lambda t, batch: t.evaluate([batch])),
)
def test_errors_name_the_method(name: str, call: Callable[[Trainer, Any], Any]) -> None:
    trainer = trainer_of(fresh(Plain, 2))
    said = rf"^{name}: expected batches of \(inputs, target\), got "
    refuses(InputError, said + r"float64\[4, 5\]$", call, trainer, X)
    refuses(InputError, said + r"\(float64\[4, 5\],\)$", call, trainer, (X,))


def test_errors_print_shapes_of_tensors_in_any_object() -> None:
    trainer = trainer_of(fresh(Plain, 2))
    given = {"x": UserDict(ids=X), "other": nn.ParameterList([X])}
    refuses(
        InputError,
        r"UserDict\(\{'ids': float64\[4, 5\]\}\), 'other': ParameterList",
        trainer.step,
        given,
        Y,
    )
    assert feed(trainer, [(X, Y)])
