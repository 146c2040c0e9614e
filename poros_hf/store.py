"""HostStore: the frozen weights, once, in host memory, entry by entry.

An entry is what crosses the link at once: a block of decoder layers, the embedding or the head.
It is a run of bytes in the arena with a layout table; the same table, laid over a device slot,
gives the tensors on the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from poros_hf.arena import HostArena
from poros_hf.errors import CheckpointError, StreamStateError, name_offenders
from poros_hf.runtime_base import Runtime
from poros_hf.units import align_up

EMBEDDING = "embedding"
HEAD = "head"


def block_key(block: int) -> str:
    """Return the key of a block's entry."""
    return f"block.{block}"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, type and shape of one stored tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size without padding."""
        return math.prod(self.shape) * self.dtype.itemsize


class EntryLayout:
    """Where each tensor of an entry lies, from the start of the entry.

    Every tensor starts at a multiple of 256 bytes, so that kernels see the alignment which the
    allocator would give.
    """

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self.specs = {spec.name: spec for spec in specs}
        if len(self.specs) != len(specs):
            raise ValueError("two tensors of one entry have the same name")
        self.offsets: dict[str, int] = {}
        position = 0
        for spec in specs:
            self.offsets[spec.name] = position
            position = align_up(position + spec.num_bytes)
        self.num_bytes = position

    def lay_over(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the entry's tensors as views of `buffer`, uint8 [at least num_bytes].

        The views live as long as the memory does; what they hold is up to the buffer's owner.
        """
        views = {}
        for name, spec in self.specs.items():
            start = self.offsets[name]
            raw = buffer[start : start + spec.num_bytes]
            views[name] = raw.view(spec.dtype).view(spec.shape)
        return views


@dataclass(frozen=True, slots=True)
class _Place:
    layout: EntryLayout
    offset_bytes: int


class HostStore:
    """Entries in one arena: written tensor by tensor while loading, read-only once sealed.

    Args:
        entries: Key of each entry -> its tensors, in the order they lie in memory.
        runtime: Page-locks the arena.
        must_pin: See `HostArena`.

    Raises:
        CapacityError: Not enough RAM.
        HostSetupError: Page-locking failed and `must_pin` is set.
    """

    def __init__(
        self,
        entries: Mapping[str, Sequence[TensorSpec]],
        runtime: Runtime,
        *,
        must_pin: bool = False,
    ) -> None:
        self._places: dict[str, _Place] = {}
        position = 0
        for key, specs in entries.items():
            layout = EntryLayout(specs)
            self._places[key] = _Place(layout, position)
            position += layout.num_bytes
        self._arena = HostArena(position, runtime, must_pin=must_pin)
        self._missing = {key: set(place.layout.specs) for key, place in self._places.items()}
        self._is_sealed = False
        self.is_closed = False

    @property
    def num_bytes(self) -> int:
        """Size of the whole store."""
        return self._arena.num_bytes

    @property
    def is_pinned(self) -> bool:
        """Whether the store's memory is page-locked (always true without a GPU)."""
        return self._arena.is_pinned

    @property
    def keys(self) -> list[str]:
        """Keys of all entries, in memory order."""
        return list(self._places)

    def layout(self, key: str) -> EntryLayout:
        """Return the layout table of an entry."""
        return self._places[key].layout

    def write(self, key: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy tensors of an entry, from any device, into their places.

        Raises:
            CheckpointError: A tensor's type or shape is not the one that was planned.
            StreamStateError: The store is sealed.
            HostSetupError: Page-locking failed meanwhile and `must_pin` is set.
        """
        if self._is_sealed:
            raise StreamStateError("store-sealed", f"entry {key!r} of a sealed store was written")
        self._arena.check()
        place = self._places[key]
        for name, tensor in tensors.items():
            spec = place.layout.specs[name]
            if tensor.dtype != spec.dtype or tuple(tensor.shape) != spec.shape:
                raise CheckpointError(
                    "weight-layout",
                    f"{name} is {tensor.dtype} {tuple(tensor.shape)}, planned was {spec.dtype} "
                    f"{spec.shape}",
                    remedies=["quantise the original 16-bit checkpoint instead"],
                    name=name,
                )
            self.read(key, name).copy_(tensor)
            self._missing[key].discard(name)

    def seal(self) -> None:
        """End writing.

        Raises:
            CheckpointError: Tensors were never written; they are named.
            HostSetupError: Page-locking failed and `must_pin` is set.
        """
        self._arena.settle()
        missing = [name for names in self._missing.values() for name in sorted(names)]
        if missing:
            raise CheckpointError(
                "weights-missing",
                f"the checkpoint has no values for {len(missing)} weights: "
                f"{name_offenders(missing)}",
                remedies=["download the checkpoint again"],
                missing=missing,
            )
        self._is_sealed = True

    def entry(self, key: str) -> torch.Tensor:
        """Return all bytes of an entry, uint8 [layout(key).num_bytes], to copy from."""
        place = self._places[key]
        return self._arena.view(place.offset_bytes, place.layout.num_bytes)

    def read(self, key: str, name: str) -> torch.Tensor:
        """Return one tensor over the store's own memory, with a storage of its own."""
        place = self._places[key]
        spec = place.layout.specs[name]
        offset = place.offset_bytes + place.layout.offsets[name]
        return self._arena.view(offset, spec.num_bytes).view(spec.dtype).view(spec.shape)

    def note_written(self, key: str, name: str) -> None:
        """Count a tensor as written that was filled in place, through what `read` returns."""
        self._missing[key].discard(name)

    def is_written(self, key: str, name: str) -> bool:
        """Tell whether a tensor has its values."""
        return name not in self._missing[key]

    def close(self) -> None:
        """Release the page lock; idempotent."""
        self.is_closed = True
        self._arena.close()


def total_bytes(specs: Iterable[TensorSpec]) -> int:
    """Return the bytes that an entry of these tensors takes."""
    return EntryLayout(list(specs)).num_bytes
