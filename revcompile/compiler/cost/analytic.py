"""Analytic costs: every piece runs once on fake tensors, without memory and without arithmetic.

The unit of work is a FLOP. Pieces that compute little (pooling, norms, activations) still have to
move their operands, so every byte read or written counts as `FLOPS_PER_BYTE` more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from revcompile.compiler.capture.fake_values import NEEDS_DATA, FakeMode, fake_copy
from revcompile.compiler.capture.isolation import copy_model, preserve_rng, set_mode
from revcompile.compiler.cost.run_pieces import (
    Code,
    PieceCall,
    PieceResult,
    example_batch_size,
    run_pieces,
    submodules_only,
)
from revcompile.errors import InputError
from revcompile.ir.module_tree import device_of_model, parameters_read
from revcompile.ir.types import Cost, Rewired, Segment, TensorType

FLOPS_PER_BYTE: Final = 64.0
"""What a byte moved counts in FLOPs.

Data sheets give accelerators 80 to 300 FLOPs of matrix products for every byte of memory traffic,
of which models reach a half or less. Over the segments of ResNet-50, ViT-B and ConvNeXt-T on an
H200 (batch 64) work counted with 64 follows the measured times about three times as closely as
FLOPs alone in float32, where anything from 32 to 150 does about as well, and twice in TF32
and bfloat16, where more (500 and up) would be better still; `cost="measured"` asks the device.
"""

BACKWARD: Final = 3.0
"""Forward again, then one product for each operand of every product: three times the forward."""


def analytic_costs(
    rewired: Rewired, pieces: Sequence[Segment], types: Mapping[str, Any]
) -> tuple[Cost, ...]:
    """Cost of every piece in order.

    Data-dependent control flow (`if x.sum() > 0`) cannot run on fake tensors; such a model runs
    once on real ones.
    """
    fake = FakeMode()
    try:
        return _Analysis(rewired, pieces, types, fake).costs()
    except NEEDS_DATA as error:
        if device_of_model(rewired.root).type == "meta":
            raise InputError(
                f"cost: {rewired.name} has data-dependent control flow ({error}), which needs real "
                "tensors; move it from the meta device to a real one first"
            ) from error
    with preserve_rng():
        return _Analysis(rewired, pieces, types, None).costs()


class _Analysis:
    """One run of all pieces, and the costs of those that were run so far."""

    def __init__(
        self,
        rewired: Rewired,
        pieces: Sequence[Segment],
        types: Mapping[str, Any],
        fake: FakeTensorMode | None,
    ) -> None:
        self.mode: AbstractContextManager[Any] = fake or nullcontext()
        self.pieces = pieces
        original = submodules_only(rewired.root)
        device = device_of_model(rewired.root)
        # Fake tensors of the meta device would choose other kernels than any real device.
        real = torch.device("cpu") if device.type == "meta" else None
        copy = copy_model(original) if fake is None else fake_copy(original, fake, real)
        self.root = set_mode(copy, original, training=True)
        self.batch_size = example_batch_size(rewired, types)
        self.model_storages = {_storage(t) for t in (*copy.parameters(), *copy.buffers())}
        self.counted_parameters: set[int] = set()
        self.saved_before: dict[int, int] = {}
        """Storages that the piece before has saved, with their sizes."""
        self.alive: list[Any] = []  # a storage that is freed could give its address to another
        self.result: list[Cost] = []
        self.largest_op = 0
        """The most bytes that one operation of the current piece and its operands take."""
        with self.mode:
            self.values = {
                name: torch.zeros(types[name].shape, dtype=types[name].dtype, device=real or device)
                for name in rewired.signature.placeholders
                if isinstance(types[name], TensorType)
            }

    def costs(self) -> tuple[Cost, ...]:
        with self.mode:
            run_pieces(self.pieces, self.values, self._code, self._run)
        return tuple(self.result)

    def _code(self, graph: fx.Graph) -> Code:
        return _OperandSizes(self, graph).run

    def _run(self, piece: Segment, call: PieceCall) -> PieceResult:
        saved: dict[int, int] = {}
        self.largest_op = 0

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if (key := int(storage._cdata)) not in self.model_storages:
                saved[key] = storage.nbytes()
                self.alive.append(storage)
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        with torch.enable_grad(), hooks, _Counter(self.model_storages) as counter:
            result = call.forward()
        work = counter.flops + FLOPS_PER_BYTE * counter.moved
        read = parameters_read(piece.graph, self.root)
        new = [p for p in read if id(p) not in self.counted_parameters]
        self.counted_parameters.update(map(id, new))
        self.result.append(
            Cost(
                flops=counter.flops,
                parameters=sum(p.numel() for p in new),
                forward=work,
                backward=BACKWARD * work,
                saved=sum(saved.values()),
                shared=sum(size for key, size in saved.items() if key in self.saved_before),
                passing=self.largest_op,
                unsaved=self._unsaved(result, saved),
                weights=sum(p.numel() * p.itemsize for p in new),
                trained=sum(p.numel() * p.itemsize for p in new if p.requires_grad),
                batch=self.batch_size,
            )
        )
        self.saved_before = saved
        return result

    def _unsaved(self, result: PieceResult, saved: Mapping[int, int]) -> int:
        tensors = [out for out in result.outputs if isinstance(out, Tensor)]
        sizes = {_storage(out): out.untyped_storage().nbytes() for out in tensors}
        known = {*saved, *self.model_storages}
        return sum(size for key, size in sizes.items() if key not in known)


class _OperandSizes(fx.Interpreter):
    """Runs a graph, and records the most that one of its operations and its operands take."""

    def __init__(self, analysis: _Analysis, graph: fx.Graph) -> None:
        super().__init__(analysis.root, graph=graph)
        self.analysis = analysis

    def run_node(self, n: fx.Node) -> Any:
        """Run a node; parameters do not count."""
        result = super().run_node(n)
        made = self._size(result)
        if made and n.op in ("call_function", "call_method", "call_module"):
            read = sum(self._size(self.env[operand]) for operand in n.all_input_nodes)
            self.analysis.largest_op = max(self.analysis.largest_op, made + read)
        return result

    def _size(self, value: Any) -> int:
        tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
        storages = self.analysis.model_storages
        return sum(t.numel() * t.itemsize for t in tensors if _storage(t) not in storages)


def _storage(tensor: Tensor) -> int:
    """The identity of a tensor's storage; views of it have the same."""
    return int(tensor.untyped_storage()._cdata)


class _Counter(TorchDispatchMode):
    """FLOPs by torch's own formulas, and the bytes that operators read and write.

    Parameters do not count as read: an example has few samples, and in training a parameter is
    read once for many.
    """

    def __init__(self, model_storages: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model_storages = model_storages
        self.flops = 0
        self.moved = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if formula := _FORMULAS.get(func._overloadpacket):
            self.flops += int(formula(*args, **kwargs, out_val=out))
        if not func.is_view and func.namespace != "prim":
            self.moved += self._bytes(args) + self._bytes(out)
        return out

    def _bytes(self, values: Any) -> int:
        total = 0
        for value in values if isinstance(values, (tuple, list)) else (values,):
            if isinstance(value, Tensor) and _storage(value) not in self.model_storages:
                total += value.numel() * value.itemsize
            elif isinstance(value, (tuple, list)):
                total += self._bytes(value)
        return total


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Attention as its two products: older torch has no formula for its fused CPU kernel.

    >>> _attention_flops(torch.empty(2, 3, 5, 8), torch.empty(2, 3, 7, 8), torch.empty(2, 3, 7, 4))
    5040
    """
    *batch, length, width = query.shape
    pairs = torch.Size(batch).numel() * length * key.shape[-2]
    return 2 * pairs * (width + value.shape[-1])


_FORMULAS: Final[dict[Any, Any]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    **flop_registry,
}
