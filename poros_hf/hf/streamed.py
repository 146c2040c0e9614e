"""Loading through our own reader: transformers keeps the names, we open the files.

transformers decides which file holds what, which tensor of the checkpoint is which of the model,
what is tied, converted, missing or superfluous. All it needs for that is a state dict whose values
read themselves when they are indexed. Stock values are slices of mapped files, and mapped pages
count as resident until the last shard is done. Ours read with `CheckpointReader`.

Bytes that go to the store as they are (packed weights and their scales, embedding and head) are
read right into it;
what transformers gets in their place is a tensor of one item on the device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.utils import logging as transformers_logging

from poros_hf.environment import HeapTrimmer
from poros_hf.errors import ConfigError
from poros_hf.hf.capture import CaptureDeserialize, ModelCapture
from poros_hf.hf.quantizer import PorosHfQuantizer
from poros_hf.reading import CheckpointReader, WantedTensor, can_cast, torch_dtype
from poros_hf.shard_index import check_files
from poros_hf.shards import StoredTensor
from poros_hf.store import TensorSpec
from poros_hf.units import GB, GIB, MIB, format_bytes

logger = logging.getLogger(__name__)

_HOOK = "_load_pretrained_model"
_is_active: ContextVar[bool] = ContextVar("poros_streamed_reading", default=False)
# Bytes read between two clean-ups of the heap: it grows by what is quantised on the CPU, and hardly
# where weights go straight to a device.
_TRIM_BYTES = {"cpu": 64 * MIB, "cuda": GIB}
# Last part of a tensor's name in a 4-bit checkpoint -> its part in the store.
_STORED_PARTS = {"weight": "packed", "absmax": "absmax", "nested_absmax": "nested_absmax"}


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor of the checkpoint that is read when it is indexed, as safetensors' slices are.

    Attributes:
        stored: Its type and shape.
        load: Reads it.
    """

    stored: StoredTensor
    load: Callable[[], torch.Tensor]

    def get_dtype(self) -> str:
        """Return the name of its type, such as `BF16`."""
        return self.stored.dtype

    def get_shape(self) -> list[int]:
        """Return its shape."""
        return list(self.stored.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.load()[index]


@contextmanager
def streamed_reading() -> Iterator[None]:
    """Make transformers read through our reader what this thread loads with a PorosConfig."""
    stock = PreTrainedModel.__dict__[_HOOK]

    def load(
        model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, **kwargs: Any
    ) -> Any:
        quantizer = load_config.hf_quantizer
        if not _is_active.get() or not isinstance(quantizer, PorosHfQuantizer):
            return stock.__func__(model, state_dict, checkpoint_files, load_config, **kwargs)
        try:
            with _open_checkpoint(model, checkpoint_files, load_config) as lazy:
                return stock.__func__(model, lazy, checkpoint_files, load_config, **kwargs)
        except BaseException:
            assert quantizer.capture is not None, "weights are read before they are planned"
            quantizer.capture.close()  # the traceback keeps it alive, and its page lock with it
            raise

    setattr(PreTrainedModel, _HOOK, staticmethod(load))
    token = _is_active.set(True)
    try:
        yield
    finally:
        _is_active.reset(token)
        setattr(PreTrainedModel, _HOOK, stock)


def refuse_other_reader() -> None:
    """Refuse a load that is to be streamed and came in by a door of transformers.

    Raises:
        ConfigError: transformers' own reader is about to read.
    """
    if not _is_active.get():
        raise ConfigError(
            "load-strategy",
            "nf4_load_strategy='streamed' is for poros_hf.from_pretrained; AutoModel reads with "
            "transformers' own reader, which maps every file of the checkpoint",
            remedies=["use poros_hf.from_pretrained", "set nf4_load_strategy='auto'"],
        )


@contextmanager
def _open_checkpoint(
    model: Any, checkpoint_files: list[str], load_config: Any
) -> Iterator[dict[str, LazyTensor]]:
    """Yield the state dict of a checkpoint, while its files are open and are read ahead."""
    quantizer = load_config.hf_quantizer
    names = _NameMap(model, load_config.weight_mapping or [], quantizer.capture)
    headers = check_files(checkpoint_files, is_quantised=quantizer.pre_quantized)
    wanted = [
        WantedTensor(
            name=name,
            path=header.path,
            data_bytes=header.data_bytes,
            stored=stored,
            target=names.target(name, stored, header.data_bytes),
            is_ahead=names.is_known(name),
        )
        for header in headers
        for name, stored in header.tensors.items()
    ]
    wanted.sort(key=lambda item: dot_natural_key(item.name))  # as transformers asks for them
    total_bytes = sum(item.num_bytes for item in wanted if item.is_ahead)
    heap = HeapTrimmer(_TRIM_BYTES[names.capture.device.type])

    def note(num_bytes: int) -> None:
        bar.update(num_bytes)
        heap.note(num_bytes)

    with _progress(total_bytes) as bar, CheckpointReader(wanted, note) as reader:
        yield {item.name: _lazy(item, reader, names) for item in wanted}
        _report(bar, total_bytes, reader)


def _lazy(wanted: WantedTensor, reader: CheckpointReader, names: _NameMap) -> LazyTensor:
    device = names.capture.device
    target = wanted.target
    if target is None:
        return LazyTensor(wanted.stored, lambda: reader.read(wanted.name, device))

    def settle() -> torch.Tensor:
        reader.settle(wanted.name)
        names.note_written(wanted.name)
        shape = wanted.stored.shape
        item = torch.empty([1] * len(shape), dtype=target.dtype, device=device)
        return item.expand(shape)

    return LazyTensor(wanted.stored, settle)


class _NameMap:
    """Which tensors of a checkpoint the model wants, and which of them the store takes as they are.

    The names are mapped by transformers' own rules for the model.
    """

    def __init__(self, model: Any, mapping: list[Any], capture: ModelCapture) -> None:
        self.capture = capture
        self._prefix = model.base_model_prefix
        self._known = model.state_dict()
        self._renamings = [rule for rule in mapping if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in mapping if isinstance(rule, WeightConverter)]
        self._rule = {
            pattern: rule for rule in self._converters for pattern in rule.source_patterns
        }
        self._places: dict[str, tuple[str, str]] = {}

    def is_known(self, name: str) -> bool:
        """Tell whether the model has a place for a tensor of the checkpoint."""
        return self._rename(name)[0] in self._known

    def target(self, name: str, stored: StoredTensor, data_bytes: int) -> torch.Tensor | None:
        """Return the store's memory for a tensor that goes there as it is, or but cast, or None.

        What is not as planned has none: it is refused where everybody's is.
        """
        renamed, pattern = self._rename(name)
        part = _STORED_PARTS.get(name.rpartition(".")[2])
        if part is None or not self.capture.wants(renamed):
            return None
        is_dense = self.capture.wants_dense(renamed)
        rule = self._rule.get(pattern or "")
        if not (is_dense if rule is None else _is_capture(rule)):
            return None
        key, tensor = place = self.capture.place(renamed, part)
        spec = self.capture.store.layout(key).specs.get(tensor)
        found = TensorSpec(tensor, torch_dtype(stored.dtype), stored.shape)
        is_castable = is_dense and can_cast(data_bytes, stored)
        if spec is None or stored.shape != spec.shape or not (found == spec or is_castable):
            return None
        self._places[name] = place
        return self.capture.store.read(*place).view(-1)

    def note_written(self, name: str) -> None:
        """Tell the store that a tensor has arrived."""
        self.capture.store.note_written(*self._places[name])

    def _rename(self, name: str) -> tuple[str, str | None]:
        renamed, pattern = rename_source_key(
            name, self._renamings, self._converters, self._prefix, self._known
        )
        if renamed not in self._known and name in self._known:
            return name, None
        return renamed, pattern


def _is_capture(rule: Any) -> bool:
    return bool(rule.operations) and all(
        isinstance(operation, CaptureDeserialize) for operation in rule.operations
    )


@contextmanager
def _progress(total_bytes: int) -> Iterator[Any]:
    """Show bytes and bytes per second in place of transformers' own bar, which counts weights."""
    is_shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    bar = tqdm(
        total=total_bytes,
        desc="reading and quantising",
        unit="B",
        unit_scale=True,
        disable=not is_shown,
    )
    try:
        yield bar
    finally:
        bar.close()
        if is_shown:
            transformers_logging.enable_progress_bar()


def _report(bar: Any, total_bytes: int, reader: CheckpointReader) -> None:
    seconds = bar.format_dict["elapsed"]
    logger.info(
        "read %s in %.1f s, %.2f GB/s, %s the page cache",
        format_bytes(total_bytes),
        seconds,
        total_bytes / GB / max(seconds, 1e-9),
        "past" if reader.is_direct else "through",
    )
