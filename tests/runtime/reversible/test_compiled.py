"""Compiled couplings: the same training as eager ones, by few artifacts, and what is refused."""

from __future__ import annotations

import copy
import io
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from helpers import ON_GPU, cases, gradients, worst
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import revcompile
from revcompile.errors import InputError, ModifiedError, RevcompileWarning
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


def in_another_thread(call: Callable[..., Any], *args: Any) -> None:
    thread = threading.Thread(target=call, args=args)
    thread.start()
    thread.join()


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
        in_another_thread(torch.randn, 5)
        sum(losses).backward()
        found.append({name: p.grad for name, p in module.named_parameters()})
    assert worst(*found)[0] < 1e-10


def test_draws_of_another_thread_during_a_run_are_noticed() -> None:
    _, compiled = pair(dropout=0.5)
    disturbs = False

    def backend(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            if disturbs:
                in_another_thread(torch.randn, 5)
            return graph(*args)

        return run

    compiled.compile(backend=backend)
    x = torch.randn(3, 5, 4).double()
    compiled(x).sum().backward()
    loss = compiled(x).sum()
    disturbs = True
    with pytest.raises(ModifiedError, match="not drawn the random numbers"):
        loss.backward()


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
    assert "blocks.0 (it writes to buffers)" in repr(twin)


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


class Dilated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Conv1d(3, 3, 3, padding=width, dilation=width) for width in range(1, 11)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x).tanh()
        return x


def test_blocks_with_other_settings_have_artifacts_of_their_own() -> None:
    """One function would be compiled more often than torch allows."""
    x = torch.randn(2, 3, 24).double()
    net = reversified(Dilated().double(), x)
    compiled = copy.deepcopy(net)
    compiled.compile(backend=BACKEND)
    assert_same(net, compiled, x)
    assert compiled.compiler is not None and not compiled.compiler.failures


def test_settings_that_change_too_often_end_in_eager_blocks() -> None:
    net, compiled = pair()
    x = torch.randn(3, 5, 4).double()
    reached = pytest.warns(RevcompileWarning, match="recompile_limit is reached")
    with torch._dynamo.config.patch(recompile_limit=8), reached as said:
        for rate in range(10):
            for module in (net, compiled):
                for block in module.get_submodule("blocks").children():
                    block.drop.p = 0.05 * rate
            assert_same(net, compiled, x)
    assert len(said) == 1


def test_a_block_with_hooks_runs_eagerly() -> None:
    net, compiled = pair(dropout=0.0)
    for module in (net, compiled):
        module.get_submodule("blocks.1.up").register_forward_hook(lambda m, i, o: 1.5 * o)
    assert_same(net, compiled, torch.randn(3, 5, 4).double())


def test_a_net_says_what_is_compiled() -> None:
    net, compiled = pair()
    x = torch.randn(3, 5, 4).double()
    assert "couplings run eagerly; net.compile() compiles them" in repr(net)
    assert f"couplings are compiled by {BACKEND}, 0 artifacts so far\n" in repr(compiled)
    compiled.get_submodule("blocks.1.up").register_forward_hook(lambda m, i, o: None)
    compiled(x)
    line = "couplings are compiled by eager, 3 artifacts so far; eager: blocks.1 (it has hooks)"
    assert line in repr(compiled) and line == compiled.summary().splitlines()[-1]
    assert "run eagerly" in repr(copy.deepcopy(compiled))
    torch.compile(net, backend="aot_eager")(x)
    assert "compiled by aot_eager" in repr(net)
    net(x)
    assert "run eagerly" in repr(net)


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


def test_averages_and_state_dicts_of_a_compiled_net_are_its_own() -> None:
    net, compiled = pair(dropout=0.0)
    found = []
    for module in (net, compiled):
        torch.manual_seed(2)
        average = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(3):
            module.zero_grad()
            module(torch.randn(3, 5, 4).double()).square().mean().backward()
            optimizer.step()
            average.update_parameters(module)
        module.eval(), average.eval()
        with torch.no_grad():
            outputs = [each(torch.ones(2, 5, 4).double()) for each in (module, average)]
        module.train()
        found.append(dict(zip("ab", outputs, strict=True)) | average.module.state_dict())
    assert worst(*found)[0] < 1e-10
    twin = reversified(Stack(dropout=0.0).double(), torch.randn(2, 5, 4).double())
    twin.load_state_dict(compiled.state_dict())
    assert_same(twin, compiled, torch.randn(3, 5, 4).double())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_a_gradient_scaler_scales_and_skips_alike(device: str) -> None:
    torch.manual_seed(0)
    net = reversified(Stack(dropout=0.0, width=32), torch.randn(2, 5, 4)).to(device)
    compiled = copy.deepcopy(net)
    compiled.compile(backend="aot_eager" if device == "cpu" else "inductor")
    x, found = torch.randn(6, 5, 4, device=device), []
    for module in (net, compiled):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        scaler = torch.amp.GradScaler(device, init_scale=2.0**60)  # the first step is skipped
        for scale in (None, 2.0**10, 2.0**10):
            with torch.autocast(device, torch.float16):
                loss = module(x).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update(scale)
            optimizer.zero_grad()
        found.append({"scale": torch.tensor(scaler.get_scale()), **module.state_dict()})
    assert worst(*found)[0] < 5e-3


def test_deterministic_algorithms_may_be_switched_between_steps() -> None:
    net, compiled = pair()
    for on in (False, True, False):
        torch.use_deterministic_algorithms(on)
        assert_same(net, compiled, torch.randn(3, 5, 4).double())
    assert compiled.compiler is not None and not compiled.compiler.failures


@pytest.mark.nightly
def test_without_a_compiler_of_cpp_couplings_run_eagerly(tmp_path: Path) -> None:
    """In a process of its own: inductor looks for the compiler once."""
    file = tmp_path / "train.py"
    file.write_text(
        "import torch, revcompile\n"
        "from test_compiled import Stack, gradients, worst\n"
        "torch.set_num_threads(1)\n"
        "x, found = torch.randn(2, 5, 4).double(), []\n"
        "options = {'policy': 'same_parameters', 'check': 'off'}\n"
        "net = revcompile.reversify(Stack(dropout=0.0).double(), x, **options).train()\n"
        "found.append(gradients(net, x))\n"
        "net.compile()\n"
        "found.append(gradients(net, x))\n"
        "assert worst(*found)[0] == 0.0\n"
        "print(net.compiler.failures)\n"
    )
    path = os.pathsep.join([*sys.path, str(Path(__file__).parent)])
    env = {**os.environ, "CXX": str(tmp_path / "missing"), "PYTHONPATH": path}
    env["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / "cache")
    run = subprocess.run(
        [sys.executable, file], env=env, capture_output=True, text=True, check=False, timeout=300
    )
    assert run.returncode == 0, run.stderr
    assert "blocks.0" in run.stdout
    assert run.stderr.count("run eagerly") == 1, run.stderr
    assert "C++ compiler" in run.stderr


def test_transforms_of_torch_func_run_eagerly() -> None:
    net, compiled = pair(dropout=0.0)
    x, found = torch.randn(3, 5, 4).double(), []
    for module in (net, compiled):
        weights = dict(module.named_parameters())

        def loss(given: dict[str, Tensor], module: nn.Module = module) -> Tensor:
            return torch.func.functional_call(module, given, (x,)).square().sum()

        results = dict(torch.func.grad(loss)(weights))
        results["each sample"] = torch.func.vmap(module)(x.expand(2, 3, 5, 4))
        results["tangent"] = torch.func.jvp(module, (x,), (torch.ones_like(x),))[1]
        found.append({name: value.detach() for name, value in results.items()})
    assert worst(*found)[0] < 1e-10
    assert compiled.compiler is not None and not compiled.compiler.artifacts


def test_what_fails_in_the_backward_graph_fails_in_forward() -> None:
    from torch._dynamo.backends.common import aot_autograd

    def backward(graph: Any, inputs: Any) -> Any:
        raise NotImplementedError("no kernels")

    net, compiled = pair(dropout=0.0)
    compiled.compile(backend=aot_autograd(fw_compiler=lambda g, _: g, bw_compiler=backward))
    with pytest.warns(RevcompileWarning, match="run eagerly.*no kernels") as said:
        assert_same(net, compiled, torch.randn(3, 5, 4).double())
    assert len(said) == 1
    assert compiled.compiler is not None
    assert list(compiled.compiler.failures) == ["stem", "blocks.0", "head"]


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
    assert "; eager: blocks.1 (Unsupported: " in repr(compiled)


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
