"""The kernels of norms under Triton's interpreter, on the CPU, against torch's own.

A process of its own: Triton decides on being imported whether it interprets.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from revcompile.kernels import batch_norm as batchnorms
from revcompile.kernels import fixed_point
from revcompile.kernels import layer_norm as norms
from revcompile.kernels import triton_average as average_kernels
from revcompile.kernels import triton_batch_norm as batch_kernels
from revcompile.kernels import triton_kernels as kernels
from revcompile.kernels.gradient_sum import GradientSum

SKIPPED = 77
"""Exit status where kernels cannot be interpreted."""

STEPS = {torch.float32: 2e-6, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-7}
"""One rounding, relatively; the interpreter cuts a bfloat16 off where a GPU rounds it."""


def problem(rows: tuple[int, ...], columns: int) -> tuple[Tensor, ...]:
    """A stream that is neither centred nor of one scale, a weight and a bias."""
    x = torch.randn(*rows, columns) * 3 + 1
    return tuple(t.requires_grad_() for t in (x, torch.randn(columns), torch.randn(columns)))


def check(rows: tuple[int, ...], columns: int, dtype: torch.dtype) -> None:
    """The result to one rounding, gradients to float32's last bits."""
    given = problem(rows, columns)
    out = norms._CastDownLayerNorm.apply(*given, 1e-5, dtype)
    expected = F.layer_norm(given[0], (columns,), *given[1:], 1e-5)
    assert out.dtype == dtype and out.shape == expected.shape
    assert torch.allclose(out.float(), expected, rtol=STEPS[dtype], atol=2e-6)
    grad = torch.randn_like(expected).to(dtype)
    found = torch.autograd.grad(out, given, grad)
    wanted = torch.autograd.grad(expected, given, grad.float())
    for have, want in zip(found, wanted, strict=True):
        assert torch.allclose(have, want, atol=2e-6 * float(want.abs().max()))


def check_added(columns: int) -> None:
    """A stream's own gradient on top, and a copy of the sum."""
    given = problem((3, 37), columns)
    own, total = torch.randn_like(given[0]), GradientSum()
    out = norms._CastDownLayerNorm.apply(*given, 1e-5, torch.float16, total)
    grad = torch.randn_like(out)
    plain = torch.autograd.grad(out, given, grad, retain_graph=True)
    total.begin(own, torch.float16)
    found = torch.autograd.grad(out, given, grad)
    assert torch.allclose(found[0], own + plain[0], rtol=1e-6, atol=1e-6)
    whole, copied = total.finish(found[0])
    assert whole is found[0] and copied is not None
    assert torch.equal(copied, whole.half())
    assert all(torch.equal(have, want) for have, want in zip(found[1:], plain[1:], strict=True))


def check_bn_relu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """A batch norm and its ReLU: result, running statistics, gradients."""
    channels = shape[1]
    x = torch.randn(shape) * 3 + 5 * torch.randn(channels)[:, None, None]
    x = x.to(dtype, memory_format=torch.channels_last)
    parameters = [torch.randn(channels).requires_grad_() for _ in range(2)]
    running = torch.randn(channels), torch.rand(channels)
    moved = tuple(t.clone() for t in running)
    given, wide = (x.requires_grad_(), *parameters), x.detach().float().requires_grad_()
    out, *statistics = batchnorms._BnRelu.apply(*given, 1e-5, (*moved, 0.3), None)
    still = batchnorms._BnRelu.apply(*given, 1e-5, None, None)[0]
    known = batchnorms._BnRelu.apply(*given, 1e-5, None, tuple(statistics))[0]
    expected = F.relu(F.batch_norm(wide, *running, *parameters, True, 0.3, 1e-5))
    assert out.dtype == dtype and out.stride() == x.stride() and torch.equal(out, still)
    assert torch.equal(out, known)
    assert torch.allclose(out.float(), expected, rtol=STEPS[dtype], atol=1e-5)
    for have, want in zip(moved, running, strict=True):
        assert torch.allclose(have, want, rtol=1e-5, atol=1e-6)
    grad = torch.randn_like(expected).to(dtype)
    found = torch.autograd.grad(out, given, grad)
    wanted = torch.autograd.grad(expected, (wide, *parameters), grad.float())
    for have, want in zip(found, wanted, strict=True):
        atol = 2e-6 * float(want.abs().max())
        assert torch.allclose(have.float(), want, rtol=STEPS[have.dtype], atol=atol)


def check_twice() -> None:
    """Gradients of a function of gradients."""
    given = problem((3, 4), 12)
    results = (
        norms._CastDownLayerNorm.apply(*given, 1e-5, torch.float32),
        F.layer_norm(given[0], (12,), *given[1:], 1e-5),
    )
    found = []
    for out in results:
        first = torch.autograd.grad(out.sin().sum(), given, create_graph=True)
        found.append(torch.autograd.grad(sum(g.pow(2).sum() for g in first), given))
    for have, want in zip(*found, strict=True):
        assert torch.allclose(have, want, atol=1e-4 * float(want.abs().max()))


def check_average(shape: tuple[int, ...], samples: int) -> None:
    """Averaged couplings: to the bit what torch's operations give, and NaN after an overflow."""
    unit = fixed_point.unit_of(torch.full((1,), 9.0), torch.zeros(1)).reshape(1)
    a, b = (fixed_point.in_units(torch.randn(shape) * scale, unit) for scale in (1, 4))
    signs = samples, *(1 for _ in shape[1:])
    sign, limit = fixed_point.random_signs(signs, a.device, a.dtype), 2.0**24
    for dtype in (torch.float32, torch.float16):
        addend = torch.randn(shape).to(dtype)
        y, lost, _ = fixed_point.average(a, b, addend, sign, unit)
        found = average_kernels.average(a, b, addend, sign, unit, limit, dtype)
        assert all(map(torch.equal, found, (y, lost, y.to(dtype))))
        given = y, b, addend, sign, unit, lost
        rebuilt, copy = average_kernels.undo_average(*given, dtype)
        assert torch.equal(rebuilt, a) and torch.equal(copy, a.to(dtype))
        assert torch.equal(fixed_point.undo_average(*given)[0], a)
        broken = a.clone()
        broken.view(-1)[0] = torch.nan
        found = average_kernels.average(broken, b, addend, sign, unit, limit, None)
        assert found[0].isnan().sum() == 1 and found[2] is None
    of_b, of_y = torch.randn(2, *shape)
    gradients = average_kernels.average_gradients(of_b, of_y, sign, torch.float32)
    wanted_gradients = fixed_point.average_gradients(of_b, of_y, sign)
    for function in (average_kernels.average_gradients, fixed_point.average_gradients):
        copies = of_b.clone(), of_y.clone()
        overwritten = function(*copies, sign, torch.float32, True)
        assert all(map(torch.equal, overwritten, wanted_gradients))
        assert overwritten[0] is copies[1] and overwritten[1] is copies[0]
    assert all(map(torch.equal, gradients, wanted_gradients))
    addend.view(-1)[:2] = torch.tensor([torch.nan, torch.inf])
    addend.view(-1)[2] = 60000.0
    for found in (
        average_kernels.average(a, b, addend, sign, unit, limit, None),
        fixed_point.average(a, b, addend, sign, unit),
    ):
        assert found[0].isnan().sum() == 3  # not finite, or too large
        rebuilt = average_kernels.undo_average(found[0], b, addend, sign, unit, found[1], None)
        assert rebuilt[0].isnan().sum() == 3


if __name__ == "__main__":
    torch.manual_seed(0)
    kernels._PROGRAMS = 3  # type: ignore[misc]
    try:
        kernels.layer_norm_forward(*torch.zeros(3, 1, 8).unbind(), 1.0, torch.float32)
    except RuntimeError as error:
        # some versions of triton ask for a GPU's driver even to interpret a kernel
        if "active driver" not in str(error):
            raise
        raise SystemExit(SKIPPED) from error
    assert kernels.supports_layer_norm(torch.device("cpu"), 8, torch.bfloat16)
    assert not kernels.supports_layer_norm(torch.device("cpu"), 8192, torch.bfloat16)
    for dtype in STEPS:
        check((5,), 8, dtype)
        check((3, 37), 96, dtype)
        check((70,), 128, dtype)
        check((7,), 1500, dtype)
    check_added(96)
    check_added(1500)
    check_twice()
    check_average((3, 5, 37), 3)
    check_average((1, 1040), 1)
    batch_kernels._PROGRAMS = 5  # type: ignore[misc]
    assert batch_kernels.works_on(torch.device("cpu"), torch.float16)
    check_bn_relu((3, 8, 5, 7), torch.float16)
    check_bn_relu((2, 200, 9, 9), torch.float16)
    check_bn_relu((5, 130, 6, 7), torch.float32)
