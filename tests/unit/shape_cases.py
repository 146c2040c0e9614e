"""Shapes of real models as numbers, for tests of the planner."""

from __future__ import annotations

from typing import Any

from poros_hf.shapes import LinearShape, ModelShapes


def qwen_shapes(
    *,
    hidden: int,
    inner: int,
    num_layers: int,
    heads: int,
    kv_heads: int,
    vocabulary: int = 152064,
    **changes: Any,
) -> ModelShapes:
    keys = hidden // heads * kv_heads
    sizes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    layer = tuple(
        LinearShape(name=name, num_out=num_out, num_in=num_in)
        for name, (num_out, num_in) in sizes.items()
    )
    values: dict[str, Any] = {
        "name": "qwen",
        "layers": (layer,) * num_layers,
        "hidden_size": hidden,
        "vocab_size": vocabulary,
        "embedding_bytes": 2 * vocabulary * hidden,
        "head_bytes": 2 * vocabulary * hidden,
        "other_bytes": 2 * (num_layers * (3 * hidden + 2 * keys) + hidden),
    }
    return ModelShapes(**{**values, **changes})


QWEN_32B = qwen_shapes(hidden=5120, inner=27648, num_layers=64, heads=40, kv_heads=8)
QWEN_72B_16 = qwen_shapes(hidden=8192, inner=29568, num_layers=16, heads=64, kv_heads=8)
TINY = qwen_shapes(hidden=64, inner=128, num_layers=6, heads=4, kv_heads=2, vocabulary=260)
