"""Which modules stay one call in the graph without having resisted."""

from __future__ import annotations

from typing import Final

from torch import nn

__all__ = ["is_leaf"]

_DESCEND: Final = (
    nn.Sequential,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)
"""torch.nn containers that hold residual blocks of their own."""

_CONTAINERS: Final = frozenset(
    {nn.Module, nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict}
)

_MODE_LEAVES: Final = ("DropPath", "StochasticDepth", "DropBlock2d", "DropBlock2D", "DropBlock3d")
"""Stochastic depth by any name: identity in eval mode, a mask in training mode."""


def is_leaf(module: nn.Module) -> bool:
    """Is the module, or what it derives from, a layer of torch.nn, or stochastic depth?"""
    if type(module).__name__ in _MODE_LEAVES:
        return True
    is_layer = any(
        cls.__module__.startswith(("torch.nn", "torch.ao.nn")) and cls not in _CONTAINERS
        for cls in type(module).__mro__
    )
    return is_layer and not isinstance(module, _DESCEND)
