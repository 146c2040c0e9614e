"""The decoder layers that are known to be equal, bit for bit, when they are replayed."""

from __future__ import annotations

from torch import nn

# One tensor in, one out, no argument changed, no side output (routers, shared keys and values):
# each is trained through SFTTrainer against the stock layer in tests/parity.
REPLAYABLE = frozenset(
    {
        "ApertusDecoderLayer",
        "ArceeDecoderLayer",
        "CohereDecoderLayer",
        "Cohere2DecoderLayer",
        "Ernie4_5DecoderLayer",
        "Exaone4DecoderLayer",
        "GemmaDecoderLayer",
        "Gemma2DecoderLayer",
        "Gemma3DecoderLayer",
        "GlmDecoderLayer",
        "Glm4DecoderLayer",
        "GraniteDecoderLayer",
        "HeliumDecoderLayer",
        "HunYuanDenseV1DecoderLayer",
        "LlamaDecoderLayer",
        "Ministral3DecoderLayer",
        "MinistralDecoderLayer",
        "MistralDecoderLayer",
        "NemotronDecoderLayer",
        "OlmoDecoderLayer",
        "Olmo2DecoderLayer",
        "Olmo3DecoderLayer",
        "PhiDecoderLayer",
        "Phi3DecoderLayer",
        "Qwen2DecoderLayer",
        "Qwen3DecoderLayer",
        "SeedOssDecoderLayer",
        "SmolLM3DecoderLayer",
        "StableLmDecoderLayer",
        "Starcoder2DecoderLayer",
    }
)


def is_replayable(layer: nn.Module) -> bool:
    """Tell whether a layer is of a class on the list, and of transformers' own."""
    kind = type(layer)
    return kind.__module__.startswith("transformers.models.") and kind.__name__ in REPLAYABLE
