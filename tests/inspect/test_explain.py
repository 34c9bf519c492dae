"""explain: how a module was found, by which rule it was rewired, where it runs."""

import functools

import pytest
import torch
from nets import ResNet
from torch import Tensor, nn

import revcompile
from revcompile.errors import InputError
from revcompile.inspect.explain import PieceExplanation
from revcompile.staged import StagedModel


@functools.cache
def net() -> StagedModel:
    torch.manual_seed(0)
    return revcompile.petrafy(ResNet(), 3, torch.randn(2, 3, 8, 8), check="off")


def explained(path: str) -> PieceExplanation:
    (found,) = net().explain(path).pieces
    return found


def test_a_coupling_is_explained_from_its_sum_to_its_stage() -> None:
    piece = explained("blocks.1")
    assert piece.found[0].startswith("in blocks.1: act(x + F(x))")
    assert piece.found[1] == "F = conv1 > bn1 > blocks.1 > conv2 > bn2"
    assert any(line.startswith("written at") and "nets.py" in line for line in piece.found)
    assert piece.rewired[0].startswith("reversible coupling: (a, b) -> (b, a + F(b))")
    assert "the activation behind the sum moved into F" in piece.rewired
    home = next(s for s in net().stages if "blocks.1" in {p.name for p in s.part.pieces})
    assert piece.stage == home.part.index
    assert piece.placed[0].startswith(f"stage {piece.stage} of 3 (")
    delays = net().delays()
    assert f"{delays[piece.stage]} update" in piece.placed[-1]
    assert "it keeps nothing: backward inverts it" in piece.placed[-2]


def test_a_projected_shortcut_becomes_a_transition() -> None:
    piece = explained("blocks.2")
    assert "P = short" in piece.found
    assert piece.rewired[0].startswith("transition: (a, b) -> (s(b), P(a) + F(b))")
    assert piece.rewired[1] == "not reversible: its shortcut is projected to another shape"


def test_layers_that_rewiring_enlarged_are_named_where_they_are() -> None:
    stem, head = explained("conv"), explained("fc")
    assert "conv.weight: twice as wide, starting as [W, W]" in stem.rewired
    assert "fc.weight: reads both streams, starting as [W/2, W/2]" in head.rewired
    assert "its graph is kept" in head.placed[-2]
    assert "the input of" in stem.placed[-2] and "is kept" in stem.placed[-2]


def test_a_layer_inside_a_block_leads_to_the_block_and_a_parent_to_all_of_it() -> None:
    assert explained("blocks.1.conv2") == explained("blocks.1")
    names = [piece.piece for piece in net().explain("blocks").pieces]
    assert names[:4] == ["blocks.0", "blocks.1", "blocks.2", "blocks.3"]


def test_it_prints_as_text() -> None:
    found = net().explain("blocks.1")
    assert str(found) == repr(found) == str(explained("blocks.1"))
    lines = str(found).splitlines()
    assert lines[0] == "blocks.1"
    titles = [line.split()[0] for line in lines[1:] if line[2:3].strip()]
    assert titles == ["found", "rewired", "placed"]


def test_an_unknown_module_is_refused_with_a_near_one() -> None:
    with pytest.raises(InputError, match=r"no part of ResNet is called 'bloks\.1'.*'blocks\.1'"):
        net().explain("bloks.1")


class Forked(nn.Module):
    """Its last sum is no shortcut: neither summand is the other's input."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.a(x).tanh()
        x = x + self.b(x).tanh()
        return self.left(x).tanh() + self.right(x).tanh()


def test_a_refused_sum_is_named_with_its_reason() -> None:
    staged = revcompile.petrafy(Forked(), 2, torch.randn(2, 4), check="off")
    (refusal,) = staged._partition.rewired.refusals
    (piece,) = staged.explain("head").pieces
    assert piece.found[0].startswith("no additive shortcut")
    assert piece.found[-1] == f"a sum at the top level was refused: {refusal.reason}"
