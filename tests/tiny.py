"""Tiny models of the families that are supported, built from configs: no hub, no network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    PreTrainedTokenizerFast,
)

from tests import families

VOCABULARY = 260
NUM_LAYERS = 13
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 256,
    "bos_token_id": 257,
    "eos_token_id": 258,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"model_type": "qwen2"},
    "qwen2-sliding": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 4,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "llama": {"model_type": "llama"},
    "mistral": {"model_type": "mistral", "sliding_window": 8},
    "gemma2": {"model_type": "gemma2", "head_dim": 16, "sliding_window": 8},
    "gemma3": {"model_type": "gemma3_text", "head_dim": 16, "sliding_window": 8},
    "phi3": {"model_type": "phi3"},
}


_FEWER = {**_COMMON, "num_hidden_layers": families.NUM_LAYERS}
MULTIMODAL = tuple(families.MULTIMODAL_FAMILIES)


def tiny_config(family: str, **overrides: Any) -> Any:
    """Return the config of a tiny model of `family`, which is of this file or of families.py."""
    if family in FAMILIES:
        values = {**_COMMON, **FAMILIES[family]}
    elif family in MULTIMODAL:
        values = dict(families.MULTIMODAL_FAMILIES[family])
        values["text_config"] = {**_FEWER, **values["text_config"]}
    elif family in families.REFUSED_FAMILIES:
        values = {**_FEWER, **families.REFUSED_FAMILIES[family][0]}
    else:
        values = {**_FEWER, **families.MORE_FAMILIES[family]}
    return AutoConfig.for_model(**{**values, **overrides})


def auto_class(config: Any) -> Any:
    """Return the Auto class that a person loads such a model with."""
    if hasattr(config, "vision_config"):
        return AutoModelForImageTextToText
    return AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte, so that any text becomes tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    special = ["<pad>", "<bos>", "<eos>", "<unk>"]
    vocabulary |= {token: 256 + index for index, token in enumerate(special)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
    )


def write_tiny_model(folder: Path, family: str, **overrides: Any) -> Path:
    """Write config, bf16 weights and tokenizer of a tiny model of `family` into `folder`."""
    torch.manual_seed(0)
    config = tiny_config(family, **overrides)
    model = auto_class(config).from_config(config, dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 and name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder
