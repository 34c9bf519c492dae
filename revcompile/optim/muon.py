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
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from revcompile.errors import InputError
from revcompile.optim.adamw import DelayAwareAdamW, with_decay
from revcompile.optim.late import LateOptimizer, check_settings, is_number, wide

_COEFFICIENTS: Final = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic iteration, for the steepest slope at zero (Jordan et al.)."""

_LEAST_SPECTRAL_NORM: Final = 0.1
"""The least spectral norm assumed of a matrix that limits its update: it may start at zero."""


class DelayAwareMuon(DelayAwareAdamW):
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

    def _updates(
        self, group: Mapping[str, Any], params: list[Tensor], grads: list[Tensor]
    ) -> list[Tensor]:
        use_muon = group["use_muon"]
        for p in params:
            if self.state[p] and ("momentum_buffer" in self.state[p]) != use_muon:
                saved, now = ("AdamW", "Muon") if use_muon else ("Muon", "AdamW")
                raise InputError(
                    f"DelayAwareMuon: a parameter of shape {tuple(p.shape)} has the state of "
                    f"{saved}, but is to be updated by {now}; load a state into the groups that it "
                    "was saved of"
                )
        if not use_muon:
            return super()._updates(group, params, grads)
        updates = with_decay(self._muon_updates(group, params, grads), group, params)
        late = self.delay or self.predicted_delay
        if group["max_drift"] is not None and late:
            _limit(updates, params, group["max_drift"] / late)
        return updates

    def _muon_updates(
        self, group: Mapping[str, Any], params: list[Tensor], grads: list[Tensor]
    ) -> list[Tensor]:
        momentum, count = group["momentum"], group["chunks"]
        for p in params:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p, dtype=wide(p))
        buffers = [self.state[p]["momentum_buffer"] for p in params]
        torch._foreach_lerp_(buffers, grads, 1 - momentum)
        nesterov = torch._foreach_lerp(grads, buffers, momentum)
        if count == 1:
            return orthogonalise(nesterov, group["ns_steps"], group["lr"])
        sides = [int(matrix.shape[1] > matrix.shape[0]) for matrix in nesterov]
        parts = [m.chunk(count, side) for m, side in zip(nesterov, sides, strict=True)]
        flat = orthogonalise(
            [part for own in parts for part in own], group["ns_steps"], group["lr"]
        )
        return [
            torch.cat(flat[count * index : count * (index + 1)], side)
            for index, side in enumerate(sides)
        ]


def orthogonalise(
    matrices: Sequence[Tensor], steps: int = 5, rate: float | Tensor | None = None
) -> list[Tensor]:
    """Approximately the nearest semi-orthogonal matrix of each, by Newton-Schulz iterations.

    Matrices of equal shapes are iterated in one batch. Tensors of more than two dimensions count as
    matrices of their first dimension times all others.

    Args:
        matrices: The tensors.
        steps: Iterations.
        rate: Multiply each by this learning rate, and adjust it to its shape.

    >>> torch.manual_seed(0) and None
    >>> (result,) = orthogonalise([torch.randn(8, 3)], steps=10)
    >>> singular = torch.linalg.svdvals(result)
    >>> bool(singular.min() > 0.6) and bool(singular.max() < 1.3)
    True
    """
    batches: dict[Any, list[int]] = {}
    for index, matrix in enumerate(matrices):
        batches.setdefault((matrix.shape, matrix.device, matrix.dtype), []).append(index)
    results: list[Tensor] = list(matrices)
    for (shape, device, dtype), indices in batches.items():
        rows, columns = shape[0], math.prod(shape[1:])
        # On GPUs in bfloat16: the iteration corrects its own rounding errors.
        low = torch.bfloat16 if device.type == "cuda" else dtype
        batch = torch.empty((len(indices), *shape), dtype=low, device=device)
        torch._foreach_copy_(list(batch.unbind()), [matrices[index] for index in indices])
        iterated = _newton_schulz(batch.view(-1, rows, columns), steps).to(dtype)
        if rate is not None:  # the default `adjust_lr_fn` of `torch.optim.Muon`
            iterated.mul_(rate * math.sqrt(max(1.0, rows / columns)))
        for index, result in zip(indices, iterated.unbind(), strict=True):
            results[index] = result.view(shape)
    return results


def _newton_schulz(x: Tensor, steps: int) -> Tensor:
    """Iterate a batch of matrices, with polynomials of the smaller of their two Gram matrices."""
    a, b, c = _COEFFICIENTS
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    is_tall = x.shape[-2] > x.shape[-1]
    for _ in range(steps):
        gram = x.mT @ x if is_tall else x @ x.mT
        powers = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, *((x, powers) if is_tall else (powers, x)), beta=a)
    return x


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
