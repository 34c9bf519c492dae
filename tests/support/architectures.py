"""Tiny, random Hugging Face models with the arguments a training loop would give them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

__all__ = ["ARCHITECTURES", "LAYERS", "Architecture"]

LAYERS: Final = 4
DEPTHS: Final = frozenset(
    ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers")
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
    return {"input_features": sound, "decoder_input_ids": answer, "decoder_attention_mask": mask}


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


GPT2: Final[dict[str, Any]] = {"n_embd": 16, "n_head": 2, "n_layer": LAYERS, "n_positions": 64}
MPT: Final[dict[str, Any]] = {"d_model": 16, "n_heads": 2, "n_layers": LAYERS, "max_seq_len": 64}
T5: Final[dict[str, Any]] = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_heads": 2}
OPT: Final[dict[str, Any]] = {"word_embed_proj_dim": 16, "ffn_dim": 32}
DISTILLED: Final[dict[str, Any]] = {"dim": 16, "hidden_dim": 32, "n_layers": LAYERS, "n_heads": 2}
BOTH: Final[dict[str, Any]] = {
    f"{side}_{name}": value
    for side in ("encoder", "decoder")
    for name, value in (("layers", LAYERS), ("attention_heads", 2), ("ffn_dim", 32))
}
SOUND: Final[dict[str, Any]] = {"num_mel_bins": 8, "max_source_positions": 8}
NAMED: Final[dict[str, Any]] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WORDS: Final[dict[str, Any]] = {"vocab_size": VOCABULARY}
# The grouped product of experts has no double precision; a residual of it would be rounded.
EXPERTS: Final[dict[str, Any]] = {"num_local_experts": 4, "experts_implementation": "eager"}
MAMBA: Final[dict[str, Any]] = {"state_size": 4, "residual_in_fp32": False}

TABLE: Final[dict[str, tuple[str, str, dict[str, Any], Callable[[int, int], dict[str, Any]]]]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2 | WORDS, _text),
    "llama": ("LlamaForCausalLM", "LlamaConfig", DECODER, _text),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", DECODER, _text),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", DECODER | {"head_dim": 8}, _text),
    "mistral": ("MistralForCausalLM", "MistralConfig", DECODER | {"head_dim": 8}, _text),
    "gemma2": (
        *("Gemma2ForCausalLM", "Gemma2Config"),
        *(DECODER | {"head_dim": 8, "sliding_window": 4}, _text),
    ),
    "phi": ("PhiForCausalLM", "PhiConfig", DECODER, _text),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", TEXT, _text),
    "opt": ("OPTForCausalLM", "OPTConfig", TEXT | OPT, _text),
    "mpt": ("MptForCausalLM", "MptConfig", MPT | WORDS | {"expansion_ratio": 2}, _text),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", DECODER | EXPERTS, _text),
    "bert": ("BertModel", "BertConfig", TEXT, _text),
    "roberta": ("RobertaModel", "RobertaConfig", TEXT, _text),
    "distilbert": ("DistilBertModel", "DistilBertConfig", DISTILLED | TEXT, _text),
    "modernbert": (
        *("ModernBertModel", "ModernBertConfig"),
        *(TEXT | {"pad_token_id": 0, "local_attention": 4}, _text),
    ),
    "t5": (
        *("T5ForConditionalGeneration", "T5Config"),
        *(T5 | WORDS | {"num_layers": LAYERS}, _two_texts),
    ),
    "bart": (
        *("BartForConditionalGeneration", "BartConfig"),
        *(BOTH | WORDS | {"d_model": 16, "max_position_embeddings": 64}, _two_texts),
    ),
    "whisper": (
        *("WhisperForConditionalGeneration", "WhisperConfig"),
        BOTH
        | WORDS
        | SOUND
        | NAMED
        | {"d_model": 16, "max_target_positions": 64, "decoder_start_token_id": 1},
        _speech,
    ),
    "vit": ("ViTModel", "ViTConfig", IMAGES, _image),
    "deit": ("DeiTModel", "DeiTConfig", IMAGES, _image),
    "mamba": ("MambaForCausalLM", "MambaConfig", SMALL | WORDS | MAMBA, _text),
}
ARCHITECTURES: Final[dict[str, Architecture]] = {
    name: Architecture(_made(model, config, **options), inputs)
    for name, (model, config, options, inputs) in TABLE.items()
} | {"clip": Architecture(_clip, _captioned)}
