"""What autograd saves in a forward pass, stored apart from its graph.

A CUDA graph repeats its kernels on fixed addresses, but a stage that keeps autograd graphs has
several of them in flight. Forward passes that can be captured all record the same autograd graph,
with other saved tensors. So each micro-batch's saved tensors go to its slot, and the autograd graph
of one captured forward pass serves all micro-batches.

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
from revcompile.ir.reached import reached
from revcompile.runtime.reversible.overlap import on_side_streams


class Saved(NamedTuple):
    """What a graph holds in place of a saved tensor."""

    number: int
    """The index of the stored tensor, or of the parameter."""
    is_parameter: bool = False
    view: tuple[torch.dtype, Sequence[int], Sequence[int], int] | None = None
    """Which part was saved: dtype, shape, strides and the offset in elements; None: all."""

    def of(self, whole: Tensor) -> Tensor:
        """The saved tensor, from the stored tensor or the parameter."""
        if self.view is None:
            return whole
        dtype, shape, strides, offset = self.view
        flat = whole if self.is_parameter else whole.view(dtype)
        return flat.as_strided(shape, strides, flat.storage_offset() + offset)


class Graph(NamedTuple):
    """The values that a forward pass has kept, with their autograd graph."""

    kept: tuple[Any, ...]
    leaves: Mapping[str, Tensor] | None
    """The graph's leaves in place of parameters; None: the parameters themselves."""


class Recorded:
    """The tensors that the graph of one forward pass has saved.

    Args:
        inputs: The values that the pass is given.
        parameters: The parameters of the stage, which are not stored.
        is_captured: Whether the pass is captured.
    """

    def __init__(self, inputs: Any, parameters: Mapping[str, Tensor], is_captured: bool) -> None:
        # A parameter's autograd node is bound to the stream it was made on, and lives as long as a
        # graph that holds it. A capture must not meet the nodes of graphs in flight, which are
        # needed if it fails: it computes with other leaves.
        self.leaves: dict[str, Tensor] | None = None
        """In a capture: tensors that the pass computes with in place of parameters."""
        if is_captured:
            leaves = {n: p.detach().requires_grad_(p.requires_grad) for n, p in parameters.items()}
            self.leaves = leaves
        self._tensors: list[Tensor] = []
        """What is to be stored: whole storages, as autograd would keep them; inputs as they are."""
        self._saved: list[Saved] = []
        self._is_complete = True
        """Whether everything that was saved can be stored."""
        self._states = 0
        """How many integers stay in the graph: generator states, see `is_repeatable`."""
        self._numbers: dict[Any, int] = {}
        self._parameters: dict[int, list[tuple[int, Tensor]]] = {}
        """Parameters with their numbers, by the address of their storage."""
        for number, parameter in enumerate(parameters.values()):
            address = parameter.untyped_storage().data_ptr()
            self._parameters.setdefault(address, []).append((number, parameter))
        # Inputs may share the storage of a message, which differs from step to step.
        tensors = [x for x in pytree.tree_leaves(inputs) if isinstance(x, Tensor)]
        self._devices = {x.device for x in (*tensors, *parameters.values())}
        self._inputs = {x.untyped_storage().data_ptr() for x in tensors}

    def pack(self, x: Tensor) -> Saved | Tensor:
        """The saved-tensor hook: what a graph keeps instead of a tensor."""
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
        """Whether everything that the graph has saved of its micro-batch went through hooks.

        False for attention with dropout, which saves a generator state instead of its mask, and
        for Python autograd functions that store tensors as attributes.

        Args:
            kept: Values that the pass keeps; some belong to the graph.
        """
        states = self._states
        others = {id(p) for _, p in chain(*self._parameters.values())} if self.leaves else ()
        ends = [x.grad_fn for x in kept if isinstance(x, Tensor) and x.grad_fn is not None]
        for node in reached(ends, lambda node: [n for n, _ in node.next_functions if n]):
            states -= 2 * ("Attention" in node.name())  # saves up to two; other integers are data
            # A module that reads a parameter from elsewhere has not computed with the leaf.
            if getattr(node, "_saved_dropout_p", 0.0) or id(getattr(node, "variable", 0)) in others:
                return False
            attributes = getattr(node, "__dict__", {}).values()
            if any(isinstance(x, Tensor) for x in pytree.tree_leaves(list(attributes))):
                return False
        return self._is_complete and states <= 0

    def stored(self) -> tuple[Any, ...]:
        """The tensors to store, and as text how the graph reads them: slots compare both."""
        return *self._tensors, str(self._saved)

    def clear(self) -> None:
        """Release all tensors: autograd holds `pack`, and so this object, as long as the graph."""
        for each in (self._tensors, self._saved, self._numbers, self._parameters, self._inputs):
            each.clear()

    def _number(self, key: Any, tensor: Callable[[], Tensor]) -> int:
        """The index of a stored tensor; a tensor that was saved before is not stored again."""
        if key not in self._numbers:
            self._numbers[key] = len(self._tensors)
            self._tensors.append(tensor())
        return self._numbers[key]


class SavedTensors:
    """The saved tensors of one stage's graphs: recorded in forward, read in backward."""

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
        """Around a backward pass, with the tensors that its forward pass saved."""
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
    """A tensor's whole storage, as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())
