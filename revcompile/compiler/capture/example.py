"""Example arguments: bound, flattened, and at two batch sizes."""

from __future__ import annotations

import inspect
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any, Final

import torch
from torch import fx, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from revcompile.arguments import check_examples
from revcompile.compiler.capture.memory import tensors_in
from revcompile.errors import InputError
from revcompile.ir.signature import NESTED, Signature


@dataclass(frozen=True)
class Example:
    """Example arguments, flattened, at two batch sizes."""

    signature: Signature
    """The calling convention, except the structure of results."""
    leaves: tuple[Any, ...]
    grown: tuple[Any, ...]
    batch: tuple[int, int]
    single: tuple[Any, ...] | None = None
    """The leaves as given, if they are a batch of one: `leaves` has two samples then."""

    def tensors(self, which: int) -> list[torch.Tensor]:
        """The tensors among the arguments at the first or the second batch size."""
        leaves = (self.leaves, self.grown)[which]
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def arguments(self, tensors: Iterable[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """`(args, kwargs)` with these in place of the tensors, in order."""
        given = iter(tensors)
        leaves = [next(given) if isinstance(a, torch.Tensor) else a for a in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.signature.in_spec)
        return args, kwargs

    def __str__(self) -> str:
        shapes = (
            f"{label}: {str(t.dtype).removeprefix('torch.')}{list(t.shape)}"
            for label, t in zip(self.signature.labels, self.tensors(0), strict=True)
        )
        return ", ".join(shapes)


def make_example(
    model: nn.Module,
    example_inputs: Any,
    example_kwargs: Mapping[str, Any] | None = None,
    fixed_batch: bool = False,
) -> Example:
    """Bind and flatten example arguments, and derive a second batch size unless it is fixed."""
    _refuse_wrapped(model)
    check_examples(model, example_inputs, example_kwargs)
    args = _as_args(model, example_inputs, example_kwargs)
    signature = _without_cache(model, inspect.signature(model.forward))
    try:
        bound = signature.bind(*args, **(example_kwargs or {}))
    except TypeError as error:
        raise InputError(
            f"capture: the example inputs do not fit {type(model).__name__}.forward{signature}: "
            f"{error}"
        ) from None
    if _caches(model) and _CACHE in signature.parameters:
        bound.arguments.setdefault(_CACHE, False)
    with_paths, in_spec = pytree.tree_flatten_with_path((bound.args, bound.kwargs))
    labels = [_label(signature, path) for path, _ in with_paths]
    leaves = [leaf for _, leaf in with_paths]
    # Tensors made in inference mode have no version counters, which show what a forward writes to.
    leaves = [a.clone() if isinstance(a, torch.Tensor) and a.is_inference() else a for a in leaves]
    _refuse_unknown_containers(leaves, labels)
    where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    if not where:
        raise InputError("capture: no tensor among the example inputs, so there is no graph")
    for label in (labels[i] for i in where if leaves[i].is_nested):
        raise InputError(f"capture: {label} is {NESTED}")
    first = next((leaves[i] for i in where if leaves[i].dim()), None)
    if first is not None and not first.shape[0]:
        raise InputError("capture: the example inputs have no samples; pass a batch of two or more")
    size = 1 if first is None else first.shape[0]
    batched = [i for i in where if leaves[i].dim() and leaves[i].shape[0] == size]
    single = None
    if fixed_batch:
        batched = []
    elif size == 1:
        single, leaves, size = tuple(leaves), _resized(leaves, batched, 0, 2), 2
    tensor_labels = tuple(labels[i] for i in where)
    return Example(
        Signature(
            forward=signature,
            given=tuple(bound.arguments),
            in_spec=in_spec,
            fixed=tuple((i, leaf) for i, leaf in enumerate(leaves) if i not in where),
            placeholders=_names(tensor_labels),
            labels=tensor_labels,
        ),
        leaves=tuple(leaves),
        grown=tuple(_resized(leaves, batched, 0, size + 1)),
        batch=(size, size if fixed_batch else size + 1),
        single=single,
    )


_CACHE: Final = "use_cache"
"""The argument that tells transformer models to return keys and values."""


def _caches(model: nn.Module) -> bool:
    """Whether it may cache: trainers switch the setting in its configuration on and off."""
    return isinstance(getattr(getattr(model, "config", None), _CACHE, None), bool)


def _without_cache(model: nn.Module, signature: inspect.Signature) -> inspect.Signature:
    """The signature of the forward, with caching of keys and values off by default.

    A cache is for generation, and a graph cannot return one.
    """
    if not _caches(model):
        return signature
    parameters = dict(signature.parameters)
    rest = next((n for n, p in parameters.items() if p.kind is p.VAR_KEYWORD), None)
    if _CACHE in parameters:
        parameters[_CACHE] = parameters[_CACHE].replace(default=False)
    elif rest is not None:
        off = inspect.Parameter(_CACHE, inspect.Parameter.KEYWORD_ONLY, default=False)
        parameters |= {_CACHE: off, rest: parameters.pop(rest)}
    return signature.replace(parameters=list(parameters.values()))


def with_other_batch_dims(example: Example) -> Iterator[Example]:
    """The example with other batch dimensions; at last, with a fixed batch size."""
    leaves = example.leaves
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    for dim in (0, 1):
        wide = [i for i in tensors if leaves[i].dim() > dim]
        for chosen in (wide, wide[:1]):
            size = leaves[chosen[0]].shape[dim] if chosen else 0
            chosen = [i for i in chosen if leaves[i].shape[dim] == size]
            grown = tuple(_resized(leaves, chosen, dim, size + 1))
            yield replace(example, grown=grown, batch=(size, size + 1))
    yield with_fixed_batch(example)


def with_fixed_batch(example: Example) -> Example:
    return replace(example, grown=example.leaves, batch=(example.batch[0], example.batch[0]))


def _resized(leaves: Sequence[Any], chosen: Sequence[int], dim: int, size: int) -> list[Any]:
    """The leaves, the chosen ones with `size` samples along a dimension."""
    resized = list(leaves)
    for i in chosen:
        samples = torch.arange(size, device=leaves[i].device) % leaves[i].shape[dim]
        resized[i] = leaves[i].index_select(dim, samples)
    return resized


def _refuse_wrapped(model: nn.Module) -> None:
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise InputError(
            f"capture: the model is wrapped for data parallelism ({type(model).__name__}); pass "
            "the plain model, model.module, and wrap the result"
        )
    paths = {module: path or "the model" for path, module in model.named_modules()}
    for module, path in paths.items():
        if isinstance(module, torch.jit.ScriptModule):
            raise InputError(
                f"capture: {path} is scripted, and copies of scripted modules do not train; pass "
                "the Python module it was made from"
            )
        if vars(module).get("_compiled_call_impl") is not None:
            raise InputError(
                f"{path or 'the model'} has been compiled by .compile(), which a reversible module "
                "would not follow; make it from the plain model, and call .compile() of the result"
            )
        if isinstance(module._modules.get("_orig_mod"), nn.Module):  # torch.compile
            raise InputError(
                f"capture: {path} is compiled ({type(module).__name__}); pass the plain module, "
                "its _orig_mod, and compile the result"
            )
        for name, value in vars(module).items():
            held = None if name == "_compiled_call_impl" else _held_module(value, paths)
            if held is not None:
                raise InputError(
                    f"capture: {path} has a function as its attribute {name}, which holds "
                    f"{paths[held]} (as a lambda that reads self does, or torch.compile of a "
                    "method). A copy of the model would run that module, not its own copy of it: "
                    f"make {name} a method of the class, and compile the result"
                )
    lazy = next((name for name, p in model.named_parameters() if is_lazy(p)), None)
    if lazy is not None:
        raise InputError(f"capture: {lazy} has no shape yet; run the model once, then capture it")


def _held_module(value: Any, modules: Container[nn.Module]) -> nn.Module | None:
    """One of the modules that a function refers to; deep copies of the function refer to it too."""
    work, seen = [(value, False)], set[int]()
    while work:
        value, is_shared = work.pop()
        if isinstance(value, nn.Module) and is_shared and value in modules:
            return value
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, FunctionType):
            cells = [cell for cell in value.__closure__ or () if cell != CellType()]  # not empty
            work += [(cell.cell_contents, True) for cell in cells]
            work += [(default, True) for default in value.__defaults__ or ()]
        elif isinstance(value, MethodType):
            work += [(value.__self__, is_shared), (value.__func__, is_shared)]
        elif isinstance(value, partial):
            work += [(part, is_shared) for part in (value.func, *value.args)]
    return None


def _refuse_unknown_containers(leaves: Sequence[Any], labels: Sequence[str]) -> None:
    for leaf, label in zip(leaves, labels, strict=True):
        if not isinstance(leaf, torch.Tensor) and tensors_in(leaf):
            kind = type(leaf).__name__
            raise InputError(
                f"capture: {label} is a {kind}, which pytree does not know, and holds tensors; "
                f"register it first: torch.export.register_dataclass({kind})"
            )


def _as_args(
    model: nn.Module, example_inputs: Any, example_kwargs: Mapping[str, Any] | None
) -> tuple[Any, ...]:
    if isinstance(example_inputs, (tuple, list)):
        return tuple(example_inputs)
    if example_inputs is not None:
        return (example_inputs,)
    if example_kwargs:
        return ()
    config = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None)
    size = config.get("input_size") if isinstance(config, Mapping) else None
    if size is None:
        raise InputError(
            f"capture: {type(model).__name__} says nothing about its input (no timm default_cfg);"
            " pass example_inputs=(tensor, ...) with a batch of 2 or more"
        )
    size = _size_set_by_user(model, tuple(size))
    channels = getattr(model, "in_chans", None)
    if isinstance(channels, int):
        size = (channels, *size[1:])
    parameter = next(model.parameters(), torch.empty(0))
    image = torch.randn(2, *size, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    return (image.to(device=parameter.device, dtype=parameter.dtype),)


def _size_set_by_user(model: nn.Module, size: tuple[int, ...]) -> tuple[int, ...]:
    """timm keeps an `img_size=` given by the user in the patch embedding, not in default_cfg."""
    chosen = getattr(getattr(model, "patch_embed", None), "img_size", None)
    if isinstance(chosen, (tuple, list)) and len(chosen) == 2:
        return (size[0], *map(int, chosen))
    return size


def _label(signature: inspect.Signature, path: tuple[Any, ...]) -> str:
    """`x`, `batch['mask']`, `rest[1]`: how a user would write the argument."""
    side, argument, *rest = path
    if side.idx == 1:
        return "".join(map(str, (argument.key, *rest)))
    for position, (name, parameter) in enumerate(signature.parameters.items()):
        if parameter.kind is parameter.VAR_POSITIONAL:
            return "".join(map(str, (name, f"[{argument.idx - position}]", *rest)))
        if position == argument.idx:
            break
    return "".join(map(str, (name, *rest)))


def _names(labels: tuple[str, ...]) -> tuple[str, ...]:
    """A name for each placeholder that a graph will keep (`input` would become `input_1`)."""
    scratch = fx.Graph()
    scratch.placeholder("self")  # the model, in generated code
    words = ("".join(c if c.isalnum() else "_" for c in label) for label in labels)
    return tuple(scratch.placeholder(word.strip("_") or "x").name for word in words)
