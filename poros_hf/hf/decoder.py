"""The text decoder of a model: where its layers are, and what in them can be streamed."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from poros_hf.errors import UnsupportedModelError, name_offenders
from poros_hf.units import format_bytes

logger = logging.getLogger(__name__)

# Norms, biases, routers and the like stay on the device as they are; a decoder of which more than
# this share is not 4-bit would hold most of its bytes on the device, unseen by the plan.
_MAX_UNQUANTISED_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One decoder layer and its module path in the model."""

    path: str
    module: nn.Module


def find_decoder_layers(model: Any) -> list[DecoderLayer]:
    """Find the text decoder's layers by type, and check their number against the config.

    Args:
        model: A transformers model; it may be on the meta device.

    Raises:
        UnsupportedModelError: There is no list, or more than one list, of such layers.
    """
    expected = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
    decoder = model.get_decoder()
    found = [
        (name, module)
        for name, module in decoder.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) == expected
        and all(isinstance(layer, GradientCheckpointingLayer) for layer in module)
    ]
    if len(found) != 1:
        raise UnsupportedModelError(
            "decoder-not-found",
            f"{type(model).__name__} has {len(found)} lists of {expected} decoder layers; exactly "
            "one is needed to stream it",
            remedies=["use a decoder-only text model that transformers ships"],
            num_found=len(found),
        )
    prefix = next(name for name, module in model.named_modules() if module is decoder)
    list_name, layers = found[0]
    path = ".".join(part for part in (prefix, list_name) if part)
    return [DecoderLayer(f"{path}.{index}", layer) for index, layer in enumerate(layers)]


def quantised_linears(layer: DecoderLayer) -> Iterator[tuple[str, Any]]:
    """Yield (module path in the model, module) of the 4-bit linear layers of a decoder layer."""
    for name, module in layer.module.named_modules():
        if _is_four_bit(module):
            yield f"{layer.path}.{name}", module


def refuse_unquantised(layers: list[DecoderLayer], bytes_per_weight: int) -> None:
    """Refuse decoders whose bytes would mostly stay 16-bit, above all fused experts.

    Linear layers that stay 16-bit are on the checkpoint's or the model's own skip list; those are
    named in a warning.

    Args:
        layers: Their linear layers are 4-bit; on the meta device or loaded.
        bytes_per_weight: Of the type the rest is loaded in.

    Raises:
        UnsupportedModelError: The offenders are named, with the bytes that would stay.
    """
    total = 0
    stays: dict[str, int] = {}
    skipped: dict[str, int] = {}
    for layer in layers:
        for name, module in layer.module.named_modules():
            if ".lora_" in f".{name}":
                continue  # an adapter's, not the base's
            if _is_four_bit(module):
                total += module.in_features * module.out_features
                continue
            counted = skipped if isinstance(module, nn.Linear) else stays
            for own, parameter in module.named_parameters(recurse=False):
                total += parameter.numel()
                if parameter.dim() > 1:
                    path = ".".join(part for part in (layer.path, name, own) if part)
                    counted[path] = parameter.numel() * bytes_per_weight
    if skipped:
        logger.warning(
            "%s of linear weights are not quantised and stay on the device: %s",
            format_bytes(sum(skipped.values())),
            name_offenders(list(skipped)),
        )
    if sum(stays.values()) > _MAX_UNQUANTISED_SHARE * total * bytes_per_weight:
        raise UnsupportedModelError(
            "unquantised-weights",
            f"{format_bytes(sum(stays.values()))} of the decoder's weights would stay 16-bit, "
            f"because they are not linear layers (fused experts): {name_offenders(list(stays))}",
            remedies=["use a dense model", "wait for a version that streams fused experts"],
            stays_bytes=sum(stays.values()),
            names=list(stays),
        )


def _is_four_bit(module: nn.Module) -> bool:
    import bitsandbytes as bnb

    return isinstance(module, bnb.nn.Linear4bit)
