"""The Triton kernels under Triton's interpreter, on the CPU, against torch."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from revcompile import grid, kernels


def check_norm(rows: int, columns: int) -> None:
    """Forward to what half precision can tell, gradients to float32's last bits."""
    x = (torch.randn(rows, columns) * 3 + 1).requires_grad_()
    weight, bias = (torch.randn(columns).requires_grad_() for _ in range(2))
    out, means, scales = kernels.norm(x.detach(), weight.detach(), bias.detach(), 1e-5, torch.half)
    expected = F.layer_norm(x, (columns,), weight, bias, 1e-5)
    assert torch.allclose(out.float(), expected, atol=1e-2)
    grad = torch.randn(rows, columns).half()
    found = kernels.norm_back(grad, x.detach(), weight.detach(), means, scales)
    wanted = torch.autograd.grad(expected, (x, weight, bias), grad.float())
    for have, want in zip(found, wanted, strict=True):
        assert torch.allclose(have, want, atol=1e-5 * float(want.abs().max()))


def check_sum(dtype: torch.dtype) -> None:
    """To the bit."""
    stream, addend = torch.randn(3, 700), torch.randn(3, 700).to(dtype)
    g = grid.make_grid(stream, stream)
    stream = grid.rounded(stream, g)
    there = kernels.on_grid(stream, addend, g, True)
    assert torch.equal(there, grid.add(stream, addend, g))
    assert torch.equal(kernels.on_grid(there, addend, g, False), stream)
    nothing = kernels.nothing(stream.device)
    assert torch.equal(kernels.on_grid(stream, addend, nothing, True), stream + addend)


if __name__ == "__main__":
    torch.manual_seed(0)
    kernels._PROGRAMS = 3  # type: ignore[misc]
    for sizes in ((5, 8), (37, 96), (70, 128)):
        check_norm(*sizes)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        check_sum(dtype)
