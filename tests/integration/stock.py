"""The resident side of the integration tests: stock transformers and bitsandbytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

IDS = torch.arange(1, 33).view(2, 16)


def quantisation(**options: Any) -> BitsAndBytesConfig:
    """Return the stock config that quantises as PorosConfig() does, but for `options`."""
    config = {
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": "bfloat16",
        **options,
    }
    return BitsAndBytesConfig(load_in_4bit=True, **config)


def load_stock(folder: Path, **options: Any) -> Any:
    """Load a resident 4-bit model, quantised as PorosConfig() does but for `options`."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=quantisation(**options), dtype="bfloat16"
    )
    stop_repacking(model)
    return model


def stop_repacking(model: Any) -> None:
    """Keep evaluation from repacking 4-bit weights for inference, which rounds their scales."""
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            module.support_avx512bf16_for_cpu = False


def logits(model: Any) -> torch.Tensor:
    """Return the logits of fixed tokens."""
    with torch.no_grad():
        result: torch.Tensor = model.eval()(IDS).logits
    return result
