"""`from_pretrained`: load a causal language model for streaming, quantised already or not."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig

from poros_hf.config import PorosConfig
from poros_hf.environment import environment_variable
from poros_hf.errors import CheckpointError
from poros_hf.hf.decoder import auto_class
from poros_hf.hf.quantizer import PrequantisedConfig

# What AutoConfig needs to find the same checkpoint that AutoModel will load.
_LOCATION_KEYS = (
    "cache_dir",
    "force_download",
    "local_files_only",
    "revision",
    "subfolder",
    "token",
    "trust_remote_code",
)


def from_pretrained(model_id: str, config: PorosConfig | None = None, **kwargs: Any) -> Any:
    """Load a causal language model whose decoder is streamed.

    Takes 16-bit checkpoints, which are quantised weight by weight, and checkpoints that are 4-bit
    already (`*-bnb-4bit`), which `AutoModelForCausalLM` refuses together with a PorosConfig. How
    those are quantised is theirs to say: nested or not, NF4 or FP4, with modules left out.

    Args:
        model_id: Folder, or repository on the Hub.
        config: How to quantise and stream; PorosConfig() by default. Its compute_dtype holds for
            checkpoints that are 4-bit already, its quantisation does not.
        **kwargs: As for `AutoModelForCausalLM.from_pretrained`; `dtype` is the config's
            compute_dtype by default.

    Returns:
        The transformers model, in evaluation mode; add an adapter to train it.

    Raises:
        CheckpointError: The checkpoint is quantised in another format.
        PorosError: See docs/errors.md; raised before weights are read wherever possible.
    """
    config = config or PorosConfig()
    kwargs.setdefault("dtype", getattr(torch, config.compute_dtype))
    location = {key: kwargs[key] for key in _LOCATION_KEYS if key in kwargs}
    model_config = kwargs.pop("config", None) or AutoConfig.from_pretrained(model_id, **location)
    stored = getattr(model_config, "quantization_config", None)
    if stored is None:
        kwargs["quantization_config"] = config
    else:
        model_config.quantization_config = _prequantised(model_id, config, stored)
    # Reading ahead fills the device with tensors that wait to be captured.
    with environment_variable("HF_DEACTIVATE_ASYNC_LOAD", "1"):
        return auto_class(model_config).from_pretrained(model_id, config=model_config, **kwargs)


def _prequantised(model_id: str, config: PorosConfig, stored: Any) -> PrequantisedConfig:
    values = stored if isinstance(stored, dict) else stored.to_dict()
    method = str(values.get("quant_method"))
    if method != "bitsandbytes" or not values.get("load_in_4bit"):
        raise CheckpointError(
            "checkpoint-format",
            f"{model_id} is quantised already, by {method} and not in 4 bits of bitsandbytes, "
            "which alone can be streamed as it is",
            remedies=["use the original 16-bit repository", "use a *-bnb-4bit repository"],
            quant_method=method,
        )
    return PrequantisedConfig(config, values)
