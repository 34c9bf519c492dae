"""Parameters, modules, modes and hooks are those of the moment, and a rebuild keeps to them."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import cases, refuses
from nets import LoRA, module_of
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import revcompile
from revcompile.errors import InputError, ModifiedError
from revcompile.ir.module_tree import copy_module

X = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Stack(nn.Module):
    """Residual blocks, inlined by the capture, whose layers are called."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(drop)) for _ in range(3)
        )
        self.scale = nn.Parameter(torch.ones(8))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = x + block(x) * self.scale
        return self.head(x)


def reversible(drop: float = 0.0) -> Any:
    torch.manual_seed(0)
    return revcompile.reversify(Stack(drop).double(), X, check="off").train()


def found(net: Any, is_reversible: bool, call: Callable[[Tensor], Tensor] | None = None) -> Any:
    net.reversible = is_reversible
    net.zero_grad()
    torch.manual_seed(1)
    (call or net)(X).pow(2).sum().backward()
    return {n: None if p.grad is None else p.grad.clone() for n, p in net.named_parameters()}


def assert_exact(net: Any) -> None:
    """Gradients equal those with stored activations; buffers that runs change are left out."""
    want, have = found(copy_module(net), False), found(net, True)
    for name, gradient in want.items():
        assert (gradient is None) == (have[name] is None), name
        assert gradient is None or torch.allclose(gradient, have[name], atol=1e-12), name


# -- by name, when they run ------------------------------------------------------------------------


def _wrap(net: Any) -> None:
    net.blocks[1][0] = LoRA(net.blocks[1][0])


def _normed(net: Any) -> None:
    net.blocks[1][1] = nn.BatchNorm1d(8).double()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "parameter": lambda net: setattr(
        net.blocks[0][0], "weight", nn.Parameter(torch.eye(8, dtype=torch.float64))
    ),
    "own parameter": lambda net: setattr(
        net, "scale", nn.Parameter(torch.full((8,), 0.5, dtype=torch.float64))
    ),
    "LoRA": _wrap,
    "batch norm": _normed,
    "parametrize": lambda net: parametrize.register_parametrization(
        net.blocks[0][0], "weight", module_of(lambda self, weight: weight.triu() + weight.triu(1).T)
    ),
    "parametrize own": lambda net: parametrize.register_parametrization(
        net, "scale", module_of(lambda self, weight: weight * 2)
    ),
    "weight_norm": lambda net: parametrizations.weight_norm(net.blocks[0][0]),
    "spectral_norm": lambda net: parametrizations.spectral_norm(net.blocks[0][0]),
    "old spectral_norm": lambda net: nn.utils.spectral_norm(net.blocks[0][0]),
    "freeze": lambda net: net.blocks[0].requires_grad_(False),
    "average": lambda net: [setattr(p, "data", p.data * 0.5) for p in net.parameters()],
}


@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize("late", [False, True], ids=["before the first run", "after it"])
def test_what_is_changed_after_reversify_is_trained(kind: str, late: bool) -> None:
    net = reversible()
    if late:
        found(net, True)
    CHANGES[kind](net)
    assert_exact(net)
    assert_exact(net)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # of dynamo
@cases("compiles", False, True)
def test_weights_that_are_computed_once_for_a_step_are_trained(compiles: bool) -> None:
    net = reversible()
    for block in net.blocks:
        parametrizations.weight_norm(block[0])
    stored_twin = copy_module(net)
    if compiles:
        net.compile(backend="eager")
    with parametrize.cached():
        want = found(stored_twin, False)
    with parametrize.cached():
        have = found(net, True)
    for name, gradient in want.items():
        assert gradient is not None and have[name] is not None, name
        assert torch.allclose(gradient, have[name], atol=1e-12), name


def test_functional_call_gives_the_gradients_of_its_parameters() -> None:
    net, results = reversible(), []
    base = {n: p.detach().clone().requires_grad_() for n, p in net.named_parameters()}
    for net.reversible in (False, True):
        given = {name: p * 2 for name, p in base.items()}
        for tensor in (*base.values(), *given.values()):
            tensor.grad = None
        for tensor in given.values():
            tensor.retain_grad()
        torch.func.functional_call(net, given, (X,)).pow(2).sum().backward()
        results.append({n: (base[n].grad, given[n].grad) for n in base})
    for name, pair in results[0].items():
        for want, have in zip(pair, results[1][name], strict=True):
            assert torch.allclose(want, have), name
    assert all(p.grad is None for p in net.parameters())


# -- between a forward and its backward ------------------------------------------------------------


def test_a_weight_written_to_between_forward_and_backward_is_named() -> None:
    net = reversible()
    loss = net(X).sum()
    with torch.no_grad():
        net.blocks[1][0].weight.add_(1.0)
    with pytest.raises(
        ModifiedError, match=r"modified by an inplace operation: parameter blocks\.1\.0\.weight"
    ) as error:
        loss.backward()
    assert isinstance(error.value, RuntimeError)


def test_a_layer_replaced_between_forward_and_backward_is_named() -> None:
    net = reversible()
    loss = net(X).sum()
    _wrap(net)
    refuses(ModifiedError, r"blocks\.1\.0 was replaced", loss.backward)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # of dynamo
@cases("compiles", False, True)
def test_a_layer_unfrozen_between_forward_and_backward_is_a_cause_that_is_named(
    compiles: bool,
) -> None:
    net = reversible()
    if compiles:
        net.compile(backend="eager")
    layer = net.blocks[1][0].requires_grad_(False)
    loss = net(X).sum()
    layer.requires_grad_(True)
    refuses(InputError, "or a layer that was unfrozen between forward and", loss.backward)


def test_modes_and_rates_of_the_forward_hold_in_backward() -> None:
    net, results = reversible(drop=0.5), []
    for net.reversible in (False, True):
        net.train().zero_grad()
        torch.manual_seed(0)
        loss = net(X).sum()
        net.eval()
        net.blocks[0][2].p = 0.1
        loss.backward()
        assert not net.training and net.blocks[0][2].p == 0.1
        net.blocks[0][2].p = 0.5
        results.append([p.grad.clone() for p in net.parameters()])
    assert all(map(torch.allclose, *results))


# -- hooks -----------------------------------------------------------------------------------------


def test_forward_hooks_run_in_both_runs_and_gradient_hooks_once() -> None:
    net = reversible()
    layer, seen = net.blocks[0][0], []
    layer.weight.register_hook(lambda grad: seen.append(("gradient", grad.clone())))
    layer.weight.register_post_accumulate_grad_hook(lambda p: seen.append(("accumulated", p)))
    layer.register_forward_pre_hook(lambda *_: seen.append(("before", None)))
    layer.register_forward_hook(lambda *_: seen.append(("after", None)))
    layer.register_full_backward_hook(lambda *_: seen.append(("backward", None)))
    net(X).sum().backward()
    assert [name for name, _ in seen[:4]] == ["before", "after"] * 2
    assert sorted(name for name, _ in seen[4:]) == ["accumulated", "backward", "gradient"]
    assert torch.equal(dict(seen)["gradient"], layer.weight.grad)


def _node_hooks(tensor: Tensor) -> None:
    assert tensor.grad_fn is not None
    tensor.grad_fn.register_prehook(lambda gradients: tuple(3 * g for g in gradients))


def _observed(tensors: list[Tensor], seen: list[Tensor]) -> Any:
    return torch.autograd.graph.register_multi_grad_hook(
        tensors, lambda gradients: seen.extend(g.clone() for g in gradients if g is not None)
    )


TENSOR_HOOKS: dict[str, Callable[[Tensor, list[Tensor]], Any]] = {
    "scale": lambda tensor, seen: tensor.register_hook(lambda gradient: 2 * gradient),
    "observe": lambda tensor, seen: tensor.register_hook(lambda g: seen.append(g.clone())),
    "observe several": lambda tensor, seen: _observed([tensor], seen),
    "node": lambda tensor, seen: _node_hooks(tensor),
    "retain": lambda tensor, seen: (tensor.retain_grad(), seen.append(tensor)),
}


@cases("kind", *TENSOR_HOOKS)
@cases("of", "output", "stream", "input")
def test_hooks_on_tensors_that_forward_hooks_set_act_on_gradients(kind: str, of: str) -> None:
    if kind == "node" and of == "stream":
        pytest.skip("the rebuilt stream has no graph before the block")
    net, results = reversible(), []
    for is_reversible in (False, True):
        seen: list[Tensor] = []

        def hook(layer: Any, given: Any, *out: Any, seen: list[Tensor] = seen) -> None:
            TENSOR_HOOKS[kind](out[0] if of == "output" else given[0], seen)

        each = net.blocks[1][1] if of == "input" else net.blocks[1][0]
        register = each.register_forward_hook if of == "output" else each.register_forward_pre_hook
        handle = register(hook)
        gradients = found(net, is_reversible)
        handle.remove()
        if kind == "retain":
            seen = [tensor.grad for tensor in seen if tensor.grad is not None]
        results.append((gradients, seen))
    (want, were), (have, are) = results
    for name, gradient in want.items():
        assert torch.allclose(gradient, have[name], atol=1e-12), name
    assert len(were) == len(are) == (kind not in ("scale", "node"))
    assert all(map(torch.allclose, were, are))


def test_hooks_that_compute_take_part_in_the_rebuild_even_if_removed_since() -> None:
    net = reversible()
    handle = net.blocks[1][0].register_forward_hook(lambda layer, args, out: out * 2)
    assert_exact(net)
    want = found(net, False)
    net.reversible = True
    net.zero_grad()
    torch.manual_seed(1)
    loss = net(X).pow(2).sum()
    handle.remove()
    loss.backward()
    for name, parameter in net.named_parameters():
        assert torch.allclose(want[name], parameter.grad), name


@pytest.mark.parametrize("is_frozen", [False, True])
def test_gradients_of_what_hooks_bring_into_a_block_are_not_lost_silently(is_frozen: bool) -> None:
    net, outside = reversible(), nn.Parameter(torch.ones(()))
    net.blocks.requires_grad_(not is_frozen)
    handle = net.blocks[1][0].register_forward_hook(lambda layer, args, out: out * outside)
    for _ in range(2):
        says = r"hook of a Linear .* depends on a tensor \[\] that"
        refuses(InputError, says, lambda: net(X).sum().backward())
    handle.remove()
    assert_exact(net)


@cases("method, where", ("petra", "hook of a Linear"), ("1f1b", "stage 0"))
def test_nor_are_those_in_a_stage(method: str, where: str) -> None:
    net, outside = revcompile.petrafy(Stack().double(), 2, X), nn.Parameter(torch.ones(()))
    trainer = net.trainer(lambda p: torch.optim.SGD(p, 0.1), nn.functional.mse_loss, method=method)
    layer: Any = net.model.get_submodule("blocks.0.0")
    layer.register_forward_hook(lambda layer, args, out: out * outside)
    with pytest.raises(InputError, match=f"{where}.* depends on a tensor .* that requires a grad"):
        for _ in range(3):
            trainer.step(X, X[:, :2])


@cases("method", "reversible_backprop", "backprop")
def test_tensor_hooks_that_forward_hooks_set_act_in_stages(method: str) -> None:
    def trained(scales: float | None) -> Tensor:
        torch.manual_seed(0)
        net = revcompile.petrafy(Stack().double(), 2, X)
        layer: Any = net.model.get_submodule("blocks.0.0")
        if scales is not None:
            layer.register_forward_hook(
                lambda layer, args, out: out.register_hook(lambda g: scales * g) and None
            )
        trainer = net.trainer(
            lambda p: torch.optim.SGD(p, 0.1), nn.functional.mse_loss, method=method
        )
        before = layer.weight.detach().clone()
        trainer.step(X, X[:, :2])
        trainer.flush()
        return layer.weight.detach() - before

    assert torch.allclose(trained(2.0), 2 * trained(None), atol=1e-12)


class Scaled(nn.Module):
    """A module with tensors that are no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.scale, self.number, self.none = torch.ones(8), 1.0, None
        self.listed, self.named = [torch.ones(1)], {"a": [torch.ones(8)]}
        self.register_buffer("kept", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x) * self.scale * self.kept * self.listed[0] * self.named["a"][0]
        return x * self.number * (1.0 if self.none is None else self.none)


def _trained(size: int = 8) -> Tensor:
    return torch.ones(size, requires_grad=True)


LATER: dict[str, Callable[[Any], Any]] = {
    "scale": lambda layer: layer.scale.requires_grad_(),
    "scale, another": lambda layer: setattr(layer, "scale", _trained()),
    "scale, computed": lambda layer: setattr(layer, "scale", 2 * _trained()),
    "kept": lambda layer: layer.kept.requires_grad_(),
    "kept, another": lambda layer: setattr(layer, "kept", _trained()),
    "kept, computed": lambda layer: setattr(layer, "kept", 2 * _trained()),
    "number": lambda layer: setattr(layer, "number", _trained()),
    "none": lambda layer: setattr(layer, "none", _trained()),
    "listed[0]": lambda layer: layer.listed[0].requires_grad_(),
    "listed[0], another": lambda layer: layer.listed.__setitem__(0, _trained(1)),
    "listed[0], another list": lambda layer: setattr(layer, "listed", [_trained()]),
    "named['a'][0]": lambda layer: layer.named["a"][0].requires_grad_(),
    "named['a'][0], another": lambda layer: layer.named["a"].__setitem__(0, _trained()),
}


@pytest.mark.parametrize("row", [*LATER, *(f"traced {row}" for row in LATER if "[" in row)])
def test_nor_are_those_of_attributes_that_get_one_later(row: str) -> None:
    model, x, later = Stack(), X.float(), row.removeprefix("traced ")
    leaf_modules = [Scaled] if later == row else []
    model.blocks[1][0] = Scaled()
    net: Any = revcompile.reversify(model, x, leaf_modules=leaf_modules, check="off")
    staged = revcompile.petrafy(model, 2, x, leaf_modules=leaf_modules, check="off")
    trainer = staged.trainer(lambda p: torch.optim.SGD(p, 0.1), nn.functional.mse_loss)
    net(x).sum().backward()
    for _ in range(3):
        trainer.step(x, x[:, :2])
    trainer.flush()
    for trained in (net, staged.model):
        LATER[later](trained.get_submodule("blocks.1.0"))
    with pytest.raises(InputError, match=r"blocks\.1 depends on a tensor \[[18]\] that"):
        net(x).sum().backward()
    where = re.escape(f"blocks.1.0.{later.partition(',')[0]}")
    says = rf"requires_grad of {where} was changed|blocks\.1\.0\.\w+.* was .* and is|stage 0 dep"
    with pytest.raises(InputError, match=says):
        for _ in range(3):
            trainer.step(x, x[:, :2])


def test_a_tensor_in_a_list_outside_of_blocks_is_trained() -> None:
    model, x = Stack(), X.float()
    model.head = nn.Sequential(Scaled(), nn.Linear(8, 2))
    model.head[0].listed[0].requires_grad_()
    net: Any = revcompile.reversify(model, x).train()
    net(x).sum().backward()
    assert net.head[0].listed[0].grad is not None


class Caching(nn.Linear):
    """A layer that keeps what it has computed, and the last of it in a list."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.seen: list[Tensor | None] = [None]
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.seen[0] = super().forward(x)
        return self.last


def test_results_that_layers_keep_are_no_other_tensors() -> None:
    model, x = Stack(), X.float()
    model.blocks[1][0] = Caching()
    net: Any = revcompile.petrafy(model, 2, x, leaf_modules=(Caching,))
    trainer = net.trainer(lambda p: torch.optim.SGD(p, 0.1), nn.functional.mse_loss)
    for _ in range(5):
        trainer.step(x, x[:, :2])
    trainer.flush()
    trainer.step(x, x[:, :2])


def test_a_hook_on_an_inlined_module_is_an_error_until_it_is_removed() -> None:
    net = reversible()
    for register in ("register_forward_hook", "register_full_backward_hook"):
        handle = getattr(net.blocks[0], register)(lambda *_: None)
        refuses(revcompile.RevcompileError, r"blocks\.0 has a hook .*leaf_mod", net, X)
        handle.remove()
    assert_exact(net)


# -- other ways to run and to differentiate --------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant: bool) -> None:
    net = reversible(drop=0.5)
    want = found(net, False)
    have = found(net, True, lambda x: checkpoint(net, x.requires_grad_(), use_reentrant=reentrant))
    assert all(torch.allclose(want[name], have[name]) for name in want)


def test_func_transforms_and_forward_mode() -> None:
    net = reversible()
    weights = {name: p.detach() for name, p in net.named_parameters()}

    def loss(given: dict[str, Tensor], x: Tensor) -> Any:
        return torch.func.functional_call(net, given, (x,)).pow(2).sum()

    want = found(net, False)
    net.reversible = True
    have = torch.func.grad(loss)(weights, X)
    assert all(torch.allclose(want[name], have[name]) for name in want)
    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, X[:, None])
    assert all(torch.allclose(want[name], each[name].sum(0)) for name in want)
    _, along = torch.func.jvp(lambda x: loss(weights, x), (X,), (X,))
    with forward_ad.dual_level():
        dual = loss(weights, forward_ad.make_dual(X, X))
        assert torch.allclose(forward_ad.unpack_dual(dual).tangent, along)


class OfLength(nn.Module):
    """Reads the length of its input in Python: another length needs another capture."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x)) * (2 if x.shape[1] > 5 else 1)
        return x


@pytest.mark.parametrize("transform", ["grad", "per sample", "jvp", "dual"])
def test_func_transforms_that_need_another_capture(transform: str) -> None:
    model, x = OfLength().double().eval(), torch.randn(2, 7, 4, dtype=torch.float64)
    example = torch.randn(2, 5, 4, dtype=torch.float64)
    net = revcompile.reversify(model, example, policy="pretrained").eval()
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def found(net: nn.Module) -> Any:
        def loss(given: dict[str, Tensor], x: Tensor) -> Any:
            return torch.func.functional_call(net, given, (x,)).pow(2).sum()

        if transform == "grad":
            return torch.func.grad(loss)(weights, x)["blocks.0.weight"]
        if transform == "per sample":
            each = torch.func.vmap(torch.func.grad(loss), (None, 0))
            return each(weights, x[:, None])["blocks.0.weight"]
        if transform == "jvp":
            return torch.func.jvp(lambda x: loss(weights, x), (x,), (x,))[1]
        with forward_ad.dual_level():
            dual = loss(weights, forward_ad.make_dual(x, x))
            return forward_ad.unpack_dual(dual).tangent

    assert torch.allclose(found(net), found(model))


@pytest.mark.parametrize("power", [1, 2])
def test_second_derivatives_say_what_to_do(power: int) -> None:
    net, x = reversible(), X.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(net(x).pow(power).sum(), x, create_graph=True)
    penalty = gradient.pow(2).sum()
    for wanted in (x, net.blocks[0][0].weight, net.blocks[2][0].weight):
        with pytest.raises(revcompile.RevcompileError, match=r"net\.reversible = False"):
            torch.autograd.grad(penalty, wanted, retain_graph=True, allow_unused=True)
    with pytest.raises(revcompile.RevcompileError, match="a second time"):
        torch.autograd.functional.hessian(lambda x: net(x).pow(power).sum(), X)
