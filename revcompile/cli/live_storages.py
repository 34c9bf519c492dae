"""Memory of a training step on devices whose allocator keeps no count."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class LiveStorages(TorchDispatchMode):
    """Counts the bytes of all storages that operations under it create, while they are alive.

    What was there before does not count, nor do views of it. Scratch space inside a kernel is not
    seen. Counting bytes rather than asking the operating system makes the result exact and the same
    in every run.
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
        for tensor in _tensors((*args, *kwargs.values())):
            self._watch(tensor, counts=False)
        out = func(*args, **kwargs)
        for tensor in _tensors((out,)):
            self._watch(tensor, counts=True)
        self.peak = max(self.peak, self.live)
        return out

    def _watch(self, tensor: Tensor, counts: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes() if counts else 0
        self._known[key] = size
        self.live += size
        weakref.finalize(storage, self._forget, key).atexit = False

    def _forget(self, key: int) -> None:
        self.live -= self._known.pop(key)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """All tensors among an operator's arguments or results, which may be lists of them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
