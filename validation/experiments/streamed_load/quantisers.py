"""Compare what bitsandbytes packs on the CPU and on the GPU from the same 16-bit weights."""

from __future__ import annotations

from collections.abc import Mapping

import bitsandbytes as bnb
import torch

SHAPES = ((27648, 5120), (5120, 27648), (1024, 5120), (8192, 8192))
INIT_STD = 0.02


def pack(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Quantise as every model here is, and return the parts on the CPU."""
    packed, state = bnb.functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    parts = {
        "packed": packed,
        "absmax": state.absmax,
        "nested_absmax": state.state2.absmax,
        "offset": state.offset,
    }
    return {name: part.cpu() for name, part in parts.items()}


def unequal_bytes(
    first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]
) -> dict[str, int]:
    """Count by part the bytes that differ."""
    return {
        f"{name}_unequal_bytes": int((_raw(part) != _raw(second[name])).sum())
        for name, part in first.items()
    }


def compare(shape: tuple[int, int], device: torch.device, seed: int = 0) -> dict[str, int]:
    """Pack one random weight on the CPU and on `device`; returns sizes and differing bytes."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.empty(shape).normal_(0.0, INIT_STD, generator=generator).to(torch.bfloat16)
    here, there = pack(weight), pack(weight.to(device))
    sizes = {f"{name}_bytes": part.nbytes for name, part in here.items()}
    return {"rows": shape[0], "columns": shape[1], **sizes, **unequal_bytes(here, there)}


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
