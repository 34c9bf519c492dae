"""Models by name: of timm, torchvision or transformers, or returned by a user's function."""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from revcompile.api import ReversibleModule, petrafy, reversify
from revcompile.compiler.capture import make_example
from revcompile.compiler.capture.check import why_it_fails
from revcompile.errors import InputError, nearest
from revcompile.schedule import choose
from revcompile.staged import StagedModel


@dataclass(frozen=True)
class Loaded:
    """A model and its example inputs; `example` is None if the model itself describes them."""

    name: str
    model: nn.Module
    example: Any


def load(
    args: argparse.Namespace, *, microbatch_size: int | None = None, device: str = "meta"
) -> Loaded:
    """Build the model, by default on the meta device, where it takes no memory.

    A model that does not run there, because it reads values of tensors, is built on the CPU.
    """
    with torch.device(device):
        model, example = _build(args.model)
    name = args.model.rpartition(":")[2]
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
    elif isinstance(example, torch.Tensor) and microbatch_size:
        example = torch.cat([example] * microbatch_size)[:microbatch_size]
    if device == "meta" and why_it_fails(model, make_example(model, example), 0):
        return load(args, microbatch_size=microbatch_size, device="cpu")
    return Loaded(name, model, example)


def rewired(loaded: Loaded, args: argparse.Namespace) -> ReversibleModule:
    """The model made reversible, not cut into stages."""
    return reversify(loaded.model, loaded.example, policy=args.policy, check="off")


def staged(loaded: Loaded, args: argparse.Namespace) -> StagedModel:
    """The model cut into stages, for the method given on the command line."""
    net = petrafy(loaded.model, args.stages, loaded.example, policy=args.policy, check="off")
    if args.method is not None:
        net.method = args.method
    net.method = choose(
        net.method, in_flight_per_stage=args.in_flight_per_stage, weights=args.weights
    )
    return net


def _build(name: str) -> tuple[nn.Module, Any]:
    source, _, wanted = name.rpartition(":")
    if source == "hf":
        return _from_transformers(wanted)
    if source not in ("", "timm", "torchvision"):
        return _call_factory(source, wanted)
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
    raise InputError(f"no model {wanted!r}; {hint} (your own: package.module:factory)")


def _from_transformers(kind: str) -> tuple[nn.Module, Any]:
    """A model of transformers from the default configuration of its type: nothing is downloaded."""
    transformers = _import_or_none("transformers")
    if transformers is None:
        raise InputError(f"hf:{kind} needs transformers: pip install transformers")
    if kind not in transformers.CONFIG_MAPPING:
        hint = nearest(kind, transformers.CONFIG_MAPPING, "give one like gpt2, bert, vit")
        raise InputError(f"hf:{kind}: transformers has no model type {kind!r}; {hint}")
    config = transformers.AutoConfig.for_model(kind)
    config.use_cache = False
    model = transformers.AutoModel.from_config(config)
    if model.main_input_name == "pixel_values":
        return model, torch.randn(2, config.num_channels, config.image_size, config.image_size)
    return model, torch.randint(config.vocab_size, (2, 128))


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
