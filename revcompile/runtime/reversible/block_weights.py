"""A block's weights in the dtype of autocast, converted together for each of its two runs.

Autocast converts every weight by itself, in forward and again in the rebuild, and every gradient of
one, each by a kernel of its own: on a GPU launching those takes the host as long as a convolution.
Stages have such copies too, and keep them from one update to the next (`stage.weights`). A chain
does not: it would need half as much memory again as its weights take.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, fx, nn

from revcompile.ir.module_tree import is_cast
from revcompile.kernels.autocast import converted
from revcompile.runtime.reversible.bindings import Bindings


class BlockWeights:
    """The parameters of one branch that only layers read for which autocast converts them.

    A layer that is called twice is left to autocast, which adds the gradients of both calls in
    float32.
    """

    def __init__(self, branch: fx.Graph, root: nn.Module, bindings: Bindings) -> None:
        called = [root.get_submodule(str(n.target)) for n in branch.find_nodes(op="call_module")]
        calls = Counter(id(inner) for module in called for inner in module.modules())
        read = [str(node.target).rpartition(".")[0] for node in branch.find_nodes(op="get_attr")]
        calls.update(id(root.get_submodule(path)) for path in read)
        owners = {id(m._parameters) for m in called if is_cast(m) and calls[id(m)] == 1}
        slots = enumerate(bindings.slots)
        self._slots = [(i, *slot) for i, slot in slots if id(slot[0]) in owners]

    def converted(
        self, parameters: Sequence[Tensor | None], dtype: torch.dtype | None
    ) -> dict[int, Tensor]:
        """Copies by the ids of what they are copies of, if `dtype` is given, and if that pays.

        Args:
            parameters: Those of the branch, in the order of its bindings.
        """
        if dtype is None or len(self._slots) < 2:
            return {}
        uses = Counter(map(id, parameters))
        present = (parameters[i] for i, _, _ in self._slots)
        chosen = [p for p in present if p is not None and _is_plain(p) and uses[id(p)] == 1]
        copies = converted(chosen, [dtype] * len(chosen))
        return dict(zip(map(id, chosen), copies, strict=True))

    @contextmanager
    def replaced_by(self, copies: Mapping[int, Tensor]) -> Iterator[None]:
        """Let the layers read the copies."""
        before = [(owner, name, owner[name]) for _, owner, name in self._slots]
        for owner, name, value in before:
            owner[name] = copies.get(id(value), value)
        try:
            yield
        finally:
            for owner, name, value in before:
                owner[name] = value


def _is_plain(parameter: Tensor) -> bool:
    return type(parameter) is nn.Parameter and parameter.dtype == torch.float32


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
