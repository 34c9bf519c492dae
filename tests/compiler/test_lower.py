"""lower: what each stage keeps, needs back and sends back, and the code it runs."""

from __future__ import annotations

import ast
import copy
import functools
import itertools
from contextvars import ContextVar
from typing import Any, Final

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import revcompile
from revcompile.ir import ops
from revcompile.ir.program import StageProgram
from revcompile.ir.python_code import compile_graph
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
        executor.program for executor in net.trainer(sgd, F.mse_loss, method=chosen)._executors
    )


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


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


def test_data_has_no_gradient() -> None:
    assert [program.inputs_with_grad for program in programs("petra")] == [
        (),
        ("stem_a", "stem_b", "stem"),
        ("add_a", "add_b", "stem"),
        ("add_1_a", "add_1_b"),
        ("add_2_a", "add_2_b"),
    ]


def test_every_parameter_has_its_gradient_in_one_stage() -> None:
    found = [name for program in programs("petra") for name in program.parameters]
    assert sorted(found) == sorted(dict(sided().model.named_parameters()))


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
        "a, b = minus(b, blocks_2(self, a), grid), a # blocks.2",
        "a, b, da, db = uncouple(blocks_2, self, a, b, da, db, grid, grads) # blocks.2",
    ]:
        assert line in lines, line


def test_verbose_code_is_the_graph_that_runs() -> None:
    text = sided().stages[3].source(verbose=True)
    for line in [
        "blocks_2 = self.blocks[2](add_1_b)",
        "tanh_2 = torch.tanh(blocks_2)",
        "add_2_b = plus(add_1_a, tanh_2, stem_a_grid)",
        "add_2_a_leaf = stream_leaf(add_2_a)",
        "add_1_a = minus(add_2_b, tanh_2, stem_a_grid)",
        "grads = branch_vjp(add_2_a_leaf, grad_add_2_a, (tanh_2,), (grad_add_2_b,), (), ",
        "grad_add_1_b = grads[0]",
    ]:
        assert line in text, line


@pytest.mark.parametrize("method", METHODS)
def test_code_is_python_in_which_no_name_hides_a_function(method: str) -> None:
    net = copy.copy(sided())
    net.method = choose(method)
    for stage in net.stages:
        assert str(stage) == stage.code
        for text in (stage.code, stage.source(verbose=True)):
            for function in ast.parse(text).body:
                if isinstance(function, ast.FunctionDef):
                    called = {n.func for n in ast.walk(function) if isinstance(n, ast.Call)}
                    names = {func.id for func in called if isinstance(func, ast.Name)}
                    stored = [n for n in ast.walk(function) if isinstance(n, ast.Name)]
                    assert not names & {n.id for n in stored if isinstance(n.ctx, ast.Store)}


# -- statistics -----------------------------------------------------------------------------------


class Normed(nn.Module):
    """Batch norms in the stem, in blocks, in a transition, in the head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(3)
        )
        self.head = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


@functools.cache
def normed(stages: int) -> revcompile.StagedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, example = Normed().double(), torch.randn(4, 5, dtype=torch.float64)
    return revcompile.petrafy(model, stages, example, check="off", policy="same_parameters")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("stages", [1, 3, 5])
def test_statistics_move_once_a_micro_batch(method: str, stages: int) -> None:
    """With standing weights they are those of a plain forward pass of every micro-batch."""
    net = copy.deepcopy(normed(stages))
    reference = net.to_module()
    trainer = net.trainer(lambda p: torch.optim.SGD(p, lr=0.0), F.cross_entropy, method=method)
    for size in (4, 4, 3, 4, 4, 4, 2):
        x = torch.randn(size, 5, dtype=torch.float64)
        reference(x)
        trainer.step(x, torch.zeros(size, dtype=torch.long))
    trainer.flush()
    for name, expected in reference.named_buffers():
        found = net.model.get_buffer(name)
        if name.endswith("num_batches_tracked"):
            assert int(found) == 7, name
        else:
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9, msg=name)


def test_the_model_handed_in_stays_as_it_is() -> None:
    torch.manual_seed(0)
    model = Normed()
    before = copy.deepcopy(model)
    hooks = [dict(m._forward_hooks) for m in model.modules()]
    net = revcompile.petrafy(model, 3, torch.randn(4, 5), check="off")
    trainer = net.trainer(sgd, F.cross_entropy)
    for _ in range(4):
        trainer.step(torch.randn(4, 5), torch.zeros(4, dtype=torch.long))
    trainer.flush()
    assert [name for name, _ in model.named_modules()] == [n for n, _ in before.named_modules()]
    assert [dict(m._forward_hooks) for m in model.modules()] == hooks
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before.state_dict()[name]), name
    assert not {id(p) for p in model.parameters()} & {id(p) for p in net.model.parameters()}
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("name", ["test_vit", "resnet18", "test_convnext"])
def test_inverse_programs_undo_forward_programs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # programs leave it as they end
    monkeypatch.setattr(ops, "statistics_frozen", ContextVar("frozen", default=False))
    size = 160 if name == "test_vit" else 64
    x = torch.randn(2, 3, size, size, dtype=torch.float64)
    model = timm.create_model(name, drop_path_rate=0.0).double()
    net = revcompile.petrafy(model, num_stages=4, example_inputs=x, check="off")
    found = [stage.generated for stage in net.stages if stage.generated.inverse is not None]
    assert [p.index for p in found] == [s.part.index for s in net.stages if s.reversible]
    root = net.model.train()
    values = {"x": x}
    for stage in net.stages:
        program = stage.generated
        inputs = [values[port.name] for port in program.inputs]
        with torch.no_grad():
            outputs, kept = compile_graph(program.forward, "forward")(root, 1, *inputs)
            values = dict(zip((port.name for port in program.outputs), outputs, strict=True))
            if program.inverse is not None:
                sent_back = [values[n] for n in program.needs_back]
                rebuilt = compile_graph(program.inverse, "inverse")(root, 1, *kept, *sent_back)
                streams = stage.part.pieces[0].inputs[:2]
                given = dict(zip((port.name for port in program.inputs), inputs, strict=True))
                for stream, after in zip(streams, rebuilt, strict=True):
                    assert torch.allclose(given[stream], after, atol=1e-12, rtol=1e-12)
