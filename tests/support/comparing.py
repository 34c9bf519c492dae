"""Models of timm and transformers in stages, compared with the originals and with autograd."""

import copy
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import timm
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import revcompile
from revcompile.compiler.capture import capture
from revcompile.compiler.cost import segment_costs
from revcompile.compiler.find import Found
from revcompile.compiler.rewire import rewire
from revcompile.errors import GuardError
from revcompile.ir.policy import Policy
from revcompile.ir.types import Coupling
from revcompile.runtime.reversible.module import Reversible
from tests.fuzz.compare import loss
from tests.recorded import with_gradients
from tests.support.architectures import ARCHITECTURES, LAYERS, Architecture

TOLERANCE: Final = 1e-10
EXAMPLE: Final = (2, 8)
"""Samples and length of what a transformer is captured with."""
OTHER: Final = (3, 11)
"""Another batch size and another length."""


def fixed_randomness(model: nn.Module) -> None:
    """No dropout: autograd could not draw the same masks."""
    for module in model.modules():
        for name in (
            "p",
            "drop_prob",
            "drop_rate",
            "drop_path_rate",
            "dropout",
            "dropout_p",
            "drop",
            "attn_drop",
        ):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def examine_timm(
    name: str, stages: int, steps: int, double: float, device: str = "cpu", side: int | None = None
) -> dict[str, Any]:
    """Petrafy a model, train some steps at rate 0, compare; `side` of images: the model's own."""
    torch.manual_seed(0)
    model: Any = timm.create_model(name)
    if side is not None and hasattr(model, "set_input_size"):  # transformers are built for one
        model.set_input_size(img_size=side)
    fixed_randomness(model)
    size = sum(p.numel() for p in model.parameters())
    dtype = torch.float64 if size <= double * 1e6 else torch.float32
    model = model.to(device, dtype)
    shape = model.default_cfg.get("input_size", (3, 224, 224))
    shape = shape if side is None else (shape[0], side, side)
    batches = [
        torch.randn(2 if i < steps - 1 else 3, *shape).to(device, dtype) for i in range(steps)
    ]
    start = time.perf_counter()
    net = revcompile.petrafy(model, stages, batches[0], check="off")
    spent = time.perf_counter() - start
    del model
    error = staged_error(net, batches)
    work = [sum(c.forward + c.backward for c in part.costs) for part in net._partition.parts]
    return {
        "parameters": size,
        "dtype": str(dtype).removeprefix("torch."),
        "seconds": round(spent, 1),
        "reversible": sum(part.reversible for part in net._partition.parts),
        "couplings": sum(p.reversible for part in net._partition.parts for p in part.pieces),
        "balance": max(work) * len(work) / sum(work),
        "error": error,
        "ok": error <= (1e-10 if dtype is torch.float64 else 1e-3),
    }


def staged_error(net: Any, batches: Sequence[Any]) -> float:
    """The worst gradient of steps at learning rate 0 on these inputs, beside autograd's."""
    data = [(x, torch.tensor([0.1 * index])) for index, x in enumerate(batches, 1)]
    _, found = with_gradients(net, data, loss)
    reference = net.to_module().train()
    reference.reversible = False
    worst = 0.0
    for (x, y), gradients in zip(data, found, strict=True):
        reference.zero_grad()
        loss(reference(**x) if isinstance(x, dict) else reference(x), y).backward()
        expected = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
        largest = max(float(g.abs().max()) for g in expected.values())
        for name in expected.keys() | gradients.keys():
            want, got = expected.get(name), gradients.get(name)
            want = torch.zeros_like(got) if want is None else want
            got = torch.zeros_like(want) if got is None else got
            # A gradient that is zero in exact arithmetic is noise: measure against the largest.
            error = float((got - want).abs().max()) / max(float(want.abs().max()), 1e-4 * largest)
            # max() passes over a nan, which would then count as no error at all
            worst = max(worst, error if math.isfinite(error) else math.inf)
    return worst


# -- transformers ----------------------------------------------------------------------------------


def examine_transformer(name: str, stages: int = 4, layers: int = LAYERS) -> dict[str, Any]:
    """One row: how the capture compares, how the gradients compare, and what is reversible."""
    torch.manual_seed(0)
    architecture = ARCHITECTURES[name]
    model = architecture.build(layers).double().train()
    fixed_randomness(model)
    start = time.perf_counter()
    row: dict[str, Any] = {"captured_error": compare_capture(model, architecture)}
    net = revcompile.petrafy(
        model, stages, example_kwargs=architecture.inputs(*EXAMPLE), check="off"
    )
    row["seconds"] = round(time.perf_counter() - start, 1)
    try:
        row |= {"lengths": "free", "gradient_error": train(net, architecture, OTHER)}
    except GuardError as refused:
        row |= {"lengths": "fixed", "guard": refused.expression}
        same_length = train(net, architecture, (OTHER[0], EXAMPLE[1]))
        row["gradient_error"] = max(same_length, reversified_error(model, architecture))
    return row | shares(net)


def compare_capture(model: nn.Module, architecture: Architecture) -> float:
    """The captured graph beside the original: the example's length and another one, padded."""
    example, other = architecture.inputs(*EXAMPLE), architecture.inputs(*OTHER)
    net = _as_module(model, example)
    error = _difference(model, net, example)
    try:
        return max(error, _difference(model, net, other))
    except GuardError:
        return max(error, _difference(model, _as_module(model, other), other))


def reversified_error(model: nn.Module, architecture: Architecture) -> float:
    """The worst output and gradient at a length for which `reversify`'s net captures anew.

    Beside a net made for that length from the beginning, with stored activations.
    """
    other = architecture.inputs(*OTHER)
    reference: Any = revcompile.reversify(model, None, other, check="off")
    reference.reversible = False
    net = revcompile.reversify(model, None, architecture.inputs(*EXAMPLE), check="off")
    results: list[list[Tensor]] = []
    for each in (reference, net):
        output = each.train()(**other)
        loss(output, torch.tensor([0.1])).backward()
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in each.parameters()]
        results.append([*_tensors(output), *gradients])
    return max(distance(*pair) for pair in zip(*results, strict=True))


def _as_module(model: nn.Module, example: Mapping[str, Any]) -> nn.Module:
    """The captured graph as a module: no sum is rewired."""
    captured = capture(model, None, example)
    plain = rewire(captured, Found((), ()), Policy.SAME_PARAMETERS)
    return Reversible(plain)


def _difference(model: nn.Module, net: nn.Module, inputs: Mapping[str, Any]) -> float:
    worst = 0.0
    for training in (True, False):
        twin = copy.deepcopy(model).train(training)
        with torch.no_grad():
            expected = twin(**inputs)
            got = net.train(training)(**inputs)
        assert type(got) is type(expected), f"{type(got).__name__} is returned"
        pairs = zip(_tensors(expected), _tensors(got), strict=True)
        worst = max([worst, *(distance(want, have) for want, have in pairs)])
    return worst


def _tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]


def distance(want: Tensor, have: Tensor) -> float:
    assert want.shape == have.shape, f"{tuple(want.shape)} became {tuple(have.shape)}"
    scale = float(want.abs().max()) or 1.0
    error = float((want - have).abs().max()) / scale
    return error if math.isfinite(error) else math.inf  # max() would pass over a nan


def train(net: Any, architecture: Architecture, last: tuple[int, int]) -> float:
    """The worst gradient of three steps, the last with a batch of that size."""
    return staged_error(net, [architecture.inputs(*size) for size in (EXAMPLE, EXAMPLE, last)])


def shares(net: Any) -> dict[str, Any]:
    """What became reversible, and the most frequent reason of what did not."""
    rewired = net.model.rewired
    cost = list(zip(rewired.body.segments, segment_costs(rewired), strict=True))
    inside = [c for segment, c in cost if isinstance(segment, Coupling)]
    reasons: dict[str, int] = {}
    for refusal in rewired.refusals:
        reasons[refusal.reason] = reasons.get(refusal.reason, 0) + 1
    return {
        "stages": net.num_stages,
        "couplings": len(inside),
        "flops_share": 100 * sum(c.flops for c in inside) / max(sum(c.flops for _, c in cost), 1),
        "refused": reasons,
    }
