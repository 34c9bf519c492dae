"""partition: legal cuts only, as even as they can be, within memory, tied layers together."""

import copy
import dataclasses
import itertools
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from training import Plain

import revcompile
from revcompile.compiler.cost import MemoryModel, Workload
from revcompile.compiler.partition.partition import Pieces, partition
from revcompile.errors import InputError
from revcompile.ir.program import Partition
from revcompile.ir.types import Cost
from revcompile.schedule import Keep, choose
from tests.support.comparing import staged_error


class Chain(Plain):
    """A stem, blocks of one layer each, and a head: one piece each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.append(nn.Linear(6, 6))


class Opaques(nn.Module):
    """No shortcut, but branches that rejoin, a tuple of tensors, a value read far away."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right = (nn.Linear(6, 6) for _ in range(3))
        self.both = nn.Linear(12, 6)
        self.lstm = nn.LSTM(6, 6, batch_first=True)
        self.last, self.out = nn.Linear(6, 6), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.first(x))
        far = torch.sin(x)
        left, right = torch.tanh(self.left(x)), torch.tanh(self.right(x))
        x = self.both(torch.cat((left, right), -1)).tanh()
        found = self.lstm(x)
        x = self.last(found[0]) * found[1][0][0][:, None]
        return self.out(torch.cat((x, far), -1)), x


class Vgg(nn.Sequential):
    def __init__(self) -> None:
        super().__init__()
        for index, (before, after) in enumerate(itertools.pairwise((3, 4, 4, 8, 8))):
            self.add_module(f"conv{index}", nn.Conv2d(before, after, 3, padding=1))
            self.add_module(f"norm{index}", nn.BatchNorm2d(after))
            self.add_module(f"relu{index}", nn.ReLU(inplace=True))
        self.add_module("flat", nn.Flatten())
        self.add_module("head", nn.Linear(8 * 16, 3))


def cut(model: nn.Module, stages: int, *inputs: Tensor, **options: Any) -> Partition:
    return revcompile.petrafy(model, stages, inputs, check="off", **options)._partition


def weighed(
    model: nn.Module,
    stages: int,
    x: Tensor,
    work: dict[str, float],
    *,
    keep: list[Keep] | None = None,
    batch: int = 2,
    **budget: Any,
) -> Partition:
    """Cut with this work of each segment, divided among its pieces by what is counted."""
    pieces = Pieces.of(cut(model, 1, x).rewired)
    costs, rest = list[Cost](), iter(pieces.costs)
    for segment, group in zip(pieces.rewired.body.segments, pieces.groups, strict=True):
        counted = [next(rest) for _ in group]
        own = [cost.forward + cost.backward or 1e-300 for cost in counted]
        for cost, flops in zip(counted, own, strict=True):
            share, forward = work[segment.name] * flops / sum(own), cost.forward / flops or 0.25
            parts = {"forward": share * forward, "backward": share * (1 - forward)}
            costs.append(dataclasses.replace(cost, **parts))
    pieces = dataclasses.replace(pieces, costs=tuple(costs))
    return partition(pieces, stages, Workload(choose("petra"), batch), keeps=keep, **budget)


def names(partition: Partition) -> list[list[str]]:
    return [[piece.name for piece in part.pieces] for part in partition.parts]


def sizes(partition: Partition) -> list[int]:
    return [len(part.pieces) for part in partition.parts]


def work(partition: Partition) -> list[float]:
    """Both passes and an update; the last stage does not compute its opaque pieces again."""
    *_, last = partition.parts
    pairs = zip(last.pieces, last.costs, strict=True)
    spared = sum(cost.forward for piece, cost in pairs if not piece.reversible)
    found = [sum(c.forward + c.backward + c.update for c in p.costs) for p in partition.parts]
    return [*found[:-1], found[-1] - spared]


# -- where it may be cut --------------------------------------------------------------------------


@pytest.mark.parametrize("stages", range(1, 7))
def test_torn_segments_compute_the_same(stages: int) -> None:
    x = torch.randn(2, 4, 6, dtype=torch.float64)
    net = revcompile.petrafy(Opaques().double(), stages, x, check="off")
    assert staged_error(net, [x, x.flip(0)]) < 1e-10


def test_a_model_without_shortcuts_is_cut_before_its_layers() -> None:
    x = torch.randn(2, 3, 4, 4)
    assert names(cut(Vgg(), 5, x)) == [
        ["stem: conv0"],
        ["stem: conv1"],
        ["stem: conv2"],
        ["stem: conv3"],
        ["stem: head"],
    ]
    assert cut(Vgg(), 1, x).parts[0].pieces[0].name == "stem"


def test_segments_stay_whole_unless_tearing_helps() -> None:
    """Two layers before the blocks: one piece if they are light, two if they are heavy."""

    class Stem(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh())

    light = {"stem": 2.0, "head": 1.0, **{f"layers.{i}": 1.0 for i in range(5)}}
    assert names(weighed(Stem(), 3, torch.randn(2, 6), light))[0][0] == "stem"
    heavy = {**light, "stem": 18.0}
    assert names(weighed(Stem(), 3, torch.randn(2, 6), heavy)) == [
        ["stem: stem.0"],
        ["stem: stem.2"],
        ["layers.0", "layers.1", "layers.2", "layers.3", "layers.4", "head"],
    ]


def test_too_many_stages() -> None:
    with pytest.raises(InputError) as raised:
        cut(Chain(), 8, torch.randn(2, 5))
    assert str(raised.value) == (
        "petrafy: num_stages=8, but Chain has 7 pieces that can stand alone (5 of them reversible "
        "blocks); use num_stages <= 7. The pieces are: stem, layers.0, layers.1, layers.2, "
        "layers.3, layers.4, head"
    )
    assert sizes(cut(Chain(), 7, torch.randn(2, 5))) == [1] * 7


# -- balance --------------------------------------------------------------------------------------


def test_heavy_pieces_have_stages_of_their_own() -> None:
    x = torch.randn(2, 5)
    first_is_heavy = {"stem": 10.0, "head": 1.0, **{f"layers.{i}": 1.0 for i in range(5)}}
    assert sizes(weighed(Chain(), 2, x, first_is_heavy)) == [1, 6]
    late_is_heavy = {**first_is_heavy, "stem": 1.0, "layers.4": 9.0}
    assert sizes(weighed(Chain(), 2, x, late_is_heavy)) == [5, 2]


def test_measured_costs_change_nothing() -> None:
    model, x, generator = Chain(), torch.randn(2, 5), torch.get_rng_state()
    before = copy.deepcopy(model.state_dict())
    measured = cut(model, 2, x, cost="measured")
    assert torch.equal(generator, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert sum(sizes(measured)) == 7


# -- memory ---------------------------------------------------------------------------------------


def needs(partition: Partition, batch: int) -> list[int]:
    """Bytes of every stage."""
    model = MemoryModel(partition, Workload(choose("petra"), batch))
    ends = list(itertools.accumulate(sizes(partition)))
    spans = itertools.pairwise((0, *ends))
    return [model.stage(index, start, end).total for index, (start, end) in enumerate(spans)]


def test_a_memory_limit_moves_the_cuts() -> None:
    """The work is even with one heavy layer in front; memory is not."""
    x = torch.randn(2, 5)
    heavy = {"stem": 4.0, "head": 1.0, **{f"layers.{i}": 1.0 for i in range(5)}}
    free = weighed(Chain(), 2, x, heavy, batch=64)
    largest = max(needs(free, 64))
    limit = largest - 1
    bound = weighed(Chain(), 2, x, heavy, memory_budget=limit, batch=64)
    assert sizes(bound) != sizes(free)
    assert max(needs(bound, 64)) <= limit
    assert max(work(bound)) > max(work(free))


def test_a_memory_limit_that_cannot_be_met() -> None:
    with pytest.raises(InputError) as raised:
        cut(Chain(), 2, torch.randn(2, 5), memory_budget=1000, microbatch_size=64)
    said = str(raised.value)
    assert said.startswith("petrafy: Chain does not fit 2 devices of 1000 B at 64 samples")
    assert "the most), and no other cut fits either. Use more stages" in said


# -- what stages will keep ------------------------------------------------------------------------

HEAVY_HEAD: Final = {"stem": 1.0, "head": 6.0, **{f"layers.{i}": 1.0 for i in range(5)}}
"""Of 4 parts of work 1 is spared where nothing is computed again: always, in a head."""


def test_stages_that_keep_graphs_are_balanced_by_what_they_then_compute() -> None:
    x = torch.randn(2, 5)
    rebuilt = weighed(Chain(), 2, x, HEAVY_HEAD)
    kept = weighed(Chain(), 2, x, HEAVY_HEAD, keep=[Keep.GRAPH] * 2)
    assert (sizes(rebuilt), sizes(kept)) == ([5, 2], [6, 1])
    assert [sum(rebuilt.works(part)) for part in rebuilt.parts] == work(rebuilt) == [5.0, 5.5]
    assert [sum(kept.works(part)) for part in kept.parts] == [4.5, 4.5]
    graphs = [sum(rebuilt.works(part, Keep.GRAPH)) for part in rebuilt.parts]
    assert graphs == [3.75, 5.25]
    keep = [Keep.NOTHING, Keep.GRAPH]
    mixed = weighed(Chain(), 2, x, dict.fromkeys(HEAVY_HEAD, 1.0), keep=keep)
    assert (sizes(mixed), mixed.keeps) == ([3, 4], (Keep.NOTHING, Keep.GRAPH))


# -- tied layers ----------------------------------------------------------------------------------


class Tied(Chain):
    def __init__(self, *pairs: tuple[int, int]) -> None:
        super().__init__()
        for one, other in pairs:
            self.layers[other].weight = self.layers[one].weight
            self.layers[other].bias = self.layers[one].bias


def test_layers_that_share_weights_stay_together_if_that_costs_little() -> None:
    """layers.1 and layers.2 have the middle between them."""
    x = torch.randn(2, 5)
    cost = {"stem": 1.0, **{f"layers.{i}": 1.0 for i in range(5)}, "head": 0.0}
    light = {**cost, "layers.1": 0.1, "layers.2": 0.1}
    assert sizes(weighed(Chain(), 2, x, light)) == [3, 4]
    together = weighed(Tied((1, 2)), 2, x, light)
    assert sizes(together) in ([2, 5], [4, 3])
    assert not together.ties
    apart = weighed(Tied((1, 2)), 2, x, cost)
    assert sizes(apart) == [3, 4]
    assert [(tie.owner, tie.holder) for tie in apart.ties] == [(0, 1)]


def test_layers_that_share_weights_are_tied_where_they_must_part() -> None:
    partition = cut(Tied((0, 4)), 3, torch.randn(2, 5))
    assert {(tie.owner, tie.holder): shared for tie, shared in partition.ties.items()} == {
        (0, 2): ("layers.0.weight", "layers.0.bias")
    }
