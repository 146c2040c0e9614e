"""How large an adapter will be, and whether it fits the model, from the config alone."""

from __future__ import annotations

import copy
from typing import Any

import torch
from peft import get_peft_model

from poros_hf.errors import ConfigError
from poros_hf.hf.decoder import auto_class
from poros_hf.hf.refusals import refuse_adapter
from poros_hf.hf.towers import refuse_tower_adapters


def count_adapter_weights(model_config: Any, lora: Any) -> int:
    """Return how many weights an adapter has, without a weight of the model.

    Args:
        model_config: Of the base.
        lora: The LoraConfig.

    Raises:
        UnsupportedModelError: The adapter reads base weights, or lies on a vision tower.
        ConfigError: It finds no layer to lie on.
    """
    refuse_adapter("default", lora)
    model = meta_model(model_config)
    with torch.device("meta"):
        try:
            model = get_peft_model(model, copy.deepcopy(lora))
        except ValueError as error:
            raise ConfigError(
                "adapter-targets",
                f"the adapter does not fit {type(model).__name__}: {error}",
                remedies=["set target_modules to 'all-linear'", "name layers that the model has"],
            ) from error
    refuse_tower_adapters(model)
    return sum(weight.numel() for weight in model.parameters() if weight.requires_grad)


def meta_model(model_config: Any) -> Any:
    """Return the model that a config describes, in 16 bits and without memory."""
    plain = copy.deepcopy(model_config)
    if hasattr(plain, "quantization_config"):
        del plain.quantization_config  # building the model would ask for its kernels
    with torch.device("meta"):
        return auto_class(plain).from_config(plain)
