"""Shapes and row lengths of the experiment, and what follows for a model of full depth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import AutoConfig

FEW_LAYERS, MORE_LAYERS = 4, 8
LENGTHS = (512, 2048, 8192)
# (decoder layers, tokens): both depths at one length give what a layer adds.
CASES = ((FEW_LAYERS, 2048), *((MORE_LAYERS, tokens) for tokens in LENGTHS))
CALIBRATED_ON = ("7b", "32b")

_QWEN = {"model_type": "qwen2", "vocab_size": 152064, "max_position_embeddings": 32768}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "toy": {
        **_QWEN,
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 320,
        "num_hidden_layers": 12,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
    },
    "0.5b": {
        **_QWEN,
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "7b": {
        **_QWEN,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
    "14b": {
        **_QWEN,
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "32b": {
        **_QWEN,
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "72b": {
        **_QWEN,
        "hidden_size": 8192,
        "intermediate_size": 29568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "llama-8b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    },
    "gemma-7b": {
        "model_type": "gemma",
        "vocab_size": 256000,
        "hidden_size": 3072,
        "intermediate_size": 24576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
}


def make_config(shape: str, num_layers: int | None = None) -> Any:
    """Return the transformers config of a shape, with another number of layers where given."""
    values = dict(SHAPES[shape])
    if num_layers is not None:
        values["num_hidden_layers"] = num_layers
    return AutoConfig.for_model(
        **values, dtype="bfloat16", bos_token_id=0, eos_token_id=1, pad_token_id=2
    )


def at_full_depth(
    shape: str, samples: Sequence[Mapping[str, float]], predicted: Mapping[int, float]
) -> list[dict[str, float]]:
    """Return the error of the plan for the whole model, at each length.

    The measured peak grows linearly with the layers: what one adds is measured at one length, and
    differs between lengths by the layer's kept input, whose bytes are known.

    Args:
        shape: Name of the shape.
        samples: Measured, with `num_layers`, `tokens` and `peak_bytes`.
        predicted: Tokens -> planned peak of the full depth.
    """
    measured = {(s["num_layers"], s["tokens"]): s["peak_bytes"] for s in samples}
    middle = LENGTHS[1]
    added = measured[MORE_LAYERS, middle] - measured[FEW_LAYERS, middle]
    per_layer = added / (MORE_LAYERS - FEW_LAYERS)
    full = SHAPES[shape]["num_hidden_layers"]
    rows = []
    for tokens in LENGTHS:
        kept = 2 * SHAPES[shape]["hidden_size"] * (tokens - middle)
        peak = measured[MORE_LAYERS, tokens] + (full - MORE_LAYERS) * (per_layer + kept)
        error = 100 * (predicted[tokens] / peak - 1)
        rows.append(
            {
                "num_layers": full,
                "tokens": tokens,
                "full_peak_bytes": peak,
                "planned_full_peak_bytes": predicted[tokens],
                "error_percent": error,
                "abs_error_percent": abs(error),
                "under_percent": max(0.0, -error),
            }
        )
    return rows
