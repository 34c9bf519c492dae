"""DelayAwareMuon's kernels against torch's operations. Run with `pytest -m gpu`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from revcompile.optim import DelayAwareMuon
from revcompile.optim.muon import _symmetric_product

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def trained(is_fused: bool | None, delay: float) -> tuple[list[Tensor], DelayAwareMuon]:
    torch.manual_seed(0)
    sizes = (96, 64), (64, 96), (64, 96), (200, 30), (8, 4, 3, 3), (70,), ()
    params = [nn.Parameter(torch.randn(size, device="cuda")) for size in sizes]
    optimizer = DelayAwareMuon(params, weight_decay=0.1, capturable=True)
    optimizer.delay, optimizer._is_fused = delay, is_fused
    for _ in range(3):
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()
    return params, optimizer


@pytest.mark.parametrize("delay", [0.0, 2.5])
def test_kernels_update_as_torchs_operations(delay: float) -> None:
    start = [p.detach() for p in trained(None, delay)[0]]
    for p, other in zip(start, trained(False, delay)[0], strict=True):
        torch.testing.assert_close(p, other, atol=2e-3, rtol=0.0)


def test_a_flag_stops_kernels() -> None:
    params, optimizer = trained(None, 1.0)
    assert len(optimizer.guarded()) == len(params)

    def everything() -> list[Tensor]:
        return [t for p in params for t in (p.detach(), *optimizer.state[p].values())]

    before = [t.clone() for t in everything()]
    for flag in (1.0, 0.0):
        optimizer.found_inf = torch.tensor(flag, device="cuda")  # type: ignore[attr-defined]
        optimizer.step()
        same = [torch.equal(a, b) for a, b in zip(before, everything(), strict=True)]
        assert all(same) if flag else not any(same)


@pytest.mark.parametrize(("count", "rows", "columns"), [(1, 200, 72), (9, 96, 256), (30, 300, 64)])
def test_symmetric_products(count: int, rows: int, columns: int) -> None:
    from revcompile.optim.triton_muon import symmetric_product

    torch.manual_seed(0)
    x = (torch.randn(count, rows, columns, device="cuda") / rows**0.5).bfloat16()
    for given in (x, x.mT):
        gram = symmetric_product(given)
        torch.testing.assert_close(gram, _symmetric_product(given), atol=1e-2, rtol=1e-2)
        powers = symmetric_product(gram, 2.0, -5.0)
        exact = _symmetric_product(gram.float(), 2.0, -5.0).bfloat16()
        torch.testing.assert_close(powers, exact, atol=2e-2, rtol=1e-2)
