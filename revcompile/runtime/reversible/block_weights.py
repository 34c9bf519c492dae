"""A block's weights in the dtype of autocast, converted together for each of its two runs.

Autocast converts every weight by itself, in forward and again in the rebuild, and every gradient of
one, each by a kernel of its own: on a GPU launching those takes the host as long as a convolution.
Stages have such copies too, and keep them from one update to the next (`stage.weights`). A chain
does not: it would need half as much memory again as its weights take.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor, fx, nn

from revcompile.ir.module_tree import is_cast
from revcompile.kernels.autocast import converted
from revcompile.runtime.reversible.bindings import Bindings
from revcompile.runtime.reversible.slots import filled


class BlockWeights:
    """The parameters of one branch that only layers read for which autocast converts them.

    A layer that is called twice is left to autocast, which adds the gradients of both calls in
    float32, and so is a branch with forward hooks, which may look at the weights.
    """

    def __init__(self, slots: Sequence[tuple[int, dict[str, Any], str]] = ()) -> None:
        self._slots = slots

    @classmethod
    def of(cls, branch: fx.Graph, root: nn.Module, bindings: Bindings) -> BlockWeights:
        """Those of a branch, by what it reads of the module tree."""
        called = [root.get_submodule(str(n.target)) for n in branch.find_nodes(op="call_module")]
        calls = Counter(id(inner) for module in called for inner in module.modules())
        read = [str(node.target).rpartition(".")[0] for node in branch.find_nodes(op="get_attr")]
        calls.update(id(root.get_submodule(path)) for path in read)
        owners = {id(m._parameters) for m in called if is_cast(m) and calls[id(m)] == 1}
        slots = enumerate(() if bindings.hooked else bindings.slots)
        return cls([(i, *slot) for i, slot in slots if id(slot[0]) in owners])

    def converted(
        self, parameters: Sequence[Tensor | None], dtype: torch.dtype | None
    ) -> dict[int, Tensor]:
        """Copies by the ids of what they are copies of, if `dtype` is given, and if that pays.

        `parameters` are those of the branch, in the order of its bindings. If it uses one twice,
        all are left to autocast.
        """
        if dtype is None or len(self._slots) < 2:
            return {}
        used = [id(p) for p in parameters if p is not None]
        if len(set(used)) < len(used):
            return {}
        present = [parameters[i] for i, _, _ in self._slots]
        chosen = [p for p in present if type(p) is nn.Parameter and p.dtype == torch.float32]
        return dict(zip(map(id, chosen), converted(chosen, [dtype] * len(chosen)), strict=True))

    def replaced_by(self, copies: Mapping[int, Tensor]) -> AbstractContextManager[None]:
        """Let the layers read the copies."""
        if not copies:
            return _NOTHING
        pairs = [((owner, name), copies.get(id(owner[name]))) for _, owner, name in self._slots]
        return filled([(slot, copy) for slot, copy in pairs if copy is not None])


_NOTHING: Final = nullcontext()


def to_dtypes_of(
    parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Gradients of copies in the dtypes of the parameters themselves."""
    result, pairs = list(gradients), zip(gradients, parameters, strict=True)
    other = {i: g for i, (g, p) in enumerate(pairs) if g is not None and g.dtype != p.dtype}
    copies = converted(list(other.values()), [parameters[i].dtype for i in other])
    for i, copy in zip(other, copies, strict=True):
        result[i] = copy
    return result
