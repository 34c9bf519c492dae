"""The fourth row of PETRA's Table 4: no method one would train with, so the library has none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from revcompile.runtime.stage.stage import Stage


def rebuild_with_latest(stage: Stage) -> None:
    """Differentiate with the forward pass's parameters, but rebuild inputs with the latest.

    Backward runs twice: what it rebuilds is taken from the run with the latest parameters, its
    gradients from the one with those of the forward pass. Running statistics move once.
    """
    differentiate = stage.differentiate

    def twice(
        microbatch: int, values: Mapping[str, Any], gradients: Mapping[str, Tensor | None]
    ) -> tuple[dict[str, Any], dict[str, Tensor | None], dict[str, Tensor | None]]:
        held = stage.in_flight[microbatch]
        statistics = [(tensor, tensor.clone()) for tensor in stage.statistics()]
        stage.in_flight[microbatch] = replace(held, used=stage.weights.of_age(0))
        rebuilt, _, _ = differentiate(microbatch, values, gradients)
        for tensor, before in statistics:
            tensor.copy_(before)
        stage.in_flight[microbatch] = held
        _, back, parameter_gradients = differentiate(microbatch, values, gradients)
        return rebuilt, back, parameter_gradients

    stage.differentiate = twice  # type: ignore[method-assign]
