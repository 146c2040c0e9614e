"""The model of a resident side."""

from __future__ import annotations

import bitsandbytes as bnb
import torch
from torch import nn
from transformers import AutoModelForCausalLM


def load_resident(path: str, device: torch.device) -> nn.Module:
    """Load the checkpoint with stock transformers."""
    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.bfloat16, device_map={"": device}
    )
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            # On CPUs with AVX512-BF16 one forward without grad would repack the weight.
            module.support_avx512bf16_for_cpu = False
    return model
