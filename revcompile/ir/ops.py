"""The few functions that generated graphs call besides torch's own, and names of operations."""

from __future__ import annotations

import functools
from contextvars import ContextVar
from typing import Any, Final

import torch
from torch import Tensor, fx

from revcompile.kernels.autocast import LOW_PRECISION, is_autocasting


def select(training: bool, train: Any, evaluation: Any) -> Any:
    """The value of a constant that depends on the mode.

    >>> select(True, 0.1, 0.0)
    0.1
    """
    return train if training else evaluation


Size = int | tuple[int, ...]


def samples_beyond(tensor: Tensor, dim: int, size: int, per_sample: int) -> int:
    """How many more samples than the example a tensor holds.

    >>> samples_beyond(torch.zeros(3, 20), dim=1, size=8, per_sample=4)
    3
    """
    return (tensor.shape[dim] - size) // per_sample


def grown_size(first: Size, second: Size, beyond: int) -> Size:
    """A size for `beyond` more samples than the example, from its values there and at one more.

    >>> grown_size(8, 12, beyond=3), grown_size((2, 7), (3, 7), beyond=-1)
    (20, torch.Size([1, 7]))
    """
    if isinstance(first, int) and isinstance(second, int):
        return first + (second - first) * beyond
    assert isinstance(first, tuple) and isinstance(second, tuple)
    return torch.Size(a + (b - a) * beyond for a, b in zip(first, second, strict=True))


def with_item(tensor: Tensor, index: Any, value: Any) -> Tensor:
    """`tensor[index] = value`, out of place."""
    result = tensor.clone()
    result[index] = value
    return result


def out_of_place(tensor: Tensor, method: str, *args: Any, **kwargs: Any) -> Tensor:
    """The result of an in-place method on a copy, for methods that have no out-of-place form.

    >>> out_of_place(torch.tensor([1, 2]), "gt_", 1)
    tensor([0, 1])
    """
    result = tensor.clone()
    getattr(result, method)(*args, **kwargs)
    return result


def fuse_mean(a: Tensor, b: Tensor) -> Tensor:
    """The mean of two streams: two equal streams give the same value as one."""
    return torch.lerp(a, b, 0.5) if a.is_floating_point() else (a + b) // 2


def attribute(root: Any, path: str) -> Any:
    """The value at a dotted path: what a `get_attr` node reads.

    >>> attribute(torch.nn.Sequential(torch.nn.Linear(2, 3)), "0.bias").shape
    torch.Size([3])
    """
    return functools.reduce(getattr, path.split("."), root)


def called(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Call the function or method of a node with these arguments."""
    target: Any = node.target
    if node.op == "call_method":
        return getattr(args[0], target)(*args[1:], **kwargs)
    return target(*args, **kwargs)


def op_name(node: fx.Node) -> str:
    """The name of the function, method or operator that a node calls, without its overload.

    >>> graph = fx.Graph()
    >>> x = graph.placeholder("x")
    >>> op_name(graph.call_function(torch.ops.aten.add.Tensor, (x, x)))
    'add'
    >>> op_name(graph.call_function(out_of_place, (x, "gt_", 1)))
    'gt_'
    """
    if node.target is out_of_place:
        return str(node.args[1])
    return str(getattr(node.target, "__name__", node.target)).split(".")[0]


FACTORIES: Final = frozenset(
    (
        *("empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like"),
        *("zeros_like", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor"),
        "new_zeros",
    )
)
"""Functions that read only the shape, type and device of their input."""


@functools.cache
def is_random_operator(name: str) -> bool:
    """Whether torch tags its operator of this name as drawing random numbers.

    >>> is_random_operator("dropout"), is_random_operator("relu")
    (True, False)
    """
    packet = getattr(torch.ops.aten, name, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return False
    overloads = (getattr(packet, overload) for overload in packet.overloads())
    return any(torch.Tag.nondeterministic_seeded in each.tags for each in overloads)


def as_read(x: Tensor) -> Tensor:
    """A value in the dtype to which autocast casts it for the layers that read it."""
    if x.dtype != torch.float32 or not is_autocasting(x.device):
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


def widened(value: Any) -> Any:
    """A value as programs compute with it: in float32 if it was stored or sent in low precision."""
    is_low = isinstance(value, Tensor) and value.dtype in LOW_PRECISION
    return value.float() if is_low else value


def matching(source: Any, like: Any) -> Any:
    """Under autocast, a tensor in the floating-point type of another; else the tensor itself."""
    if not isinstance(source, Tensor) or not isinstance(like, Tensor) or source.dtype == like.dtype:
        return source
    both = source.is_floating_point() and like.is_floating_point()
    return source.to(like.dtype) if both and is_autocasting(like.device) else source


statistics_frozen: Final = ContextVar("statistics_frozen", default=False)
"""While True, batch norms do not update running statistics: only one run of a branch may.

Each thread has its own value. Code that autograd runs in another thread sets it there."""


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """`F.batch_norm`, without updates of running statistics while `statistics_frozen`."""
    if training and statistics_frozen.get():  # with copies, as many tensors are saved as without
        running_mean = None if running_mean is None else running_mean.clone()
        running_var = None if running_var is None else running_var.clone()
    return torch.nn.functional.batch_norm(
        input, running_mean, running_var, weight, bias, training, momentum, eps
    )
