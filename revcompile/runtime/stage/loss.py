"""The loss at the end of the pipeline, any function of output and target; and its scale.

Loss scaling for float16, while micro-batches are in flight.

The last stage multiplies a micro-batch's loss by the current scale, and sends the scale back with
the gradients: every stage divides its parameters' gradients by it before it accumulates them. So
accumulated gradients are right even if the scale changes between two micro-batches of one update,
or while they are in flight.

    forward messages    carry the least scale that overflowed at the stages before, unless reported
    backward messages   carry the scale of the micro-batch's loss

If a micro-batch's gradient overflows at a stage, this stage leaves it out and sends a void message
back, so the stages before leave it out, too; the later stages have used their gradients already.
Forward messages report the overflow to the last stage. The actions of a stage have a fixed order,
so this does not depend on timing and needs no extra messages. One incident causes many reports,
because all micro-batches in flight had the same scale. The last stage reacts only to reports of a
scale not above its current one, and lowers its scale below all of them. Other reports belong to an
incident that it has already reacted to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from revcompile.errors import InputError, NonFiniteError
from revcompile.ir.coupling_ops import leaf
from revcompile.ir.reached import reached
from revcompile.ir.types import Live, Rewired, TensorType
from revcompile.kernels.autocast import wide_dtype, widest_dtype
from revcompile.kernels.fixed_point import STREAM_RANGE
from revcompile.schedule import Method, Order

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
        self.target: Any = None
        """The target of the next micro-batch."""
        self.latest: tuple[Tensor, Any] | None = None
        """The last micro-batch's loss, and the model's output, until a step has reported them."""
        self.totals: Tensor | None = None
        """The sum and the number of the losses that steps have reported, on the device."""
        self.scale: Tensor | None = None
        """The factor by which the last loss was scaled."""

    def __call__(
        self,
        microbatch: int,
        outputs: Mapping[str, Any],
        scale: Tensor | None = None,
        waits: bool = True,
    ) -> dict[str, Tensor | None]:
        """The gradients of `scale` times the loss with respect to the outputs.

        The loss itself and the output are stored in `latest`. With `waits` the host waits for the
        loss, and raises `NonFiniteError` if it is not finite.
        """
        leaves = {name: leaf(value) for name, value in outputs.items()}
        with torch.enable_grad():
            output = self.assembled(leaves)
            loss = self.evaluate(output, self.target, f"micro-batch {microbatch}")
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
            self.scale = scale
            seed = None if scale is None else scale.to(loss.dtype)
            try:
                grads = torch.autograd.grad(loss, list(inputs.values()), seed, allow_unused=True)
            except RuntimeError as error:
                raise InputError(
                    f"loss, micro-batch {microbatch}: its gradient could not be computed: {error}\n"
                    "Return the loss without calling backward() on it, and compute it with "
                    "differentiable operations"
                ) from error
        self.latest = loss.detach(), pytree.tree_map_only(Tensor, torch.Tensor.detach, output)
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
                remedy = "no target was given: call trainer.step(x, y), or use another loss"
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


# -- scaling the loss -----------------------------------------------------------------------------


LOWEST: Final = 2.0**-16
"""An overflow at this scale or below is not due to the scale: it is an error."""
_HIGHEST: Final = torch.finfo(torch.float32).max
_GROWTH, _BACKOFF = 2.0, 0.5
"""Factors of torch.amp.GradScaler."""
OVERFLOW: Final = 2.0
"""The flag of a micro-batch whose gradient overflowed because of its loss scale."""
_CPU: Final = torch.device("cpu")
_NUMBERS: Final = ("scale", "good", "overflow", "skipped")


@dataclass(frozen=True)
class LossScale:
    """How the loss is scaled: the settings of torch.amp.GradScaler, with its defaults.

    With `dynamic=False` the scale is constant, and a gradient that is not finite is an error.

    >>> LossScale(init_scale=1024.0).growth_interval
    2000
    """

    init_scale: float = 2.0**16
    growth_interval: int = 2000
    """The scale grows after this many updates of the last stage without an overflow."""
    dynamic: bool = True

    def __post_init__(self) -> None:
        problems = [
            (not LOWEST < self.init_scale < _HIGHEST, f"init_scale={self.init_scale}", "2**16"),
            (self.growth_interval < 1, f"growth_interval={self.growth_interval}", "2000"),
        ]
        for is_wrong, got, usual in problems:
            if is_wrong:
                raise InputError(f"LossScale: {got} cannot work; torch's is {usual}")


def loss_scale_of(
    given: LossScale | float | Literal["dynamic"] | None, autocast: torch.dtype | None
) -> LossScale | None:
    """The settings for a value of `loss_scale=`; None: the loss is not scaled.

    >>> loss_scale_of(None, torch.float16) == loss_scale_of("dynamic", None) == LossScale()
    True
    >>> loss_scale_of(None, torch.bfloat16)
    >>> loss_scale_of(256.0, None).dynamic
    False
    """
    if given is None:
        return LossScale() if autocast is torch.float16 else None
    if isinstance(given, LossScale):
        return given
    if given == "dynamic":
        return LossScale()
    if isinstance(given, int | float) and not isinstance(given, bool):
        return LossScale(init_scale=float(given), dynamic=False)
    raise InputError(
        f'loss_scale={given!r}; use "dynamic", a number, a LossScale(...), or None: dynamic with '
        "autocast=torch.float16, none otherwise"
    )


class Scaling:
    """State of one stage: overflows to report; at the last stage, the scale itself.

    All numbers are on the device: a captured step reads and changes them without waiting.

    >>> scaling = Scaling(LossScale(init_scale=8.0, growth_interval=1))
    >>> scaling.record_overflow(8.0)
    >>> float(scaling.next_scale())
    4.0
    >>> scaling.updated()
    >>> float(scaling.next_scale())
    8.0
    """

    def __init__(self, settings: LossScale, device: torch.device = _CPU) -> None:
        self.settings = settings
        self.values = torch.zeros(len(_NUMBERS), dtype=widest_dtype(device), device=device)
        self.scale, self._good, self._overflow, self.skipped = self.values.unbind()
        """In this order: the factor of the next loss; updates since it last changed; the least
        scale with an overflow not reported yet; micro-batches whose gradient overflowed here."""
        self.load_state_dict(None)

    def overflowed(self, found: Tensor, before: Tensor, scale: Tensor) -> Tensor:
        """The flag of a micro-batch: OVERFLOW if the scale of its loss can be the cause.

        Args:
            found: Whether one of its gradients is not finite.
            before: Its flag from the stage after this one, which stays if it is set.
            scale: The scale of its loss.
        """
        is_due_to_scale = (before == 0) & (found != 0) & (scale > LOWEST) & self.settings.dynamic
        self.skipped.add_(is_due_to_scale.reshape(()))
        self.record_overflow(torch.where(is_due_to_scale.reshape(()), scale, math.inf))
        return torch.where(before != 0, before, torch.where(is_due_to_scale, OVERFLOW, found))

    def record_overflow(self, scale: float | Tensor | None) -> None:
        """Note that a gradient overflowed at this scale, here or at a stage before; inf: none."""
        if scale is not None:
            limit = self._overflow.new_tensor(scale) if isinstance(scale, float) else scale
            self._overflow.clamp_(max=limit.to(self._overflow))

    def take_overflow(self) -> Tensor:
        """The overflow to report to the next stage, once; infinite if there is none."""
        overflow = self._overflow.clone()
        self._overflow.fill_(math.inf)
        return overflow

    def next_scale(self) -> Tensor:
        """At the last stage: the scale of the loss about to be computed."""
        overflow = self.take_overflow()
        is_new = overflow <= self.scale
        lower = (overflow * _BACKOFF).clamp(min=LOWEST)
        torch.where(is_new, lower, self.scale, out=self.scale)
        self._good.mul_(~is_new)
        return self.scale.clone()

    def updated(self, found_inf: Tensor | None = None) -> None:
        """Note an update of the last stage, unless the flag is set."""
        self._good.add_(1 if found_inf is None else (found_inf == 0).reshape(()))
        grows = (self._good == self.settings.growth_interval) & self.settings.dynamic
        grown = self.scale * _GROWTH
        torch.where(grows & (grown < _HIGHEST), grown, self.scale, out=self.scale)
        self._good.mul_(~grows)

    # -- checkpoints --------------------------------------------------------------------------

    def state_dict(self) -> dict[str, float]:
        return dict(zip(_NUMBERS, self.values.tolist(), strict=True))

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Continue from a state; start again without one, or if the scale is fixed."""
        numbers = dict(zip(_NUMBERS, (self.settings.init_scale, 0, math.inf, 0), strict=True))
        if self.settings.dynamic:
            numbers |= {name: (state or numbers)[name] for name in _NUMBERS}
        self.values.copy_(torch.tensor([float(n) for n in numbers.values()], dtype=torch.float64))


def scaling_of(settings: LossScale | None, method: Method, device: torch.device) -> Scaling | None:
    """The initial state of a stage; None: the loss is not scaled."""
    if settings is None:
        return None
    if method.order is Order.SYNTHETIC:
        raise InputError(
            f"loss_scale: {method.name!r} predicts gradients, which are not scaled; use "
            "autocast=torch.bfloat16, or another method"
        )
    return Scaling(settings, device)


def unscaled(gradients: Mapping[str, Tensor | None], scale: Tensor) -> dict[str, Tensor | None]:
    """Gradients of the unscaled loss, as new tensors.

    >>> unscaled({"w": torch.tensor([8.0]), "b": None}, torch.tensor(4.0))
    {'w': tensor([2.]), 'b': None}
    """
    result = dict(gradients)
    scaled = {name: gradient for name, gradient in gradients.items() if gradient is not None}
    for dtype in dict.fromkeys(gradient.dtype for gradient in scaled.values()):
        own = {name: gradient for name, gradient in scaled.items() if gradient.dtype == dtype}
        wide = wide_dtype(dtype)  # float16 cannot hold every scale
        divided = torch._foreach_div([g.to(wide) for g in own.values()], scale.to(wide))
        result |= zip(own, (each.to(dtype) for each in divided), strict=True)
    return result
