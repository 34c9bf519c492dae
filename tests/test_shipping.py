"""shipping: a stage comes back as it was, and a file cannot make the reader run what it likes."""

from __future__ import annotations

import ast
import dataclasses
import json
import operator
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import timm
import torch
from timm.layers import BatchNormAct2d, DropPath, LayerScale, Mlp, PatchEmbed, create_act_layer
from torch import Tensor, fx, nn

import revcompile
from revcompile.compiler.lower import lower
from revcompile.compiler.partition import partition
from revcompile.errors import InputError
from revcompile.ir import PATH, SOURCE, TYPE, VALUE, Coupling, Rewired, TensorType
from revcompile.program import Port, StageProgram, Unit
from revcompile.runtime import shipping
from revcompile.runtime.code import compile_graph
from revcompile.runtime.shipping import ALLOWED, load_stage, save_stage
from revcompile.schedule import Keep, choose

GRAPHS = ("forward", "backward", "inverse")
Plain = dict[str, Any]


def program_of(
    forward: fx.Graph, backward: fx.Graph | None = None, inverse: fx.Graph | None = None
) -> StageProgram:
    """A stage with something in every field, around these graphs."""
    kind = TensorType((2, 3), (1, 0), torch.float32, batch=2)
    return StageProgram(
        index=1,
        stages=3,
        method=choose("petra", order="paper"),
        units=(Unit("block", ("a", "b"), True, Keep.NOTHING, random=True),),
        inputs=(Port("x", kind, True), Port("size", None, False)),
        outputs=(Port("y", kind, True),),
        kept=("x",),
        wanted=("y",),
        returned=(),
        parameters=(),
        forward=forward,
        backward=backward or forward,
        inverse=inverse,
    )


def calling(*paths: str) -> fx.Graph:
    """A graph that reads these modules (one after another) or attributes (adding them)."""
    graph = fx.Graph()
    value = graph.placeholder("x")
    for path in paths:
        if path.endswith("!"):
            value = graph.call_function(torch.add, (value, graph.get_attr(path[:-1])))
        else:
            value = graph.call_module(path, (value,))
    graph.output(value)
    return graph


def holding(**parts: Any) -> nn.Module:
    """A root with these modules, parameters and plain attributes."""
    root = nn.Module()
    for name, part in parts.items():
        setattr(root, name, part)
    return root


def shipped(program: StageProgram, root: nn.Module, folder: Path) -> nn.Module:
    """The root that comes back, after the program was found to be the same."""
    save_stage(program, root, folder)
    loaded, loaded_root = load_stage(folder)
    assert_same_program(program, loaded)
    return loaded_root


def assert_same_program(want: StageProgram, got: StageProgram) -> None:
    for field in dataclasses.fields(want):
        if field.name not in GRAPHS:
            assert getattr(got, field.name) == getattr(want, field.name), field.name
    for name in GRAPHS:
        first, second = getattr(want, name), getattr(got, name)
        assert (first is None) == (second is None)
        if first is not None:
            assert_same_graph(first, second)


def assert_same_graph(want: fx.Graph, got: fx.Graph) -> None:
    assert str(got) == str(want)
    assert got.python_code("self").src == want.python_code("self").src
    for first, second in zip(want.nodes, got.nodes, strict=True):
        kept = {key: first.meta[key] for key in (TYPE, PATH, SOURCE, VALUE) if key in first.meta}
        assert second.meta == kept


def assert_equal(want: Any, got: Any) -> None:
    """The same values, bit for bit."""
    assert type(got) is type(want)
    if isinstance(want, Tensor):
        assert got.dtype == want.dtype
        assert torch.equal(got, want)
    elif isinstance(want, (tuple, list)):
        for first, second in zip(want, got, strict=True):
            assert_equal(first, second)
    else:
        assert got == want


def assert_same_state(want: nn.Module, got: nn.Module) -> None:
    state = want.state_dict()
    for name, tensor in got.state_dict().items():
        assert_equal(state[name], tensor)


MODELS: dict[str, tuple[Plain, int]] = {
    "resnet18": ({}, 64),
    "vit_tiny_patch16_224": ({"img_size": 32, "depth": 2, "drop_path_rate": 0.2}, 32),
    "swin_tiny_patch4_window7_224": ({"img_size": 56, "depths": (2, 2, 2)}, 56),
    "convnext_atto": ({"drop_path_rate": 0.2}, 64),
}


def rewired(name: str) -> tuple[Rewired, Tensor]:
    options, size = MODELS[name]
    options = {"depths": (2, 1, 1, 1)} | options if name == "convnext_atto" else options
    x = torch.randn(2, 3, size, size)
    return revcompile.reversify(timm.create_model(name, num_classes=5, **options), x).rewired, x


@pytest.mark.parametrize("name", MODELS)
def test_every_segment_comes_back_and_computes_the_same_bits(name: str, tmp_path: Path) -> None:
    model, x = rewired(name)
    live: dict[str, Any] = {model.signature.placeholders[0]: x}
    for segment in model.body.segments:
        link = segment.link if isinstance(segment, Coupling) else None
        graph = segment.branch if isinstance(segment, Coupling) else segment.graph
        program = program_of(graph, *((link.forward, link.inverse) if link else ()))
        save_stage(program, model.root, tmp_path / segment.name)
        loaded, root = load_stage(tmp_path / segment.name)
        assert_same_program(program, loaded)
        assert_same_state(model.root, root)
        assert set(root.state_dict()) == read_by(program, model.root)

        outcomes = []
        for source, owner in ((program, model.root), (loaded, root)):
            torch.manual_seed(1)
            outcomes.append(outputs(segment, source, owner, live))
        assert_equal(*outcomes)
        assert_same_state(model.root, root)  # running statistics have moved alike
        live |= dict(zip(segment.outputs, outcomes[0], strict=True))


def read_by(program: StageProgram, root: nn.Module) -> set[str]:
    """Names in the root's state dict that the program's graphs reach."""
    graphs = [g for g in (program.forward, program.backward, program.inverse) if g]
    targets = [
        str(n.target) for g in graphs for n in g.nodes if n.op in ("call_module", "get_attr")
    ]
    names = root.state_dict()
    return {name for name in names for t in targets if name == t or name.startswith(f"{t}.")}


def outputs(segment: Any, program: StageProgram, root: nn.Module, live: Plain) -> tuple[Any, ...]:
    """A segment's live outputs, as the program's code computes them on `root`."""
    code = compile_graph(program.forward, "shipped")
    if not isinstance(segment, Coupling):
        return tuple(code(root, *(live[name] for name in segment.inputs)))
    a, b = (live[name] for name in segment.streams_in)
    if segment.link:
        there = compile_graph(program.backward, "link")
        assert program.inverse is not None
        back = compile_graph(program.inverse, "unlink")
        sides = [live[name] for name in segment.link.sides]
        (a, _), (arranged, shapes) = there(root, a, *sides), there(root, b, *sides)
        assert_equal(b, back(root, arranged, shapes))
        b = arranged
    found = code(root, b, *(live[name] for name in segment.sides))
    added, *extras = found if segment.extras else (found,)
    return (b, a + added, *extras)


@pytest.mark.parametrize("method", ["petra", "backprop", "features_replay"])
def test_every_stage_of_a_pipeline_comes_back_and_trains_alike(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = rewired("resnet18")
    programs = lower(partition(model, 4, choose(method)), choose(method))
    for program in programs:
        save_stage(program, model.root, tmp_path / str(program.index))
    stages = [load_stage(tmp_path / str(program.index)) for program in programs]
    for want, (got, root) in zip(programs, stages, strict=True):
        assert_same_program(want, got)
        assert read_by(want, model.root) | set(want.parameters) == set(root.state_dict())
    steps = []
    for pairs in ([(program, model.root) for program in programs], stages):
        with torch.no_grad(), monkeypatch.context() as patch:  # as a worker starts its programs
            patch.setattr(revcompile.ops, "statistics_frozen", True)
            steps.append(one_step(pairs, x))
    assert_equal(*steps)
    assert any(isinstance(g, Tensor) and g.abs().sum() > 0 for g in steps[0])
    for _, root in stages:
        assert_same_state(model.root, root)


def one_step(stages: list[tuple[StageProgram, nn.Module]], x: Tensor) -> list[Any]:
    """The model's output and all parameter gradients, from stages run one after another."""
    values: Any = (x,)
    keep = []
    for program, root in stages:
        values, kept = compile_graph(program.forward, "forward")(root, 7, *values)
        keep.append(kept)
    found: list[Any] = list(values)
    torch.manual_seed(2)
    wanted, gradients = (), tuple(torch.randn_like(v) for v in values)
    for (program, root), kept in zip(reversed(stages), reversed(keep), strict=True):
        code = compile_graph(program.backward, "backward")
        wanted, gradients, parameters = code(root, 7, *kept, *wanted, *gradients)
        found += parameters
    return found


def values_graph() -> fx.Graph:
    """Every kind of value that arguments are made of."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    shape = graph.call_function(getattr, (x, "shape"))
    size = graph.call_function(operator.getitem, (shape, 0))
    index: Any = (slice(None, size, None), ..., None, slice(0, 2))
    cut = graph.call_function(operator.getitem, (x, index))
    low = graph.call_method("to", (cut,), {"dtype": torch.bfloat16, "memory_format": None})
    high = graph.call_method("to", (low, torch.device("cpu"), torch.float32))
    kept = graph.call_method("contiguous", (high,), {"memory_format": torch.contiguous_format})
    bound = graph.call_function(torch.clamp, (kept, float("-inf")), {"max": float("inf")})
    total = graph.call_function(torch.ops.aten.add.Tensor, (bound, 1), {"alpha": 0.1})
    packet = graph.call_function(torch.ops.aten.mul, (total, 2.5))
    number = graph.call_function(int, (graph.call_function(torch.Tensor.size, (x, 1)),))
    made = graph.call_function(revcompile.ops.shape, (size, number))
    pooled = graph.call_function(nn.functional.max_pool2d, (packet, 1))
    rest: Any = [made, {"a": torch.Size((1, 2)), "b": True}]
    graph.output((pooled, rest, "it's", None))
    return graph


def test_every_kind_of_argument(tmp_path: Path) -> None:
    graph = values_graph()
    shipped(program_of(graph), nn.Module(), tmp_path)
    loaded, root = load_stage(tmp_path)
    x = torch.randn(3, 4, 5)
    assert_equal(
        compile_graph(graph, "a")(nn.Module(), x), compile_graph(loaded.forward, "b")(root, x)
    )


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "containers": (
        lambda: nn.Sequential(nn.ModuleList([nn.Linear(4, 4)])[0], nn.Dropout(0.5), nn.Identity()),
        (2, 4),
    ),
    "mlp": (lambda: Mlp(8, 16, drop=0.3), (2, 3, 8)),
    "layer scale": (lambda: LayerScale(8), (2, 3, 8)),
    "drop path": (lambda: DropPath(0.5), (8, 3)),
    "patch embedding": (lambda: PatchEmbed(16, 4, 3, 8), (2, 3, 16, 16)),
    "batch norm and activation": (lambda: BatchNormAct2d(4), (2, 4, 3, 3)),
    "lazy choice": (lambda: create_act_layer("hard_swish"), (2, 3)),
    "recurrent": (lambda: nn.LSTM(4, 5, bidirectional=True), (3, 2, 4)),
    "transformer layer": (lambda: nn.TransformerEncoderLayer(8, 2, 16), (3, 2, 8)),
}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("training", [True, False])
def test_layers_compute_the_same_bits(kind: str, training: bool, tmp_path: Path) -> None:
    make, shape = LAYERS[kind]
    root = holding(deep=holding(layer=make())).train(training)
    program = program_of(calling("deep.layer"))
    loaded = shipped(program, root, tmp_path)
    x, code = torch.randn(shape), compile_graph(program.forward, kind)
    found = []
    for owner in (root, loaded):
        torch.manual_seed(3)
        found.append(code(owner, x))
    assert_equal(*found)
    assert_same_state(root, loaded)
    assert list(loaded.state_dict()) == list(root.state_dict())
    assert [type(m) for m in loaded.modules()] == [type(m) for m in root.modules()]
    assert all(m.training is training for m in loaded.modules())


def test_only_what_the_code_reads_is_shipped(tmp_path: Path) -> None:
    root = holding(used=nn.Linear(3, 3), unused=nn.Linear(3, 3), group=nn.Linear(3, 3))
    loaded = shipped(program_of(calling("used", "group.bias!")), root, tmp_path)
    assert set(loaded.state_dict()) == {"used.weight", "used.bias", "group.bias"}
    assert type(loaded.get_submodule("group")) is nn.Module


def test_parameters_of_the_program_are_shipped_though_no_node_reads_them(tmp_path: Path) -> None:
    root = holding(a=nn.Linear(3, 3))
    program = dataclasses.replace(program_of(calling()), parameters=("a.bias",))
    assert set(shipped(program, root, tmp_path).state_dict()) == {"a.bias"}


def test_tied_parameters_and_shared_modules_are_one_object_again(tmp_path: Path) -> None:
    one, two = nn.Linear(3, 3), nn.Linear(3, 3)
    two.weight = one.weight
    root = holding(one=one, two=two, again=one)
    loaded = shipped(program_of(calling("one", "two", "again", "two.weight!")), root, tmp_path)
    assert loaded.get_submodule("one") is loaded.get_submodule("again")
    assert loaded.get_parameter("one.weight") is loaded.get_parameter("two.weight")
    stored = safetensors.torch.load_file(tmp_path / "tensors.safetensors")
    assert sorted(tuple(t.shape) for t in stored.values()) == [(3,), (3,), (3, 3)]


def test_views_of_one_memory_share_it_again(tmp_path: Path) -> None:
    base = torch.arange(12.0).view(3, 4)
    parts = {"base": base, "turned": base.t(), "corner": base[1:, 1:], "row": base[2]}
    root = nn.Module()
    for name, tensor in parts.items():
        root.register_buffer(name, tensor)
    loaded = shipped(program_of(calling(*(f"{name}!" for name in parts))), root, tmp_path)
    assert_same_state(root, loaded)
    loaded.get_buffer("base").add_(1)
    root.get_buffer("base").add_(1)
    assert_same_state(root, loaded)
    for name in parts:
        assert loaded.get_buffer(name).stride() == root.get_buffer(name).stride()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(4, 3).t(),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(3, 1).expand(3, 5),
        torch.randn(10)[3:7:2],
        torch.tensor(2.5),
        torch.tensor([True, False]),
        torch.arange(5, dtype=torch.int16),
        torch.empty(0, 3),
        torch.randn(3).to(torch.bfloat16),
        torch.randn(3).to(torch.complex64),
        torch.randn(2, 3, dtype=torch.complex128),
    ],
    ids=lambda t: f"{t.dtype}-{tuple(t.shape)}-{t.stride()}",
)
@pytest.mark.parametrize("persistent", [True, False])
def test_buffers_of_every_kind(tensor: Tensor, persistent: bool, tmp_path: Path) -> None:
    root = nn.Module()
    root.register_buffer("t", tensor, persistent=persistent)
    loaded = shipped(program_of(calling("t!")), root, tmp_path)
    assert_equal(tensor, loaded.get_buffer("t"))
    assert loaded.get_buffer("t").stride() == tensor.stride()
    assert list(loaded.state_dict()) == (["t"] if persistent else [])


def test_plain_tensors_and_frozen_parameters(tmp_path: Path) -> None:
    root = holding(frozen=nn.Parameter(torch.ones(2), requires_grad=False), table=torch.ones(2))
    loaded = shipped(program_of(calling("frozen!", "table!")), root, tmp_path)
    assert not loaded.get_parameter("frozen").requires_grad
    assert_equal(root.table, loaded.table)
    assert list(loaded.state_dict()) == ["frozen"]


def test_a_loaded_stage_can_be_saved_over_its_own_files(tmp_path: Path) -> None:
    program, root = program_of(calling("a")), holding(a=nn.Linear(3, 3))
    loaded = shipped(program, root, tmp_path)
    with torch.no_grad():
        loaded.get_parameter("a.bias").add_(1)
    again = shipped(program, loaded, tmp_path)
    assert_equal(root.get_parameter("a.bias") + 1, again.get_parameter("a.bias") + 0)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["program.json", "tensors.safetensors"]


def test_a_loaded_stage_does_not_depend_on_its_files(tmp_path: Path) -> None:
    root = holding(a=nn.Linear(64, 64))
    loaded = shipped(program_of(calling("a")), root, tmp_path)
    file = tmp_path / "tensors.safetensors"
    with file.open("r+b") as opened:
        opened.write(bytes(file.stat().st_size))
    assert_same_state(root, loaded)


class Doubling(nn.Module):
    """A user's own layer."""

    def __init__(self, helper: Any = None) -> None:
        super().__init__()
        self.helper = helper

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def double(x: Tensor) -> Tensor:
    """A user's own function."""
    return 2 * x


def test_code_of_other_packages_needs_permission(tmp_path: Path) -> None:
    graph = calling("own")
    output = graph.output_node()
    with graph.inserting_before(output):
        output.args = (graph.call_function(double, (output.args[0],)),)
    save_stage(program_of(graph), holding(own=Doubling(double)), tmp_path)
    with pytest.raises(InputError, match=rf'module own: {__name__}:Doubling .* add "{__name__}"'):
        load_stage(tmp_path)
    loaded, root = load_stage(tmp_path, allow=(*ALLOWED, __name__))
    assert_equal(compile_graph(loaded.forward, "own")(root, torch.ones(1)), torch.tensor([4.0]))


def local_layer() -> nn.Module:
    class Local(Doubling):
        pass

    return Local()


def hooked() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.register_forward_hook(lambda *_: None)
    return layer


def on_meta() -> nn.Module:
    return nn.Linear(2, 2, device="meta")


UNWRITABLE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "object": (lambda: Doubling(object()), r"attribute 'helper' holds .*builtins.object.*replace"),
    "lambda": (lambda: Doubling(lambda x: x), r"attribute 'helper' holds .*lambda.*top level"),
    "nested": (lambda: Doubling([{1: {"a": object()}}]), "attribute 'helper' holds"),
    "getattr": (lambda: Doubling(getattr), "attribute 'helper' holds"),
    "hooks": (hooked, r"has hooks \(_forward_hooks\).*remove"),
    "parametrised": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
        "has parametrizations, .*remove_parametrizations",
    ),
    "local class": (local_layer, "Local .*cannot be found by its name; move it"),
    "meta": (on_meta, "tensor bad.weight: is on the meta device.*load the weights"),
}


@pytest.mark.parametrize("case", UNWRITABLE)
def test_what_cannot_be_written_is_named(case: str, tmp_path: Path) -> None:
    make, message = UNWRITABLE[case]
    with pytest.raises(InputError, match=f"save_stage: stage 1: module bad .*{message}"):
        save_stage(program_of(calling("bad")), holding(bad=make()), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_root_of_another_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"a\.b: the graphs read it, but root has no such"):
        save_stage(program_of(calling("a.b")), holding(a=nn.Linear(2, 2)), tmp_path)


@pytest.fixture
def stage(tmp_path: Path) -> Path:
    """A saved stage: x -> norm(linear(x)) + scale, getattr and a method."""
    graph = calling("linear", "norm", "scale!")
    output = graph.output_node()
    with graph.inserting_before(output):
        moved = graph.call_method("to", (output.args[0],), {"dtype": torch.float64})
        shape = graph.call_function(getattr, (moved, "shape"))
        output.args = ((moved, shape),)
    root = holding(
        linear=nn.Linear(2, 2), norm=nn.BatchNorm1d(2), scale=nn.Parameter(torch.ones(2))
    )
    save_stage(program_of(graph), root, tmp_path)
    return tmp_path


def tamper(folder: Path, change: Callable[[Plain], None]) -> None:
    file = folder / "program.json"
    found = json.loads(file.read_text())
    change(found)
    file.write_text(json.dumps(found))


def nodes(found: Plain, op: str) -> Iterator[Plain]:
    return (node for node in found["graphs"]["forward"] if node["op"] == op)


def test_the_untampered_stage_loads(stage: Path) -> None:
    tamper(stage, lambda found: None)
    load_stage(stage)


FORBIDDEN_CALLS = [
    "os:system",
    "subprocess:run",
    "builtins:eval",
    "builtins:exec",
    "builtins:open",
    "builtins:compile",
    "builtins:__import__",
    "builtins:setattr",
    "builtins:object.__subclasses__",
    "operator:methodcaller",
    "_operator:attrgetter",
    "torch:load",
    "torch:save",
    "torch:from_file",
    "torch:os.system",
    "torch:Tensor.__reduce_ex__",
    "torch.serialization:os.system",
    "torch.serialization:load",
    "torch.hub:load",
    "torch.hub:urlopen",
    "torch.jit:load",
    "torch.utils.collect_env:run",
    "torch.utils.cpp_extension:load_inline",
    "torch._C:_jit_set_profiling_mode",
    "torch.ops.load_library",
    "torch.ops.aten.from_file.default",
    "torch.ops.aten.save",
    "torch.ops.aten.__class__",
    "timm.models._helpers:load_checkpoint",
    "timm.models.resnet:resnet18",
    "torchvision.models.resnet:resnet18",
    "torchvision.io:read_file",
    "revcompile.runtime.code:compile_graph",
    "revcompile.runtime.shipping:save_stage",
    "no colon",
    "torch:",
]


@pytest.mark.parametrize("target", FORBIDDEN_CALLS)
def test_a_file_cannot_call_what_it_likes(stage: Path, target: str) -> None:
    def call(found: Plain) -> None:
        next(nodes(found, "call_function"))["target"] = target

    tamper(stage, call)
    with pytest.raises(InputError, match=f"forward: node add: .*{target.split('.')[0]}"):
        load_stage(stage)


def test_a_name_leads_through_no_other_module(stage: Path) -> None:
    def call(found: Plain) -> None:
        next(nodes(found, "call_function"))["target"] = "torch:nn.functional.relu"

    tamper(stage, call)
    with pytest.raises(InputError, match=r"torch:nn.functional.relu leads through another module"):
        load_stage(stage)


@pytest.mark.parametrize("target", FORBIDDEN_CALLS)
def test_nor_hand_it_on_as_a_value(stage: Path, target: str) -> None:
    def attach(found: Plain) -> None:
        found["modules"][1].setdefault("attributes", {})["f"] = {"function": target}

    tamper(stage, attach)
    with pytest.raises(InputError, match="module linear: attribute 'f': "):
        load_stage(stage)


@pytest.mark.parametrize(
    "name",
    ["subprocess:Popen", "collections:OrderedDict", "torch:Tensor", "torch:os.PathLike", "os:x.y"],
)
def test_a_file_cannot_name_any_class(stage: Path, name: str) -> None:
    def rename(found: Plain) -> None:
        found["modules"][1]["class"] = name

    tamper(stage, rename)
    with pytest.raises(InputError, match=f"module linear: {name}"):
        load_stage(stage)


def test_an_allowed_module_is_named_in_full(stage: Path) -> None:
    def call(found: Plain) -> None:
        next(nodes(found, "call_function"))["target"] = "torch.hub:get_dir"

    tamper(stage, call)
    with pytest.raises(InputError, match=r'torch.hub:get_dir is not .* add "torch.hub" to allow='):
        load_stage(stage)
    load_stage(stage, allow=(*ALLOWED, "torch.hub"))


def test_importing_comes_after_the_check(stage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (stage / "evil_module.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(stage)
    tamper(stage, lambda found: found["modules"][1].update({"class": "evil_module:Layer"}))
    with pytest.raises(InputError, match='add "evil_module" to allow='):
        load_stage(stage)


EVIL = "x); __import__('os').abort("


@pytest.mark.parametrize("evil", [EVIL, "a b", "a\nb", "lambda", 'a"+"', ""])
@pytest.mark.parametrize(
    ("op", "key"), [("call_method", "name"), ("placeholder", "target"), ("call_method", "target")]
)
def test_names_in_generated_code_are_names(stage: Path, op: str, key: str, evil: str) -> None:
    tamper(stage, lambda found: next(nodes(found, op)).update({key: evil}))
    with pytest.raises(InputError, match="is no name that generated code could use"):
        load_stage(stage)


def test_keywords_in_generated_code_are_names(stage: Path) -> None:
    tamper(stage, lambda found: next(nodes(found, "call_method"))["kwargs"].update({EVIL: 1}))
    with pytest.raises(InputError, match="is no name that generated code could use"):
        load_stage(stage)


@pytest.mark.parametrize("evil", ['a"), print("', "a b", "a..b", "linear.__class__", "a\\", "a\n"])
@pytest.mark.parametrize("op", ["call_module", "get_attr"])
def test_paths_in_generated_code_are_paths(stage: Path, op: str, evil: str) -> None:
    tamper(stage, lambda found: next(nodes(found, op)).update(target=evil))
    with pytest.raises(InputError, match="is not a path that a stage may read"):
        load_stage(stage)


@pytest.mark.parametrize("name", ["__class__", "__globals__", "_typed_storage", "numpy", "tofile"])
def test_special_attributes_are_refused(stage: Path, name: str) -> None:
    original = (stage / "program.json").read_text()
    tamper(stage, lambda found: next(nodes(found, "call_method")).update(target=name))
    with pytest.raises(InputError, match=f"may not use the attribute '{name}'"):
        load_stage(stage)
    (stage / "program.json").write_text(original)

    def read(found: Plain) -> None:
        *_, node = nodes(found, "call_function")
        assert node["target"] == "builtins:getattr"
        node["args"][1] = name

    tamper(stage, read)
    with pytest.raises(InputError, match=f"may not use the attribute '{name}'"):
        load_stage(stage)


def test_getattr_takes_no_computed_name(stage: Path) -> None:
    def read(found: Plain) -> None:
        *_, node = nodes(found, "call_function")
        node["args"][1] = {"node": "x"}

    tamper(stage, read)
    with pytest.raises(InputError, match="getattr needs the attribute's name as a constant"):
        load_stage(stage)


@pytest.mark.parametrize("name", ["_forward_hooks", "__class__", "_parameters", "training"])
def test_a_file_cannot_set_a_modules_workings(stage: Path, name: str) -> None:
    tamper(stage, lambda found: found["modules"][1]["attributes"].update({name: 1}))
    with pytest.raises(InputError, match=f"module linear: attribute '{name}' is not a file's"):
        load_stage(stage)


BROKEN: dict[str, tuple[Callable[[Plain], Any], str]] = {
    "format": (lambda f: f.pop("format"), "is no stage written by save_stage"),
    "version": (lambda f: f.update(version=99), "has version 99, but this revcompile reads 1"),
    "section": (lambda f: f.pop("graphs"), "is not as save_stage writes it .KeyError: 'graphs'"),
    "field": (lambda f: f["program"].pop("kept"), "is not as save_stage writes it .*kept"),
    "type": (lambda f: f["program"].update(kept=["x"]), "kept: expected a tuple"),
    "tag": (lambda f: f["program"].update(kept={"bag": []}), "'bag' is no kind of value"),
    "order": (lambda f: f["graphs"]["forward"].pop(0), "node linear: .*'x', which does not come"),
    "end": (lambda f: f["graphs"]["forward"].pop(), "forward: the graph does not end"),
    "op": (lambda f: f["graphs"]["forward"][0].update(op="jump"), "'jump' is no kind of node"),
    "twin": (lambda f: f["graphs"]["forward"][1].update(name="x"), "'x' is taken or reserved"),
    "module": (lambda f: f["modules"].pop(1), "the graphs read 'linear', which no module has"),
    "root": (lambda f: f["modules"].clear(), "is not as save_stage writes it"),
    "tensor": (lambda f: f["tensors"].pop("linear.bias"), "tensor 'linear.bias' is not in the"),
    "shape": (
        lambda f: f["tensors"]["linear.bias"].update(shape=[3]),
        r"linear.bias: expected float32 \[3\], got float32 \[2\]; the two files",
    ),
    "view": (
        lambda f: f["tensors"]["scale"].update(memory="scale", stride=[1], offset=9),
        "tensor scale: does not fit its memory",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_a_clear_error(stage: Path, case: str) -> None:
    change, message = BROKEN[case]
    tamper(stage, change)
    with pytest.raises(InputError, match=message) as caught:
        load_stage(stage)
    assert str(caught.value).startswith(f"load_stage: {stage}")


@pytest.mark.parametrize("file", ["program.json", "tensors.safetensors"])
@pytest.mark.parametrize("damage", ["cut", "gone", "noise"])
def test_a_damaged_file_is_a_clear_error(stage: Path, file: str, damage: str) -> None:
    whole = (stage / file).read_bytes()
    (stage / file).unlink()
    if damage != "gone":
        (stage / file).write_bytes(whole[: len(whole) // 2] if damage == "cut" else b"\xff\x00{")
    with pytest.raises(InputError, match=f"{file} cannot be read .*save the stage again"):
        load_stage(stage)


def test_a_missing_tensor_is_a_clear_error(stage: Path) -> None:
    file = stage / "tensors.safetensors"
    tensors = safetensors.torch.load_file(file)
    del tensors["norm.running_var"]
    safetensors.torch.save_file(tensors, file)
    with pytest.raises(InputError, match=r"norm.running_var: .* is missing in the file of tensors"):
        load_stage(stage)


def test_nothing_is_pickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("pickle was used")

    program, root = program_of(values_graph(), calling("a")), holding(a=nn.LSTM(3, 3))
    for name in ("load", "loads", "dump", "dumps", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    for name in ("load", "save"):
        monkeypatch.setattr(torch, name, refuse)
    shipped(program, root, tmp_path)


def test_no_file_of_shipping_knows_pickle_eval_or_exec() -> None:
    files = sorted(Path(shipping.__file__).parent.glob("*.py"))
    assert len(files) > 3
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                assert not {a.name for a in node.names} & {"pickle", "marshal", "shelve"}, file
            if isinstance(node, ast.ImportFrom):
                assert node.module not in ("pickle", "marshal", "shelve"), file
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec", "compile", "__import__"), file
