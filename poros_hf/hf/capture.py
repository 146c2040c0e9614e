"""From a loading model to a sealed store: each weight is captured as soon as it is 4-bit.

transformers hands every quantised weight to an operation and puts what comes back into the
module. The operations here give the bytes to the store and put a placeholder back, so that one
weight at a time is on the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from transformers.integrations.bitsandbytes import Bnb4bitDeserialize, Bnb4bitQuantize

from poros_hf.config import PorosConfig
from poros_hf.errors import PorosError
from poros_hf.head import HostWeight
from poros_hf.hf.decoder import (
    DecoderLayer,
    find_decoder_layers,
    quantised_linears,
    refuse_unquantised,
    refuse_written,
)
from poros_hf.hf.dense import find_dense
from poros_hf.hf.planning import refuse_small_card
from poros_hf.hf.replayable import is_replayable
from poros_hf.hf.session import StreamSession, refuse_fixed_layers
from poros_hf.layers import BlockHold, swap_class
from poros_hf.linear import StreamedLinear4bit, WeightHandle
from poros_hf.matrix import WEIGHT, HostMatrix
from poros_hf.nf4 import (
    PackedWeight,
    TableCache,
    WeightFormat,
    placeholder,
    take_apart,
    tensor_specs,
)
from poros_hf.oom import Situation, explained
from poros_hf.planner import block_size, plan_stream
from poros_hf.replay import LayerReplayer
from poros_hf.runtime_base import Runtime
from poros_hf.store import HostStore, TensorSpec, block_key, total_bytes
from poros_hf.streamer import Streamer


class ModelCapture:
    """The store of one model while it is being filled.

    Everything is sized from the meta model, so that what does not fit is refused before a weight
    is read.

    Args:
        model: On the meta device, its linear layers replaced by `bnb.nn.Linear4bit`.
        config: Block size, slots and host memory.
        weight_format: How the weights are, or will be, quantised.
        runtime: The device that will compute.

    Raises:
        UnsupportedModelError: The decoder cannot be streamed.
        ConfigError: The config does not fit the number of blocks.
        CapacityError: The store does not fit into RAM, or the slots alone are over the budget.
    """

    def __init__(
        self, model: Any, config: PorosConfig, weight_format: WeightFormat, runtime: Runtime
    ) -> None:
        # Weights that were 4-bit already say themselves whether their scales are quantised.
        self._config = replace(config, double_quant=weight_format.is_nested)
        self._runtime = runtime
        self._layers = find_decoder_layers(model)
        refuse_unquantised(self._layers, config_bytes(config))
        refuse_written(self._layers)
        fixed = {type(it.module).__name__ for it in self._layers if not is_replayable(it.module)}
        self._fixed_layers = tuple(sorted(fixed))
        refuse_fixed_layers(config.micro_batch_size, self._fixed_layers)
        size = block_size(config)
        self._block_of_layer = [index // size for index in range(len(self._layers))]
        self._block_of_weight: dict[str, int] = {}
        entries: dict[str, list[TensorSpec]] = {}
        for layer, block in zip(self._layers, self._block_of_layer, strict=True):
            specs = entries.setdefault(block_key(block), [])
            for path, module in quantised_linears(layer):
                shape = (module.out_features, module.in_features)
                specs += tensor_specs(path, shape, weight_format)
                self._block_of_weight[f"{path}.weight"] = block
        self._plan = plan_stream([total_bytes(specs) for specs in entries.values()], config)
        refuse_small_card(model, self._config)
        self._dense = find_dense(model)
        entries.update({dense.key: [dense.spec] for dense in self._dense})
        self._store = HostStore(entries, runtime, must_pin=config.host_memory == "pinned")
        self._host_weights: dict[str, HostWeight] = {}
        # Tied weights are taken under one of their names; transformers ties the others to it.
        self._key_of_dense = {dense.names[0]: dense.key for dense in self._dense}
        self._tables = TableCache()
        self._weights: dict[str, PackedWeight] = {}

    def wants(self, name: str) -> bool:
        """Tell whether the parameter of this name goes to the store."""
        return self.is_packed(name) or self.wants_dense(name)

    def is_packed(self, name: str) -> bool:
        """Tell whether the parameter of this name goes to the store in 4 bits."""
        return name in self._block_of_weight

    @property
    def store(self) -> HostStore:
        """The store, until it is sealed by `finish`."""
        return self._store

    @property
    def device(self) -> torch.device:
        """The device that will compute, and that quantises."""
        return self._runtime.device

    def place(self, name: str, part: str) -> tuple[str, str]:
        """Return entry and tensor name in the store for one part of a weight that it wants."""
        if name in self._key_of_dense:
            return self._key_of_dense[name], WEIGHT
        path = name.removesuffix(".weight")
        return block_key(self._block_of_weight[name]), f"{path}.{part}"

    def wants_dense(self, name: str) -> bool:
        """Tell whether the parameter of this name goes to the store as it is."""
        return name in self._key_of_dense

    def take(self, name: str, weight: Any) -> Any:
        """Put a quantised weight into the store and return its placeholder.

        Parts that a reader has filled in already are left alone.

        Raises:
            UnsupportedModelError: The weight is not NF4 as it was planned for.
            CheckpointError: Its tensors have other types or shapes than planned.
        """
        path = name.removesuffix(".weight")
        packed, tensors = take_apart(path, weight, self._tables)
        key = block_key(self._block_of_weight[name])
        rest = {part: t for part, t in tensors.items() if not self._store.is_written(key, part)}
        self._store.write(key, rest)
        self._weights[name] = packed
        return placeholder(weight)

    def take_dense(self, name: str, weight: torch.Tensor) -> HostWeight:
        """Put the embedding or the head into the store and return what stands for it.

        Values that a reader has filled in already are left alone.

        Raises:
            CheckpointError: It has another shape than planned.
        """
        key = self._key_of_dense[name]
        if not self._store.is_written(key, WEIGHT):
            dtype = self._store.layout(key).specs[WEIGHT].dtype
            self._store.write(key, {WEIGHT: weight.to(dtype)})
        self._host_weights[key] = HostWeight(HostMatrix(self._store, key, self._runtime))
        return self._host_weights[key]

    def take_resident(self) -> None:
        """Take every weight of a model that is loaded, and free its memory as it goes."""
        self._take_dense_modules()
        for layer in self._layers:
            for path, module in quantised_linears(layer):
                module.weight = self.take(f"{path}.weight", module.weight)
                module.quant_state = None

    def _take_dense_modules(self) -> None:
        """Take embedding and head out of the modules, where they have not been taken before.

        A checkpoint may hold tied weights under the name that they are not taken under, and one
        that transformers finds no values for it draws at random, with a warning.
        """
        for dense in self._dense:
            if dense.key in self._host_weights:
                continue
            users = list(dense.users.values())
            weight = users[0].get_parameter(WEIGHT)
            host_weight = self.take_dense(dense.names[0], weight.data)
            for module in users:
                if module.get_parameter(WEIGHT) is weight:
                    module.weight = host_weight

    def finish(self, store_fields: tuple[str, ...]) -> StreamSession:
        """Seal the store, bind the linear layers to it and swap the decoder layers' classes.

        Args:
            store_fields: See `StreamSession`.

        Raises:
            CheckpointError: Weights are missing from the checkpoint.
        """
        self._take_dense_modules()
        self._store.seal()
        matrices = {key: weight.matrix for key, weight in self._host_weights.items()}
        streamer = Streamer(self._store, self._plan, self._runtime, matrices)
        streamer.situation.num_layers = len(self._layers)
        streamer.situation.block_size = block_size(self._config)
        is_nf4 = all(weight.state.quant_type == "nf4" for weight in self._weights.values())
        replayer = LayerReplayer(streamer)
        session = StreamSession(
            self._config, streamer, replayer, self._fixed_layers, store_fields, is_nf4
        )
        session.set_micro_batch_size(self._config.micro_batch_size)
        for layer, block in zip(self._layers, self._block_of_layer, strict=True):
            self._bind(layer, block, session)
        return session

    def close(self) -> None:
        """Give the page lock back after a load that failed; idempotent."""
        self._store.close()

    def _bind(self, layer: DecoderLayer, block: int, session: StreamSession) -> None:
        for path, module in quantised_linears(layer):
            handle = WeightHandle(session.streamer, block, self._weights[f"{path}.weight"])
            StreamedLinear4bit.bind(module, handle)
        hold = BlockHold(
            session.streamer,
            block,
            session.note_training_forward,
            session.replayer if is_replayable(layer.module) else None,
        )
        swap_class(layer.module, hold)


def config_bytes(config: PorosConfig) -> int:
    """Return the bytes per weight of the compute dtype."""
    dtype: torch.dtype = getattr(torch, config.compute_dtype)
    return dtype.itemsize


_failures: ContextVar[list[PorosError] | None] = ContextVar("poros_load_failures", default=None)


@contextmanager
def telling_failures() -> Iterator[None]:
    """Raise what went wrong with a weight; transformers puts it into a report and goes on."""
    failures: list[PorosError] = []
    token = _failures.set(failures)
    try:
        yield
    except RuntimeError as error:
        if failures:
            raise failures[0] from error
        raise
    finally:
        _failures.reset(token)


@contextmanager
def _noted(name: str) -> Iterator[None]:
    """Note what goes wrong with the weight `name` for `telling_failures`."""
    try:
        with explained(Situation(), f"loading {name}"):
            yield
    except PorosError as error:
        failures = _failures.get()
        if failures is not None:
            failures.append(error)
        raise


class CaptureQuantize(Bnb4bitQuantize):  # type: ignore[misc] # transformers is not typed
    """Quantise a weight as bitsandbytes does, and capture it."""

    def convert(self, input_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Return {parameter name: parameter or its placeholder}."""
        capture = self.hf_quantizer.capture
        dense = {name: value for name, value in input_dict.items() if capture.wants_dense(name)}
        if dense:
            return {name: capture.take_dense(name, _single(value)) for name, value in dense.items()}
        with _noted(kwargs.get("full_layer_name") or "a weight"):
            result = super().convert(input_dict, **kwargs)
        return {
            name: capture.take(name, weight) if capture.wants(name) else weight
            for name, weight in result.items()
        }


class CaptureDeserialize(Bnb4bitDeserialize):  # type: ignore[misc] # transformers is not typed
    """Put a stored 4-bit weight together as bitsandbytes does, and capture it."""

    def convert(self, input_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Return {"weight": parameter or its placeholder}."""
        is_packed = len(input_dict) > 1
        with _noted(kwargs.get("full_layer_name") or "a weight"):
            result = dict(super().convert(input_dict, **kwargs))
        name = kwargs.get("full_layer_name")
        capture = self.hf_quantizer.capture
        if name is None or not capture.wants(name):
            return result
        if capture.wants_dense(name):
            return {key: capture.take_dense(name, _single(value)) for key, value in result.items()}
        if not is_packed:
            return result
        return {key: capture.take(name, weight) for key, weight in result.items()}


def _single(value: Any) -> torch.Tensor:
    tensor: torch.Tensor = value[0] if isinstance(value, list) else value
    return tensor
