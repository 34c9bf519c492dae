"""Analytic costs: every piece runs once on fake tensors, without memory and without arithmetic.

The unit of work is a FLOP. Pieces that compute little (pooling, norms, activations) still have to
move their operands, so every byte read or written adds `FLOPS_PER_BYTE` FLOPs.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from revcompile.compiler.capture.fake_values import NEEDS_DATA, FakeMode, fake_copy
from revcompile.compiler.capture.isolation import copy_model, preserve_rng, set_mode
from revcompile.compiler.capture.memory import storage_of
from revcompile.compiler.cost.run_pieces import PieceCall, run_pieces, submodules_only
from revcompile.errors import InputError
from revcompile.ir.module_tree import device_of_model, parameters_read
from revcompile.ir.types import Cost, Rewired, Segment, TensorType

FLOPS_PER_BYTE: Final = 64.0
"""FLOPs that each byte moved counts as.

Data sheets give accelerators 80 to 300 FLOPs of matrix products per byte of memory traffic; models
reach half of that or less. The value 64 was compared with measured times of the segments of
ResNet-50, ViT-B and ConvNeXt-T on an H200 (batch 64). In float32 work follows them about three
times as closely as FLOPs alone (32 to 150 do about as well), in TF32 and bfloat16 twice as closely
(500 and more would be better still). `cost="measured"` measures on the device instead.
"""

BACKWARD: Final = 3.0
"""Backward work in units of forward: forward again (1), a product for each of two operands (2)."""


def analytic_costs(
    rewired: Rewired, pieces: Sequence[Segment], types: Mapping[str, Any]
) -> tuple[Cost, ...]:
    """Cost of every piece in order.

    Data-dependent control flow (`if x.sum() > 0`) cannot run on fake tensors; such a model runs
    once on real ones.
    """
    try:
        return _counted(rewired, pieces, types, FakeMode())
    except NEEDS_DATA as error:
        if device_of_model(rewired.root).type == "meta":
            raise InputError(
                f"cost: {rewired.name} has data-dependent control flow ({error}), which needs real "
                "tensors; move it from the meta device to a real one first"
            ) from error
    with preserve_rng():
        return _counted(rewired, pieces, types, None)


def _counted(
    rewired: Rewired,
    pieces: Sequence[Segment],
    types: Mapping[str, Any],
    fake: FakeTensorMode | None,
) -> tuple[Cost, ...]:
    """One run of all pieces, on fake tensors or on real ones."""
    original, device = submodules_only(rewired.root), device_of_model(rewired.root)
    # Fake tensors of the meta device would choose other kernels than any real device.
    real = torch.device("cpu") if device.type == "meta" else None
    copy = copy_model(original) if fake is None else fake_copy(original, fake, real)
    root = set_mode(copy, original, training=True)
    # kept alive: a new storage could get the address of a freed one
    of_model = {storage_of(t): t for t in (*copy.parameters(), *copy.buffers())}
    costs: list[Cost] = []
    counted: set[int] = set()
    saved_before: dict[int, int] = {}
    alive: list[Any] = []

    def run(piece: Segment, call: PieceCall) -> tuple[Any, ...]:
        nonlocal saved_before
        saved: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if (key := storage_of(tensor)) not in of_model:
                saved[key] = storage.nbytes()
                alive.append(storage)
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        try:
            with torch.enable_grad(), hooks, _Counter(of_model) as counter:
                results = call.run()
                passing = counter.largest
                outputs = call.outputs(results)
        except RuntimeError as error:
            if "saved tensor hooks" not in str(error):
                raise
            # torch.func.grad in a forward allows no hooks: what is written counts as saved.
            saved.clear()
            with torch.enable_grad(), _Counter(of_model, written=pack) as counter:
                results = call.run()
                passing = counter.largest
                outputs = call.outputs(results)
        work = counter.flops + FLOPS_PER_BYTE * counter.moved
        new = [p for p in parameters_read(piece.graph, root) if id(p) not in counted]
        counted.update(map(id, new))
        made = {storage_of(t): t.untyped_storage() for t in outputs if isinstance(t, Tensor)}
        unsaved = made.keys() - saved.keys() - of_model.keys()
        costs.append(
            Cost(
                flops=counter.flops,
                parameters=sum(p.numel() for p in new),
                forward=work,
                backward=BACKWARD * work,
                saved=sum(saved.values()),
                shared=sum(size for key, size in saved.items() if key in saved_before),
                passing=passing,
                unsaved=sum(made[key].nbytes() for key in unsaved),
                weights=sum(p.numel() * p.itemsize for p in new),
                trained=sum(p.numel() * p.itemsize for p in new if p.requires_grad),
                batch=rewired.batch,
            )
        )
        saved_before = saved
        return outputs

    with fake or nullcontext():
        values = {
            name: torch.zeros(types[name].shape, dtype=types[name].dtype, device=real or device)
            for name in rewired.signature.placeholders
            if isinstance(types[name], TensorType)
        }
        run_pieces(pieces, values, root, run)
    return tuple(costs)


class _Counter(TorchDispatchMode):
    """FLOPs by torch's own formulas, and the bytes that operators read and write.

    Parameters do not count as read: an example has few samples, and in training a parameter is
    read once for many samples.
    """

    def __init__(
        self, of_model: Container[int], written: Callable[[Tensor], object] | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.of_model, self._written = of_model, written
        self.flops = self.moved = self.largest = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if formula := _FORMULAS.get(func._overloadpacket):
            self.flops += int(formula(*args, **kwargs, out_val=out))
        if not func.is_view and func.namespace != "prim":
            if self._written is not None:
                pytree.tree_map_only(Tensor, self._written, out)
            moved = sum(
                leaf.numel() * leaf.itemsize
                for leaf in pytree.tree_leaves((args, out))
                if isinstance(leaf, Tensor) and storage_of(leaf) not in self.of_model
            )
            self.moved += moved
            self.largest = max(self.largest, moved)
        return out


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
