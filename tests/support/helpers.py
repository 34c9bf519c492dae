"""What several test files need: gradients of a net, how far two sets of them are apart, steps."""

import copy
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

Returned = TypeVar("Returned")

ON_GPU: Final = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
"""The marks of a file whose tests need one."""

FORMS: Final[dict[str, Tensor]] = {
    "dense": torch.randn(2, 3, 4),
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "transposed": torch.randn(4, 6).t(),
    "chunk": torch.randn(2, 8, 3).chunk(2, 1)[1],
    "expanded": torch.randn(3, 1).expand(3, 5),
    "with gaps": torch.randn(4, 6)[:, ::2],
    "not aligned": torch.randn(7)[1:],
    "a number": torch.tensor(3.5, dtype=torch.float64),
    "odd bytes": torch.arange(3, dtype=torch.uint8),
    "bfloat16": torch.randn(3).bfloat16(),
    "integers": torch.arange(7),
    "true or false": torch.tensor([True, False]),
    "empty": torch.empty(0, 3),
    "complex": torch.randn(3, 4, dtype=torch.complex64),
    "complex, transposed": torch.randn(3, 4, dtype=torch.complex128).t(),
    "conjugate": torch.randn(3, 4, dtype=torch.complex64).conj(),
}
"""Tensors of all kinds, as they may lie in memory."""


def cases(names: str, *rows: Any, **options: Any) -> pytest.MarkDecorator:
    """`pytest.mark.parametrize` with a case in each row."""
    return pytest.mark.parametrize(names, rows, **options)


def refuses(error: Any, said: str, call: Callable[..., Any], /, *args: Any, **how: Any) -> None:
    """A call ends with this error, whose text matches."""
    __tracebackhide__ = True
    with pytest.raises(error, match=said):
        call(*args, **how)


def noting(asked: list[str], function: Callable[..., Any], word: str = "") -> Callable[..., Any]:
    """A function that notes its name, and the word if its sixth argument is given."""

    def call(*args: Any) -> Any:
        is_given = bool(word) and args[5] is not None
        asked.append(function.__name__.strip("_") + (word if is_given else ""))
        return function(*args)

    return call


def refilling(step: Callable[..., Returned], *batch: Any) -> Returned:
    """A step on a copy of a batch, whose memory is written to right after it, unseen by autograd.

    So may every caller of `trainer.step`.
    """
    copies = pytree.tree_map_only(Tensor, torch.clone, batch)
    try:
        return step(*copies)
    finally:
        for tensor in pytree.tree_leaves(copies):
            if isinstance(tensor, Tensor) and tensor.layout is torch.strided:
                is_float = tensor.is_floating_point() or tensor.is_complex()
                tensor.data.fill_(torch.nan if is_float else 0)


def gradients(net: nn.Module, *args: Any, seed: int = 0, **kwargs: Any) -> dict[str, Tensor]:
    """Outputs, gradients of parameters and of floating inputs, and buffers after one step."""
    net.zero_grad()
    args = pytree.tree_map(_leaf, args)
    torch.manual_seed(seed)
    outputs = pytree.tree_leaves(net(*args, **kwargs))
    outputs = [o for o in outputs if isinstance(o, Tensor) and o.requires_grad]
    generator = torch.Generator().manual_seed(seed)
    weighted = [
        (o * torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o)).sum()
        for o in outputs
    ]
    torch.stack([w.double() for w in weighted]).sum().backward()
    found = {f"output {i}": o.detach() for i, o in enumerate(outputs)}
    found |= {f"grad {n}": p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}
    inputs = pytree.tree_leaves(args)
    found |= {
        f"input {i}": t.grad.clone()
        for i, t in enumerate(inputs)
        if isinstance(t, Tensor) and t.grad is not None
    }
    return found | {f"buffer {n}": b.clone() for n, b in net.named_buffers()}


def gradients_in_flight(net: nn.Module, *shapes: tuple[int, ...]) -> dict[str, Tensor]:
    """Gradients of calls that are all made before the last one, and then the others, go back."""
    torch.manual_seed(3)
    outputs = [net(x) for x in [torch.randn(shape).double() for shape in shapes]]
    for output in reversed(outputs):
        (output**2).sum().backward()
    return {name: p.grad.clone() for name, p in net.named_parameters()}


def stored(net: nn.Module) -> Any:
    """The same net with stored activations."""
    twin: Any = copy.deepcopy(net)
    twin.reversible = False
    return twin


def assert_exact(net: nn.Module, *args: Any, limit: float = 1e-10, **kwargs: Any) -> None:
    """A step gives the outputs, gradients and buffers of one with stored activations."""
    expected = gradients(stored(net), *args, **kwargs)
    deviation, where = worst(expected, gradients(net, *args, **kwargs))
    assert deviation < limit, where


def saved_bytes(net: nn.Module, *inputs: Tensor) -> int:
    """What autograd holds after one forward pass, parameters left out."""
    held: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in net.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = net(*inputs)
    assert kept is not None
    return sum(held.values())


def _leaf(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().clone().requires_grad_()
    return value


def worst(expected: Mapping[str, Tensor], actual: Mapping[str, Tensor]) -> tuple[float, str]:
    """The largest deviation, relative to each tensor's largest element, and where it is.

    Rounding noise of 1e-14 times the largest tensor is not counted: some gradients (of a bias
    before a batch norm) are zero in exact arithmetic and nothing but noise in floating point.
    """
    assert expected.keys() == actual.keys(), expected.keys() ^ actual.keys()
    largest = max(float(t.abs().max()) for t in expected.values() if t.numel())
    deviations = []
    for name, want in expected.items():
        if not want.numel():
            continue
        difference = float((want.double() - actual[name].double()).abs().max())
        scale = max(float(want.abs().max()), 1e-30)
        deviations.append((max(difference - 1e-14 * largest, 0.0) / scale, name))
    return max(deviations)
