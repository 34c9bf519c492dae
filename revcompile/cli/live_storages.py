"""Memory of a training step on devices whose allocator keeps no count."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class LiveStorages(TorchDispatchMode):
    """Counts the bytes of all storages that operations under it create, while they are alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live, self.peak = 0, 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._watch((args, kwargs), counts=False)
        out = func(*args, **kwargs)
        self._watch(out, counts=True)
        self.peak = max(self.peak, self.live)
        return out

    def _watch(self, tree: Any, counts: bool) -> None:
        for tensor in (leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._sizes:
                self._sizes[storage._cdata] = size = storage.nbytes() if counts else 0
                self.live += size
                weakref.finalize(storage, self._forget, storage._cdata).atexit = False

    def _forget(self, key: int) -> None:
        self.live -= self._sizes.pop(key)
