"""The quantizer that transformers finds under PorosConfig's `quant_method`."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from transformers import BitsAndBytesConfig
from transformers.quantizers.auto import (
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from poros_hf.config import PorosConfig
from poros_hf.errors import UnsupportedModelError
from poros_hf.hf.compat import check_versions
from poros_hf.hf.session import QUANTISED_BEFORE, QUANTISED_HERE, attach
from poros_hf.runtime import runtime_for
from poros_hf.shard_index import check_files
from poros_hf.units import format_bytes

if TYPE_CHECKING:
    from poros_hf.hf.capture import ModelCapture

logger = logging.getLogger(__name__)


class PrequantisedConfig(QuantizationConfigMixin):  # type: ignore[misc] # not typed
    """PorosConfig for a checkpoint that is 4-bit already.

    transformers takes a checkpoint's own quantisation from `config.quantization_config`, asks it
    for `quant_method` and reads it like a dictionary; this is both.

    Args:
        config: How to stream it.
        stored: How it was quantised: the dictionary in the checkpoint's config.json.
    """

    quant_method = PorosConfig.quant_method

    def __init__(self, config: PorosConfig, stored: dict[str, Any]) -> None:
        self.config = config
        self.stored = stored

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> PorosConfig:
        """Read what PorosConfig.to_dict wrote, which is how a config comes out of YAML or JSON."""
        return PorosConfig.from_dict(config_dict)

    def get(self, key: str, default: Any = None) -> Any:
        """Answer for `quant_method` alone: other keys would select another quantizer."""
        return self.quant_method if key == "quant_method" else default

    def to_dict(self) -> dict[str, Any]:
        """Return the stored quantisation."""
        return dict(self.stored)


def bitsandbytes_config(config: PorosConfig) -> BitsAndBytesConfig:
    """Return the stock config that quantises as `config` does."""
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=config.quantization,
        bnb_4bit_use_double_quant=config.double_quant,
        bnb_4bit_compute_dtype=config.compute_dtype,
    )


class PorosHfQuantizer(Bnb4BitHfQuantizer):  # type: ignore[misc] # transformers is not typed
    """Stock bitsandbytes quantisation whose results go to the host store.

    The model it leaves behind says `bitsandbytes` in its config, so that what it saves loads
    without this package.

    Args:
        quantization_config: A PorosConfig, or a PrequantisedConfig.
        **kwargs: As transformers passes them.
    """

    def __init__(
        self, quantization_config: PorosConfig | PrequantisedConfig, **kwargs: Any
    ) -> None:
        if isinstance(quantization_config, PrequantisedConfig):
            self.poros_config = quantization_config.config
            self._store_fields: tuple[str, ...] = QUANTISED_BEFORE
            stock = BitsAndBytesConfig.from_dict(quantization_config.stored)
            stock.bnb_4bit_compute_dtype = getattr(torch, self.poros_config.compute_dtype)
        else:
            self.poros_config = quantization_config
            self._store_fields = QUANTISED_HERE
            stock = bitsandbytes_config(quantization_config)
        self.capture: ModelCapture | None = None
        super().__init__(stock, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> PorosHfQuantizer:
        """Return itself: transformers copies converters, and with them the quantizer they hold."""
        return self

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Refuse what cannot be streamed before anything is read."""
        check_versions()
        refuse_device_map(kwargs.get("device_map"))
        super().validate_environment(*args, **kwargs)

    def update_device_map(self, device_map: Any) -> dict[str, Any]:
        """Put everything that is not streamed on one device, whatever `auto` would have done."""
        if isinstance(device_map, dict):
            return device_map
        device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
        return {"": device}

    def param_element_size(self, model: Any, param_name: str, param: torch.Tensor) -> float:
        """Return 0 for streamed weights, for which transformers must not reserve device memory."""
        if self.capture is not None and self.capture.wants(param_name):
            return 0.0
        size: float = super().param_element_size(model, param_name, param)
        return size

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        """Have embedding and head pass through the operation that captures, too."""
        if self.capture is not None and self.capture.wants_dense(param_name):
            return True
        needs: bool = super().param_needs_quantization(model, param_name, **kwargs)
        return needs

    def get_quantize_ops(self) -> Any:
        """Return the operation that quantises and captures."""
        from poros_hf.hf.capture import CaptureQuantize

        return CaptureQuantize(self)

    def get_weight_conversions(self) -> list[Any]:
        """Return the stock conversions with the operation that captures in their place."""
        from poros_hf.hf.capture import CaptureDeserialize

        conversions: list[Any] = super().get_weight_conversions()
        for conversion in conversions:
            conversion.operations = [CaptureDeserialize(self) for _ in conversion.operations]
        return conversions

    def _process_model_before_weight_loading(
        self, model: Any, device_map: Any, **kwargs: Any
    ) -> None:
        from poros_hf.hf.capture import ModelCapture
        from poros_hf.hf.streamed import refuse_other_reader
        from poros_hf.nf4 import WeightFormat

        if self.poros_config.nf4_load_strategy == "streamed":
            refuse_other_reader()
        # Both doors pass here, with all files on this machine and none of them open.
        check_files(kwargs.get("checkpoint_files") or [], is_quantised=self.pre_quantized)
        super()._process_model_before_weight_loading(model, device_map, **kwargs)
        weight_format = WeightFormat(
            is_nested=self.quantization_config.bnb_4bit_use_double_quant,
            storage=self.quantization_config.bnb_4bit_quant_storage,
        )
        runtime = runtime_for(single_device(device_map))
        self.capture = ModelCapture(model, self.poros_config, weight_format, runtime)
        self._warn_of_float32(model)

    def _warn_of_float32(self, model: Any) -> None:
        """Name the cost of a float32 load; TRL asks for one unless it is told otherwise."""
        capture = self.capture
        assert capture is not None, "the model has not been planned"
        stays_bytes = sum(
            parameter.numel() * parameter.element_size()
            for name, parameter in model.named_parameters()
            if parameter.dtype == torch.float32 and not capture.is_packed(name)
        )
        if model.dtype == torch.float32:
            logger.warning(
                "loading in float32: embedding, head and norms take %s of memory, and half of it "
                "in bfloat16, as does what the head moves in every step. Pass dtype='bfloat16' "
                "(to TRL: model_init_kwargs={'dtype': 'bfloat16'}).",
                format_bytes(stays_bytes),
            )

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        model = super()._process_model_after_weight_loading(model, **kwargs)
        assert self.capture is not None, "weights were loaded before they were planned"
        attach(model, self.capture.finish(self._store_fields))
        self.capture = None
        # The state dict is in stored form already, so nothing of ours is to be undone by saving.
        model._weight_conversions = [
            conversion
            for conversion in getattr(model, "_weight_conversions", None) or []
            if not _is_capture(conversion)
        ]
        return model


def _is_capture(conversion: Any) -> bool:
    from poros_hf.hf.capture import CaptureDeserialize

    operations = getattr(conversion, "operations", [])
    return any(isinstance(operation, CaptureDeserialize) for operation in operations)


def refuse_device_map(device_map: Any) -> None:
    """Refuse a device map with more than one device, or with cpu or disk beside a GPU.

    Raises:
        UnsupportedModelError: The map and what to do are named.
    """
    if not isinstance(device_map, dict):
        return
    devices = {str(device) for device in device_map.values()}
    allowed_cpu = not torch.cuda.is_available()
    if len(devices) == 1 and "disk" not in devices and ("cpu" not in devices or allowed_cpu):
        return
    raise UnsupportedModelError(
        "device-map",
        f"device_map with {', '.join(sorted(devices))}: a streamed model computes on one GPU and "
        "keeps its base in host memory by itself",
        remedies=["leave device_map out", 'use device_map={"": 0}'],
        devices=sorted(devices),
    )


def single_device(device_map: dict[str, Any]) -> torch.device:
    """Return the one device of a map that `refuse_device_map` let through."""
    device = next(iter(device_map.values()))
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def register() -> None:
    """Tell transformers about the quantizer; idempotent."""
    if PorosConfig.quant_method not in AUTO_QUANTIZER_MAPPING:
        # Without a config class of this name a checkpoint's own quantisation would be ignored.
        register_quantization_config(PorosConfig.quant_method)(PrequantisedConfig)
        register_quantizer(PorosConfig.quant_method)(PorosHfQuantizer)
