"""Muon for late gradients: matrices by orthogonalised momentum, everything else by AdamW.

Muon (Jordan et al., 2024; `torch.optim.Muon`) replaces the momentum of a weight matrix by the
nearest semi-orthogonal matrix, computed by a few Newton-Schulz iterations. All singular values of
an update are then about equal, so no direction of a matrix moves much faster than the others, and
a gradient that is t updates old still points downhill. Adam's elementwise denominators do not have
that property: transformers trained with Adam under delay stay far behind.

Error feedback compensates for the delay (see `revcompile.optim.error_feedback`):

    w <- w - u_n - c (u_n - u_{n-1})        u_n: the update, learning rate and decay included
                                            c = feedback * delay

An update of Muon has the same size whatever the gradient, so a matrix that starts small moves far
while a gradient is on its way, and the gradient no longer fits it. Updates of matrices are
therefore limited to `max_drift / delay` of the norm of the matrix. Matrices grow in training, and
the limit with them.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import AdamW, Muon, Optimizer

from revcompile.errors import InputError
from revcompile.optim.error_feedback import apply_with_feedback
from revcompile.optim.late import LateOptimizer, check_settings, is_number, wide_gradient

_LEAST_SPECTRAL_NORM: Final = 0.1
"""The least spectral norm assumed of a matrix that limits its update: it may start at zero."""


class DelayAwareMuon(LateOptimizer):
    """Muon for weight matrices, AdamW for the rest, and error feedback for the delay of a stage.

    A trainer sets `delay` (in updates) for each stage's optimizer. With `delay` 0 matrices are
    updated as by `torch.optim.Muon` and the rest as by `torch.optim.AdamW`.

    Parameters of two or more dimensions count as matrices (convolutions: output channels times
    all the rest). Embeddings and the output layer train better with AdamW, and the matrices of
    queries, keys and values one by one; an optimizer sees only tensors, so use
    `param_groups=muon_groups(model)`, or give groups with `use_muon` and `chunks` set.

    Args:
        params: parameters, or groups of them; a group may set `use_muon=True` or `False`, and
            `chunks=3` for three matrices fused along their longer side (`max_drift` limits them as
            one).
        lr: learning rate of matrices.
        adamw_lr: learning rate of everything else.
        momentum: of matrices; the step is Nesterov's.
        betas: of AdamW.
        weight_decay: decoupled, times the learning rate, for matrices and everything else.
        feedback: error feedback for each update of delay; 0 switches it off.
        max_drift: how far a matrix may move during the delay of its gradients, relative to its
            norm and without error feedback; None: no limit. There is none without delay either.
        ns_steps: Newton-Schulz iterations.
        eps: added to AdamW's denominators.
        capturable: keep counters on the device, as CUDA graphs need.

    >>> weight, bias = torch.nn.Parameter(torch.eye(2)), torch.nn.Parameter(torch.zeros(2))
    >>> optimizer = DelayAwareMuon([weight, bias])
    >>> [(len(group["params"]), group["use_muon"], group["lr"]) for group in optimizer.param_groups]
    [(1, True, 0.01), (1, False, 0.0005)]
    """

    copied = (*LateOptimizer.copied, "_adamw_lr")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.01,
        adamw_lr: float = 5e-4,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        feedback: float = 1.0,
        max_drift: float | None = 0.0075,
        ns_steps: int = 5,
        eps: float = 1e-8,
        capturable: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "betas": betas,
            "weight_decay": weight_decay,
            "feedback": feedback,
            "max_drift": max_drift,
            "chunks": 1,
            "ns_steps": ns_steps,
            "eps": eps,
            "capturable": capturable,
        }
        self._adamw_lr = adamw_lr
        _check(defaults | {"adamw_lr": adamw_lr})
        LateOptimizer.__init__(self, params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; without `use_muon` they are split by their dimensions."""
        # All are checked before any is added: a group that is refused changes nothing.
        groups = [_checked(g, self.defaults) for g in _split(param_group, self._adamw_lr)]
        for group in groups:
            super().add_param_group(group)

    def _update(self, group: dict[str, Any]) -> None:
        params = [p for p in group["params"] if p.grad is not None and p.numel()]
        if not params:
            return
        self._check_state(group, params)
        # What torch's optimizers subtract from zeros at a learning rate of 1.
        grads = [wide_gradient(p) for p in params]
        updates = (self._muon if group["use_muon"] else self._adamw)(group, params, grads)
        torch._foreach_mul_(updates, group["lr"])
        if group["weight_decay"]:
            decayed = torch._foreach_mul(params, group["lr"] * group["weight_decay"])
            torch._foreach_add_(updates, decayed)
        late = self.delay or self.predicted_delay
        if group["use_muon"] and group["max_drift"] is not None and late:
            _limit(updates, params, group["max_drift"] / late)
        apply_with_feedback(params, updates, self.state, group["feedback"] * self.delay)

    def _check_state(self, group: Mapping[str, Any], params: list[Tensor]) -> None:
        use_muon = group["use_muon"]
        for p in params:
            if self.state[p] and ("momentum_buffer" in self.state[p]) != use_muon:
                saved, now = ("AdamW", "Muon") if use_muon else ("Muon", "AdamW")
                raise InputError(
                    f"DelayAwareMuon: a parameter of shape {tuple(p.shape)} has the state of "
                    f"{saved}, but is to be updated by {now}; load a state into the groups that it "
                    "was saved of"
                )

    def _adamw(
        self, group: Mapping[str, Any], params: list[Tensor], grads: list[Tensor]
    ) -> list[Tensor]:
        zeros = [torch.zeros_like(grad) for grad in grads]
        settings = {name: group[name] for name in ("betas", "eps", "capturable")}
        adamw = AdamW(zeros, 1.0, weight_decay=0.0, **settings)
        # Capturable steps are taken outside of captures, too, with the same results.
        adamw._warned_capturable_if_run_uncaptured = True
        return _updates(adamw, zeros, grads, [self.state[p] for p in params], zeros)

    def _muon(
        self, group: Mapping[str, Any], params: list[Tensor], grads: list[Tensor]
    ) -> list[Tensor]:
        zeros = [torch.zeros(grad.shape, dtype=grad.dtype, device=grad.device) for grad in grads]
        for p, zero in zip(params, zeros, strict=True):
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = zero.clone()
        buffers = [self.state[p]["momentum_buffer"] for p in params]

        def parts(tensors: list[Tensor]) -> list[Tensor]:
            """Matrices: those of convolutions, and those that are fused, one by one."""
            flat = [tensor.view(len(tensor), -1) for tensor in tensors]
            count = group["chunks"]
            return [m for t in flat for m in t.chunk(count, int(t.shape[1] > t.shape[0]))]

        matrices, settings = parts(zeros), {name: group[name] for name in ("momentum", "ns_steps")}
        muon = Muon(matrices, 1.0, weight_decay=0.0, **settings)
        states = [{"momentum_buffer": buffer} for buffer in parts(buffers)]
        return _updates(muon, matrices, parts([g.contiguous() for g in grads]), states, zeros)


def _updates(
    optimizer: Optimizer,
    params: list[Tensor],
    grads: list[Tensor],
    states: list[dict[str, Any]],
    whole: list[Tensor],
) -> list[Tensor]:
    """What an optimizer subtracts from its parameters, which are views of zeros."""
    for p, grad, state in zip(params, grads, states, strict=True):
        p.grad, optimizer.state[p] = grad, state
    optimizer.step()
    torch._foreach_neg_(whole)
    return whole


def _limit(updates: list[Tensor], matrices: list[Tensor], share: float) -> None:
    """Scale down updates whose norm is larger than a share of the norm of their matrix."""
    least = [_LEAST_SPECTRAL_NORM * math.sqrt(min(m.shape[0], m[0].numel())) for m in matrices]
    # In the precision of updates: a norm may be too large for float16.
    same = [matrix.to(update) for matrix, update in zip(matrices, updates, strict=True)]
    scales = list(torch._foreach_norm(same))
    torch._foreach_clamp_min_(scales, least)
    torch._foreach_mul_(scales, share)
    torch._foreach_div_(scales, torch._foreach_norm(updates))  # inf for an update of zeros
    torch._foreach_clamp_max_(scales, 1.0)
    torch._foreach_mul_(updates, scales)


def _split(group: Mapping[str, Any], adamw_lr: float) -> list[dict[str, Any]]:
    """Split a group into one that Muon updates and one that AdamW updates; none is empty."""
    given = group["params"]
    params: list[Any] = [given] if isinstance(given, Tensor) else list(given)
    if "use_muon" in group:
        kinds = [(bool(group["use_muon"]), params)]
    else:
        vectors = [p for p in params if _tensor(p).ndim < 2]
        kinds = [(True, [p for p in params if _tensor(p).ndim >= 2]), (False, vectors)]
    split = []
    for use_muon, members in kinds:
        if members:
            rate = {} if use_muon or "lr" in group else {"lr": adamw_lr}
            split.append({**group, **rate, "params": members, "use_muon": use_muon})
    return split


def _tensor(p: Any) -> Tensor:
    """The tensor of a parameter, which may be given as (name, parameter)."""
    tensor = p[1] if isinstance(p, tuple) else p
    if not isinstance(tensor, Tensor):
        raise TypeError(f"DelayAwareMuon: expected parameters, got {type(tensor).__name__}")
    return tensor


def _checked(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """A group with plain numbers as settings; refused if they do not fit its parameters."""
    settings = {**defaults, **group}
    _check(settings)
    shapes = [_tensor(p).shape for p in group["params"] if group["use_muon"]]
    if any(len(shape) < 2 for shape in shapes):
        raise InputError("use_muon=True: expected parameters of two or more dimensions")
    count, drift = int(settings["chunks"]), settings["max_drift"]
    odd = [shape for shape in shapes if len(shape) != 2 or max(shape) % count]
    if count > 1 and odd:
        raise InputError(
            f"chunks={count}: expected matrices whose longer side can be divided by {count}, got "
            f"shape {tuple(odd[0])}"
        )
    return {**group, "chunks": count, "max_drift": None if drift is None else float(drift)}


def _check(settings: Mapping[str, Any]) -> None:
    check_settings(settings)
    drift = settings["max_drift"]
    if drift is not None and not (is_number(drift) and 0 < drift < math.inf):
        raise InputError(
            f"max_drift={drift!r}: expected a number above 0, or None for matrices that may move "
            "by any distance"
        )
    for name in ("ns_steps", "chunks"):
        value = settings[name]
        is_whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
        if not is_whole or value < 1:
            raise InputError(f"{name}={value!r}: expected a whole number, at least 1")
