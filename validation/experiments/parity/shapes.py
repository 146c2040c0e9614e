"""Model shapes of the experiment, as arguments of Qwen2Config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import Qwen2Config

_QWEN = {
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "toy": {
        **_QWEN,
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 320,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "7b": {
        **_QWEN,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    "14b": {
        **_QWEN,
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
    },
    "32b": {
        **_QWEN,
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
    },
    "72b": {
        **_QWEN,
        "hidden_size": 8192,
        "intermediate_size": 29568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
}


def qwen_config(shape: str, num_layers: int | None = None) -> Qwen2Config:
    """Return the config of a shape, with another number of layers where one is given."""
    values = dict(SHAPES[shape])
    if num_layers is not None:
        values["num_hidden_layers"] = num_layers
    config = Qwen2Config(
        **values, rope_theta=1e6, dtype="bfloat16", bos_token_id=0, eos_token_id=1, pad_token_id=2
    )
    config.architectures = ["Qwen2ForCausalLM"]
    return config
