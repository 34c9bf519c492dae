"""Models of transformers from a configuration, with their heads and inputs; nothing is fetched."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from revcompile.errors import InputError, nearest

_TOKENS: Final = 128
_SOUND: Final = 16_000
_SAMPLES: Final = 2
_WITH_A_DECODER: Final = ("SPEECH_SEQ_2_SEQ", "SEQ_TO_SEQ_CAUSAL_LM")
_WITHOUT: Final = (
    *("ZERO_SHOT_IMAGE_CLASSIFICATION", "IMAGE_CLASSIFICATION", "MASKED_LM", "CAUSAL_LM"),
    *("CTC", "AUDIO_CLASSIFICATION", "VIDEO_CLASSIFICATION"),
)
"""Tasks whose head a model gets, the first that it has: encoders may also be used as decoders."""


def build(name: str, sample: tuple[int, ...] | None) -> tuple[nn.Module, dict[str, Any]]:
    """A model with random weights, by type or configuration, and keyword arguments for it.

    `sample`: the shape of a sample, a length or the size of an image.
    """
    try:
        import transformers
    except ModuleNotFoundError:
        raise InputError(f"hf:{name} needs transformers: pip install transformers") from None
    config = _config(transformers, name)
    config.use_cache = False
    kind = _class(transformers, config)
    try:
        model = kind(config) if isinstance(kind, type) else kind.from_config(config)
        return model, _inputs(config, model, sample)
    except InputError:
        raise
    except Exception as error:  # whatever a configuration lacks
        raise InputError(
            f"hf:{name}: {type(error).__name__}: {error}; write a factory that returns (model, "
            "example inputs), and give package.module:factory"
        ) from error


def _config(transformers: Any, name: str) -> Any:
    """The configuration of a model type, a file, a folder, or a name on the Hub that is cached."""
    if name in transformers.CONFIG_MAPPING:
        return transformers.AutoConfig.for_model(name)
    path = Path(name)
    if not path.exists() and "/" not in name:
        hint = nearest(name, transformers.CONFIG_MAPPING, "give one like gpt2, bert, vit")
        raise InputError(f"hf:{name}: transformers has no model type {name!r}; {hint}")
    try:
        return transformers.AutoConfig.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        if path.exists() or name.startswith(("/", ".")):
            why = str(error).partition("\n")[0]
            raise InputError(
                f"hf:{name} is not the configuration of a model ({why}); give a config.json, its "
                "folder, or a model type like hf:gpt2"
            ) from None
        folder = name.rpartition("/")[2]
        raise InputError(
            f"hf:{name} is not on this machine, and nothing is downloaded; fetch its config.json "
            f"with `hf download {name} config.json --local-dir {folder}`, then give hf:./{folder}"
        ) from None


def _class(transformers: Any, config: Any) -> Any:
    """The class that the configuration names, or the auto class of the first task that fits."""
    for name in getattr(config, "architectures", None) or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    for task in _WITH_A_DECODER if config.is_encoder_decoder else _WITHOUT:
        mapping = getattr(transformers, f"MODEL_FOR_{task}_MAPPING", {})
        if type(config) in mapping:
            found = mapping[type(config)]
            return found[0] if isinstance(found, tuple) else found
    return transformers.AutoModel


def _inputs(config: Any, model: Any, sample: tuple[int, ...] | None) -> dict[str, Any]:
    """What a training loop gives the model, without labels; masks hide nothing."""
    takes = signature(model.forward).parameters
    text, image = config.get_text_config(), getattr(config, "vision_config", config)
    length = min(_TOKENS, getattr(text, "max_position_embeddings", None) or _TOKENS)
    if sample is not None and len(sample) == 1:
        (length,) = sample

    def tokens() -> Tensor:
        return torch.randint(text.vocab_size, (_SAMPLES, length))

    def pixels() -> Tensor:
        if sample is not None and len(sample) > 1:
            return torch.randn(_SAMPLES, *sample)
        side = image.image_size
        sides = tuple(side) if isinstance(side, (list, tuple)) else (side, side)
        return torch.randn(_SAMPLES, getattr(image, "num_channels", 3), *sides)

    def spectrogram() -> Tensor:
        return torch.randn(_SAMPLES, config.num_mel_bins, 2 * config.max_source_positions)

    def sound() -> Tensor:
        return torch.randn(_SAMPLES, *(sample or (_SOUND,)))

    makers: dict[str, Callable[[], Tensor]] = {
        "input_ids": tokens,
        "pixel_values": pixels,
        "input_features": spectrogram,
        "input_values": sound,
    }
    main = model.main_input_name
    if main not in makers:
        raise InputError(f"its input {main} is unknown")
    inputs = {main: makers[main]()}
    if main == "input_ids" and hasattr(config, "vision_config") and "pixel_values" in takes:
        inputs["pixel_values"] = pixels()
    if "input_ids" in inputs and "attention_mask" in takes:
        inputs["attention_mask"] = torch.ones(_SAMPLES, length, dtype=torch.long)
    if config.is_encoder_decoder and "decoder_input_ids" in takes:
        inputs["decoder_input_ids"] = tokens()
    return inputs
