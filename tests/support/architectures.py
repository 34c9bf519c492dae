"""Tiny, random Hugging Face models with the arguments a training loop would give them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

__all__ = ["ARCHITECTURES", "LAYERS", "Architecture"]

LAYERS: Final = 4
DEPTHS: Final = frozenset(
    (
        "num_hidden_layers",
        "n_layer",
        "n_layers",
        "num_layers",
        "encoder_layers",
        "decoder_layers",
    )
)
"""What configurations call their number of layers."""
VOCABULARY: Final = 50
SMALL: Final[dict[str, Any]] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
}
TEXT: Final[dict[str, Any]] = SMALL | {"vocab_size": VOCABULARY, "max_position_embeddings": 64}
DECODER: Final[dict[str, Any]] = TEXT | {"num_key_value_heads": 2, "pad_token_id": 0}
IMAGES: Final[dict[str, Any]] = SMALL | {"image_size": 16, "patch_size": 4}


@dataclass(frozen=True)
class Architecture:
    """How a model is built, and its keyword arguments for a number of samples and a length."""

    build: Callable[..., nn.Module]
    """Takes the number of layers."""
    inputs: Callable[[int, int], dict[str, Any]]


def _made(model: str, config: str, **options: Any) -> Callable[..., nn.Module]:
    def build(layers: int = LAYERS) -> nn.Module:
        import transformers

        depth = dict.fromkeys(DEPTHS & options.keys(), layers)
        made = getattr(transformers, config)(**options | depth)
        made.use_cache = False  # a cache is for generation, and no value a graph can return
        built: nn.Module = getattr(transformers, model)(made)
        return built

    return build


def _tokens(samples: int, length: int) -> Tensor:
    chosen = torch.arange(samples * length).view(samples, length)
    return 3 + (chosen * 7 + chosen // 5) % (VOCABULARY - 3)


def _mask(samples: int, length: int) -> Tensor:
    """Every sample but the first is padded at its end, by more and more."""
    ends = length - torch.arange(samples)[:, None]
    return (torch.arange(length)[None] < ends).long()


def _text(samples: int, length: int) -> dict[str, Any]:
    return {"input_ids": _tokens(samples, length), "attention_mask": _mask(samples, length)}


def _two_texts(samples: int, length: int) -> dict[str, Any]:
    answer = _tokens(samples, length - 2).flip(1)
    mask = _mask(samples, length - 2)
    return _text(samples, length) | {"decoder_input_ids": answer, "decoder_attention_mask": mask}


def _speech(samples: int, length: int) -> dict[str, Any]:
    """A spectrogram has one length; the text that is said has several."""
    sound = torch.sin(torch.arange(samples * 8 * 16, dtype=torch.float64)).view(samples, 8, 16)
    answer, mask = _tokens(samples, length), _mask(samples, length)
    return {
        "input_features": sound,
        "decoder_input_ids": answer,
        "decoder_attention_mask": mask,
    }


def _image(samples: int, length: int) -> dict[str, Any]:
    pixels = torch.sin(torch.arange(samples * 3 * 16 * 16, dtype=torch.float64) / 3)
    return {"pixel_values": pixels.view(samples, 3, 16, 16)}


def _captioned(samples: int, length: int) -> dict[str, Any]:
    return _text(samples, length) | _image(samples, length)


def _clip(layers: int = LAYERS) -> nn.Module:
    import transformers

    both = {"projection_dim": 16, "num_hidden_layers": layers}
    config = transformers.CLIPConfig(
        text_config=TEXT | {"eos_token_id": 1} | both,
        vision_config=IMAGES | both,
        projection_dim=16,
    )
    return transformers.CLIPModel(config)


ARCHITECTURES: Final[dict[str, Architecture]] = {
    "gpt2": Architecture(
        _made(
            "GPT2LMHeadModel",
            "GPT2Config",
            n_layer=LAYERS,
            n_embd=16,
            n_head=2,
            n_positions=64,
            vocab_size=VOCABULARY,
        ),
        _text,
    ),
    "llama": Architecture(_made("LlamaForCausalLM", "LlamaConfig", **DECODER), _text),
    "qwen2": Architecture(_made("Qwen2ForCausalLM", "Qwen2Config", **DECODER), _text),
    "qwen3": Architecture(_made("Qwen3ForCausalLM", "Qwen3Config", head_dim=8, **DECODER), _text),
    "mistral": Architecture(
        _made("MistralForCausalLM", "MistralConfig", head_dim=8, **DECODER), _text
    ),
    "gemma2": Architecture(
        _made("Gemma2ForCausalLM", "Gemma2Config", head_dim=8, sliding_window=4, **DECODER), _text
    ),
    "phi": Architecture(_made("PhiForCausalLM", "PhiConfig", **DECODER), _text),
    "gpt_neox": Architecture(_made("GPTNeoXForCausalLM", "GPTNeoXConfig", **TEXT), _text),
    "opt": Architecture(
        _made(
            "OPTForCausalLM",
            "OPTConfig",
            hidden_size=16,
            word_embed_proj_dim=16,
            ffn_dim=32,
            num_hidden_layers=LAYERS,
            num_attention_heads=2,
            vocab_size=VOCABULARY,
            max_position_embeddings=64,
        ),
        _text,
    ),
    "mpt": Architecture(
        _made(
            "MptForCausalLM",
            "MptConfig",
            d_model=16,
            n_heads=2,
            n_layers=LAYERS,
            expansion_ratio=2,
            max_seq_len=64,
            vocab_size=VOCABULARY,
        ),
        _text,
    ),
    "mixtral": Architecture(
        _made(
            "MixtralForCausalLM",
            "MixtralConfig",
            num_local_experts=4,
            experts_implementation="eager",  # the grouped product has no double precision
            **DECODER,
        ),
        _text,
    ),
    "bert": Architecture(_made("BertModel", "BertConfig", **TEXT), _text),
    "roberta": Architecture(_made("RobertaModel", "RobertaConfig", **TEXT), _text),
    "distilbert": Architecture(
        _made(
            "DistilBertModel",
            "DistilBertConfig",
            dim=16,
            hidden_dim=32,
            n_layers=LAYERS,
            n_heads=2,
            vocab_size=VOCABULARY,
            max_position_embeddings=64,
        ),
        _text,
    ),
    "modernbert": Architecture(
        _made("ModernBertModel", "ModernBertConfig", pad_token_id=0, local_attention=4, **TEXT),
        _text,
    ),
    "t5": Architecture(
        _made(
            "T5ForConditionalGeneration",
            "T5Config",
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_layers=LAYERS,
            num_heads=2,
            vocab_size=VOCABULARY,
        ),
        _two_texts,
    ),
    "bart": Architecture(
        _made(
            "BartForConditionalGeneration",
            "BartConfig",
            d_model=16,
            encoder_layers=LAYERS,
            decoder_layers=LAYERS,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=32,
            decoder_ffn_dim=32,
            vocab_size=VOCABULARY,
            max_position_embeddings=64,
        ),
        _two_texts,
    ),
    "whisper": Architecture(
        _made(
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            d_model=16,
            encoder_layers=LAYERS,
            decoder_layers=LAYERS,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=32,
            decoder_ffn_dim=32,
            vocab_size=VOCABULARY,
            num_mel_bins=8,
            max_source_positions=8,
            max_target_positions=64,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
        ),
        _speech,
    ),
    "vit": Architecture(_made("ViTModel", "ViTConfig", **IMAGES), _image),
    "clip": Architecture(_clip, _captioned),
    "deit": Architecture(_made("DeiTModel", "DeiTConfig", **IMAGES), _image),
    "mamba": Architecture(
        _made(
            "MambaForCausalLM",
            "MambaConfig",
            hidden_size=16,
            state_size=4,
            residual_in_fp32=False,  # a residual of double precision would be rounded
            num_hidden_layers=LAYERS,
            vocab_size=VOCABULARY,
        ),
        _text,
    ),
}
