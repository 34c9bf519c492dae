"""Muon for late gradients: matrices by orthogonalised momentum, everything else by AdamW.

Muon (Jordan et al., 2024; `torch.optim.Muon`) replaces the momentum of a weight matrix by the
nearest semi-orthogonal matrix, computed by a few Newton-Schulz iterations. All singular values of
an update are then about equal, so no direction of a matrix moves much faster than the others, and
a gradient that is t updates old still points downhill. Adam's elementwise denominators do not have
that property: transformers trained with Adam under delay stay far behind.

What delay is left is compensated by error feedback (see `revcompile.optim.error_feedback`):

    w <- w - u_n - c (u_n - u_{n-1})        u_n: the update, learning rate and decay included
                                            c = feedback * delay

An update of Muon has the same size whatever the gradient, so a matrix that starts small moves far
while a gradient is on its way, and the gradient no longer fits it. Updates of matrices are
therefore limited to `max_drift / delay` of the norm of the matrix. Matrices grow in training, and
the limit with them.
"""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final

import torch
from torch import Tensor, nn

from revcompile.errors import InputError
from revcompile.optim.closures import loss_of
from revcompile.optim.error_feedback import apply_with_feedback
from revcompile.optim.late import LateOptimizer, wide
from revcompile.optim.settings import check_settings, is_number, two_betas

_COEFFICIENTS: Final = (3.4445, -4.7750, 2.0315)
"""Of the quintic iteration: its slope at zero is as steep as it can be (Jordan et al.)."""

_LEAST_SPECTRAL_NORM: Final = 0.1
"""A matrix counts as at least so large when its update is limited: it may start at zero."""

_LEAST_RATIO: Final = 1 / 8
"""Of the sides of a matrix; below it is a factor of low rank."""

_FUSED: Final = frozenset(("qkv", "to_qkv", "qkv_proj", "Wqkv", "c_attn"))
"""Names of layers that compute queries, keys and values as one, usually in this order."""

_BY_HEAD: Final = frozenset(
    ("tiny_vit", "levit", "modeling_codegen", "modeling_gpt_bigcode", "modeling_minimax")
)
"""Modules of timm and transformers whose layers of these names have other orders: head by head."""

NamedParameters = Sequence[tuple[str, nn.Parameter]]


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
            `chunks=3` for matrices that are three in one, along their longer side (`max_drift`
            limits them as one).
        lr: learning rate of matrices.
        adamw_lr: learning rate of everything else.
        momentum: of matrices; the step is Nesterov's.
        betas: of AdamW.
        weight_decay: decoupled, times the learning rate, for matrices and everything else.
        feedback: error feedback for each update of delay; 0 switches it off.
        max_drift: how far a matrix may move during the delay of its gradients, relative to its
            norm, what error feedback adds not counted; None: any distance. Without delay there is
            no limit.
        ns_steps: Newton-Schulz iterations.
        eps: added to AdamW's denominators.
        capturable: keep counters on the device, as CUDA graphs need it.

    >>> weight, bias = torch.nn.Parameter(torch.eye(2)), torch.nn.Parameter(torch.zeros(2))
    >>> optimizer = DelayAwareMuon([weight, bias])
    >>> [(len(group["params"]), group["use_muon"], group["lr"]) for group in optimizer.param_groups]
    [(1, True, 0.01), (1, False, 0.0005)]
    """

    copied = (*LateOptimizer.copied, "_adamw_lr")
    added_settings: ClassVar[Mapping[str, Any]] = {"max_drift": None, "chunks": 1}
    """Settings of groups that were saved before there were these: as they were."""

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
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; without `use_muon` they are split by their dimensions."""
        # All are checked before any is added: a group that is refused changes nothing.
        groups = [_checked(g, self.defaults) for g in _split(param_group, self._adamw_lr)]
        for group in groups:
            super().add_param_group(group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Groups of a state that was saved before there were these settings are as they were."""
        super().__setstate__(state)
        for group in self.param_groups:
            group.update({**self.added_settings, **group})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update of all parameters that have a gradient."""
        loss = loss_of(closure)
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None and p.numel()]
            if not params:
                continue
            for p in params:
                self._initialise(p, group)
            grads = [p.grad.to(wide(p)) for p in params]
            compute = self._muon_updates if group["use_muon"] else self._adamw_updates
            updates = compute(group, params, grads)
            if group["weight_decay"]:
                decayed = torch._foreach_mul(params, group["lr"] * group["weight_decay"])
                torch._foreach_add_(updates, decayed)
            late = self.delay or self.predicted_delay
            if group["use_muon"] and group["max_drift"] is not None and late:
                _limit(updates, params, group["max_drift"] / late)
            apply_with_feedback(params, updates, self.state, group["feedback"] * self.delay)
        return loss

    def _initialise(self, p: Tensor, group: Mapping[str, Any]) -> None:
        assert p.grad is not None
        if p.grad.is_sparse or p.grad.is_complex():
            raise RuntimeError("DelayAwareMuon: expected dense, real gradients")
        state = self.state[p]
        if ("momentum_buffer" if group["use_muon"] else "exp_avg") in state:
            return
        if state:
            saved, now = ("AdamW", "Muon") if group["use_muon"] else ("Muon", "AdamW")
            raise InputError(
                f"DelayAwareMuon: a parameter of shape {tuple(p.shape)} has the state of {saved}, "
                f"but is to be updated by {now}; load a state into the groups that it was saved of"
            )
        if group["use_muon"]:
            state["momentum_buffer"] = torch.zeros_like(p, dtype=wide(p))
        else:
            state["step"] = torch.zeros((), device=p.device if group["capturable"] else "cpu")
            state["exp_avg"] = torch.zeros_like(p, dtype=wide(p))
            state["exp_avg_sq"] = torch.zeros_like(p, dtype=wide(p))

    def _muon_updates(
        self, group: Mapping[str, Any], params: list[Tensor], grads: list[Tensor]
    ) -> list[Tensor]:
        momentum = group["momentum"]
        buffers = [self.state[p]["momentum_buffer"] for p in params]
        torch._foreach_lerp_(buffers, grads, 1 - momentum)
        nesterov = torch._foreach_lerp(grads, buffers, momentum)
        count = group["chunks"]
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

    def _adamw_updates(
        self, group: Mapping[str, Any], params: list[Tensor], grads: list[Tensor]
    ) -> list[Tensor]:
        beta1, beta2 = group["betas"]
        states = [self.state[p] for p in params]
        means = [state["exp_avg"] for state in states]
        squares = [state["exp_avg_sq"] for state in states]
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, 1)
        torch._foreach_lerp_(means, grads, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
        if group["capturable"]:
            # In double precision: 1 - beta ** step loses half its digits otherwise.
            counts = [step.double() for step in steps]
            corrections1: Any = [1 - beta1**count for count in counts]
            corrections2: Any = [(1 - beta2**count).sqrt() for count in counts]
        else:
            numbers = [step.item() for step in steps]
            corrections1 = [1 - beta1**number for number in numbers]
            corrections2 = [math.sqrt(1 - beta2**number) for number in numbers]
        denominators = torch._foreach_sqrt(squares)
        torch._foreach_div_(denominators, corrections2)
        torch._foreach_add_(denominators, group["eps"])
        updates = list(torch._foreach_div(means, denominators))
        torch._foreach_div_(updates, corrections1)
        torch._foreach_mul_(updates, group["lr"])
        return updates


def orthogonalise(
    matrices: Sequence[Tensor], steps: int = 5, rate: float | Tensor | None = None
) -> list[Tensor]:
    """The nearest semi-orthogonal matrix of each, about, by Newton-Schulz iterations.

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
    """Of a batch of matrices; the polynomials are of the smaller of both Gram matrices."""
    a, b, c = _COEFFICIENTS
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    is_tall = x.shape[-2] > x.shape[-1]
    for _ in range(steps):
        gram = x.mT @ x if is_tall else x @ x.mT
        powers = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, *((x, powers) if is_tall else (powers, x)), beta=a)
    return x


def _limit(updates: list[Tensor], matrices: list[Tensor], share: float) -> None:
    """Scale updates down, where they are larger than a share of the norm of their matrix."""
    least = [_LEAST_SPECTRAL_NORM * math.sqrt(min(m.shape[0], m[0].numel())) for m in matrices]
    # In the precision of updates: a norm may be too large for float16.
    same = [matrix.to(update) for matrix, update in zip(matrices, updates, strict=True)]
    scales = list(torch._foreach_norm(same))
    torch._foreach_clamp_min_(scales, least)
    torch._foreach_mul_(scales, share)
    torch._foreach_div_(scales, torch._foreach_norm(updates))  # no update: inf
    torch._foreach_clamp_max_(scales, 1.0)
    torch._foreach_mul_(updates, scales)


def muon_groups(
    model: nn.Module, adamw: Sequence[str] = ()
) -> Callable[[NamedParameters], list[dict[str, Any]]]:
    """`param_groups=` for a trainer: which parameters `DelayAwareMuon` updates by Muon, and how.

    AdamW gets vectors (of any number of dimensions), embeddings (what `no_weight_decay()` of a timm
    model names, and what has a first dimension of 1, included), matrices of which one side is less
    than an eighth of the other (adapters, classifiers of few classes, large vocabularies), and the
    output layer: what the model's `get_classifier()` (timm) or `get_output_embeddings()` (Hugging
    Face) returns; name that of a model of your own in `adamw`. Matrices that compute queries, keys
    and values as one are updated as three: those of layers that are called `qkv`, `to_qkv`,
    `qkv_proj`, `Wqkv` or `c_attn` and have three outputs for each input, and of
    `nn.MultiheadAttention`. Those whose outputs are known to be ordered by head stay one matrix; if
    those of your own layer are, set `chunks` of its group to 1.

    Args:
        model: the model the parameters belong to.
        adamw: paths of further modules or parameters to update by AdamW.

    >>> model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 4, bias=False))
    >>> groups = muon_groups(model)(list(model.named_parameters()))
    >>> [(group["use_muon"], len(group["params"])) for group in groups]
    [(True, 1), (False, 1)]
    """
    if not isinstance(model, nn.Module):
        got = repr(model) if isinstance(model, int | float | str) else type(model).__name__
        raise InputError(
            f"muon_groups: expected the model, got {got}; write param_groups=muon_groups(model)"
        )
    if isinstance(adamw, str):
        raise InputError(f"adamw={adamw!r}: expected a list of paths; write adamw=[{adamw!r}]")
    # By all its names: a stage may know a tied weight by that of the output layer.
    every = list(model.named_parameters(remove_duplicate=False))
    unknown = [path for path in adamw if not any(_is_in(name, path) for name, _ in every)]
    if unknown:
        raise InputError(f"adamw={list(adamw)!r}: the model has no {unknown[0]!r}")
    named_by_model = getattr(model, "no_weight_decay", ())
    paths = (*adamw, *(named_by_model() if callable(named_by_model) else named_by_model))
    excluded = {id(p) for module in _not_matrices(model) for p in module.parameters()}
    excluded |= {id(p) for name, p in every if any(_is_in(name, path) for path in paths)}
    names = {name for name, p in every if id(p) in excluded}
    fused = {name for name, _ in every if _is_fused(model, name)}
    known = {name for name, _ in every}

    def is_matrix(name: str, p: Tensor) -> bool:
        if p.ndim < 2 or not 1 < p.shape[0] < p.numel() or name in names:
            return False
        # A limit by the norm of a low-rank factor would be far too small: adapters start at zero.
        return p.ndim > 2 or _LEAST_RATIO * max(p.shape) <= min(p.shape)

    def is_fused(name: str, p: Tensor) -> bool:
        return name in fused and max(p.shape) == 3 * min(p.shape)

    def groups(named: NamedParameters) -> list[dict[str, Any]]:
        # By name: a compiled model may hold parameters of its own under the original names.
        foreign = [name for name, _ in named if name not in known]
        if foreign:
            raise InputError(
                f"muon_groups: the model has no {foreign[0]!r}; give it the model whose "
                "parameters are trained"
            )
        matrices = [(name, p) for name, p in named if is_matrix(name, p)]
        split: list[dict[str, Any]] = [
            {"use_muon": True, "params": [p for name, p in matrices if not is_fused(name, p)]},
            {
                "use_muon": True,
                "params": [p for name, p in matrices if is_fused(name, p)],
                "chunks": 3,
            },
            {"use_muon": False, "params": [p for name, p in named if not is_matrix(name, p)]},
        ]
        return [group for group in split if group["params"]]

    return groups


def _not_matrices(model: nn.Module) -> list[nn.Module]:
    embeddings = nn.Embedding, nn.EmbeddingBag
    modules: list[nn.Module] = [m for m in model.modules() if isinstance(m, embeddings)]
    for getter in ("get_classifier", "get_output_embeddings"):
        method = getattr(model, getter, None)
        head = method() if callable(method) and not _needs_arguments(method) else None
        heads = head if isinstance(head, tuple | list) else [head]
        modules += [module for module in heads if isinstance(module, nn.Module)]
    return modules


def _needs_arguments(method: Callable[..., Any]) -> bool:
    """Then it is a method of another meaning."""
    try:
        inspect.signature(method).bind()
    except TypeError:
        return True
    return False


def _is_fused(model: nn.Module, name: str) -> bool:
    """Does a parameter compute queries, keys and values, one after the other?"""
    path, _, own_name = name.rpartition(".")
    layer = model.get_submodule(path)
    if isinstance(layer, nn.MultiheadAttention):
        return own_name == "in_proj_weight"
    of_layer, _, layer_name = path.rpartition(".")
    shape = getattr(layer, own_name).shape
    if own_name != "weight" or layer_name not in _FUSED or len(shape) != 2:
        return False
    outputs, inputs = shape if isinstance(layer, nn.Linear) else sorted(shape, reverse=True)
    attention = model.get_submodule(of_layer)
    is_by_head = (
        getattr(attention, "head_first", False)
        or type(attention).__module__.rpartition(".")[2] in _BY_HEAD
    )
    has_fewer_keys = getattr(attention, "num_key_value_groups", 1) != 1
    return outputs == 3 * inputs and not is_by_head and not has_fewer_keys


def _is_in(name: str, path: str) -> bool:
    return name == path or name.startswith(f"{path}.")


def _split(group: Mapping[str, Any], adamw_lr: float) -> list[dict[str, Any]]:
    """A group as groups of which each is updated by Muon or by AdamW."""
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
    """A parameter; optimizers are given (name, parameter), too."""
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


_CHECKED: Final = ("lr", "adamw_lr", "momentum", "weight_decay", "feedback", "eps")


def _check(settings: Mapping[str, Any]) -> None:
    check_settings({name: settings[name] for name in _CHECKED if name in settings})
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
    first, second = two_betas(settings["betas"])
    check_settings({"betas[0]": first, "betas[1]": second})
