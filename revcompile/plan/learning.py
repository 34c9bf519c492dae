"""How late gradients affect learning, and what to do about it.

Transformers learn little from gradients that are several updates late, unless the optimizer
compensates for the delay. Convolutional nets learn much better. docs/results.md has the numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from torch import fx, nn

from revcompile.errors import warn
from revcompile.ir.module_tree import called_module
from revcompile.ir.ops import op_name
from revcompile.optim.combined import members
from revcompile.runtime.trainer.trainer import Trainer
from revcompile.schedule import Weights, window

_ATTENTION_OPS: Final = frozenset(("scaled_dot_product_attention", "multi_head_attention_forward"))
_PRODUCTS: Final = frozenset(("matmul", "bmm", "baddbmm", "einsum"))
_HARMLESS: Final = 1
"""The most updates of delay that hardly affect how transformers learn."""
_HARMLESS_LIMITED: Final = 7
"""The same for optimizers that limit how far matrices move during the delay."""
_REMEDIES: Final = (
    "revcompile.optim.DelayAwareMuon (not with max_drift=None) with "
    "param_groups=revcompile.optim.muon_groups(model), or another optimizer of revcompile.optim "
    "(ErrorFeedback wraps any) with weights='stashed', a copy of the weights for each update of "
    "delay"
)
_REMEDIES_OF_LONG_DELAYS: Final = (
    "fewer stages, or momentum 0.8 and learning rates times 2 / (1 + delay) "
    "(docs/guides/choosing.md), which needed up to twice the updates"
)


def warn_of_delay(trainer: Trainer) -> None:
    """Warn if a model with attention is trained with late gradients and without a remedy.

    One update of delay needs no remedy. Up to seven, the optimizer must compensate for the delay,
    and either it limits how far matrices move during the delay, or backward uses the weights of the
    forward pass. Above seven, no remedy is enough. Only the process with the first stage of the
    first replica warns.
    """
    programs, updaters = trainer._programs, [(e.index, e.updater) for e in trainer._executors]
    late = [
        (trainer.delays[stage], optimizer)
        for stage, updater in updaters
        if updater.parameters and trainer.delays[stage] > _HARMLESS
        for optimizer in members(updater.optimizer)
    ]
    is_told = trainer.is_first and not trainer.replica and late
    if not is_told or not has_attention((p.forward for p in programs), trainer.model):
        return
    most, method = late[0][0], programs[0].method
    is_far = most > _HARMLESS_LIMITED
    # The trainer predicts weights, or the optimizer compensates for the delay.
    is_compensated = method.weights is Weights.PREDICTED or all(
        hasattr(optimizer, "delay") for _, optimizer in late
    )
    # Muon may limit how far matrices move during the delay of their gradients.
    groups = (group for _, optimizer in late for group in optimizer.param_groups)
    is_limited = any(g.get("use_muon") and g.get("max_drift") is not None for g in groups)
    if is_compensated and not is_far and (is_limited or method.weights is Weights.STASHED):
        return
    remedies = _REMEDIES_OF_LONG_DELAYS if is_far else _REMEDIES
    enough = window(method, len(programs), 0, trainer._settings.accumulation_steps) - 1
    warn(
        f"net.trainer: the model has attention, and its gradients are up to {most} updates late: "
        f"expect it to learn much less than by backprop. Use {remedies}; or accumulation_steps="
        f"{enough}, with smaller micro-batches, for at most one update of delay"
    )


def has_attention(graphs: Iterable[fx.Graph], root: nn.Module) -> bool:
    """Whether graphs call an attention, or a softmax whose result goes into a matrix product."""
    kinds = ((node, _operator(node, root)) for graph in graphs for node in graph.nodes)
    return any(
        kind in _ATTENTION_OPS or (kind == "softmax" and _reaches_product(node, root))
        for node, kind in kinds
    )


def _reaches_product(node: fx.Node, root: nn.Module, steps: int = 8) -> bool:
    """Whether a matrix product uses a node's result, after dropouts, casts, masks and the like."""
    reached: dict[fx.Node, None] = {node: None}
    for _ in range(steps):
        reached = {user: None for before in reached for user in before.users}
        if any(_operator(user, root) in _PRODUCTS for user in reached):
            return True
    return False


def _operator(node: fx.Node, root: nn.Module) -> str:
    """The name of an operator: `softmax` for torch.softmax, x.softmax and nn.Softmax."""
    if (module := called_module(node, root)) is not None:
        if isinstance(module, nn.MultiheadAttention):
            return "multi_head_attention_forward"
        return "softmax" if isinstance(module, nn.Softmax) else ""
    return op_name(node).strip("_")
