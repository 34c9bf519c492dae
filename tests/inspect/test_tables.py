"""What people read of a staged model: its table, its facts, its code and its actions."""

import copy
import functools

import pytest
import torch
from nets import ResNet, ViT, Words
from torch import Tensor, nn

import revcompile
from revcompile.ir.types import Opaque
from revcompile.schedule import choose, delay, window
from revcompile.staged import StagedModel


@functools.cache
def resnet() -> StagedModel:
    torch.manual_seed(0)
    return revcompile.petrafy(ResNet(), 4, torch.randn(2, 3, 8, 8), check="off")


@functools.cache
def vit() -> StagedModel:
    return revcompile.petrafy(ViT(), 3, torch.randn(2, 3, 8, 8), check="off")


# -- facts ----------------------------------------------------------------------------------------


def test_every_piece_and_parameter_is_listed_once() -> None:
    facts = resnet().facts()
    pieces = [name for stage in facts for name in stage.pieces]
    assert pieces == [p.name for part in resnet()._partition.parts for p in part.pieces]
    total = sum(p.numel() for p in resnet().to_module().parameters())
    assert sum(stage.parameters for stage in facts) == total
    assert sum(stage.work_share for stage in facts) == pytest.approx(1)
    assert {"conv", "bn", "fc"} <= {module for stage in facts for module in stage.modules}


def test_what_is_not_reversible_has_its_reason() -> None:
    for stage, part in zip(resnet().facts(), resnet()._partition.parts, strict=True):
        opaque = [p for p in part.pieces if isinstance(p, Opaque)]
        assert [name for name, _ in stage.opaque] == [piece.name for piece in opaque]
        assert all(reason for _, reason in stage.opaque)
        assert stage.reversible == (not opaque)


def test_boundaries_windows_and_delays_are_the_methods() -> None:
    net, petra = copy.copy(resnet()), choose("petra")
    net.microbatch_size = 10
    facts = net.facts()
    for stage in facts:
        assert stage.window == window(petra, 4, stage.index)
        assert stage.delay == delay(petra, 4, stage.index)
    assert facts[-1].sends == ("f32[B,5]",)
    assert facts[-1].sent_bytes == 10 * 5 * 4
    assert facts[0].sends == ("2×f32[B,4,8,8]",)
    assert facts[0].sent_bytes == 2 * 10 * 4 * 8 * 8 * 4


# -- the table ------------------------------------------------------------------------------------


def test_the_table_names_stages_reasons_balance_and_totals() -> None:
    text = " ".join(str(resnet()).split())
    assert "ResNet: 4 stages, petra, micro-batches of 2" in text
    assert "(a) no additive shortcut: stem, head" in text
    assert "(b) its shortcut is projected to another shape: blocks.2" in text
    worst = max(resnet().facts(), key=lambda stage: stage.work_share)
    assert (
        f"the largest stage ({worst.index}) has {4 * worst.work_share:.2f}x the mean work" in text
    )
    before = sum(p.numel() for p in ResNet().parameters())
    after = sum(p.numel() for p in resnet().to_module().parameters())
    assert (
        f"{after:,} parameters ({before:,} before rewiring: {100 * (after / before - 1):+.1f} %)"
        in text
    )
    assert "by backprop on one device" in text


def test_a_stage_that_keeps_nothing_says_so() -> None:
    staged = vit()
    kept = {stage.index for stage in staged.facts() if not stage.memory.buffers}
    assert kept and str(staged).count("nothing") == len(kept)


def test_shared_weights_are_named() -> None:
    words = revcompile.petrafy(Words(), 3, torch.randint(0, 11, (2, 4)), check="off")
    assert "stages 0 and 2 share embed.weight" in str(words)


class Plain(nn.Module):
    """No shortcut anywhere, long names, many values alive at every cut."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.ModuleDict(
            {f"a_rather_long_name_{i}": nn.Linear(4 + 2 * i, 2) for i in range(8)}
        )

    def forward(self, x: Tensor) -> Tensor:
        found = [x]
        for layer in self.features.values():
            found.append(layer(torch.cat(found, 1)).tanh())
        return torch.cat(found, 1)


@pytest.mark.parametrize("columns", ["80", "100"])
def test_tables_fit_the_terminal(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    reversible = revcompile.reversify(Plain(), torch.randn(2, 4), check="off")
    for text in (resnet().summary(), vit().summary(), reversible.summary(verbose=True)):
        assert max(map(len, text.splitlines())) <= int(columns)
        assert "\x1b" not in text  # no colours: the text may go to a file


def test_a_table_appears_once_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rich would display what it prints there, and the notebook what we return."""
    displayed: list[object] = []
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr("rich.jupyter.display", lambda *given: displayed.append(given))
    assert resnet().summary() and not displayed


# -- one stage ------------------------------------------------------------------------------------


def test_the_program_is_the_action_list_in_words() -> None:
    stage = next(stage for stage in resnet().stages if stage.reversible)
    assert stage.program == stage.actions
    lines = str(stage.program).replace("\n    ", " · ").splitlines()
    assert len(lines) == 2 * resnet().num_stages  # one for each micro-batch
    flying = window(choose("petra"), 4, stage.part.index)
    first = flying - 1
    assert lines[first].startswith(f"RECV x,m{first} · FORWARD m{first} · SEND y,m{first}")
    assert "RECV (y,dy),m0 · INVERT+VJP m0 · " in lines[first]
    assert lines[first].endswith("UPDATE u0")


def test_a_notebook_shows_a_drawing() -> None:
    assert "<svg" in resnet()._repr_html_()


def test_the_first_line_says_which_function_is_computed() -> None:
    model, x = ViT(depth=1), torch.randn(2, 3, 8, 8)
    for policy, said in (
        ("paper", "in two streams: a new function, to be trained from scratch"),
        ("pretrained", "in two streams: in eval mode the original's function"),
    ):
        reversible = revcompile.reversify(model, x, policy=policy, check="off")
        staged = revcompile.petrafy(model, 2, x, policy=policy, check="off")
        for text in (reversible.summary(), str(staged)):
            assert said in text.partition("\n")[0]


class Rotary(nn.Module):
    """A block whose branch has a sum of its own, and a stem that also returns positions."""

    def __init__(self, is_reversible: bool = True) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(11, 6), nn.Linear(6, 2)
        self.inner, self.turned = nn.Linear(6, 6), nn.Linear(6, 6)
        self.is_reversible = is_reversible

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        branch = (self.inner(x) + self.turned(x)).tanh()
        return self.out(x + branch if self.is_reversible else branch)


def test_sums_inside_a_reversible_block_are_not_called_not_rewired() -> None:
    ids = torch.randint(0, 11, (2, 4))
    net = revcompile.reversify(Rotary(), ids, check="off")
    assert net.rewired.couplings and "not rewired" not in net.summary()


def test_a_summary_is_short_and_all_of_it_can_be_asked_for() -> None:
    net = revcompile.reversify(ResNet(), torch.randn(2, 3, 8, 8), check="off")
    assert len(net.summary().splitlines()) < 12 < len(net.summary(verbose=True).splitlines())
    assert "no additive shortcut: stem, head" in " ".join(net.summary().split())


def test_nothing_reversible_is_no_advice_to_train_it() -> None:
    with pytest.warns(revcompile.RevcompileWarning, match="nothing in Rotary"):
        net = revcompile.reversify(Rotary(False), torch.randint(0, 11, (2, 4)), check="off")
    assert "train it" not in net.summary() and "not rewired" in net.summary()


def test_a_size_the_model_refuses_is_one_message(caplog: pytest.LogCaptureFixture) -> None:
    class Sized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = nn.Linear(4, 4)
            self.place = nn.Parameter(torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            if x.shape[1] != 4:
                raise ValueError(f"width {x.shape[1]}, not 4")
            x = x + self.place
            return x + self.f(x).tanh() if x.shape[1] > 2 else x

    net = revcompile.reversify(Sized(), torch.randn(2, 4))
    with pytest.raises(ValueError, match=r"Sized fails on these inputs \(\[2, 8\]\): width") as got:
        net(torch.randn(2, 8))
    assert got.value.__suppress_context__ and not caplog.records
