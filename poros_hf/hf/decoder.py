"""The text decoder of a model: where its layers are, and what in them can be streamed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from poros_hf.errors import UnsupportedModelError, name_offenders
from poros_hf.units import format_bytes

logger = logging.getLogger(__name__)

# Norms, biases, routers and the like stay on the device as they are; a decoder of which more than
# this share is not 4-bit would hold most of its bytes on the device, unseen by the plan.
_MAX_UNQUANTISED_SHARE = 0.05
# Gemma 3n clamps these weights in every training forward, as if what is packed were numbers.
_WRITTEN_IN_FORWARD = (".altup.prediction_coefs", ".altup.correction_coefs")


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One decoder layer and its module path in the model."""

    path: str
    module: nn.Module


def auto_class(config: Any) -> Any:
    """Return the Auto class for a language model, which may have only one with a vision tower."""
    kind = type(config)
    has_tower_only = (
        kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and kind not in MODEL_FOR_CAUSAL_LM_MAPPING
    )
    return AutoModelForImageTextToText if has_tower_only else AutoModelForCausalLM


def find_decoder_layers(model: Any) -> list[DecoderLayer]:
    """Find the text decoder's layers by type, and check their number against the config.

    Args:
        model: A transformers model; it may be on the meta device.

    Raises:
        UnsupportedModelError: There is no list, or more than one list, of such layers; or there is
            an encoder beside them.
    """
    has_encoder = bool(getattr(model.config, "is_encoder_decoder", False))
    expected = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
    decoder = model.get_decoder()
    found = [
        (name, module)
        for name, module in decoder.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) == expected
        and all(isinstance(layer, GradientCheckpointingLayer) for layer in module)
    ]
    if has_encoder or len(found) != 1:
        raise UnsupportedModelError(
            "decoder-not-found",
            f"{type(model).__name__} has {len(found)} lists of {expected} decoder layers"
            f"{' and an encoder' if has_encoder else ''}; exactly one list, and nothing beside it, "
            "can be streamed",
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


def refuse_written(layers: list[DecoderLayer]) -> None:
    """Refuse decoders whose own code writes into weights that are 4-bit.

    Raises:
        UnsupportedModelError: The weights are named.
    """
    names = [
        path
        for layer in layers
        for path, _ in quantised_linears(layer)
        if path.endswith(_WRITTEN_IN_FORWARD)
    ]
    if names:
        raise UnsupportedModelError(
            "weight-written",
            f"the model changes {len(names)} of its own weights in every training forward, which "
            f"cannot be done to packed ones: {name_offenders(names)}",
            remedies=[
                "load a checkpoint that is 4-bit already and leaves these 16-bit, with "
                "poros_hf.from_pretrained"
            ],
            names=names,
        )


def refuse_unquantised(
    layers: list[DecoderLayer],
    bytes_per_weight: int,
    is_packed: Callable[[nn.Module], bool] | None = None,
) -> None:
    """Refuse decoders whose bytes would mostly stay 16-bit, above all fused experts.

    Linear layers that stay 16-bit are on the checkpoint's or the model's own skip list; those are
    named in a warning, unless they are all there is.

    Args:
        layers: Their linear layers are 4-bit; on the meta device or loaded.
        bytes_per_weight: Of the type the rest is loaded in.
        is_packed: Tells a module that is, or will be, 4-bit; by default one that is.

    Raises:
        UnsupportedModelError: The offenders are named, with the bytes that would stay.
    """
    share = _count_weights(layers, bytes_per_weight, is_packed or _is_four_bit)
    stays = share.not_linear
    if share.packed == 0:
        stays = {**stays, **share.skipped}
    elif share.skipped:
        logger.warning(
            "%s of linear weights are not quantised and stay on the device: %s",
            format_bytes(sum(share.skipped.values())),
            name_offenders(list(share.skipped)),
        )
    stays_bytes = sum(stays.values())
    if share.packed == 0 or stays_bytes > _MAX_UNQUANTISED_SHARE * share.total * bytes_per_weight:
        raise UnsupportedModelError(
            "unquantised-weights",
            f"{format_bytes(stays_bytes)} of the decoder's weights would stay 16-bit, because they "
            "are not linear layers that bitsandbytes knows (fused experts, or layers of a class "
            f"of their own): {name_offenders(list(stays))}",
            remedies=["use a dense model", "wait for a version that streams fused experts"],
            stays_bytes=stays_bytes,
            names=list(stays),
        )


@dataclass(slots=True)
class _Share:
    """Weights of a decoder: all and 4-bit ones by number, 16-bit matrices by name and bytes."""

    total: int = 0
    packed: int = 0
    not_linear: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)


def _count_weights(
    layers: list[DecoderLayer], bytes_per_weight: int, is_packed: Callable[[nn.Module], bool]
) -> _Share:
    share = _Share()
    for layer in layers:
        for name, module in layer.module.named_modules():
            if ".lora_" in f".{name}":
                continue  # an adapter's, not the base's
            if is_packed(module):
                share.packed += int(module.in_features) * int(module.out_features)
                continue
            counted = share.skipped if isinstance(module, nn.Linear) else share.not_linear
            for own, parameter in module.named_parameters(recurse=False):
                share.total += parameter.numel()
                if parameter.dim() > 1:
                    path = ".".join(part for part in (layer.path, name, own) if part)
                    counted[path] = parameter.numel() * bytes_per_weight
    share.total += share.packed
    return share


def _is_four_bit(module: nn.Module) -> bool:
    import bitsandbytes as bnb

    return isinstance(module, bnb.nn.Linear4bit)
