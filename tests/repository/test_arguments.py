"""Wrong arguments are refused with what to write; a net without couplings gets a warning."""

import collections
import re
import warnings
from collections.abc import Callable
from typing import Any, get_args

import numpy
import pytest
import timm
import torch
from helpers import cases, refuses
from nets import Residual, module_of
from torch import Tensor, nn
from torch.optim import SGD, AdamW, SparseAdam
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset
from training import settings_of

import revcompile
from revcompile import StagedModel, arguments
from revcompile.compiler.capture.check import Check
from revcompile.errors import InputError, RevcompileWarning
from revcompile.ir.policy import Policy
from revcompile.runtime.reversible.overlap import Overlap
from revcompile.runtime.stage.settings import Backend
from revcompile.schedule import METHODS, Keep


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x + self.f(x).tanh()


X = torch.randn(3, 4)
PARAMETERS = list(nn.Linear(1, 1).parameters())
LOADER: DataLoader[Any] = DataLoader(TensorDataset(X))


@cases(
    "inputs, said",
    ({"x": X}, r"a dict of x, which Block.forward takes as keyword arguments; .* example_kwar"),
    (collections.UserDict(x=X, mask=X), "a UserDict of x, mask, which Block.forward takes"),
    ((2, 4), r"\(2, 4\) is a shape; pass a tensor: torch.randn\(2, 4\)"),
    (X.numpy(), "example_inputs: a numpy array; pass a tensor, torch.from_numpy"),
    ((X, X.numpy()), r"example_inputs\[1\]: a numpy array"),
    (LOADER, r"a DataLoader; pass the inputs of one batch: x, y = next\(iter\(loader\)\)"),
    ((x for x in [X]), "a generator; pass the inputs of one batch"),
)
def test_example_inputs_of_a_wrong_kind(inputs: Any, said: str) -> None:
    refuses(InputError, said, revcompile.reversify, Block(), inputs)


def test_a_dict_that_is_an_argument_is_taken() -> None:
    class FromDict(Block):
        def forward(self, batch: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
            return super().forward(batch["x"])

    net = revcompile.reversify(FromDict(), {"x": X})
    assert net({"x": X}).shape == X.shape


@cases(
    "model, said",
    (Block, r"got the class Block; pass a model of it, Block\(\.\.\.\)"),
    ("resnet18", r"got 'resnet18'; create it first: timm.create_model\('resnet18'\)"),
    (X, "expected a torch.nn.Module, got Tensor"),
)
def test_what_is_no_model(model: Any, said: str) -> None:
    refuses(InputError, f"reversify: .*{said}", revcompile.reversify, model, X)
    refuses(InputError, f"petrafy: .*{said}", revcompile.petrafy, model, 2, X)


@cases(
    "options, said",
    ({"num_stages": 0}, "petrafy: num_stages=0; expected a whole number, at least 1"),
    ({"num_stages": X}, r"num_stages=Tensor; .*: petrafy\(model, num_stages, example_inputs\)"),
    ({"num_stages": 2.0}, "num_stages=2.0; expected a whole number"),
    ({"num_stages": True}, "num_stages=True; expected a whole number"),
    ({"num_stages": 40}, r"num_stages=40, but Block has \d+ pieces .* use num_stages <= \d+"),
    ({"cost": "mesured"}, r"cost='mesured'; use one of: .*; did you mean 'measured'\?"),
    ({"cost": {"stem": 1.0}}, "cost={'stem': 1.0}; use one of: analytic, measured"),
    ({"keep": "graphs"}, r"keep='graphs'; use one of: .*; did you mean 'graph'\?"),
    ({"keep": ["graph"] * 9}, r"keep has 9 items, num_stages="),
    ({"policy": "papers"}, r"policy='papers'; use one of: paper, .*; did you mean 'paper'\?"),
    ({"check": "slow"}, "check='slow'; use one of: fast, full, off"),
    ({"optimizer_copies": -1}, "optimizer_copies=-1; use .* 1 for SGD with momentum, 2 for Ad"),
    ({"tolerance": X}, "tolerance=Tensor; use a number above 0, or None"),
    ({"leaf_modules": "f"}, r"expected a list .* got 'f'; write leaf_modules=\['f'\]"),
    ({"leaf_modules": nn.Linear}, r"got Linear; write leaf_modules=\[Linear\]"),
    ({"memory_budget": 0}, 'memory_budget=0: expected bytes, such as "8GiB"'),
    ({"memory_budget": True}, "memory_budget=True: expected bytes"),
    ({"memory_budget": "8 gigs"}, "memory_budget='8 gigs': expected bytes"),
    ({"memory_budget": "9e999GiB"}, "memory_budget='9e999GiB': expected bytes"),
    ({"microbatch_size": 0}, "microbatch_size=0; expected a whole number"),
    ({"example_kwargs": X}, "example_kwargs: expected a dict of keyword arguments, got Tensor"),
)
def test_options_of_petrafy(options: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {"num_stages": 1, "example_inputs": X} | options
    refuses(InputError, said, revcompile.petrafy, Block(), **given)


@cases(
    "call, name, said",
    (revcompile.petrafy, "stages", "petrafy: there is .* 'stages'; did you mean num_stages"),
    (revcompile.reversify, "epochs", "'epochs'; use model, example_inputs, "),
    (StagedModel.trainer, "accumulate_steps", "net.trainer: .* did you mean accumulation_st"),
    (StagedModel.trainer, "timeou", r"options=TrainerOptions\(timeout=...\)\?"),
)
def test_unknown_keywords(call: Any, name: str, said: str) -> None:
    refuses(TypeError, said, call, Block(), **{name: 2})


def test_numbers_of_numpy_are_numbers() -> None:
    assert revcompile.petrafy(Block(), numpy.int64(1), X).num_stages == 1  # type: ignore[arg-type]


# -- trainers, drawings and plans -----------------------------------------------------------------


@pytest.fixture(scope="module")
def staged() -> StagedModel:
    return revcompile.petrafy(nn.Sequential(Block(), Block()), 2, X)


def raising(argument: Any) -> Any:
    raise KeyError("weight")


@cases(
    "options, said",
    ({"optimizer": lambda p: None}, "stage 0: expected a torch.optim.Optimizer .* got None"),
    ({"optimizer": SGD(PARAMETERS)}, "expected a function from a list of parameters"),
    ({"optimizer": "sgd"}, "expected a function .* got builtins.str"),
    ({"optimizer": lambda p: SGD([*p, *PARAMETERS])}, "it holds others, too"),
    ({"optimizer": lambda p: SGD(PARAMETERS)}, "it holds none of them: those of another model"),
    ({"optimizer": lambda p: SGD(p[:1])}, "it lacks 0.f.bias"),
    ({"optimizer": torch.optim.LBFGS}, "stage 0: .*LBFGS computes the loss several times"),
    ({"optimizer": SparseAdam}, "stage 0: SparseAdam takes sparse gradients"),
    ({"optimizer": lambda p: [SGD(p), AdamW(p[:1])]}, "give every parameter to one of them"),
    ({"optimizer": lambda p: [SGD(p[:1])]}, "it lacks"),
    ({"optimizer": lambda p: [SGD(p), None]}, "or a list of them, got None"),
    ({"optimizer": lambda p: []}, "returned no optimizer"),
    (
        {"optimizer": lambda p: [SGD(p), AdamW([])]},
        "stage 0: .* empty parameter list; it chose none of this stage's parameters.* leave",
    ),
    ({"optimizer": lambda p: [SGD(p[1:]), SparseAdam(p[:1])]}, "SparseAdam takes sparse"),
    ({"loss": 3}, r"expected a function of \(output, target\), got int"),
    ({"loss": nn.Linear(3, 1)}, "parameters of its own"),
    ({"accumulation_steps": 1.5}, "accumulation_steps=1.5; expected a whole number"),
    ({"seed": "a"}, "seed='a'; use a whole number"),
    ({"lr_schedule": 3}, "lr_schedule: expected a function, called once a stage, got int"),
    ({"param_groups": 3}, "called once a stage, got int; write e.g. param_groups=lambda named"),
    ({"autocast": torch.float64}, "use torch.bfloat16 or None"),
    ({"autocast": "fp16"}, r"float16: .* use torch\.bfloat16, or reversify\(.*GradScaler"),
    ({"method": "backprop", "in_flight_per_stage": 2}, "has a fixed order"),
    ({"lr_schedule": lambda o: 0.1}, "stage 0: expected .* torch.optim.lr_scheduler"),
    ({"lr_schedule": lambda o: StepLR(SGD(PARAMETERS), 1)}, "schedule of another optimizer"),
    ({"lr_schedule": ReduceLROnPlateau}, "needs a metric at every step"),
    ({"param_groups": lambda named: []}, "stage 0: .* empty parameter list; .* param_groups= "),
    ({"param_groups": lambda named: [{"params": [p for _, p in named[1:]]}]}, "it lacks 0.f.w"),
    ({"clip_grad_norm": 0.0}, "use a positive norm"),
    ({"method": 3}, "method=3; use the name of a method, e.g. method='petra'"),
    ({"method": "petar"}, "method 'petar' does not exist; did you mean 'petra'"),
    ({"weights": "newest"}, "use one of: latest, stashed, predicted"),
    ({"weights": "stashed", "method": "1f1b"}, "no updates between forward and backward pass"),
    ({"weights": "predicted", "method": "backprop"}, "there are no updates between"),
    ({"weights": "latest", "method": "ddg"}, "it keeps graphs"),
    ({"memory_budget": "9B", "method": "gpipe"}, "memory_budget=9: .* device 0 needs"),
    ({"memory_budget": "auto"}, r'"auto": the device does not .* memory_budget="8GiB"'),
    (
        {"in_flight_per_stage": "x"},
        r"in_flight_per_stage='x'; use a number, at least 1 \(1: the least",
    ),
    ({"param_groups": lambda named: None}, r"stage 0: .* got None; return a list of dicts"),
    (
        {"param_groups": lambda named: [{"params": [p for _, p in named]}] * 2},
        "more than one parameter group; .* hold every parameter once, e.g. lambda named",
    ),
    (
        {"param_groups": lambda named: [{"parms": [p for _, p in named]}]},
        "a group has no 'params', but 'parms'; return a list of dicts",
    ),
    ({"param_groups": lambda named: [1]}, "expected parameter groups, got .*; return a list"),
    ({"param_groups": raising}, "param_groups, stage 0: it raised KeyError: 'weight'"),
    ({"lr_schedule": raising}, "lr_schedule, stage 0: it raised KeyError: 'weight'"),
    ({"device": "gpu"}, "device='gpu' does not exist; use 'cpu', 'cuda', 'cuda:1'"),
    ({"device": "cuda:99"}, r"device='cuda:99', but torch sees \d+ CUDA devices here"),
    ({"device": "meta"}, "device='meta' cannot be used here: it holds no values"),
    ({"device": "xla"}, "device='xla' cannot be used here: "),
    ({"clip_grad_norm": True}, "clip_grad_norm=True; use a positive norm or None"),
    ({"timeout": -1}, "TrainerOptions: timeout=-1; use a number of seconds above 0"),
    ({"stage_to_rank": [0]}, r"stage_to_rank=\[0\]; expected a list of 2 numbers"),
    ({"stage_to_rank": [0, "1"]}, "an entry of stage_to_rank='1'; expected a whole number"),
    ({"kept_input_dtype": torch.float32}, r"_dtype=torch.float32; use torch\.bfloat16"),
    ({"kept_input_dtype": "offload"}, r"kept_input_dtype='offload'; use torch\.bfloat16"),
    ({"gradient_message_dtype": torch.float16}, r"gradient_message_dtype=torch\.float16"),
)
def test_options_of_a_trainer(staged: StagedModel, options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        given = {"optimizer": SGD, "loss": nn.functional.mse_loss} | options
        staged.trainer(**settings_of(**given))


def test_parameters_in_float16_are_refused_by_stages() -> None:
    net = revcompile.petrafy(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).half(), 2, X.half())
    with pytest.raises(InputError, match=r"0\.weight is in float16: .*GradScaler"):
        net.trainer(SGD, nn.functional.mse_loss)


@cases(
    "call, said",
    (lambda net: net(X), r"net\.trainer\(\.\.\.\) trains it.*net\.to_module\(\)\(x\)"),
    (lambda net: net.draw(None), r"expected a path, got None; .* net\.draw\('net\.svg'\)"),
    (lambda net: setattr(net, "microbatch_size", "8"), "net: microbatch_size='8'; expected a whol"),
    (lambda net: net.draw_schedule(3), r"got 3; write e.g. net.draw_schedule\('timeline.svg'"),
    (lambda net: net.draw("no_such_folder/x.svg"), "net.draw: there is no folder .*no_such_f"),
    (lambda net: setattr(net, "method", "pettra"), "method 'pettra' does not exist; did you m"),
    (lambda net: setattr(net, "method", 3), "method=3; use the name of a method"),
    (lambda net: net.load_weights(None), "net.load_weights: expected a path, got None"),
    (lambda net: net.save_weights(None), "net.save_weights: expected a path, got None"),
    (lambda net: net.explain(None), "net.explain: expected the path of a module, got None"),
    (lambda net: net.delays("2"), "net.delays: accumulation_steps='2'; expected a whole number"),
    (lambda net: setattr(net, "microbatch_size", -1), "microbatch_size=-1; .* at least 1"),
    (lambda net: net.workload(optimizer_copies=-1), "optimizer_copies=-1; use "),
    (lambda net: net.summary(8), "net.summary: workload=8; give what net.workload"),
    (lambda net: net.facts(memory_budget="8 gigs"), "memory_budget='8 gigs': expected bytes"),
    (
        lambda net: net.trainer(nn.functional.mse_loss, lambda p: SGD(p)),
        r"net\.trainer\(optimizer, loss\) takes the function that makes an optimizer first",
    ),
    (
        lambda net: net.trainer(SGD, options={"timeout": 3}),
        "options=dict; write options=TrainerOptions",
    ),
    (
        lambda net: revcompile.reversify(nn.Linear(4, 4, device="meta"), X),
        r"different devices, cpu and meta; move one of them: example_inputs=x\.to\('meta'\)",
    ),
    (lambda net: net.to_pipeline_stages("gpu"), "device='gpu' does not exist"),
    (lambda net: net.to_pipeline_stages(None, "yes"), "reversible='yes'; use True or False"),
    (lambda net: revcompile.check_invertible(net, X), r"pass its module, net\.to_module\(\)"),
    (lambda net: revcompile.check_invertible(net.to_module(), X, tolerance=-1), "tolerance=-1"),
    (
        lambda net: revcompile.check_invertible(net.to_module(), X, policy="pretrained"),
        "policy='pretrained', but the model was rewired with another one",
    ),
)
def test_calls_of_a_net(staged: StagedModel, call: Callable[[StagedModel], Any], said: str) -> None:
    refuses(InputError, said, call, staged)


@cases(
    "change, why",
    (lambda model: model.requires_grad_(False), "no parameter requires a gradient"),
    (lambda model: model.append(module_of(lambda self, x: x.detach())), "has a path to the result"),
)
def test_nothing_to_train_is_refused(change: Callable[[nn.Module], Any], why: str) -> None:
    model = nn.Sequential(Block(), Block())
    change(model)
    net = revcompile.petrafy(model, 2, X)
    with pytest.raises(InputError, match=rf"Sequential has nothing to train: .*{why}.*requires_gr"):
        net.trainer(SGD, nn.functional.mse_loss)


def test_the_trainer_documents_every_backend() -> None:
    text = StagedModel.trainer.__doc__ or ""
    assert all(f'"{name}"' in text for name in get_args(arguments.BackendName))


@cases(
    "names, words",
    (arguments.MethodName, list(METHODS)),
    (arguments.BackendName, [backend.value for backend in Backend]),
    (arguments.KeepName, [keep.value for keep in Keep]),
    (arguments.CheckName, [check.value for check in Check]),
    (arguments.PolicyName, [policy.value for policy in Policy]),
    (arguments.OverlapName, [overlap.value for overlap in Overlap]),
)
def test_literal_types_list_what_is_accepted(names: Any, words: list[str]) -> None:
    assert sorted(get_args(names)) == sorted(words)


# -- public names and what they print -------------------------------------------------------------


def test_every_public_name_is_importable() -> None:
    for name in revcompile.__all__:
        assert getattr(revcompile, name).__module__.startswith("revcompile.")


def test_reprs_are_one_line(staged: StagedModel) -> None:
    trainer = staged.trainer(SGD, nn.functional.mse_loss)
    metrics = trainer.step(X, X)
    assert isinstance(trainer, revcompile.Trainer) and isinstance(metrics, revcompile.Metrics)
    assert f"loss {metrics.loss:.4g}, " in repr(metrics) == str(metrics)
    assert re.fullmatch(r"CompiledStage\(0 of 2: .*, (not )?reversible\)", repr(staged.stages[0]))
    assert "\n" not in repr(metrics) + repr(staged.stages[0])


def test_a_warning_of_hooks_names_who_was_called() -> None:
    model = module_of(lambda self, x: self.blocks(x), blocks=nn.Sequential(Block(), Block()))
    model.blocks[0].register_forward_hook(lambda module, args, output: None)
    with pytest.warns(RevcompileWarning, match=r"^petrafy: blocks\.0 has hooks"):
        revcompile.petrafy(model, 2, X)
    with pytest.warns(RevcompileWarning, match=r"^reversify: blocks\.0 has hooks"):
        revcompile.reversify(model, X)


# -- nothing reversible ---------------------------------------------------------------------------


SCALED = module_of(lambda self, x: 0.5 * x + self.inner.f(x), inner=Block())
MLP = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
CASES = [
    (MLP, "nothing in Sequential became reversible, .* x \\+ F\\(x\\)"),
    (SCALED, r"nothing in Module became .*Why: \(top level\): the shortcut is scaled by 0.5"),
]


@pytest.mark.parametrize(("model", "said"), CASES)
def test_one_warning_says_that_nothing_is_reversible_and_why(model: nn.Module, said: str) -> None:
    for caller, make in (
        ("reversify", lambda: revcompile.reversify(model, X)),
        ("petrafy", lambda: revcompile.petrafy(model, 1, X)),
    ):
        with pytest.warns(RevcompileWarning, match=f"{caller}: {said}") as seen:
            make()
        assert len(seen) == 1 and seen[0].filename == __file__


def test_something_reversible_gives_no_warning() -> None:
    with warnings.catch_warnings(action="error"):
        revcompile.reversify(Block(), X)


def test_a_model_that_looks_trained_needs_a_policy() -> None:
    x, said = torch.randn(3, 4), "Residual looks trained.*'pretrained'.*'paper'"
    counted, scaled = (
        Residual(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4))) for _ in range(2)
    )
    counted(x)
    with torch.no_grad():
        scaled.branch[0].weight[0] = 2.0
    refuses(InputError, f"reversify: {said}", revcompile.reversify, scaled, x)
    refuses(InputError, f"petrafy: {said}", revcompile.petrafy, scaled, 1, x)
    for policy in ("pretrained", "paper", "same_parameters"):
        revcompile.reversify(scaled, x, policy=policy)
    revcompile.reversify(counted, x)  # a forward pass is no training
    zero_init = timm.create_model("test_resnet", num_classes=4)
    revcompile.reversify(zero_init, torch.randn(2, 3, 32, 32), check="off")
