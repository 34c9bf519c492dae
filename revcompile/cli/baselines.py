"""What reversible training is compared with: checkpointing, compiled blocks, torch's budgets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import torch
import torch._dynamo
import torch._functorch.config
from torch import fx, nn

Backend = str | Callable[..., Any]
"""Of `torch.compile`."""

_SWITCHES: Final = (
    "set_grad_checkpointing",
    "activation_checkpointing_enable",  # the other name is deprecated
    "gradient_checkpointing_enable",
)


def checkpointed(model: nn.Module) -> nn.Module | None:
    """The model with the checkpointing of its own library, timm or transformers, switched on."""
    for switch in _SWITCHES:
        if hasattr(model, switch):
            getattr(model, switch)()
            return model
    return None


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks: layers of transformers, else modules of lists; the innermost.

    >>> block = lambda: nn.TransformerEncoderLayer(8, 2)
    >>> len(blocks_of(nn.Sequential(nn.Linear(4, 8), block(), block(), nn.Linear(8, 4))))
    2
    """
    lists = nn.ModuleList, nn.Sequential
    members = [m for parent in model.modules() if isinstance(parent, lists) for m in parent]
    members = [m for m in dict.fromkeys(members) if next(m.children(), None)]
    counts = Counter(map(type, members))
    blocks = {m for m in members if _is_layer_of_transformers(m)}
    blocks = blocks or {m for m in members if counts[type(m)] > 1 and not isinstance(m, lists)}
    return [m for m in members if blocks.intersection(m.modules()) == {m}]


def _is_layer_of_transformers(module: nn.Module) -> bool:
    return any(kind.__name__ == "GradientCheckpointingLayer" for kind in type(module).__mro__)


def compile_blocks(model: nn.Module, backend: Backend = "inductor", dynamic: bool = False) -> None:
    """Compile each block on its own; blocks of one structure share what is compiled.

    A model without repeated blocks is compiled as a whole.
    """
    for block in blocks_of(model) or [model]:
        block.compile(backend=backend, dynamic=dynamic)


def within(fraction: float, name: str = "inductor") -> Backend:
    """The backend of this name under torch's `activation_memory_budget`.

    Functions compiled by one such backend are not used by another. So models with several budgets
    can live in one process.
    """
    compiler = torch._dynamo.lookup_backend(name)

    def backend(graph: fx.GraphModule, inputs: list[Any]) -> Any:
        with torch._functorch.config.patch(activation_memory_budget=fraction):
            return compiler(graph, inputs)

    return backend
