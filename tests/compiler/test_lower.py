"""lower: what each stage keeps, needs back and sends back, and the code it runs."""

import functools
import itertools
from typing import Final

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from training import plain_sgd

import revcompile
from revcompile.ir.program import StageProgram
from revcompile.schedule import METHODS, Keep, choose


class Sided(nn.Module):
    """Stem | block | block gated by the stem's output | block | head, a mask at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.gate = nn.Linear(5, 6), nn.Linear(6, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.stem(x)
        gate = torch.sigmoid(self.gate(x))
        x = x + torch.tanh(self.blocks[0](x))
        x = x + torch.tanh(self.blocks[1](x) * gate)
        x = x + torch.tanh(self.blocks[2](x))
        return self.head(x * mask)


@functools.cache
def sided() -> revcompile.StagedModel:
    torch.manual_seed(0)
    inputs = torch.randn(4, 5), torch.rand(4, 1)
    return revcompile.petrafy(Sided(), 5, inputs, check="off", policy="same_parameters")


def programs(method: str) -> tuple[StageProgram, ...]:
    net = sided()
    chosen = choose(method)
    return tuple(
        executor.program
        for executor in net.trainer(plain_sgd, F.mse_loss, method=chosen)._executors
    )


def crossing(program: StageProgram) -> list[str]:
    return [port.name for port in program.inputs]


# -- what is kept ---------------------------------------------------------------------------------


def test_values_that_cross_stage_boundaries() -> None:
    """The mask from the first stage to the last, the stem's output up to the gated block."""
    assert [crossing(program) for program in programs("petra")] == [
        ["x", "mask"],
        ["stem_a", "stem_b", "mask", "stem"],
        ["add_a", "add_b", "stem_a_grid", "mask", "stem"],
        ["add_1_a", "add_1_b", "stem_a_grid", "mask"],
        ["add_2_a", "add_2_b", "mask"],
    ]


def test_petra_keeps_what_the_next_stage_does_not_send_back() -> None:
    found = programs("petra")
    assert [program.kept for program in found] == [
        ("x",),  # opaque: its input
        (),
        ("stem",),  # read by the block, and not sent on
        ("stem_a_grid",),  # the last block of the chain
        # opaque and last: its graph, and what the block before needs back
        ("head graph", "add_2_a leaf 0", "add_2_b leaf 0", "add_2_a", "add_2_b"),
    ]
    assert [program.needs_back for program in found] == [
        (),
        ("add_a", "add_b", "stem_a_grid"),
        ("add_1_a", "add_1_b", "stem_a_grid"),
        ("add_2_a", "add_2_b"),
        (),
    ]
    assert [program.reversible for program in found] == [False, True, True, True, False]


@pytest.mark.parametrize("method", METHODS)
def test_what_a_stage_needs_back_the_next_one_sends(method: str) -> None:
    found = programs(method)
    assert found[0].sends_back == ()
    assert found[-1].needs_back == ()
    for before, after in itertools.pairwise(found):
        assert before.needs_back == after.sends_back
        assert before.outputs == after.inputs
        assert set(before.needs_back) <= set(crossing(after))


@pytest.mark.parametrize(
    ("method", "keep"),
    [(name, method.keep) for name, method in METHODS.items() if method.keep is not Keep.NOTHING],
)
def test_other_methods_keep_the_stage_as_one(method: str, keep: Keep) -> None:
    for program in programs(method):
        assert [unit.keep for unit in program.units] == [keep]
        assert program.needs_back == program.sends_back == ()
        if keep is Keep.INPUT:
            read = {name for name in crossing(program) if name in program.kept}
            assert set(program.kept) == read
        else:
            assert all(" graph" in name or " leaf " in name for name in program.kept)


# -- the code -------------------------------------------------------------------------------------

BLOCK: Final = """\
# stage 3 of 5, petra
#   takes  a = add_1_a: float32[B, 6]
#   takes  b = add_1_b: float32[B, 6]
#   takes  grid = stem_a_grid: unit of the fixed-point grid of a and b, or None
#   takes  mask: float32[B, 1]
#   gives  a = add_2_a: float32[B, 6]
#   gives  b = add_2_b: float32[B, 6]
#   gives  mask: float32[B, 1]
#   keeps  stem_a_grid
"""


def test_the_code_of_a_stage_reads_like_the_paper() -> None:
    text = sided().stages[3].code
    assert text.startswith(BLOCK)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    for line in [
        "blocks_2 = self.blocks[2](x)",
        "tanh_2 = torch.tanh(blocks_2)",
        "a, b = b, plus(a, blocks_2(self, b), grid) # blocks.2",
        "a, b, da, db = uncouple(blocks_2, self, a, b, da, db, grid, grads) # blocks.2",
    ]:
        assert line in lines, line
