"""What autograd saves in a forward pass, stored apart from its graph.

A CUDA graph repeats its kernels on fixed addresses, but a stage that keeps autograd graphs has
several in flight. What can be captured records the same graph each time, with other saved tensors.
So these go to the slot of their micro-batch, and the graph of a captured forward pass serves all.

    forward of m      records a graph; its saved tensors --> slot of m
    backward of m-3   runs that graph; its saved tensors <-- slot of m-3

Parameters are not stored: backward reads their latest values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from revcompile.ir.coupling_ops import retaining
from revcompile.runtime.reversible.overlap import on_side_streams


class Saved(NamedTuple):
    """Stands for a saved tensor in a graph."""

    number: int
    """Of what is stored, or of the parameter."""
    is_parameter: bool = False
    view: tuple[torch.dtype, Sequence[int], Sequence[int], int] | None = None
    """Which part of it: dtype, shape, strides and the offset in elements; None: all."""

    def of(self, whole: Tensor) -> Tensor:
        """The tensor."""
        if self.view is None:
            return whole
        dtype, shape, strides, offset = self.view
        flat = whole if self.is_parameter else whole.view(dtype)
        return flat.as_strided(shape, strides, flat.storage_offset() + offset)


class Graph(NamedTuple):
    """What a forward pass has kept, with its graph."""

    kept: tuple[Any, ...]
    leaves: Mapping[str, Tensor] | None
    """What the graph has for parameters; None: these."""


class Recorded:
    """The tensors that the graph of one forward pass has saved.

    Args:
        inputs: The values that the pass is given.
        parameters: Those that are not stored.
        is_captured: Whether the pass is captured.
    """

    def __init__(self, inputs: Any, parameters: Mapping[str, Tensor], is_captured: bool) -> None:
        # Autograd's node of a parameter stays on the stream it was made on and lives as long as a
        # graph that holds it. A capture must not find those of graphs in flight, and if it fails,
        # these are needed.
        self.leaves: dict[str, Tensor] | None = None
        """Tensors for the pass to compute with in place of parameters."""
        if is_captured:
            leaves = {n: p.detach().requires_grad_(p.requires_grad) for n, p in parameters.items()}
            self.leaves = leaves
        self._tensors: list[Tensor] = []
        """What is to be stored: whole storages, as autograd would keep them."""
        self._saved: list[Saved] = []
        self._is_complete = True
        """Whether nothing was saved that cannot be stored."""
        self._states = 0
        """How many integers stay with the graph: states of generators, see `is_repeatable`."""
        self._numbers: dict[Any, int] = {}
        self._parameters: dict[int, list[tuple[int, Tensor]]] = {}
        """By the addresses of their storages."""
        for number, parameter in enumerate(parameters.values()):
            address = parameter.untyped_storage().data_ptr()
            self._parameters.setdefault(address, []).append((number, parameter))
        # An input may lie in a message among others, whose storage is another one in each step.
        tensors = [x for x in pytree.tree_leaves(inputs) if isinstance(x, Tensor)]
        self._devices = {x.device for x in (*tensors, *parameters.values())}
        self._inputs = {x.untyped_storage().data_ptr() for x in tensors}

    def pack(self, x: Tensor) -> Saved | Tensor:
        """What a graph keeps instead of a tensor."""
        # Attention on a GPU saves the state of a generator, on the host unless it is captured.
        is_integer = not (x.is_floating_point() or x.is_complex())
        if x.ndim == 0 and is_integer and (x.is_cuda or x.device not in self._devices):
            self._states += 1
            return x
        if x.layout is not torch.strided or x.device not in self._devices:
            self._is_complete = False
            return x
        self._saved.append(saved := self._store(x))
        return saved

    def _store(self, x: Tensor) -> Saved:
        address, offset = x.untyped_storage().data_ptr(), int(x.storage_offset())
        for number, parameter in self._parameters.get(address, ()):
            within = offset - int(parameter.storage_offset())
            if 0 <= within < parameter.numel() and x.dtype == parameter.dtype:
                return Saved(number, True, (x.dtype, x.shape, x.stride(), within))
        if address in self._inputs:
            key = address, offset, x.dtype, x.shape, x.stride()
            return Saved(self._number(key, lambda: x))
        number = self._number(address, lambda: _bytes_of(x))
        return Saved(number, view=(x.dtype, x.shape, x.stride(), offset))

    def is_repeatable(self, kept: Iterable[Any]) -> bool:
        """Whether all that the graph has saved of its micro-batch went through hooks.

        Not so with attention that drops weights at random, which is repeated by the state of a
        generator, and with functions in Python that store tensors as attributes.

        Args:
            kept: Values, some of which belong to the graph.
        """
        states = self._states
        others = {id(p) for _, p in chain(*self._parameters.values())} if self.leaves else ()
        todo = [x.grad_fn for x in kept if isinstance(x, Tensor) and x.grad_fn is not None]
        seen = set(todo)
        while todo:
            node = todo.pop()
            states -= 2 * ("Attention" in node.name())  # saves up to two; others are data
            # A module that refers to a parameter elsewhere does not compute with the leaf.
            if getattr(node, "_saved_dropout_p", 0.0) or id(getattr(node, "variable", 0)) in others:
                return False
            attributes = getattr(node, "__dict__", {}).values()
            if any(isinstance(x, Tensor) for x in pytree.tree_leaves(list(attributes))):
                return False
            following = {before for before, _ in node.next_functions if before is not None} - seen
            seen |= following
            todo += following
        return self._is_complete and states <= 0

    def stored(self) -> tuple[Any, ...]:
        """What is to be stored, and how the graph reads it, which slots compare."""
        return *self._tensors, str(self._saved)

    def clear(self) -> None:
        """Let go of all tensors: autograd holds `pack` as long as the graph."""
        for each in (self._tensors, self._saved, self._numbers, self._parameters, self._inputs):
            each.clear()

    def _number(self, key: Any, tensor: Callable[[], Tensor]) -> int:
        """That of what is stored; what was saved before is not stored again."""
        if key not in self._numbers:
            self._numbers[key] = len(self._tensors)
            self._tensors.append(tensor())
        return self._numbers[key]


class SavedTensors:
    """Those of one stage's graphs: recorded in forward, read in backward."""

    def __init__(self) -> None:
        self._tensors: Sequence[Tensor] = ()
        self._parameters: Sequence[Tensor] = ()

    @contextmanager
    def recorded(
        self, inputs: Any, parameters: Mapping[str, Tensor], is_captured: bool
    ) -> Iterator[Recorded]:
        """Around a forward pass."""
        record = Recorded(inputs, parameters, is_captured)
        with saved_tensors_hooks(record.pack, self._unpack):
            yield record
        record.clear()

    @contextmanager
    def read(self, tensors: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Iterator[None]:
        """Around a backward pass, with what the forward pass of its micro-batch has saved."""
        self._tensors, self._parameters = tensors, list(parameters.values())
        try:
            with retaining(), on_side_streams():
                yield
        finally:
            self._tensors = self._parameters = ()

    def _unpack(self, saved: Saved | Tensor) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        return saved.of((self._parameters if saved.is_parameter else self._tensors)[saved.number])


def _bytes_of(x: Tensor) -> Tensor:
    """All of its storage."""
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())
