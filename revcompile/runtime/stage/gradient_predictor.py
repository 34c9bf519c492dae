"""Synthetic gradients (Jaderberg et al., DNI): a small layer predicts the gradient of an output."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from revcompile.ir.program import Port
from revcompile.runtime.stage.optimizers import OptimizerFactory
from revcompile.runtime.stage.tensors import TreeCopy
from revcompile.runtime.stage.update import Updater


class GradientPredictor:
    """Predicts the gradients of a stage's outputs; starts at zero, learns from the true ones."""

    def __init__(
        self, stage: int, ports: Sequence[Port], factory: OptimizerFactory, device: torch.device
    ) -> None:
        types = {port.name: port.type for port in ports if port.requires_grad and port.type}
        made = (_layer(kind.shape).to(device, kind.dtype) for kind in types.values())
        self._names, self.layers = list(types), nn.ModuleList(made)
        parameters = dict(self.layers.named_parameters())
        self.updater = Updater(f"gradient_predictor of stage {stage}", parameters, factory)

    def predict(self, outputs: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
        with torch.no_grad():
            return {name: layer(outputs[name].to(_dtype(layer))) for name, layer in self._pairs()}

    def _pairs(self) -> Iterable[tuple[str, nn.Module]]:
        return zip(self._names, self.layers, strict=True)

    def train(self, outputs: Mapping[str, Tensor], gradients: Mapping[str, Tensor | None]) -> None:
        """Take one optimizer step towards the gradients that came back."""
        named = list(self.layers.named_parameters())
        with torch.enable_grad():
            losses = []
            for name, layer in self._pairs():
                if (gradient := gradients.get(name)) is not None:
                    predicted = layer(outputs[name].detach().to(_dtype(layer)))
                    losses.append(F.mse_loss(predicted, gradient.detach().to(predicted.dtype)))
            if not losses:
                return
            layer_grads = torch.autograd.grad(
                torch.stack(losses).sum(), [p for _, p in named], allow_unused=True
            )
        pairs = zip(named, layer_grads, strict=True)
        self.updater.apply({name: g for (name, _), g in pairs if g is not None})

    def state_dict(self, copy: TreeCopy) -> dict[str, Any]:
        return {
            "layers": copy(self.layers.state_dict()),
            "optimizer": self.updater.state_dict(copy),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.layers.load_state_dict(state["layers"])
        saved = state["optimizer"]
        settings = {name: group for group in saved["groups"] for name in group["params"]}
        self.updater.load_state_dict(saved["state"], settings, saved["lr_schedule"])


def _dtype(layer: nn.Module) -> torch.dtype:
    return next(layer.parameters()).dtype


def _layer(shape: Sequence[int]) -> nn.Module:
    """A map that treats all positions alike: over the channels of images, or the last dimension."""
    is_image = len(shape) == 4
    layer = nn.Conv2d(shape[1], shape[1], 1) if is_image else nn.Linear(shape[-1], shape[-1])
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer
