"""`from_pretrained`: load a causal language model for streaming, quantised already or not."""

from __future__ import annotations

import functools
import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from poros_hf.config import PorosConfig, require_config
from poros_hf.environment import environment_variable
from poros_hf.errors import CheckpointError, ConfigError
from poros_hf.hf.adapter_file import ADAPTER_CONFIG
from poros_hf.hf.adapter_repo import AdapterRepository, is_adapter, rebuild
from poros_hf.hf.capture import telling_failures
from poros_hf.hf.decoder import auto_class
from poros_hf.hf.model_config import refuse_missing_folder
from poros_hf.hf.nf4_cache import load_through
from poros_hf.hf.quantizer import PrequantisedConfig
from poros_hf.hf.streamed import streamed_reading
from poros_hf.hf.weight_files import check_download, check_local_files
from poros_hf.hub import Repository
from poros_hf.oom import Situation, explained

logger = logging.getLogger(__name__)

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
_REPOSITORY_KEYS = ("cache_dir", "local_files_only", "revision", "token")
# With these, transformers takes other weights than the usual files of the source.
_OTHER_WEIGHTS = {"gguf_file", "state_dict"}


def from_pretrained(
    model_id: str | Path,
    config: PorosConfig | None = None,
    *,
    base_model: str | None = None,
    is_trainable: bool = False,
    nf4_cache: str | Path | None = None,
    **kwargs: Any,
) -> Any:
    """Load a causal language model whose decoder is streamed, or one with its adapter.

    Takes 16-bit checkpoints, which are quantised weight by weight, and checkpoints that are 4-bit
    already (`*-bnb-4bit`), which `AutoModelForCausalLM` refuses together with a PorosConfig. How
    those are quantised is theirs to say: nested or not, NF4 or FP4, with modules left out.

    Takes adapters as well: with an `adapter_config.json` in it, the folder or repository names its
    base in that file, and in `poros_config.json` how to stream it. The result is a PeftModel whose
    adapter has the type that it was saved in.

    Args:
        model_id: Folder, or repository on the Hub, of a model or an adapter.
        config: How to quantise and stream. By default what is stored beside an adapter, else
            PorosConfig(). Its compute_dtype holds for checkpoints that are 4-bit already, its
            quantisation does not.
        base_model: For an adapter: where its base is, if not where the adapter says.
        is_trainable: For an adapter: whether to go on training it.
        nf4_cache: Folder in which quantised weights of 16-bit checkpoints are kept: the first load
            writes them there, and later ones read a quarter of the bytes. By default none are kept.
        **kwargs: As for `AutoModelForCausalLM.from_pretrained`; `dtype` is the config's
            compute_dtype by default. With an adapter, `revision` is the adapter's and `subfolder`
            is refused; the rest is the base's.

    Returns:
        The transformers model, in evaluation mode (add an adapter to train it), or a PeftModel.

    Raises:
        CheckpointError: The checkpoint is quantised in another format, or the base of an adapter
            is not here.
        ConfigError: `config` is something else, or its fields are among `kwargs`.
        HubError: The folder does not exist.
        PorosError: See docs/errors.md; raised before weights are read wherever possible.
    """
    _check_arguments(config, kwargs)
    source = _repository(str(model_id), kwargs)
    refuse_missing_folder(source.name)
    if "subfolder" in kwargs or not is_adapter(source):
        _refuse_adapter_arguments(source.name, base_model, is_trainable)
        return _load_base(source.name, config or PorosConfig(), nf4_cache=nf4_cache, **kwargs)
    adapter = AdapterRepository(source, base_model)
    load_base = functools.partial(_load_base, nf4_cache=nf4_cache, **{**kwargs, "revision": None})
    return rebuild(adapter, config, load_base, is_trainable=is_trainable)


def _check_arguments(config: Any, kwargs: dict[str, Any]) -> None:
    """Refuse other configs, and fields of ours that stand outside of one."""
    require_config(config)
    ours = (*(item.name for item in fields(PorosConfig)), "quantization_config")
    loose = [name for name in ours if name in kwargs]
    if loose:
        raise ConfigError(
            "config-type",
            f"{', '.join(loose)} given as keywords; quantisation and streaming are settled by a "
            "PorosConfig, the second argument",
            remedies=["pass PorosConfig(...) with these fields"],
            fields=loose,
        )


def read_config(model_id: str, config: PorosConfig, **location: Any) -> Any:
    """Read a checkpoint's config, and check that what it says can be streamed.

    Args:
        model_id: Folder, or repository on the Hub.
        config: How to quantise and stream.
        **location: Those of `_LOCATION_KEYS` that were given.

    Raises:
        CheckpointError: The checkpoint is quantised in another format.
    """
    model_config = AutoConfig.from_pretrained(model_id, **location)
    return _told(model_id, config, model_config)


def _load_base(
    model_id: str, config: PorosConfig, *, nf4_cache: str | Path | None = None, **kwargs: Any
) -> Any:
    wish = kwargs.pop("torch_dtype", None)  # the older name, which transformers still takes
    kwargs.setdefault("dtype", wish or getattr(torch, config.compute_dtype))
    location = {key: kwargs[key] for key in _LOCATION_KEYS if key in kwargs}
    model_config = read_config(model_id, config, **location)
    is_quantised = getattr(model_config, "quantization_config", None) is not None
    if nf4_cache is None or is_quantised:
        if is_quantised and nf4_cache is not None:
            logger.info("%s is quantised already; nothing is kept of it", model_id)
        return _load(model_id, model_config, config, kwargs)
    return load_through(
        Path(nf4_cache),
        _repository(model_id, kwargs),
        model_config,
        config,
        _load_base,
        kwargs,
    )


def _load(model_id: str, model_config: Any, config: PorosConfig, kwargs: dict[str, Any]) -> Any:
    source = _repository(model_id, kwargs)
    if not kwargs.keys() & _OTHER_WEIGHTS:
        place = {key: kwargs[key] for key in ("subfolder", "variant") if kwargs.get(key)}
        check_local_files(source, model_config, **place)
        check_download(source, model_config, config, kwargs.get("subfolder") or "")
    if getattr(model_config, "quantization_config", None) is None:
        kwargs["quantization_config"] = config
    # Reading ahead fills the device with tensors that wait to be captured.
    with (
        environment_variable("HF_DEACTIVATE_ASYNC_LOAD", "1"),
        _reader(config, kwargs),
        explained(Situation(), f"loading {model_id}"),
        telling_failures(),
    ):
        return auto_class(model_config).from_pretrained(model_id, config=model_config, **kwargs)


def _reader(config: PorosConfig, kwargs: dict[str, Any]) -> AbstractContextManager[None]:
    """Return the context that reads as `nf4_load_strategy` says, and log which one it is.

    Raises:
        ConfigError: Streamed reading was asked for and the weights do not come from safetensors.
    """
    strategy = config.nf4_load_strategy
    others = sorted(kwargs.keys() & _OTHER_WEIGHTS)
    if others and strategy == "streamed":
        raise ConfigError(
            "load-strategy",
            f"nf4_load_strategy='streamed' reads safetensors files, and {', '.join(others)} was "
            "given",
            remedies=["leave it out", "set nf4_load_strategy='auto'"],
            arguments=others,
        )
    if others or strategy == "standard":
        why = f"{', '.join(others)} was given" if others else "nf4_load_strategy says so"
        logger.info("loading with transformers' own reader: %s", why)
        return nullcontext()
    logger.info("loading with the streamed reader (nf4_load_strategy=%r)", strategy)
    return streamed_reading()


def _repository(name: str, kwargs: dict[str, Any]) -> Repository:
    return Repository(
        name=name, **{key: kwargs[key] for key in _REPOSITORY_KEYS if kwargs.get(key) is not None}
    )


def _told(model_id: str, config: PorosConfig, model_config: Any) -> Any:
    stored = getattr(model_config, "quantization_config", None)
    if stored is not None:
        model_config.quantization_config = _prequantised(model_id, config, stored)
    return model_config


def _refuse_adapter_arguments(name: str, base_model: str | None, is_trainable: bool) -> None:
    if base_model is None and not is_trainable:
        return
    raise ConfigError(
        "not-an-adapter",
        f"{name} has no {ADAPTER_CONFIG}, and base_model= and is_trainable= are for adapters",
        remedies=["leave them out", "check the name of the adapter"],
        repository=name,
    )


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
