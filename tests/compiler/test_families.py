"""A dozen families petrafied; `python -m benchmarks.families` does all of timm's."""

import pytest

from tests.support.comparing import examine_timm

MODELS = [
    *("test_byobnet", "test_convnext", "test_convnext3", "test_efficientnet"),
    *("test_efficientnet_gn", "test_efficientnet_ln", "test_mambaout", "test_nfnet", "test_resnet"),
    *("test_vit", "test_vit3", "test_vit4"),
]


@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_four_stages_equal_autograd(name: str) -> None:
    row = examine_timm(name, stages=4, steps=3, double=60, side=64)
    assert row["dtype"] == "float64" and row["error"] < 1e-10
