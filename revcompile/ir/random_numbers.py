"""Which layers and operations may draw random numbers: a second run must draw the same ones."""

from __future__ import annotations

from typing import Final, NamedTuple

from torch import fx, nn

from revcompile.ir.module_tree import TreeReads
from revcompile.ir.ops import is_random_operator, op_name
from revcompile.kernels.layer_norm import is_layer_norm

_RANDOM_COMPOSITES: Final = frozenset(
    (
        *("dropout1d", "dropout2d", "dropout3d", "gumbel_softmax", "multi_head_attention_forward"),
        *("_fractional_max_pool2d", "fractional_max_pool2d_with_indices"),
        *("_fractional_max_pool3d", "fractional_max_pool3d_with_indices"),
    )
)
"""Functions of torch.nn.functional that call random operators."""

_KNOWN_PACKAGES: Final = frozenset(("", "_operator", "builtins", "math", "revcompile", "torch"))
"""Packages whose functions draw random numbers only through operators of torch."""

_RANDOM: Final = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout),
    *(nn.FeatureAlphaDropout, nn.RReLU, nn.MultiheadAttention, nn.RNNBase),
    *(nn.FractionalMaxPool2d, nn.FractionalMaxPool3d),
)
"""Layers of torch that may draw random numbers. All layers from elsewhere are assumed to."""


class RandomReads(NamedTuple):
    """What in a graph may draw random numbers."""

    is_unknown: bool
    """Whether anything other than `dropouts` may draw random numbers."""
    dropouts: tuple[nn.Dropout, ...]
    """Layers that draw in training, unless their rate is 0."""

    @property
    def may_draw(self) -> bool:
        """Whether the graph may draw with the current modes and rates."""
        return self.is_unknown or any(layer.p and layer.training for layer in self.dropouts)

    @property
    def may_ever_draw(self) -> bool:
        """Whether it may draw in any mode, at any rate: both may change between two steps."""
        return self.is_unknown or bool(self.dropouts)


def random_reads(graph: fx.Graph, root: nn.Module) -> RandomReads:
    """What in a graph may draw random numbers, not counting hooks of its layers."""
    layers = TreeReads(graph, root).modules
    dropouts = tuple(layer for layer in layers if type(layer) is nn.Dropout)
    is_known = all(type(layer) is nn.Dropout or _is_deterministic(layer) for layer in layers)
    return RandomReads(not is_known or any(map(draws_random, graph.nodes)), dropouts)


def _is_deterministic(layer: nn.Module) -> bool:
    """Whether a layer never draws. Subclasses from elsewhere might, like a noisy `nn.Linear`."""
    if is_layer_norm(layer):
        return True
    kinds = type(layer).__mro__[:-1]  # without `object`
    is_torchs = all(kind.__module__.startswith("torch.") for kind in kinds)
    return is_torchs and "forward" not in vars(layer) and not isinstance(layer, _RANDOM)


def draws_random(node: fx.Node) -> bool:
    """Whether a function or method may draw random numbers.

    torch tags its random operators; functions from other packages are assumed to draw.
    """
    if node.op not in ("call_function", "call_method"):
        return False
    name = op_name(node)
    if name == "scaled_dot_product_attention":
        rate = node.kwargs.get("dropout_p", node.args[4] if len(node.args) > 4 else 0)
        return bool(rate != 0)
    package = str(getattr(node.target, "__module__", None) or "").partition(".")[0]
    is_foreign = node.op == "call_function" and package not in _KNOWN_PACKAGES
    return name in _RANDOM_COMPOSITES or is_random_operator(name) or is_foreign
