"""Memory of a training step on devices whose allocator does not count bytes."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class LiveStorages(TorchDispatchMode):
    """Counts the bytes of all storages that operations inside it create, while they are alive.

    Storages that existed before do not count. Scratch space inside a kernel is not seen. Counting
    bytes, instead of asking the operating system, makes the result exact and the same in every run.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for value in pytree.tree_leaves((args, kwargs)):
            self._watch(value, counts=False)
        out = func(*args, **kwargs)
        for value in pytree.tree_leaves(out):
            self._watch(value, counts=True)
        self.peak = max(self.peak, self.live)
        return out

    def _watch(self, value: Any, counts: bool) -> None:
        if not isinstance(value, Tensor):
            return
        storage = value.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes() if counts else 0
        self._known[key] = size
        self.live += size
        weakref.finalize(storage, self._forget, key).atexit = False

    def _forget(self, key: int) -> None:
        self.live -= self._known.pop(key)
