"""cost: parameters and FLOPs of each segment, over fake tensors: no memory, no arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from revcompile.compiler.capture.tracer import fake_copy
from revcompile.ir import Cost, Coupling, Rewired, Segment, TensorType
from revcompile.ops import attribute

__all__ = ["costs"]


def costs(rewired: Rewired) -> tuple[Cost, ...]:
    """Cost of every segment in order. A parameter counts where it is used first."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    root = fake_copy(_holder(rewired.root), mode)
    root.train()
    seen: set[int] = set()
    result: list[Cost] = []
    values = _Values(rewired, mode)
    for segment in rewired.body.segments:
        graph = segment.branch if isinstance(segment, Coupling) else segment.graph
        with mode, _counting() as counter:
            values.run(segment, root)
        size = 0
        for parameter in _parameters(graph, root):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                size += parameter.numel()
        result.append(Cost(counter.get_total_flops(), size))
    return tuple(result)


@contextmanager
def _counting() -> Iterator[FlopCounterMode]:
    """Count FLOPs; attention as its two products, since fused CPU kernels have no formula."""
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        yield counter


def _holder(root: nn.Module) -> nn.Module:
    """The tree of modules alone: `root` itself may be a module with code of its own."""
    plain = nn.Module()
    plain._modules = dict(root._modules)
    plain._parameters = dict(root._parameters)
    plain._buffers = dict(root._buffers)
    return plain


class _Values:
    """Fake live values, passed from segment to segment."""

    def __init__(self, rewired: Rewired, mode: FakeTensorMode) -> None:
        self.live: dict[str, Any] = {}
        with mode:
            for name in rewired.signature.placeholders:
                kind = rewired.body.types[name]
                assert isinstance(kind, TensorType)
                self.live[name] = torch.empty(kind.shape, dtype=kind.dtype)

    def run(self, segment: Segment, root: nn.Module) -> None:
        """Compute a segment's outputs."""
        if isinstance(segment, Coupling):
            a, b = (self.live[name] for name in segment.streams_in)
            if segment.link is not None:
                sizes = [self.live[name] for name in segment.link.sides]
                a = fx.Interpreter(root, graph=segment.link.forward).run(a, *sizes)[0]
                b = fx.Interpreter(root, graph=segment.link.forward).run(b, *sizes)[0]
            sides = [self.live[name] for name in segment.sides]
            found = fx.Interpreter(root, graph=segment.branch).run(b, *sides)
            addend, *extras = found if segment.extras else (found,)
            outputs = (b, a + addend, *extras)
        else:
            inputs = [self.live[name] for name in segment.inputs]
            outputs = fx.Interpreter(root, graph=segment.graph).run(*inputs)
        self.live.update(zip(segment.outputs, outputs, strict=True))


def _parameters(graph: fx.Graph, root: nn.Module) -> list[nn.Parameter]:
    found: list[nn.Parameter] = []
    for node in graph.nodes:
        if node.op == "call_module":
            found += root.get_submodule(str(node.target)).parameters()
        elif node.op == "get_attr":
            value = attribute(root, str(node.target))
            if isinstance(value, nn.Parameter):
                found.append(value)
    return found
