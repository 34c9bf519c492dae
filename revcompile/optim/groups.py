"""Parameter groups for `DelayAwareMuon`: for Muon or AdamW, and which matrices are fused."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Final

from torch import Tensor, nn

from revcompile.errors import InputError

_LEAST_RATIO: Final = 1 / 8
"""Least ratio of a matrix's sides for Muon; below it, it counts as a low-rank factor."""

_FUSED: Final = frozenset(("qkv", "to_qkv", "qkv_proj", "Wqkv", "c_attn"))
"""Names of layers that compute queries, keys and values as one, usually in this order."""

NamedParameters = Sequence[tuple[str, nn.Parameter]]


def muon_groups(
    model: nn.Module, adamw: Sequence[str] = ()
) -> Callable[[NamedParameters], list[dict[str, Any]]]:
    """`param_groups=` for a trainer: which parameters `DelayAwareMuon` updates by Muon, and how.

    AdamW updates:

    - vectors
    - embeddings, parameters with a first dimension of 1, and what `no_weight_decay()` of a timm
      model names
    - matrices with one side less than an eighth of the other: adapters, classifiers of few
      classes, large vocabularies
    - the output layer: what `get_classifier()` (timm) or `get_output_embeddings()` (Hugging Face)
      returns; for your own model, name it in `adamw`

    Fused matrices of queries, keys and values are updated as three: in `nn.MultiheadAttention`, and
    in layers called `qkv`, `to_qkv`, `qkv_proj`, `Wqkv` or `c_attn` with three outputs per input.
    Where `head_first` of the attention (timm) is set, outputs are ordered by head, and the matrix
    stays one. For other layers with such an order, set `chunks` of the group to 1.

    Args:
        model: the model the parameters belong to.
        adamw: paths of further modules or parameters to update by AdamW.

    >>> model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4, bias=False))
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
    # With all names: a stage may know a tied weight by its name in the output layer.
    every = list(model.named_parameters(remove_duplicate=False))
    unknown = [path for path in adamw if not any(_is_in(name, path) for name, _ in every)]
    if unknown:
        raise InputError(f"adamw={list(adamw)!r}: the model has no {unknown[0]!r}")
    named_by_model = getattr(model, "no_weight_decay", ())
    paths = (*adamw, *(named_by_model() if callable(named_by_model) else named_by_model))
    excluded = {id(p) for module in _not_matrices(model) for p in module.parameters()}
    excluded |= {id(p) for name, p in every if any(_is_in(name, path) for path in paths)}
    names = {name for name, p in every if id(p) in excluded}
    named_fused = {name for name, _ in every if _is_fused(model, name)}
    known = {name for name, _ in every}

    def is_matrix(name: str, p: Tensor) -> bool:
        if p.ndim < 2 or not 1 < p.shape[0] < p.numel() or name in names:
            return False
        # The norm of a low-rank factor would limit its updates too much: adapters start at zero.
        return p.ndim > 2 or _LEAST_RATIO * max(p.shape) <= min(p.shape)

    def is_fused(name: str, p: Tensor) -> bool:
        return name in named_fused and max(p.shape) == 3 * min(p.shape)

    def groups(named: NamedParameters) -> list[dict[str, Any]]:
        # Compared by name: a compiled model may hold its own parameters under these names.
        foreign = [name for name, _ in named if name not in known]
        if foreign:
            raise InputError(
                f"muon_groups: the model has no {foreign[0]!r}; give it the model whose "
                "parameters are trained"
            )
        matrices = [(name, p) for name, p in named if is_matrix(name, p)]
        whole = [p for name, p in matrices if not is_fused(name, p)]
        fused = [p for name, p in matrices if is_fused(name, p)]
        others = [p for name, p in named if not is_matrix(name, p)]
        split: list[dict[str, Any]] = [
            {"use_muon": True, "params": whole},
            {"use_muon": True, "params": fused, "chunks": 3},
            {"use_muon": False, "params": others},
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
    """Whether a method needs arguments: then it is not the known method of that name."""
    try:
        inspect.signature(method).bind()
    except TypeError:
        return True
    return False


def _is_fused(model: nn.Module, name: str) -> bool:
    """Whether a parameter computes queries, keys and values, one after the other."""
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
    is_by_head = getattr(attention, "head_first", False)
    has_fewer_keys = getattr(attention, "num_key_value_groups", 1) != 1
    return outputs == 3 * inputs and not is_by_head and not has_fewer_keys


def _is_in(name: str, path: str) -> bool:
    return name == path or name.startswith(f"{path}.")
