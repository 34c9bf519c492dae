"""Activation memory does not grow with depth. Bytes are counted, so every run sees the same."""

import torch
from helpers import cases

import revcompile
from tests.support.measuring import LiveStorages, Memory, slope, step_memory
from tests.support.stacks import KINDS, Sizes, batch_of

CPU = torch.device("cpu")
DEPTHS = (2, 6)
SIZES = {
    "transformer": Sizes(depth=0, width=32, side=32, batch=8),
    "conv": Sizes(depth=0, width=8, side=16, batch=4),
}

WORD = 4  # bytes of a float32
ALLOWED = 0.001  # of what a block adds to the plain model; the project's bar is 0.05


def growth(memories: dict[int, Memory], of: str) -> float:
    """Bytes per added block."""
    return slope(list(memories), [getattr(memory, of) for memory in memories.values()])


@cases("kind, policy", ("transformer", "paper"), ("conv", "same_parameters"))
def test_a_block_adds_nothing(kind: str, policy: str) -> None:
    """Not even its parameters' gradients, which once waited in backward for the chain's end."""
    x, y = batch_of(kind, SIZES[kind], CPU)
    plain, ours = {}, {}
    for depth in DEPTHS:
        model = KINDS[kind](depth, SIZES[kind].width)
        net = revcompile.reversify(model, x[:2], policy=policy, check="off")
        plain[depth] = step_memory(model, x, y, CPU)
        ours[depth] = step_memory(net, x, y, CPU)
    for of in ("held", "peak"):
        assert growth(ours, of) < ALLOWED * growth(plain, of), (of, plain, ours)


def test_live_storages_counts_what_is_alive_and_made_under_it() -> None:
    before = torch.ones(1000)
    with LiveStorages() as storages:
        view = before.view(10, 100)
        made = view + 1
        assert storages.live == 1000 * WORD
        part = made[0]
        other = made * 2
        assert storages.live == 2000 * WORD
        del made, other
        assert storages.live == 1000 * WORD  # `part` holds on to the whole of `made`
        del part
    assert (storages.live, storages.peak) == (0, 2000 * WORD)
