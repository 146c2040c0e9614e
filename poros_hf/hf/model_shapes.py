"""Shapes of a transformers model, from its config alone or from the model itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from poros_hf.config import PorosConfig
from poros_hf.head import HostWeight
from poros_hf.hf.decoder import (
    auto_class,
    find_decoder_layers,
    quantised_linears,
    refuse_unquantised,
)
from poros_hf.hf.dense import find_dense
from poros_hf.hf.replayable import is_replayable
from poros_hf.shapes import LinearShape, ModelShapes, packed_bytes


def shapes_from_config(model_config: Any, config: PorosConfig, name: str = "") -> ModelShapes:
    """Return the shapes of the model that a transformers config describes; reads no weight.

    Args:
        model_config: As AutoConfig gives it.
        config: How the model will be quantised.
        name: What messages call it; by default the config's `_name_or_path` or its type.

    Raises:
        UnsupportedModelError: The decoder cannot be streamed.
    """
    plain = copy.deepcopy(model_config)
    if hasattr(plain, "quantization_config"):
        del plain.quantization_config  # building the model would ask for its kernels
    with torch.device("meta"):
        model = auto_class(plain).from_config(plain)
    item_bytes = getattr(torch, config.compute_dtype).itemsize
    layers = find_decoder_layers(model)
    refuse_unquantised(layers, item_bytes, is_packed=_will_be_packed)
    packs = {
        id(module.weight): packed_bytes(_shape("", module), double_quant=config.double_quant)
        for module in model.modules()
        if _will_be_packed(module) and module is not model.get_output_embeddings()
    }
    return _shapes(
        model,
        [
            [
                (name, module)
                for name, module in layer.module.named_modules()
                if _will_be_packed(module)
            ]
            for layer in layers
        ],
        name or getattr(model_config, "_name_or_path", "") or model_config.model_type,
        lambda weight: packs.get(id(weight), weight.numel() * item_bytes),
        all(is_replayable(layer.module) for layer in layers),
        lambda module: any(module in item.users.values() for item in find_dense(model)),
    )


def shapes_of_model(model: Any) -> ModelShapes:
    """Return the shapes of a streamed model, whatever wraps it, without what is trained."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    layers = find_decoder_layers(base)
    linears = [
        [
            (path.removeprefix(f"{layer.path}.").removesuffix(".base_layer"), module)
            for path, module in quantised_linears(layer)
        ]
        for layer in layers
    ]
    return _shapes(
        base,
        linears,
        getattr(base.config, "_name_or_path", "") or base.config.model_type,
        lambda weight: 0 if weight.requires_grad else weight.numel() * weight.element_size(),
        all(is_replayable(layer.module) for layer in layers),
        lambda module: isinstance(module.weight, HostWeight),
    )


def _shapes(
    model: Any,
    linears: list[list[tuple[str, Any]]],
    name: str,
    bytes_of: Callable[[Any], int],
    can_replay: bool,
    is_on_host: Callable[[Any], bool],
) -> ModelShapes:
    """Count a model whose linear layers that stream are known.

    Args:
        model: On the meta device, or loaded.
        linears: (path in the layer, module) of each decoder layer.
        name: What messages call it.
        bytes_of: Bytes that a weight which is not streamed takes.
        can_replay: See ModelShapes.
        is_on_host: Whether the host store has, or will have, this embedding or head.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = head is None or head.weight is embedding.weight
    apart = {id(module.weight) for layer in linears for _, module in layer}
    apart |= {id(embedding.weight)} | (set() if is_tied else {id(head.weight)})
    vocabulary, hidden = embedding.weight.shape
    return ModelShapes(
        name=name,
        layers=tuple(tuple(_shape(path, module) for path, module in layer) for layer in linears),
        hidden_size=hidden,
        vocab_size=vocabulary,
        embedding_bytes=bytes_of(embedding.weight),
        head_bytes=0 if is_tied else bytes_of(head.weight),
        other_bytes=sum(
            bytes_of(weight) for weight in model.parameters() if id(weight) not in apart
        ),
        can_replay=can_replay,
        can_stream_head=all(
            is_on_host(module) for module in (embedding, head) if module is not None
        ),
    )


def _will_be_packed(module: nn.Module) -> bool:
    """Tell what bitsandbytes replaces: linear layers of this class, none that derives from it."""
    return type(module) is nn.Linear


def _shape(name: str, module: Any) -> LinearShape:
    return LinearShape(name=name, num_out=module.out_features, num_in=module.in_features)
