"""find: every kind of shortcut, and every refusal, in small models written out."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from nets import module_of
from torch import Tensor, nn

import revcompile
from revcompile.compiler.capture import capture
from revcompile.compiler.find import Found, find
from revcompile.ir.types import ResidualKind

Forward = Callable[[Any, Tensor], Tensor]


def model(forward: Forward) -> nn.Module:
    """A few layers, and a forward given from outside."""
    convs = {name: nn.Conv2d(4, 4, 3, padding=1) for name in "fgh"}
    convs |= {"down": nn.Conv2d(4, 8, 3, 2, 1), "skip": nn.Conv2d(4, 8, 1, 2)}
    others = {"wide": nn.Conv2d(8, 8, 3, padding=1), "norm": nn.BatchNorm2d(4)}
    others |= {"relu": nn.ReLU(inplace=True), "identity": nn.Identity()}
    return module_of(forward, **convs, **others, scale=nn.Parameter(torch.ones(4, 1, 1)))


def _find(forward: Forward) -> Found:
    return find(capture(model(forward), torch.randn(2, 4, 8, 8), check="full"))


def _iadd(m: Any, x: Tensor) -> Tensor:
    shortcut = x
    x = m.g(m.relu(m.f(x)))
    x += shortcut
    return m.h(x)


def _post_activation(m: Any, x: Tensor) -> Tensor:
    x = m.relu(x + m.f(x))
    return m.relu(x + m.g(x))


def _dual_path(m: Any, x: Tensor) -> Tensor:
    whole = torch.cat([x, m.g(x)], dim=1)
    for _ in range(2):
        stream, rest = whole[:, :4], whole[:, 4:]
        whole = torch.cat([stream + m.f(m.wide(whole)[:, 4:]), rest], dim=1)
    return whole


IDENTITY, POST, PARALLEL, PROJECTED = (
    *(ResidualKind.IDENTITY, ResidualKind.POST_ACTIVATION),
    *(ResidualKind.PARALLEL, ResidualKind.PROJECTED),
)
ONE_SHORTCUT: dict[str, Forward] = {
    "plain": lambda m, x: x + m.f(x),
    "in place": _iadd,
    "identity module on the shortcut": lambda m, x: m.identity(x) + m.f(x),
    "method": lambda m, x: x.add(m.f(x)),
    "keywords": lambda m, x: torch.add(input=x, other=m.f(x)),
    "keywords of a scale": lambda m, x: torch.mul(x, other=m.scale) + m.f(x),
    "keywords of a part": lambda m, x: x + torch.cat(tensors=(m.f(x), x), dim=1)[:, :4],
    "sum, which begins with 0": lambda m, x: sum([x, m.f(x)]),
    "layer scale": lambda m, x: x + m.scale * m.f(x),
    "gate towards the branch": lambda m, x: x + m.scale * (m.f(x) - x),
    "permutes": lambda m, x: x + m.f(x).permute(0, 2, 3, 1).tanh().permute(0, 3, 1, 2),
    "windows": lambda m, x: x + m.f(x).view(x.shape[0] * 4, -1).softmax(1).view(x.shape),
    "learned scale on the shortcut": lambda m, x: x * m.scale + m.f(x),
    "a branch read elsewhere too": lambda m, x: torch.cat([x + (y := m.f(x)), m.g(y)], 1),
}
OTHERS: dict[str, tuple[Forward, list[ResidualKind]]] = {
    "post-activation": (_post_activation, [POST, POST]),
    "parallel": (lambda m, x: x + m.f(x) + m.g(x), [PARALLEL]),
    "the stream is a part of a wider value": (_dual_path, [IDENTITY, IDENTITY]),
    "two shortcuts of one input": (lambda m, x: (x + m.f(x)) * (x + m.g(x)), [IDENTITY, IDENTITY]),
    "projected": (
        lambda m, x: (y := m.skip(x) + m.wide(m.down(x))) + m.wide(y),
        [PROJECTED, IDENTITY],
    ),
}
ACCEPTED = {name: (forward, [IDENTITY]) for name, forward in ONE_SHORTCUT.items()} | OTHERS


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(name: str) -> None:
    forward, kinds = ACCEPTED[name]
    assert [r.kind for r in _find(forward).residuals] == kinds


REFUSED: dict[str, tuple[Forward, str]] = {
    "scaled by a number": (
        lambda m, x: x * 0.2 + m.f(x),
        "the shortcut is scaled by 0.2 before the add",
    ),
    "no shortcut": (lambda m, x: m.f(x) + m.g(x), "a sum of single layers"),
    "two branches": (
        lambda m, x: m.h(m.f(x)) + m.g(m.f(x)),
        "both summands transform it (2 and 2 layers)",
    ),
    "a formula": (lambda m, x: m.g(x + 0.5 * x**3), "the branch has no parameters"),
    "lonely projection": (
        lambda m, x: m.skip(x) + m.wide(m.down(x)),
        "a projected shortcut next to no reversible block",
    ),
    "part of a larger branch": (
        lambda m, x: x + m.g((y := m.h(x)) + m.f(y)),
        "part of the branch of",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_reason_in_plain_words(name: str) -> None:
    forward, reason = REFUSED[name]
    found = _find(forward)
    assert any(reason in str(refusal) for refusal in found.refusals), found.refusals


def test_a_chain_inside_a_large_shortcut_is_preferred_to_it() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = x + m.f(x)
        y = y + m.g(y)
        return x + y + m.h(y)

    kinds = [r.kind for r in _find(forward).residuals]
    assert kinds == [ResidualKind.IDENTITY] * 3


# -- sizes, types and devices of what is inside a branch -------------------------------------------


def _entangled(m: Any, x: Tensor) -> Tensor:
    """Each of the first two blocks reads the other's branch; the others are free of them."""
    x, y = m.h(x), m.norm(x)
    keys, values = m.f(x), m.g(y)
    x, y = x + m.f(keys * values), y + m.g(keys + values)
    for layer in (m.f, m.g):
        x = x + layer(x)
    return x * y


def _waiting(m: Any, x: Tensor) -> Tensor:
    """The first block reads the second one's branch, which reads nothing of the first."""
    x, y = m.h(x), m.norm(x)
    values = m.g(y)
    x = x + m.f(x) * values
    return x * (y + m.g(values))


def _positions(m: Any, x: Tensor) -> Tensor:
    """As T5: the first branch makes a bias for all of them, on its own device."""
    bias, x = None, m.h(x)
    for layer in (m.f, m.g):
        keys = layer(x)
        if bias is None:
            bias = m.scale * torch.arange(8, device=keys.device)
        x = x + keys * bias
    return x


def _typed(m: Any, x: Tensor) -> Tensor:
    """The type of the first branch is read by the next one."""
    x = m.h(x)
    keys = m.f(x)
    x = x + m.f(keys)
    return x + m.g(x).to(keys.dtype)


def _crossed(m: Any, x: Tensor) -> Tensor:
    """Cross-attention: keys of a value outside, and a mask of their type."""
    memory, x = m.norm(x), m.h(x)
    for layer, key in ((m.f, m.wide), (m.g, m.down)):
        keys = key(memory.repeat(1, 2, 1, 1) if key is m.wide else memory).mean((1, 2, 3), True)
        x = x + layer(x) * keys * (memory > 0).to(keys.dtype)
    return x


def test_a_value_on_the_device_of_one_branch_is_handed_on() -> None:
    first, second = _find(_positions).residuals
    assert first.extras == ("mul",) and second.sides == ("mul",) and not second.extras


def test_a_type_of_one_branch_that_the_next_one_reads() -> None:
    first, second = _find(_typed).residuals
    assert first.extras == ("f",) and not second.extras


def test_keys_whose_type_only_the_branch_reads_belong_to_it() -> None:
    found = _find(_crossed)
    assert [block.sides for block in found.residuals] == [("norm", "gt"), ("norm", "gt_1")]


def test_only_blocks_that_wait_for_each_other_are_given_up() -> None:
    found = _find(_entangled)
    assert len(found.residuals) == 3
    assert any("read each other" in str(refusal) for refusal in found.refusals)


def test_a_block_that_waits_for_another_comes_after_it() -> None:
    net = revcompile.reversify(model(_waiting), torch.randn(2, 4, 8, 8), check="full")
    assert [coupling.extras for coupling in net.rewired.couplings] == [("g",), ()]
    assert net.rewired.couplings[1].sides == ("g",)
