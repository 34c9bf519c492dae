"""capture: the graph is the model, in both modes, at any batch size; and what it says if not."""

import copy
import dataclasses
import functools
import random
import re
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from helpers import cases, refuses
from nets import module_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import revcompile
from revcompile.compiler.capture import capture, make_example
from revcompile.compiler.capture.check import Check, check_capture
from revcompile.compiler.capture.memory import tensors_in
from revcompile.errors import CaptureError, InputError
from revcompile.ir.module_tree import TreeReads
from revcompile.ir.python_code import compile_graph
from revcompile.ir.types import TYPE, Captured


@functools.cache
def caught(name: str) -> tuple[nn.Module, Captured, list[str]]:
    """A specimen, its capture (fully checked), and what capturing changed."""
    torch.manual_seed(0)
    specimen = zoo.ZOO[name]
    model = specimen.model()
    args, kwargs = specimen.args(2), specimen.kwargs(2)
    before = fingerprint(model, args, kwargs)
    captured = capture(model, args, kwargs, check="full")
    after = fingerprint(model, args, kwargs)
    return (
        model,
        captured,
        [key for key in {**before, **after} if before.get(key) != after.get(key)],
    )


def fingerprint(model: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    """Everything capturing must leave alone."""
    found: dict[str, Any] = {
        "torch's generator": torch.get_rng_state().tolist(),
        "Python's generator": random.getstate(),
        "NumPy's generator": np.random.get_state()[1].tolist(),
        "the example": [t.tolist() for t in pytree.tree_leaves((args, kwargs)) if is_tensor(t)],
    }
    for path, module in model.named_modules():
        found[f"{path}: mode"] = module.training
        found[f"{path}: attributes"] = list(vars(module))
        for name, value in vars(module).items():
            if isinstance(value, (int, str, list, tuple, dict)):
                found[f"{path}.{name}"] = repr(value)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        found[f"{name}: value"] = tensor.detach().clone().view(-1).tolist()
        found[f"{name}: identity"] = id(tensor), tensor._version, tensor.requires_grad, tensor.grad
    return found


def is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def run_captured(captured: Captured, tensors: list[Tensor]) -> Any:
    """The capture as generated code (its own check interprets the graph)."""
    graph, spec = captured.graph, captured.signature.out_spec
    if not captured.root.training:
        graph = captured.eval_graph or graph
        spec = captured.signature.eval_out_spec or spec
    outputs = compile_graph(graph, captured.name)(captured.root, *tensors)
    return pytree.tree_unflatten(list(outputs), spec)


RESISTING = {
    "Noise": "1 is a leaf module: random numbers drawn outside the graph",
    "UntraceableInEvalMode": "1 is a leaf module: control flow depends on the contents of a tensor",
    "BufferInPlace": "averaged is a leaf module: the forward pass writes into 'averaged.mean'",
}


@pytest.mark.parametrize("name", zoo.ZOO)
def test_a_graph_is_the_model_at_another_batch_size_in_both_modes(name: str) -> None:
    """By the full check. The model is left alone; only what cannot be traced is a leaf module."""
    _, captured, changed = caught(name)
    assert not changed
    assert [note.startswith(RESISTING.get(name, "?")) for note in captured.notes[:1]] == (
        [True] if name in RESISTING else []
    )
    for graph in (captured.graph, captured.eval_graph or captured.graph):
        names = tuple(node.name for node in graph.find_nodes(op="placeholder"))
        assert names == captured.signature.placeholders
    if name not in RESISTING:  # tensors left on the CPU would not mix with the meta device
        moved = dataclasses.replace(captured, root=copied(captured.root).to("meta"))
        graphs = [captured.graph, captured.eval_graph or captured.graph]
        for owner, attribute in TreeReads(graphs, moved.root).constants:
            vars(owner)[attribute] = vars(owner)[attribute].to("meta")
        inputs = pytree.tree_leaves((zoo.ZOO[name].args(2), zoo.ZOO[name].kwargs(2)))
        result = run_captured(moved, [t.to("meta") for t in inputs if is_tensor(t)])
        assert {t.device.type for t in tensors_in(result)} == {"meta"}


def copied(model: nn.Module) -> nn.Module:
    """A deep copy, also of old weight norms, which leave a computed tensor behind."""
    memo = {
        id(value): value.detach().clone()
        for module in model.modules()
        for value in vars(module).values()
        if is_tensor(value) and not value.is_leaf
    }
    return copy.deepcopy(model, memo)


@pytest.mark.parametrize("name", zoo.REFUSED)
def test_refused_model_is_left_alone(name: str) -> None:
    specimen = zoo.REFUSED[name]
    model, args = specimen.model(), specimen.args(2)
    before = fingerprint(model, args, {})
    with pytest.raises(CaptureError):
        capture(model, args)
    assert fingerprint(model, args, {}) == before


# -- what is in the graph ------------------------------------------------------------------------


def targets(captured: Captured, op: str) -> list[str]:
    return [str(node.target) for node in captured.graph.find_nodes(op=op)]


def test_model_in_eval_mode_is_captured_for_both_modes() -> None:
    captured = capture(zoo.FunctionalDropout().eval(), zoo.rows(2), check="full")
    assert not captured.root.training
    assert "training" in targets(captured, "get_attr")


def test_batch_of_one_is_enough() -> None:
    captured = capture(zoo.Mlp(), torch.randn(1, 8), check="full")
    assert str(next(iter(captured.graph.nodes)).meta[TYPE]) == "float32[B, 8]"


def test_batch_may_be_the_second_dimension() -> None:
    placeholder = next(iter(caught("SequenceFirstEncoder")[1].graph.nodes))
    assert str(placeholder.meta[TYPE]) == "float32[5, B, 8]"


def test_a_batch_size_that_python_reads_is_fixed_and_the_line_is_named() -> None:
    fixed = module_of(lambda self, x: x.view(len(x), 8).tanh())
    (note,) = capture(fixed, torch.randn(2, 8), check="full").notes
    assert note.startswith("the batch size is fixed at 2: (top level): control flow depends on")
    assert "x.shape[0] leaves it free" in note and "test_capture.py" in note


class OneSample(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(1, 8)
        for block in self.blocks:
            x = x + block(x).tanh()
        return x


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_model_that_takes_one_sample_only(device: str) -> None:
    with torch.device(device):
        net = revcompile.reversify(OneSample(), torch.randn(1, 8))
        result = net(torch.randn(1, 8))
    assert result.shape == (1, 8) and len(net.rewired.couplings) == 3
    assert "the batch size is fixed at 1: the model fails at any other" in net.rewired.notes


def test_plain_tensors_are_constants_and_no_buffers() -> None:
    model, captured, _ = caught("PlainTensors")
    assert "scale" in vars(captured.root)
    assert dict(captured.root.named_buffers()).keys() == dict(model.named_buffers()).keys()


def test_arguments_are_labelled_as_a_user_would_write_them() -> None:
    varied = module_of(lambda self, x, *rest, scale=1.0, **more: sum(rest, x) * scale + more["b"])
    x = torch.randn(2, 3)
    signature = capture(varied, (x, x, x), {"b": x, "scale": 2.0}, check="full").signature
    assert signature.labels == ("x", "rest[0]", "rest[1]", "b")
    assert signature.placeholders == ("x", "rest_0", "rest_1", "b")


# -- leaf_modules --------------------------------------------------------------------------------


def test_leaf_by_path() -> None:
    captured = capture(zoo.ListLoop(), zoo.rows(2), leaf_modules=["blocks.1"])
    assert "blocks.1" in targets(captured, "call_module")
    assert "blocks.0" not in targets(captured, "call_module")


def test_leaf_by_class() -> None:
    captured = capture(zoo.ListLoop(), zoo.rows(2), leaf_modules=[zoo.Mlp])
    assert targets(captured, "call_module") == ["blocks.0", "blocks.1", "blocks.2"]


def test_leaf_by_second_name_of_a_shared_module() -> None:
    captured = capture(zoo.SharedModule(), zoo.rows(2), leaf_modules=["second"])
    assert targets(captured, "call_module") == ["first", "first"]


# -- the check itself ----------------------------------------------------------------------------


def tampered(name: str, tamper: Callable[[Any, Any], None]) -> Callable[[Check], str | None]:
    """Check a capture after something has been done to its graph's output."""
    model, captured, _ = caught(name)
    graph = copy.deepcopy(captured.graph)
    output = graph.output_node()
    with graph.inserting_before(output):
        tamper(graph, output)
    specimen = zoo.ZOO[name]
    example = make_example(model, specimen.args(2), specimen.kwargs(2))
    wrong = dataclasses.replace(captured, graph=graph)
    return lambda level: check_capture(model, wrong, example, level)


def with_output(method: str, *args: Any) -> Callable[[Any, Any], None]:
    def tamper(graph: Any, output: Any) -> None:
        (value,) = output.args[0]
        output.args = ((graph.call_method(method, (value, *args)),),)

    return tamper


@cases(
    "tamper, fast, full",
    (with_output("mul", 1.01), "output 0 differs by 0.01 (relative) (train mode, batch 3", ""),
    (with_output("narrow", 0, 0, 2), "output 0: expected (3, 8)", ""),
    (with_output("detach"), None, "the gradient of input x is missing"),
    ids=["wrong output", "a batch size baked in", "lost gradient"],
)
def test_a_check_sees(tamper: Callable[[Any, Any], None], fast: str | None, full: str) -> None:
    check = tampered("OptionalMask", tamper)
    found = check(Check.FAST)
    assert found is None if fast is None else (found or "").startswith(fast)
    assert (check(Check.FULL) or "-").startswith(full)


def test_full_check_sees_buffers() -> None:
    def call_twice(graph: Any, output: Any) -> None:
        (node,) = graph.find_nodes(op="call_module")
        graph.call_module(node.target, node.args)

    problem = tampered("BufferInPlace", call_twice)(Check.FULL)
    found = "buffer averaged.steps differs by 1 (relative) (train mode, batch"
    assert problem == f"{found} 2, seed 0)"
    assert tampered("BufferInPlace", call_twice)(Check.FAST) == f"{found} 3, seed 0)"


def test_fast_check_runs_eval_mode_where_the_graph_chooses() -> None:
    def drop_always(graph: Any, output: Any) -> None:
        for node in graph.nodes:
            if getattr(node.target, "__name__", "") == "select":
                node.args = (node.args[0], node.args[1], node.args[1])

    problem = tampered("FunctionalDropout", drop_always)(Check.FAST)
    assert problem is not None and "eval mode" in problem


def test_batch_size_at_which_the_original_fails_is_not_held_against_the_graph() -> None:
    model, captured, _ = caught("OptionalMask")
    example = make_example(model, zoo.rows(2))
    broken = dataclasses.replace(example, grown=(torch.randn(3, 7),))
    assert check_capture(model, captured, broken, Check.FULL) is None


# -- errors --------------------------------------------------------------------------------------


@dataclasses.dataclass
class Batch:
    x: Tensor


class Region(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([zoo.Mlp()])

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner[0](x)
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner[0](y)


def locked() -> nn.Module:
    model = zoo.Mlp()
    model.lock = threading.Lock()
    return model


def compiled() -> nn.Module:
    return nn.Sequential(zoo.Mlp(), torch.compile(nn.Linear(8, 8)))


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scripting is deprecated
        return nn.Sequential(zoo.Mlp(), torch.jit.script(nn.Linear(8, 8)))


ROWS, OPTIONS = zoo.rows(2), dict[str, Any]()
REFUSED: dict[str, tuple[Callable[[], nn.Module], Any, dict[str, Any], str]] = {
    "data decide": (
        zoo.DataDependentTop, ROWS, OPTIONS,
        r"stopped in \(top level\): control flow depends on the contents .*zoo.py:.*leaf_modules=",
    ),
    "Python draws": (zoo.PythonLayerDrop, ROWS, OPTIONS, r"\(top level\): the forward pass draws"),
    "a module inside": (Region, ROWS, OPTIONS, r"stopped in inner\.0\.norm: an autocast region"),
    "shape": (
        lambda: nn.Conv1d(4, 4, 1), torch.randn(2, 3, 8), OPTIONS,
        r"Conv1d fails on the example .*\(input: float32\[2, 3, 8\]\): .*4 channels, but got 3",
    ),
    "one sample": (OneSample, torch.randn(1, 7), OPTIONS, r"\(x: float32\[1, 7\]\): shape"),
    "on meta": (
        lambda: zoo.Mlp().to("meta"), torch.randn(2, 3, device="meta"), OPTIONS,
        "Mlp fails on the example inputs themselves",
    ),
    "type": (zoo.TinyGPT, torch.randn(2, 6), OPTIONS, r"fails on .* \(words: float32\[2, 6\]\)"),
    "no example": (zoo.Mlp, None, OPTIONS, r"says nothing about its input .* pass example_inputs="),
    "arguments": (zoo.Mlp, (*ROWS, 3), OPTIONS, r"do not fit Mlp\.forward\(x.*too many positional"),
    "no tensor": (zoo.Mlp, (3,), OPTIONS, "no tensor among the example inputs"),
    "path": (zoo.ListLoop, ROWS, {"leaf_modules": ["block.1"]}, r"did you mean 'blocks\.1'"),
    "whole": (zoo.Mlp, ROWS, {"leaf_modules": [zoo.Mlp]}, "names the whole model"),
    "record": (
        lambda: module_of(lambda self, batch: batch.x), Batch(ROWS[0]), OPTIONS,
        "batch is a Batch, which pytree does not know",
    ),
    "parallel": (lambda: nn.DataParallel(zoo.Mlp()), ROWS, OPTIONS, "wrapped for data parallelism"),
    "scripted": (scripted, ROWS, OPTIONS, "1 is scripted, and copies of scripted modules do not"),
    "compiled": (compiled, ROWS, OPTIONS, r"1 is compiled .* pass the plain module"),
    "lazy": (lambda: nn.LazyLinear(3), ROWS, OPTIONS, "weight has no shape yet; run the model"),
    "uncopied": (locked, ROWS, OPTIONS, r"Mlp cannot be copied with copy\.deepcopy: TypeError"),
}  # fmt: skip


# Importing torch.compile takes longest.
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.nightly if n == "compiled" else ()) for n in REFUSED]
)
def test_what_cannot_be_captured_says_why(name: str) -> None:
    make, example, options, said = REFUSED[name]
    with pytest.raises((CaptureError, InputError), match=rf"(?s){said}") as error:
        capture(make(), example, **options)
    assert len(str(error.value).splitlines()) < 20


def doubled_forward(layer: nn.Module) -> nn.Module:
    before = layer.forward
    layer.forward = lambda x: 2 * before(x)  # type: ignore[method-assign]
    return layer


class WithLambda(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.run = lambda x: self.layer(x).tanh()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.run(x)


@cases(
    "wrap, words",
    (doubled_forward, "capture: 1 has a function as its attribute forward, which holds 1 ("),
    (WithLambda, "capture: 1 has a function as its attribute run, which holds 1 ("),
)
def test_parts_that_a_copy_would_share(wrap: Callable[[nn.Module], nn.Module], words: str) -> None:
    model = nn.Sequential(zoo.Mlp(), wrap(nn.Linear(8, 8)))
    with pytest.raises(InputError, match=re.escape(words)) as error:
        capture(model, zoo.rows(2))
    assert "0x" not in str(error.value)


# -- one graph for both modes, or two -------------------------------------------------------------


X = torch.randn(2, 6)


def switch(self: Any, x: Tensor) -> Any:
    """A function of the input and the mode."""
    if not self.training:
        _ = self.scale.device, x.shape  # what is only looked at makes no difference
    return self.function[0](x * self.scale, self.training)


ONE: list[Callable[[Tensor, bool], Any]] = [
    lambda x, training: x.tanh() + 1,
    lambda x, training: F.dropout(x, 0.5, training),
    lambda x, training: x * (2.0 if training else 3.0),
    lambda x, training: x[:, : 4 if training else 2],
    lambda x, training: x.sum((0, 1) if training else (0, -1)),
    lambda x, training: torch.clamp(x, max=1.0 if training else None, min=0.0),
    lambda x, training: x.clamp(min=0.0, max=1.0) if training else x.clamp(max=3.0, min=2.0),
]
TWO: list[Callable[[Tensor, bool], Any]] = [
    lambda x, training: x.tanh() if training else x,
    lambda x, training: x.tanh() if training else x.relu(),
    lambda x, training: (x, x.tanh()) if training else (x.tanh(), x),
    lambda x, training: x.tanh() - x.relu() if training else -(x.relu() - x.tanh()),
    lambda x, training: x.add(x) if training else x.add(1),
    lambda x, training: x + (torch.ones(6) if training else torch.zeros(6)),
]


@cases("function, count", *((one, 1) for one in ONE), *((two, 2) for two in TWO))
def test_modes_have_one_graph_or_two(function: Callable[[Tensor, bool], Any], count: int) -> None:
    model = module_of(switch, function=(function,), scale=nn.Parameter(torch.ones(6)))
    captured = capture(model, X, check="full")
    assert (captured.eval_graph is not None) == (count == 2)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_refused(layout: Any) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=layout)
    layer = nn.Linear(4, 4)
    refuses(InputError, "input is a nested tensor.*pad it", revcompile.reversify, layer, nested)
    net = revcompile.reversify(layer, torch.ones(2, 3, 4))
    refuses(InputError, "input is a nested tensor.*pad it", net, nested)
