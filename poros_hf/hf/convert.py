"""A model that is resident in 4 bits already: moved to the host store, weight by weight."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from poros_hf.config import PorosConfig
from poros_hf.errors import UnsupportedModelError, name_offenders
from poros_hf.hf.capture import ModelCapture
from poros_hf.hf.decoder import find_decoder_layers, quantised_linears
from poros_hf.hf.session import QUANTISED_BEFORE, StreamSession, attach
from poros_hf.nf4 import WeightFormat
from poros_hf.runtime import runtime_for


def stream_resident(model: Any, config: PorosConfig) -> StreamSession:
    """Move the decoder of a resident 4-bit model to the host store and stream it from there.

    The bytes are not changed. Device memory falls as the weights go: at most one of them is in
    both places.

    Args:
        model: Loaded by stock transformers with bitsandbytes 4-bit; it may have adapters.
        config: How to stream it; its quantisation fields follow the model.

    Returns:
        The session, attached to the model.

    Raises:
        UnsupportedModelError: The model is not 4-bit, is quantised by other means, or another
            offloader holds it.
        CapacityError: The store does not fit into RAM.
    """
    refuse_other_offloaders(model)
    linears = [
        module for layer in find_decoder_layers(model) for _, module in quantised_linears(layer)
    ]
    if not linears:
        raise UnsupportedModelError(
            "not-four-bit",
            f"PorosStreaming was given a {type(model).__name__} {_describe(model)}",
            remedies=[
                "load it with quantization_config=PorosConfig()",
                "load it with bitsandbytes 4-bit",
            ],
        )
    _refuse_unready(linears)
    weight_format, device = _format_and_device(linears[0].weight)
    if linears[0].compute_dtype is not None:
        compute_dtype = str(linears[0].compute_dtype).removeprefix("torch.")
        config = replace(config, compute_dtype=compute_dtype)
    capture = ModelCapture(model, config, weight_format, runtime_for(device))
    capture.take_resident()
    session = capture.finish(QUANTISED_BEFORE)
    attach(model, session)
    return session


def refuse_other_offloaders(model: nn.Module) -> None:
    """Refuse a model that accelerate has spread over devices or moves by itself.

    Raises:
        UnsupportedModelError: The modules with hooks are named.
    """
    hooked = [name for name, module in model.named_modules() if _is_offloaded(module)]
    places = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    if hooked or len(places) > 1:
        raise UnsupportedModelError(
            "other-offloader",
            f"accelerate holds the model already (device map: {', '.join(sorted(places)) or '-'}; "
            f"hooks on: {name_offenders(hooked) or '-'})",
            remedies=['load it with device_map={"": 0}', "load it with PorosConfig instead"],
            hooked=hooked,
        )


def _is_offloaded(module: nn.Module) -> bool:
    hook = getattr(module, "_hf_hook", None)
    hooks = getattr(hook, "hooks", [hook])
    return any(getattr(item, "offload", False) for item in hooks)


def _refuse_unready(linears: list[Any]) -> None:
    """Refuse weights that bitsandbytes has not packed yet, or has repacked for CPU inference."""
    for module in linears:
        state = module.weight.quant_state
        if state is None or getattr(state, "packing_format_for_cpu", False):
            raise UnsupportedModelError(
                "weight-not-packed",
                "a 4-bit layer of the model is not packed yet, or was repacked for CPU inference, "
                "which rounds its scales",
                remedies=["load the model anew and stream it before it is used"],
            )


def _format_and_device(weight: Any) -> tuple[WeightFormat, torch.device]:
    is_nested = bool(weight.quant_state.nested)
    return WeightFormat(is_nested=is_nested, storage=weight.dtype), weight.device


def _describe(model: Any) -> str:
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None:
        return f"that is quantised by {quantizer.quantization_config.quant_method}, not in 4 bits"
    dtypes = {parameter.dtype for parameter in model.parameters()} or {torch.float32}
    return f"with weights of {', '.join(sorted(map(str, dtypes)))}, not streamed and not 4-bit"
