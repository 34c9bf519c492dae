"""Values at fixed places: what a recorded round reads and writes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from revcompile.errors import VerificationError
from revcompile.runtime.executor.transport import InProcess, Message, MessageKind
from revcompile.runtime.stage.tensor_reuse import is_unshared

__all__ = ["InPlaceMessages", "Recycled", "StaticBuffers", "StaticTransport", "apart", "fill_all"]


Key = tuple[int, int, MessageKind]
"""Sender, receiver, kind of message."""


class StaticBuffers:
    """Nested values whose tensors stay where they are; what is put in is copied.

    >>> box = StaticBuffers({"x": torch.zeros(2), "size": 3})
    >>> box.fits({"x": torch.ones(2), "size": 3}), box.fits({"x": torch.ones(5), "size": 3})
    (True, False)
    >>> box.fill({"x": torch.ones(2), "size": 3})
    >>> box.value["x"]
    tensor([1., 1.])
    """

    def __init__(self, like: Any) -> None:
        leaves, self._spec = pytree.tree_flatten(like)
        self.leaves = [_room(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    @property
    def value(self) -> Any:
        """The values, with the box's own tensors."""
        return pytree.tree_unflatten(self.leaves, self._spec)

    @property
    def tensors(self) -> list[Tensor]:
        """The box's own tensors."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    def fits(self, tree: Any) -> bool:
        """Could the values be put in? Devices do not matter."""
        leaves, spec = pytree.tree_flatten(tree)
        return spec == self._spec and all(map(_alike, self.leaves, leaves))

    def pairs(self, tree: Any) -> list[tuple[Tensor, Tensor]]:
        """Where each tensor of the values goes."""
        found = zip(self.leaves, pytree.tree_leaves(tree), strict=True)
        return [(mine, other) for mine, other in found if isinstance(mine, Tensor)]

    def fill(self, tree: Any) -> None:
        """Copy values in."""
        _copy(self.pairs(tree))


def fill_all(filled: Iterable[tuple[StaticBuffers, Any]]) -> None:
    """Fill several boxes with values that may lie in other boxes of the same list."""
    pairs = [pair for box, tree in filled for pair in box.pairs(tree)]
    owned = {_storage(mine) for mine, _ in pairs}
    moving = [(a, b) for a, b in pairs if a.data_ptr() != b.data_ptr() or a.dtype != b.dtype]
    _copy([(a, b.clone() if _storage(b) in owned else b) for a, b in moving])


class StaticTransport(InProcess):
    """Messages between stages; what waits for the next round lies in boxes."""

    def __init__(self, stages: int) -> None:
        super().__init__(stages)
        self.boxes: dict[Key, list[StaticBuffers]] = {}
        self.leaving: InPlaceMessages | None = None
        """Set: messages stay where they were computed, and are noted here."""

    def box(self, key: Key, index: int) -> StaticBuffers:
        """Where a message is kept."""
        boxes = self.boxes[key]
        return boxes[index % len(boxes)]

    def send(self, source: int, target: int, channel: MessageKind, message: Message) -> None:
        """Into its box, if its reader takes it in a later round."""
        key = source, target, channel
        if self.boxes.get(key):
            box = self.box(key, message.index)
            waiting = [held.index for held in self.queues.get(key, ())]
            if message.index % len(self.boxes[key]) in {i % len(self.boxes[key]) for i in waiting}:
                raise VerificationError(
                    f"stage {source}: {channel.value} of {message.index} would overwrite that of "
                    f"{waiting[0]}, which stage {target} has not read"
                )
            if self.leaving is not None:
                message = self.leaving.note(key, message, box)
            else:
                box.fill(contents(message))
                message = filed(message.index, box)
        super().send(source, target, channel, message)

    def pending(
        self,
        key: Key,
        indices: Sequence[int],
        left: InPlaceMessages | None = None,
    ) -> list[Message]:
        """The messages that wait to be read: in their boxes, or where the last round left them."""
        if left is not None:
            return [replace(left.messages[key], index=index) for index in indices]
        return [filed(index, self.box(key, index)) for index in indices]


class InPlaceMessages:
    """Messages left where a round computed them, for the next round to read.

    `borrowed` is memory that changes before then: what lies there is copied.
    """

    def __init__(self, borrowed: Iterable[Tensor]) -> None:
        self.messages: dict[Key, Message] = {}
        self._borrowed = {_storage(tensor) for tensor in borrowed}

    def note(self, key: Key, message: Message, like: StaticBuffers) -> Message:
        """Leave it, or copies of what cannot stay, in the precision of its box."""
        values, gradients, bad = pytree.tree_map(self._safe, contents(message), like.value)
        self.messages[key] = Message(message.index, values, gradients, bad=bad)
        return self.messages[key]

    def _safe(self, leaf: Any, like: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.dtype != like.dtype:
            return torch.empty_like(like).copy_(leaf)
        return _apart(leaf, self._borrowed)


def apart(tree: Any, borrowed: Iterable[Tensor]) -> Any:
    """The values, with copies of those that lie in borrowed memory.

    >>> mine, other = torch.zeros(2), torch.ones(2)
    >>> found = apart({"mine": mine.view(2, 1), "other": other}, [mine])
    >>> found["other"] is other, found["mine"].data_ptr() == mine.data_ptr()
    (True, False)
    """
    storages = {_storage(tensor) for tensor in borrowed}
    return pytree.tree_map_only(Tensor, lambda tensor: _apart(tensor, storages), tree)


def _apart(tensor: Tensor, storages: set[int]) -> Tensor:
    return tensor.clone() if _storage(tensor) in storages else tensor


def contents(message: Message) -> tuple[dict[str, Any], dict[str, Tensor | None], Tensor | None]:
    """What is copied of a message."""
    return dict(message.values), dict(message.gradients), message.bad


def filed(index: int, box: StaticBuffers) -> Message:
    """A message that lies in a box."""
    values, gradients, bad = box.value
    return Message(index, values, gradients, bad=bad)


class Recycled:
    """Copies to hand out. One that nobody holds any more is used again: nothing is allocated."""

    def __init__(self) -> None:
        self._boxes: list[StaticBuffers] = []

    def copy(self, tree: Any) -> Any:
        """The values, safe from what comes after."""
        for box in self._boxes:
            if box.fits(tree) and all(map(is_unshared, box.tensors)):
                break
        else:
            box = StaticBuffers(tree)
            self._boxes.append(box)
        box.fill(tree)
        # Others hold views, not these very objects: their count would be ours.
        return pytree.tree_map_only(Tensor, lambda t: t.view_as(t), box.value)


def _room(tensor: Tensor) -> Tensor:
    """Memory for a tensor like this one, laid out alike if it is dense."""
    return torch.empty_like(tensor.detach(), requires_grad=False)


def _alike(mine: Any, other: Any) -> bool:
    if isinstance(mine, Tensor) != isinstance(other, Tensor):
        return False
    if isinstance(mine, Tensor):
        return bool(mine.shape == other.shape and mine.dtype == other.dtype)
    return type(mine) is type(other) and bool(mine == other)


def _storage(tensor: Tensor) -> int:
    found: int = tensor.untyped_storage()._cdata
    return found


_SMALL = 1 << 16


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Small tensors of one type at once, large ones one by one, each as one block of memory."""
    small: dict[tuple[Any, ...], list[tuple[Tensor, Tensor]]] = {}
    with torch.no_grad():
        for mine, other in pairs:
            alike = mine.device == other.device and mine.dtype is not torch.float8_e4m3fn
            if mine.numel() <= _SMALL and alike:
                kind = mine.device, mine.dtype, other.dtype
                small.setdefault(kind, []).append((mine, other))
            else:
                mine.copy_(other, non_blocking=True)
        for found in small.values():
            torch._foreach_copy_([a for a, _ in found], [b for _, b in found])
