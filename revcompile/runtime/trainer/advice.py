"""Advice at the creation of a trainer: what will train badly, and what to do about it.

Transformers learn little from gradients that are several updates late, unless the optimizer makes
up for the delay. Convolutional nets bear it much better.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Final

from torch import fx, nn

from revcompile.errors import RevcompileWarning
from revcompile.ir.module_tree import called_module
from revcompile.ir.ops import op_name
from revcompile.ir.program import StageProgram
from revcompile.optim.combined import members
from revcompile.runtime.stage.update import Updater
from revcompile.schedule import Weights, window

_ATTENTION: Final = frozenset(("scaled_dot_product_attention", "multi_head_attention_forward"))
_PRODUCTS: Final = frozenset(("matmul", "bmm", "baddbmm", "einsum"))
_BEARABLE: Final = 1
"""Updates of delay at which transformers learn as without, or nearly so."""


def warn_of_delay(
    delays: Sequence[tuple[Updater, int]],
    programs: Sequence[StageProgram],
    root: nn.Module,
    accumulate: int,
    stacklevel: int,
) -> None:
    """Warn where a model with attention is trained with late gradients and without a remedy.

    Remedies are an optimizer that compensates the delay and, in backward, the weights of the
    forward pass; up to one update of delay none is needed.

    Args:
        delays: of stages of this process, the first of all among them, in updates.
        programs: of all stages.
        root: holds their modules.
        accumulate: micro-batches to an update.
        stacklevel: of whoever is warned, as `warnings.warn` takes it.
    """
    late = [
        (delay, optimizer)
        for updater, delay in delays
        if updater.optimizer is not None and delay > _BEARABLE
        for optimizer in members(updater.optimizer)
    ]
    if not late or not has_attention((program.forward for program in programs), root):
        return
    most = late[0][0]
    plain = [type(optimizer).__name__ for _, optimizer in late if not hasattr(optimizer, "delay")]
    method = programs[0].method
    has_others = method.weights in (Weights.LATEST, Weights.PREDICTED)
    if not plain and not has_others:
        return
    problems, remedies = [], []
    if plain:
        problems.append(f"which {plain[0]} does not compensate")
        remedies.append(
            "revcompile.optim.DelayAwareMuon with "
            "param_groups=revcompile.optim.muon_groups(model), or "
            f"revcompile.optim.ErrorFeedback({plain[0]}(...))"
        )
    if has_others:
        problems.append("and backward uses other weights than forward did")
        remedies.append(
            "weights='stashed' (a copy of the weights for each update of delay) or "
            "weights='rewound' (one copy, and half a byte a parameter for each)"
        )
    enough = window(method, len(programs), 0, accumulate) - 1
    warnings.warn(
        f"net.trainer: the model has attention, and its gradients are up to {most} updates late, "
        f"{', '.join(problems)}: expect it to learn much less than by backprop. Use "
        f"{', and '.join(remedies)}; or accumulate={enough}, with smaller micro-batches, to be no "
        "more than one update late",
        RevcompileWarning,
        stacklevel=stacklevel + 1,
    )


def has_attention(graphs: Iterable[fx.Graph], root: nn.Module) -> bool:
    """Do graphs call an attention, or a softmax whose result goes into a matrix product?"""
    kinds = ((node, _operator(node, root)) for graph in graphs for node in graph.nodes)
    return any(
        kind in _ATTENTION or (kind == "softmax" and _reaches_product(node, root))
        for node, kind in kinds
    )


def _reaches_product(node: fx.Node, root: nn.Module, steps: int = 8) -> bool:
    """Is there a matrix product behind a node, after dropouts, casts, masks and the like?"""
    reached: dict[fx.Node, None] = {node: None}
    for _ in range(steps):
        reached = {user: None for before in reached for user in before.users}
        if any(_operator(user, root) in _PRODUCTS for user in reached):
            return True
    return False


def _operator(node: fx.Node, root: nn.Module) -> str:
    """`softmax` for torch.softmax, x.softmax, nn.Softmax and aten.softmax.int."""
    if (module := called_module(node, root)) is not None:
        if isinstance(module, nn.MultiheadAttention):
            return "multi_head_attention_forward"
        return "softmax" if isinstance(module, nn.Softmax) else ""
    return op_name(node).strip("_")
