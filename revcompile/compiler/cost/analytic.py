"""Costs over fake tensors: every piece runs once, without memory and without arithmetic.

The unit of work is a FLOP. Pieces that compute little (pooling, norms, activations) still have to
move their operands, so every byte read or written counts as `FLOPS_PER_BYTE` more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from revcompile.compiler.capture.isolation import copy_model, preserve_rng, set_mode
from revcompile.compiler.cost.run import Code, Given, Ran, bare, example_batch, walk
from revcompile.errors import InputError
from revcompile.ir.module_tree import device_of_model, parameters_read
from revcompile.ir.program import Piece
from revcompile.ir.types import Cost, Rewired, TensorType

__all__ = ["FLOPS_PER_BYTE", "analytic_costs"]

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
    rewired: Rewired, pieces: Sequence[Piece], types: Mapping[str, Any]
) -> tuple[Cost, ...]:
    """Cost of every piece in order.

    Modules that look at numbers (`if x.sum() > 0`) cannot run on fake tensors; then all of them
    are real, once.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        return _Analysis(rewired, pieces, types, fake).costs()
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        if device_of_model(rewired.root).type == "meta":
            raise InputError(
                f"cost: {rewired.name} looks at numbers ({error}), which the meta device has none "
                "of; move it to a real device first"
            ) from error
    with preserve_rng():
        return _Analysis(rewired, pieces, types, None).costs()


class _Analysis:
    """One walk over the pieces, and what it has found so far."""

    def __init__(
        self,
        rewired: Rewired,
        pieces: Sequence[Piece],
        types: Mapping[str, Any],
        fake: FakeTensorMode | None,
    ) -> None:
        self.mode: AbstractContextManager[Any] = fake or nullcontext()
        self.pieces = pieces
        own = bare(rewired.root)
        twin = copy_model(own) if fake is None else _faked(own, fake)
        self.root = set_mode(twin, own, training=True)
        self.batch = example_batch(rewired, types)
        self.own = {_storage(t) for t in (*self.root.parameters(), *self.root.buffers())}
        self.seen: set[int] = set()
        self.before: dict[int, int] = {}
        self.held: list[Tensor] = []  # a storage that died could give its address to another
        self.found: list[Cost] = []
        self.passing = 0
        device = _device(rewired.root)
        with self.mode:
            self.values = {
                name: torch.zeros(types[name].shape, dtype=types[name].dtype, device=device)
                for name in rewired.signature.placeholders
                if isinstance(types[name], TensorType)
            }

    def costs(self) -> tuple[Cost, ...]:
        with self.mode:
            walk(self.pieces, self.values, self._code, self._visit)
        return tuple(self.found)

    def _code(self, graph: fx.Graph) -> Code:
        return _Operands(self, graph).run

    def _visit(self, piece: Piece, given: Given) -> Ran:
        saved: dict[int, int] = {}
        self.passing = 0

        def pack(tensor: Tensor) -> Tensor:
            key = _storage(tensor)
            if key not in self.own:
                saved[key] = tensor.untyped_storage().nbytes()
                self.held.append(tensor.detach())
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        with torch.enable_grad(), hooks, _Counter(self.own) as counter:
            ran = given.forward()
        work = counter.flops + FLOPS_PER_BYTE * counter.moved
        new = [p for p in parameters_read(piece.segment.graph, self.root) if id(p) not in self.seen]
        self.seen.update(map(id, new))
        self.found.append(
            Cost(
                flops=counter.flops,
                parameters=sum(p.numel() for p in new),
                forward=work,
                backward=BACKWARD * work,
                saved=sum(saved.values()),
                shared=sum(size for key, size in saved.items() if key in self.before),
                passing=self.passing,
                unsaved=self._unsaved(ran, saved),
                weights=sum(p.numel() * p.itemsize for p in new),
                trained=sum(p.numel() * p.itemsize for p in new if p.requires_grad),
                batch=self.batch,
            )
        )
        self.before = saved
        return ran

    def _unsaved(self, ran: Ran, saved: Mapping[int, int]) -> int:
        tensors = [out for out in ran.outputs if isinstance(out, Tensor)]
        sizes = {_storage(out): out.untyped_storage().nbytes() for out in tensors}
        return sum(n for key, n in sizes.items() if key not in saved and key not in self.own)


class _Operands(fx.Interpreter):
    """Runs a graph, and notes the most that one of its operations and its operands take."""

    def __init__(self, analysis: _Analysis, graph: fx.Graph) -> None:
        super().__init__(analysis.root, graph=graph)
        self.analysis = analysis

    def run_node(self, n: fx.Node) -> Any:
        """A node; parameters do not count."""
        result = super().run_node(n)
        made = self._size(result)
        if made and n.op.startswith("call"):
            read = sum(self._size(self.env[operand]) for operand in n.all_input_nodes)
            self.analysis.passing = max(self.analysis.passing, made + read)
        return result

    def _size(self, value: Any) -> int:
        tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
        own = self.analysis.own
        return sum(t.numel() * t.itemsize for t in tensors if _storage(t) not in own)


def _device(root: nn.Module) -> torch.device:
    """Fake tensors of the meta device would choose other kernels than any real device."""
    device = device_of_model(root)
    return torch.device("cpu") if device.type == "meta" else device


def _faked(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """A copy of the model with fake parameters and buffers."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        with torch.no_grad():
            fake: Tensor = mode.from_tensor(tensor, static_shapes=True)
            if tensor.is_meta:
                with mode:
                    fake = torch.empty_like(tensor, device="cpu")
                if isinstance(tensor, nn.Parameter):
                    fake = nn.Parameter(fake, tensor.requires_grad)
        memo[id(tensor)] = fake
    return copy_model(model, memo)


def _storage(tensor: Tensor) -> int:
    """What tensors that share memory have in common."""
    return int(tensor.untyped_storage()._cdata)


class _Counter(TorchDispatchMode):
    """FLOPs by torch's own formulas, and the bytes that operators read and write.

    Parameters do not count as read: an example has few samples, and in training a parameter is
    read once for many.
    """

    def __init__(self, own: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.own = own
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
        found = 0
        for value in values if isinstance(values, (tuple, list)) else (values,):
            if isinstance(value, Tensor):
                own = _storage(value) in self.own
                found += 0 if own else value.numel() * value.itemsize
            elif isinstance(value, (tuple, list)):
                found += self._bytes(value)
        return found


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
