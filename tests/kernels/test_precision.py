"""Branches under autocast: what is cast when, and sums of two types. No bit may change."""

import copy
from collections.abc import Callable

import pytest
import torch
from nets import Chain, module_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from training import same, trained

import revcompile
from revcompile.ir import coupling_ops, precision_rewrites
from revcompile.ir.coupling_ops import minus, plus
from revcompile.kernels import exact_sum as grid
from revcompile.kernels import gradient_sum as sums
from revcompile.kernels import triton_kernels as kernels


class _Widened(TorchDispatchMode):
    """Counts tensors of one shape that are turned from bfloat16 into float32, or the other way."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape, self.count, self.casts_down = shape, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and out.shape == self.shape:
            self.count += args[0].dtype == torch.bfloat16 and out.dtype == torch.float32
            self.casts_down += args[0].dtype == torch.float32 and out.dtype == torch.bfloat16
        return out


class _Stack(Chain):
    def __init__(self, first: Callable[[], nn.Module] = nn.Identity) -> None:
        convs = [nn.Conv2d(4, 4, 3, padding=1) for _ in range(3)]
        super().__init__(
            *(nn.Sequential(first(), conv, nn.BatchNorm2d(4), nn.ReLU()) for conv in convs)
        )


def _functional() -> nn.Module:
    weight = nn.Parameter(torch.randn(4, 4, 3, 3))
    return module_of(lambda self, x: F.conv2d(x, self.weight, padding=1), weight=weight)


X = torch.randn(2, 4, 5, 5, generator=torch.Generator().manual_seed(0))


def _copied(
    stream: Tensor, addend: Tensor, g: Tensor | None, is_minus: bool, with_cast: bool
) -> tuple[Tensor, Tensor | None]:
    """What a GPU's kernel gives; its copy is not made with a cast that is counted."""
    total, _ = grid.add_or_subtract(stream, addend, g, is_minus, False)
    if not with_cast:
        return total, None
    assert torch.is_autocast_enabled("cpu") and not torch.is_grad_enabled()
    return total, torch.empty_like(total, dtype=torch.bfloat16).copy_(total)


def _copied_gradient(
    wide: Tensor, narrow: Tensor, dtype: torch.dtype | None = None, out: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    total = wide + narrow
    if dtype is None:
        return total, None
    return total, torch.empty_like(total, dtype=dtype).copy_(total)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_kernel_adds_as_torch_does(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run by Triton's interpreter, on the CPU."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    monkeypatch.setattr(kernels, "_sum", interpreter.InterpretedFunction(kernels._sum.fn))
    stream, addend = torch.randn(3, 700), torch.randn(3, 700).to(dtype)
    g = grid.make_grid(stream, stream)
    stream = grid.rounded(stream, g)
    there, _ = kernels.add(stream, addend, g)
    assert torch.equal(there, plus(stream, addend, g))
    assert torch.equal(kernels.add(there, addend, g, is_minus=True)[0], stream)
    assert torch.equal(kernels.add(stream, addend)[0], stream + addend)
    total, copied = kernels.add(stream, addend, g, True, torch.float16)
    assert torch.equal(total, minus(stream, addend, g))
    assert torch.equal(copied, total.half())


@pytest.mark.parametrize("size", [1e-4, 0.02, 1.0, 50.0])
def test_sums_of_streams_that_grow_are_undone_to_the_bit(size: float) -> None:
    """Embeddings are small before training; what normalised branches add is not."""
    given = size * torch.randn(4000)
    g = grid.make_grid(given, given)
    stream = grid.rounded(given, g)
    assert (stream - given).abs().max() <= 2**-11 * given.abs().max()
    addend = min(max(20.0, 10 * size), 500 * size) * torch.randn(4000)
    assert torch.equal(minus(plus(stream, addend, g), addend, g), stream)


@pytest.mark.parametrize("first", [nn.Identity, _functional, nn.ReLU])
def test_stages_read_copied_sums(
    first: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    net = revcompile.petrafy(_Stack(first), 2, X, check="off")
    parts = net._partition.parts
    assert [sum(piece.reversible for piece in part.pieces) for part in parts] == [2, 1]
    found, casts, widened = [], [], []
    for kind in ("plain", "rewritten", "copied"):
        if kind == "plain":
            rewrite = precision_rewrites.cast_streams
            monkeypatch.setattr(precision_rewrites, "cast_streams", lambda graph, *_: graph)
        elif kind == "rewritten":
            monkeypatch.setattr(precision_rewrites, "cast_streams", rewrite)
        else:
            monkeypatch.setattr(coupling_ops, "add_or_subtract", _copied)
            monkeypatch.setattr(sums, "add_gradients", _copied_gradient)
        with _Widened(X.shape) as seen:
            trainer = trained(copy.deepcopy(net), [(X, X)] * 6, autocast=torch.bfloat16)
        found.append(trainer.model.state_dict())
        casts.append(seen.casts_down)
        widened.append(seen.count)
    assert same(found[0], found[1]) and same(found[0], found[2])
    is_read_cast = first is not nn.ReLU
    assert widened[0] - widened[1] == 6 * 3 * is_read_cast
    assert casts[0] == casts[1]
    # In each pass the second of the first stage's two blocks, and the gradient of the first.
    assert casts[1] - casts[2] == 6 * (2 * is_read_cast + 1)


# -- weights --------------------------------------------------------------------------------------
