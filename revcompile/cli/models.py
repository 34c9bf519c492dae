"""Models by name: of timm, torchvision or transformers, or returned by a user's function."""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.utils import _pytree as pytree

from revcompile.api import ReversibleModule, petrafy, reversify
from revcompile.cli import transformers_models
from revcompile.compiler.capture import make_example
from revcompile.compiler.capture.check import why_it_fails
from revcompile.compiler.capture.fake_values import FakeMode, fake_copy
from revcompile.errors import InputError, nearest
from revcompile.schedule import choose
from revcompile.staged import StagedModel
from revcompile.units import format_size


@dataclass(frozen=True)
class Loaded:
    """A model and its example inputs; `example` is None if the model itself describes them."""

    name: str
    model: nn.Module
    example: Any
    kwargs: dict[str, Any]


def load(
    args: argparse.Namespace, *, microbatch_size: int | None = None, device: str = "meta"
) -> Loaded:
    """Build the model, by default on the meta device, where it takes no memory.

    A model that does not run there, because it reads values of tensors, is built on the CPU.
    """
    if device == "cpu" and not _is_factory(args.model):
        with torch.device("meta"):
            _refuse_too_large(args.model, _build(args.model, args.input)[0])
    with torch.device(device):
        model, example = _build(args.model, args.input)
    dims = args.input or _sample(model)
    if example is None and dims is None:
        raise InputError(
            f"{args.model} does not say what it takes; give --input C,H,W (a sample's shape), or "
            "a factory that returns (model, example inputs)"
        )
    is_described = _is_timm(model) and not args.input and not microbatch_size
    if example is None and dims is not None and not is_described:
        on = next((p.device for p in model.parameters()), torch.device(device))
        example = torch.randn(microbatch_size or 2, *dims, device=on)
    elif example is not None and microbatch_size:
        example = _with_samples(example, microbatch_size)
    kwargs = dict(example) if isinstance(example, Mapping) else {}
    loaded = Loaded(_title(args.model), model, None if kwargs else example, kwargs)
    if device == "meta" and not _runs_without_values(loaded):
        _refuse_too_large(args.model, model)
        return load(args, microbatch_size=microbatch_size, device="cpu")
    return loaded


def rewired(loaded: Loaded, args: argparse.Namespace) -> ReversibleModule:
    """The model made reversible, not cut into stages."""
    return reversify(loaded.model, loaded.example, loaded.kwargs, policy=args.policy, check="off")


def staged(loaded: Loaded, args: argparse.Namespace) -> StagedModel:
    """The model cut into stages, for the method given on the command line."""
    count, example = args.stages or 1, (loaded.example, loaded.kwargs)
    options = {"policy": args.policy, "microbatch_size": args.microbatch_size}
    net = petrafy(loaded.model, count, *example, check="off", **options)
    if args.method is not None:
        net.method = args.method
    net.method = choose(
        net.method, in_flight_per_stage=args.in_flight_per_stage, weights=args.weights
    )
    return net


def _with_samples(example: Any, size: int) -> Any:
    """An example with `size` samples in each tensor that has as many as the first one."""
    tensors = [leaf for leaf in pytree.tree_leaves(example) if isinstance(leaf, torch.Tensor)]
    given = next((len(tensor) for tensor in tensors if tensor.dim()), 0)

    def resized(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.dim() or len(leaf) != given:
            return leaf
        return leaf[torch.arange(size, device=leaf.device) % given]

    return pytree.tree_map(resized, example) if given else example


def _runs_without_values(loaded: Loaded) -> bool:
    """Whether a model on the meta device can be captured there.

    Some models, such as those of transformers, run on fake tensors although not on meta tensors.
    """
    example = make_example(loaded.model, loaded.example, loaded.kwargs)
    if why_it_fails(loaded.model, example, 0) is None:
        return True
    mode = FakeMode()
    fake = fake_copy(loaded.model, mode, torch.device("cpu"))
    with mode:
        tensors = [torch.empty_like(tensor, device="cpu") for tensor in example.tensors(0)]
        args, kwargs = example.arguments(tensors)
        try:
            fake(*args, **kwargs)
        except Exception:
            return False
    return True


def _refuse_too_large(name: str, model: nn.Module) -> None:
    """Refuse to build a model on the CPU if its weights are larger than the memory."""
    needed = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > total:
        raise InputError(
            f"{name} has to be built on the CPU, where its weights take {format_size(needed)} of "
            f"{format_size(total)}; give a smaller configuration (hf:FOLDER with a config.json, or "
            "package.module:factory)"
        )


def _title(name: str) -> str:
    return name.rstrip("/").removesuffix("/config.json").rpartition(":")[2].rpartition("/")[2]


def _is_factory(name: str) -> bool:
    source, found, _ = name.partition(":")
    return bool(found) and source not in _LIBRARIES


_LIBRARIES: Final = ("hf", "timm", "torchvision")


def _build(name: str, sample: tuple[int, ...] | None = None) -> tuple[nn.Module, Any]:
    if _is_factory(name):
        return _call_factory(*name.rsplit(":", 1))
    source, found, wanted = name.partition(":")
    if source == "hf":
        return transformers_models.build(wanted, sample)
    if not found:
        source, wanted = "", name
    known: list[str] = []
    if source != "torchvision" and (timm := _import_or_none("timm")):
        if timm.is_model(wanted):
            return timm.create_model(wanted), None
        known += timm.list_models()
    if source != "timm" and (vision := _import_or_none("torchvision")):
        if wanted in vision.models.list_models():
            builder = vision.models.get_model_builder(wanted)
            has_backbone = "weights_backbone" in inspect.signature(builder).parameters
            no_download = {"weights_backbone": None} if has_backbone else {}
            return builder(weights=None, **no_download), None
        known += vision.models.list_models()
    hint = nearest(wanted, known, "give a name of timm or torchvision (those that are installed)")
    if "/" in wanted:
        hint = f"models of transformers begin with hf: (hf:{wanted})"
    raise InputError(f"no model {wanted!r}; {hint} (your own: package.module:factory)")


def _import_or_none(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return None


def _call_factory(module: str, function: str) -> tuple[nn.Module, Any]:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        factory: Callable[[], Any] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise InputError(
            f"{module}:{function} cannot be imported ({error}); expected package.module:factory, "
            "seen from the folder the command is run in"
        ) from error
    try:
        result = factory()
    except Exception as error:  # whatever the user's own code raises
        places = traceback.extract_tb(error.__traceback__)[1:]  # the first is this call
        where = f" in {places[-1].filename}:{places[-1].lineno}" if places else ""
        raise InputError(
            f"{module}:{function}() failed with {type(error).__name__}: {error}{where}; "
            "expected a function without arguments that returns a model"
        ) from error
    model, example = result if isinstance(result, tuple) else (result, None)
    if not isinstance(model, nn.Module):
        raise InputError(
            f"{module}:{function}() returned {type(model).__name__}; expected a torch.nn.Module "
            "or (module, example inputs)"
        )
    return model, example


def _is_timm(model: nn.Module) -> bool:
    return isinstance(getattr(model, "default_cfg", None), dict)


def _sample(model: nn.Module) -> tuple[int, ...] | None:
    """The shape of a sample, if the model or its library defines it."""
    if _is_timm(model):
        return tuple(model.default_cfg["input_size"])  # type: ignore[index]
    vision = type(model).__module__.startswith("torchvision.")
    return (3, 224, 224) if vision else None
