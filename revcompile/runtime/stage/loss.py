"""The loss at the end of the pipeline, any function of output and target."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from revcompile.errors import InputError, NonFiniteError
from revcompile.ir.coupling_ops import leaf
from revcompile.ir.reached import reached
from revcompile.ir.types import Live, Rewired, TensorType
from revcompile.kernels.autocast import widest_dtype
from revcompile.kernels.fixed_point import STREAM_RANGE

Loss = Callable[[Any, Any], Tensor]
"""A scalar from the model's output and a target (any pytrees)."""

_RANGE_ADVICE: Final = (
    ". With policy='pretrained' an element of a stream may also have grown to more than "
    f"{STREAM_RANGE} times the chain's largest input (or 1), all that streams can hold: keep the "
    "blocks that do it as one piece with leaf_modules=[...]"
)


class LossHead:
    """Computes the loss of a micro-batch and its gradient with respect to the outputs."""

    def __init__(
        self, rewired: Rewired, loss: Loss | None, autocast: torch.dtype | None, last: int
    ) -> None:
        self._result = rewired.body.result
        self._spec = rewired.signature.out_spec
        self.has_target = loss is not None
        """False if the model returns its own loss."""
        averaged = any(coupling.averaged for coupling in rewired.couplings)
        self.overflow_advice = _RANGE_ADVICE if averaged else ""
        """Text for errors: what else may have made a number infinite."""
        if loss is None:
            _check_returned_loss(rewired, self.assembled)
            loss = _returned_loss
        if not callable(loss):
            raise InputError(
                f"loss: expected a function of (output, target), got {type(loss).__name__}; "
                "write e.g. loss=torch.nn.functional.cross_entropy"
            )
        if isinstance(loss, type):
            raise InputError(f"loss: got the class {loss.__name__}; write loss={loss.__name__}()")
        if isinstance(loss, nn.Module) and any(p.requires_grad for p in loss.parameters()):
            raise InputError(
                "loss: it has parameters of its own, which no stage would train; make them part "
                "of the model (let its forward return what the loss needs)"
            )
        self.loss, self.autocast, self.last = loss, autocast, last
        self.latest: tuple[Tensor, Any, int] | None = None
        """The last micro-batch's loss, the model's output and the number of samples, until a step
        has reported them."""
        self.totals: Tensor | None = None
        """The sum and the number of the losses that steps have reported, on the device."""

    def __call__(
        self,
        microbatch: int,
        outputs: Mapping[str, Any],
        target: Any = None,
        samples: int = 0,
        *,
        waits: bool = True,
    ) -> dict[str, Tensor | None]:
        """The gradients of the loss with respect to the outputs.

        The loss itself, the output and `samples` are stored in `latest`. With `waits` the host
        waits for the loss, and raises `NonFiniteError` if it is not finite.
        """
        leaves = {name: leaf(value) for name, value in outputs.items()}
        with torch.enable_grad():
            output = self.assembled(leaves)
            loss = self.evaluate(output, target, f"micro-batch {microbatch}")
            if waits and not bool(torch.isfinite(loss)):
                raise NonFiniteError(
                    f"stage {self.last}, micro-batch {microbatch}: the loss is "
                    f"{float(loss.detach())}. The micro-batch was left out of the update; look at "
                    f"its data, or lower the learning rate{self.overflow_advice}",
                    stage=self.last,
                    microbatch=microbatch,
                )
            inputs = {n: t for n, t in leaves.items() if isinstance(t, Tensor) and t.requires_grad}
            if not loss.requires_grad:
                raise InputError(
                    "loss: its value does not depend on the model's output, so there is nothing "
                    "to train; do not detach the output or return a plain number"
                )
            if waits and _needs_others(loss, list(inputs.values())):
                raise InputError(
                    "loss: it depends on tensors with a gradient besides the model's output, such "
                    "as a penalty on parameters, which no stage would get. Let the model's forward "
                    "return what the loss needs, or use the optimizer's weight_decay"
                )
            try:
                grads = torch.autograd.grad(loss, list(inputs.values()), allow_unused=True)
            except RuntimeError as error:
                raise InputError(
                    f"loss, micro-batch {microbatch}: its gradient could not be computed: {error}\n"
                    "Return the loss without calling backward() on it, and compute it with "
                    "differentiable operations"
                ) from error
        detached = pytree.tree_map_only(Tensor, torch.Tensor.detach, output)
        self.latest = loss.detach(), detached, samples
        return dict(zip(inputs, grads, strict=True))

    def add(self, loss: Tensor) -> None:
        """Add the loss of a step to `totals`, unless it is not finite.

        This neither waits for the device nor keeps the loss alive.
        """
        if self.totals is None:
            self.totals = torch.zeros(2, dtype=widest_dtype(loss.device), device=loss.device)
        loss = loss.detach().to(self.totals.dtype)
        added = torch.stack([loss, torch.ones_like(loss)])
        self.totals.add_(torch.where(torch.isfinite(loss), added, 0.0))

    def assembled(self, outputs: Mapping[str, Any]) -> Any:
        """The model's return value from the last stage's outputs."""
        flat = [outputs[r.name] if isinstance(r, Live) else r for r in self._result]
        return pytree.tree_unflatten(flat, self._spec)

    def evaluate(self, output: Any, target: Any, where: str) -> Tensor:
        """The loss, or an error that describes its arguments."""
        device = next((t.device for t in pytree.tree_leaves(output) if isinstance(t, Tensor)), None)
        kind = device.type if device is not None else "cpu"
        try:
            with torch.autocast(kind, self.autocast, enabled=self.autocast is not None):
                loss = self.loss(output, target)
        except InputError:
            raise
        except Exception as error:
            remedy = "check that the target fits the output"
            if target is None:
                remedy = (
                    "no target was given: call trainer.step(x, y), on several ranks with the "
                    "target where the inputs are, or use another loss"
                )
            elif "in-place" in str(error):
                remedy = (
                    "it changes the output in place, which is a leaf of autograd here; use "
                    "operations that return a new tensor (sub for sub_), or output.clone() first"
                )
            raise InputError(
                f"loss, {where}: it raised {type(error).__name__}: {error}\n"
                f"  output: {described(output)}\n  target: {described(target)}\n"
                f"{remedy}"
            ) from error
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise InputError(
                f"loss, {where}: expected a scalar tensor, got {described(loss)}; reduce it, "
                "e.g. with .mean()"
            )
        if loss.is_complex():
            raise InputError(
                f"loss, {where}: expected a real number, got {described(loss)}; of complex numbers "
                "take .abs() or .real first"
            )
        return loss.reshape(())


def _returned_loss(output: Any, target: Any) -> Any:
    """The loss that the model has computed: its output, or `loss`, an item or attribute of it."""
    if target is not None:
        raise InputError(
            "loss=None: the model computes its own loss, and a target was given, which nothing "
            "would read; give labels with the inputs, trainer.step({..., 'labels': labels})"
        )
    if isinstance(output, Mapping):
        return output.get("loss")
    return output if isinstance(output, Tensor) else getattr(output, "loss", None)


def _needs_others(loss: Tensor, outputs: Sequence[Tensor]) -> bool:
    """Whether the loss also depends on leaves that require a gradient besides the outputs."""
    start: list[Any] = [loss.grad_fn]
    nodes = reached(start, lambda node: [n for n, _ in node.next_functions if n])
    leaves = [node.variable for node in nodes if hasattr(node, "variable")]
    return not {*map(id, leaves)} <= {*map(id, outputs)}


def _check_returned_loss(rewired: Rewired, assembled: Callable[[Mapping[str, Any]], Any]) -> None:
    """Raise if the model does not return a scalar loss, as far as its captured graph tells."""
    outputs: dict[str, Any] = {}
    for name in rewired.body.returned:
        kind = outputs[name] = rewired.body.types.get(name)
        if isinstance(kind, TensorType):
            outputs[name] = torch.empty(kind.shape, dtype=kind.dtype, device="meta")
    output = assembled(outputs)
    loss = _returned_loss(output, None)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise InputError(
            f"loss=None: {rewired.name} returns no loss of its own, but {described(output)}; give "
            "the example what it computes one from (example_kwargs={..., 'labels': labels} for a "
            "model of transformers), or pass loss=, a function of the output and the target"
        )


def described(value: Any) -> str:
    """A pytree as text, with dtype and shape in place of each tensor."""

    def show(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            dtype = str(leaf.dtype).removeprefix("torch.")
            return _Shown(f"{dtype}{list(leaf.shape)}")
        if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):  # a NumPy array, for instance
            return _Shown(f"{type(leaf).__name__} {leaf.dtype}{list(leaf.shape)}")
        if leaf is None or isinstance(leaf, bool | int | float | complex | str | bytes):
            return leaf
        if isinstance(leaf, Mapping):
            return _Shown(f"{type(leaf).__name__}({described(dict(leaf))})")
        return _Shown(type(leaf).__name__)  # it may print whole tensors

    return repr(pytree.tree_map(show, value))


class _Shown(str):
    """Text that prints without quotes."""

    def __repr__(self) -> str:
        return str(self)
