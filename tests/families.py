"""Further model families: those that train bit-equal, and those that are refused by name.

Together with the eight of tests/tiny.py these are the families of docs/compatibility.md. They get
few layers, because only what differs between families is in question here.
"""

from __future__ import annotations

from typing import Any

NUM_LAYERS = 4
# Sliding and full attention by turns, as most recent families have it.
_ALTERNATING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
}
_IMAGE_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
# Vision towers have as many layers as the text decoder, so that neither can be told by its length.
_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN_TOWER = {"depth": NUM_LAYERS, "num_heads": 2, "patch_size": 14}
_PER_LAYER_INPUTS = {
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 260,
}

MORE_FAMILIES: dict[str, dict[str, Any]] = {
    "apertus": {"model_type": "apertus"},
    "arcee": {"model_type": "arcee"},
    "cohere": {"model_type": "cohere", "use_qk_norm": True},
    "cohere2": {"model_type": "cohere2", **_ALTERNATING},
    "ernie4_5": {"model_type": "ernie4_5", "head_dim": 16},
    "exaone4": {"model_type": "exaone4", "sliding_window": 8, "sliding_window_pattern": 4},
    "gemma": {"model_type": "gemma", "head_dim": 16},
    "gemma4": {
        "model_type": "gemma4_text",
        "head_dim": 16,
        "global_head_dim": 32,
        **_ALTERNATING,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
    },
    "gemma4-shared-kv": {
        "model_type": "gemma4_text",
        "head_dim": 16,
        "global_head_dim": 32,
        **_ALTERNATING,
        **_PER_LAYER_INPUTS,
    },
    "glm": {"model_type": "glm", "head_dim": 16},
    "glm4": {"model_type": "glm4", "head_dim": 16},
    "gpt_neox": {"model_type": "gpt_neox"},
    "gpt2": {"model_type": "gpt2"},
    "granite": {
        "model_type": "granite",
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
        "logits_scaling": 2.0,
    },
    "helium": {"model_type": "helium", "head_dim": 16},
    "hunyuan_v1_dense": {"model_type": "hunyuan_v1_dense", "head_dim": 16},
    "lfm2": {"model_type": "lfm2", "layer_types": ["conv", "full_attention"] * 2},
    "llama3": {"model_type": "llama", "rope_parameters": _LLAMA3_ROPE, "tie_word_embeddings": True},
    "llama-bias": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "minicpm3": {"model_type": "minicpm3", **_LATENT},
    "ministral": {"model_type": "ministral", "head_dim": 16, **_ALTERNATING},
    "ministral3": {"model_type": "ministral3", "head_dim": 16},
    "nemotron": {"model_type": "nemotron"},
    "olmo": {"model_type": "olmo"},
    "olmo2": {"model_type": "olmo2"},
    "olmo3": {"model_type": "olmo3", **_ALTERNATING},
    "phi": {"model_type": "phi"},
    "phi3-longrope": {
        "model_type": "phi3",
        "original_max_position_embeddings": 64,
        "rope_parameters": _LONG_ROPE,
    },
    "phi4-mini": {"model_type": "phi3", "partial_rotary_factor": 0.75, "tie_word_embeddings": True},
    "qwen2-tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3-tied": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
    "qwen3_5": {
        "model_type": "qwen3_5_text",
        "head_dim": 16,
        "layer_types": [*["linear_attention"] * 3, "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "seed_oss": {"model_type": "seed_oss", "head_dim": 16},
    "smollm3": {"model_type": "smollm3", "no_rope_layers": [1, 1, 1, 0]},
    "stablelm": {"model_type": "stablelm"},
    "starcoder2": {"model_type": "starcoder2", "sliding_window": 8},
}

# Language models with a vision tower: the text decoder is streamed and trained on text alone.
MULTIMODAL_FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3-vision": {
        "model_type": "gemma3",
        "text_config": {"model_type": "gemma3_text", "head_dim": 16, **_ALTERNATING},
        "vision_config": {"model_type": "siglip_vision_model", **_TOWER},
        "mm_tokens_per_image": 4,
        "image_token_index": 250,
        "boi_token_index": 251,
        "eoi_token_index": 252,
    },
    "mistral3": {
        "model_type": "mistral3",
        "text_config": {"model_type": "mistral", "head_dim": 16},
        "vision_config": {"model_type": "pixtral", "head_dim": 16, **_TOWER},
        "image_token_index": 250,
    },
    "qwen2_5_vl": {
        "model_type": "qwen2_5_vl",
        "text_config": {"model_type": "qwen2_5_vl_text", "rope_parameters": _IMAGE_ROPE},
        "vision_config": {
            **_QWEN_TOWER,
            "hidden_size": 32,
            "intermediate_size": 64,
            "out_hidden_size": 64,
        },
    },
    "qwen3_vl": {
        "model_type": "qwen3_vl",
        "text_config": {
            "model_type": "qwen3_vl_text",
            "head_dim": 16,
            "rope_parameters": _IMAGE_ROPE,
        },
        "vision_config": {
            **_QWEN_TOWER,
            "hidden_size": 32,
            "intermediate_size": 64,
            "out_hidden_size": 64,
            "deepstack_visual_indexes": [0],
        },
    },
}
# What a LoraConfig for one of these has to leave out.
TOWERS = r".*\.(vision_tower|visual|multi_modal_projector)\..*"

_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_DEEPSEEK = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
# Family -> config and the slug it is refused with.
REFUSED_FAMILIES: dict[str, tuple[dict[str, Any], str]] = {
    "deepseek_v3": (
        {"model_type": "deepseek_v3", **_LATENT, **_EXPERTS, **_DEEPSEEK},
        "unquantised-weights",
    ),
    # Its linear layers are of a class of its own, which bitsandbytes leaves alone.
    "falcon": ({"model_type": "falcon", "ffn_hidden_size": 128}, "unquantised-weights"),
    "gemma3n": (
        {"model_type": "gemma3n_text", "head_dim": 16, **_ALTERNATING, **_PER_LAYER_INPUTS}
        | {"laurel_rank": 8, "activation_sparsity_pattern": [0.0] * NUM_LAYERS},
        "weight-written",
    ),
    "glm4_moe": (
        {"model_type": "glm4_moe", "n_routed_experts": 4, "head_dim": 16, **_EXPERTS},
        "unquantised-weights",
    ),
    "gpt_oss": (
        {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2},
        "unquantised-weights",
    ),
    "granitemoe": (
        {"model_type": "granitemoe", "num_local_experts": 4, "num_experts_per_tok": 2},
        "unquantised-weights",
    ),
    "llama4": (
        {"model_type": "llama4_text", "num_local_experts": 4, "intermediate_size_mlp": 128},
        "unquantised-weights",
    ),
    "mixtral": (
        {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
        "unquantised-weights",
    ),
    "olmoe": (
        {"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2},
        "unquantised-weights",
    ),
    "qwen3_moe": (
        {"model_type": "qwen3_moe", "head_dim": 16, "num_experts": 4, **_EXPERTS},
        "unquantised-weights",
    ),
    "t5": (
        {"model_type": "t5", "d_model": 64, "d_kv": 16, "d_ff": 128, "num_heads": 4},
        "decoder-not-found",
    ),
}
