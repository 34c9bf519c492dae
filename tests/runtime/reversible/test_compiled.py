"""Compiled couplings: the same training as eager ones, by few artifacts, and what is refused."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from helpers import cases, gradients, worst
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import revcompile
from revcompile.errors import InputError, RevcompileWarning
from revcompile.runtime.reversible.module import Reversible

pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor:UserWarning", "ignore::UserWarning:torch.*"
)
BACKEND = "eager"  # dynamo alone; a GPU test and the nightly ones run inductor


class Mlp(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.drop, self.down = nn.Dropout(dropout), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(nn.functional.gelu(self.up(self.norm(x)))))


class Stack(nn.Module):
    """A chain of equal blocks between two layers."""

    def __init__(self, depth: int = 4, dropout: float = 0.1, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Linear(4, width)
        self.blocks = nn.ModuleList(Mlp(width, dropout) for _ in range(depth))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def reversified(model: nn.Module, x: Tensor, policy: str = "same_parameters") -> Reversible:
    return revcompile.reversify(model, x, policy=policy, check="off").train()


def pair(policy: str = "same_parameters", **options: Any) -> tuple[Reversible, Reversible]:
    """The same net twice, the second one compiled."""
    torch.manual_seed(0)
    net = reversified(Stack(**options).double(), torch.randn(2, 5, 4).double(), policy)
    twin = copy.deepcopy(net)
    twin.compile(backend=BACKEND)
    return net, twin


def assert_same(net: nn.Module, compiled: nn.Module, x: Tensor) -> None:
    found = []
    for module in (net, compiled):
        torch.manual_seed(1)
        of_module = gradients(module, x)
        found.append({name.replace("_orig_mod.", ""): g for name, g in of_module.items()})
    deviation, where = worst(*found)
    assert deviation < 1e-10, where


@cases(
    "policy, backend",
    ("paper", "aot_eager"),
    ("same_parameters", "eager"),
    ("pretrained", "eager"),
    pytest.param("pretrained", "inductor", marks=pytest.mark.nightly),
    ids=["paper", "same parameters", "pretrained", "inductor"],
)
def test_gradients_are_those_of_the_eager_net_for_every_batch(policy: str, backend: str) -> None:
    net, compiled = pair(policy, dropout=0.0 if backend == "inductor" else 0.1)
    compiled.compile(backend=backend)
    for batch in (2, 7, 3, 2):
        assert_same(net, compiled, torch.randn(batch, 5, 4).double())
    assert compiled.compiler is not None
    # The stem, the couplings and the head, for the first size and for all others.
    assert len(compiled.compiler.artifacts) == 6
    assert not compiled.compiler.failures


def test_torch_compile_of_the_net_means_the_same() -> None:
    net, twin = pair()
    twin.compile(disable=True)
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    wrapped = torch.compile(twin, backend=backend)
    for batch in (2, 7, 3, 2):
        assert_same(net, wrapped, torch.randn(batch, 5, 4).double())
    assert len(graphs) == 6
    twin.eval(), net.eval()
    with torch.no_grad():
        x = torch.randn(6, 5, 4).double()
        assert torch.allclose(wrapped(x), net(x), atol=1e-12)


def test_a_rebuilt_input_has_the_same_bits_under_autocast() -> None:
    torch.manual_seed(0)
    for policy in ("same_parameters", "pretrained"):
        net = reversified(Stack(6, width=32), torch.randn(2, 5, 4), policy)
        net.compile(backend=BACKEND)
        with torch.autocast("cpu", torch.bfloat16):
            errors = net._inversion_errors(torch.randn(3, 5, 4))
        assert max(error for _, error in errors) == 0.0


def test_dropout_is_replayed_with_two_calls_in_flight() -> None:
    net, compiled = pair(dropout=0.5)
    found = []
    for module in (net, compiled):
        module.zero_grad()
        torch.manual_seed(3)
        losses = [module(torch.ones(batch, 5, 4).double()).square().sum() for batch in (2, 4)]
        torch.randn(5)
        sum(losses).backward()
        found.append({name: p.grad for name, p in module.named_parameters()})
    assert worst(*found)[0] < 1e-10


class Convs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(3, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3), nn.Tanh())
            for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def test_statistics_of_batch_norms_move_once() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3, 6, 6).double()
    net = reversified(Convs().double(), x)
    compiled = copy.deepcopy(net)
    compiled.compile(backend=BACKEND)
    for _ in range(2):
        assert_same(net, compiled, x)
    for (name, have), want in zip(compiled.named_buffers(), net.buffers(), strict=True):
        assert torch.allclose(have, want, atol=1e-12), name
    assert int(compiled.get_submodule("blocks.0.1").num_batches_tracked) == 2
    assert compiled.compiler is not None
    assert sum("stepped" in text for (text, *_), _ in compiled.compiler.artifacts) == 1


class Counting(nn.Module):
    """Reads the buffer that it changes, which torch.compile differentiates wrongly."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.layer(x).tanh() / self.count


@cases("kind", "counter", "spectral norm")
def test_pieces_that_change_their_buffers_run_eagerly(kind: str) -> None:
    torch.manual_seed(0)
    model = Stack(2, dropout=0.0).double()
    for block in model.blocks:
        if kind == "counter":
            block.drop = Counting()
            block.up, block.down = nn.Linear(8, 8), nn.Linear(8, 8)
        else:
            parametrizations.spectral_norm(block.up)
    model.double()
    net = reversified(model, torch.randn(2, 5, 4).double())
    twin = copy.deepcopy(net)
    twin.compile(backend="aot_eager")
    for batch in (2, 3, 3):
        assert_same(net, twin, torch.randn(batch, 5, 4).double())
    net.eval(), twin.eval()
    assert_same(net, twin, torch.randn(3, 5, 4).double())
    assert all(map(torch.equal, net.buffers(), twin.buffers()))


def test_rates_of_stochastic_depth_share_an_artifact() -> None:
    torch.manual_seed(0)
    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 12, "num_heads": 2, "depth": 4}
    model = timm.create_model("vit_tiny_patch16_224", drop_path_rate=0.6, **sizes).double()
    x = torch.randn(6, 3, 16, 16).double()
    net = reversified(model, x)
    compiled = copy.deepcopy(net)
    compiled.compile(backend=BACKEND)
    assert_same(net, compiled, x)
    couplings = [key for key in compiled.compiler.artifacts if "stepped" in key[0][0]]
    assert len(couplings) == 4, "attention and MLP, with a rate and in the first block without"


def test_a_block_with_hooks_runs_eagerly() -> None:
    net, compiled = pair(dropout=0.0)
    for module in (net, compiled):
        module.get_submodule("blocks.1.up").register_forward_hook(lambda m, i, o: 1.5 * o)
    assert_same(net, compiled, torch.randn(3, 5, 4).double())


def lora(net: nn.Module) -> None:
    torch.manual_seed(5)
    for name in ("blocks.1.up", "blocks.2.up"):
        parametrizations.weight_norm(net.get_submodule(name))


def replaced(net: nn.Module) -> None:
    torch.manual_seed(5)
    net.get_submodule("blocks.1").up = nn.Linear(8, 16).double()


def frozen(net: nn.Module) -> None:
    net.get_submodule("blocks.0").requires_grad_(False)
    net.get_submodule("stem").requires_grad_(False)


def assigned(net: nn.Module) -> None:
    for parameter in net.parameters():
        parameter.data = parameter.data * 0.5


@cases("change", lora, replaced, frozen, assigned, ids=lambda f: f.__name__)
def test_what_is_changed_after_compiling_is_trained(change: Callable[[nn.Module], None]) -> None:
    net, compiled = pair()
    x = torch.randn(3, 5, 4).double()
    assert_same(net, compiled, x)
    change(net), change(compiled)
    assert_same(net, compiled, x)


def test_parameters_may_be_computed() -> None:
    net, compiled = pair(dropout=0.0)
    x, found = torch.randn(3, 5, 4).double(), []
    for module in (net, compiled):
        scale = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
        scaled = {name: p * scale for name, p in module.named_parameters()}
        torch.func.functional_call(module, scaled, (x,)).square().sum().backward()
        found.append({"scale": scale.grad})
    assert worst(*found)[0] < 1e-10


def test_gradients_of_inputs_and_stored_activations() -> None:
    net, compiled = pair(dropout=0.0)
    found = []
    for module, is_reversible in ((net, True), (compiled, True), (compiled, False)):
        module.reversible = is_reversible
        x = torch.ones(3, 5, 4).double().requires_grad_()
        module(x).square().sum().backward()
        found.append({"x": x.grad})
    assert worst(found[0], found[1])[0] < 1e-10
    assert worst(found[0], found[2])[0] < 1e-10


def test_copies_are_their_own_and_run_eagerly() -> None:
    net, compiled = pair()
    x = torch.randn(3, 5, 4).double()
    compiled(x)
    file = io.BytesIO()
    torch.save(compiled, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for twin in (copy.deepcopy(compiled), loaded):
        assert twin.compiler is None
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
        assert not twin.eval()(x).any()
    assert_same(net, compiled, x)


class Breaking(nn.Module):
    """A layer that dynamo does not trace."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


def test_a_block_that_cannot_be_compiled_runs_eagerly_and_says_so_once() -> None:
    torch.manual_seed(0)
    model = Stack(dropout=0.1).double()
    for index in (1, 2):
        model.blocks[index] = nn.Sequential(nn.Dropout(0.2), Breaking().double())
    x = torch.randn(3, 5, 4).double()
    net = revcompile.reversify(
        model, x, policy="same_parameters", check="off", leaf_modules=[Breaking]
    ).train()
    compiled = copy.deepcopy(net)
    compiled.compile(backend=BACKEND)
    with pytest.warns(RevcompileWarning, match="run eagerly") as said:
        assert_same(net, compiled, x)
    assert len(said) == 1
    assert_same(net, compiled, x)
    assert compiled.compiler is not None and list(compiled.compiler.failures) == ["blocks.1"]


def test_a_stance_of_eager_holds_for_both_runs() -> None:
    torch.manual_seed(0)
    net = reversified(Stack(6, dropout=0.0, width=32), torch.randn(2, 5, 4))
    net.tolerance = 1e-30
    net.compile(backend=BACKEND)
    with torch.compiler.set_stance("force_eager"), torch.autocast("cpu", torch.bfloat16):
        loss = net(torch.randn(3, 5, 4)).float().square().sum()
    loss.backward()
    assert net.compiler is not None and not net.compiler.artifacts


@cases(
    "options, said",
    ({"fullgraph": True}, "one graph"),
    ({"mode": "reduce-overhead"}, "make_graphed_callables"),
    ({"mode": "max-autotune"}, "max-autotune-no-cudagraphs"),
    ({"options": {"triton.cudagraphs": True}}, "CUDA graphs"),
    ({"backend": "cudagraphs"}, "CUDA graphs"),
    ids=["fullgraph", "reduce-overhead", "max-autotune", "options", "cudagraphs"],
)
def test_options_that_cannot_hold_are_refused(options: dict[str, Any], said: str) -> None:
    net, _ = pair()
    with pytest.raises(InputError, match=said):
        net.compile(**options)
    wrapped = torch.compile(net, **options)
    if "fullgraph" in options:
        with pytest.raises(torch._dynamo.exc.Unsupported, match="one compiled function"):
            wrapped(torch.randn(2, 5, 4).double())
    else:
        with pytest.raises(InputError, match=said):
            wrapped(torch.randn(2, 5, 4).double())


def test_compiling_a_block_is_refused() -> None:
    net, _ = pair()
    net.get_submodule("blocks.1").compile(backend=BACKEND)
    with pytest.raises(InputError, match=r"net\.compile\(\) for the whole"):
        net(torch.randn(2, 5, 4).double())
    model = Stack()
    model.blocks[0].compile(backend=BACKEND)
    with pytest.raises(InputError, match=r"blocks\.0 has been compiled"):
        revcompile.reversify(model, torch.randn(2, 5, 4))
