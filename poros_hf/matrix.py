"""HostMatrix: a dense weight in the store, read by rows: the embedding and the head.

[Note: tile lifetime]
Whoever reads rows gets device memory of its own, which lives as long as somebody refers to it. No
tile is overwritten by another, so that a reader may keep one; a reader that drops each tile before
the next leaves two at most, and none once it is through. It is memory that replayed layers use as
well: a tile that is kept while a layer runs is an error. The memory comes from the
compute stream's allocator, so a tile's copy waits for what that stream was still doing with the
memory, and its reader's stream waits for the copy.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import record_function

from poros_hf.errors import StreamStateError
from poros_hf.oom import Situation, explained
from poros_hf.runtime_base import Runtime
from poros_hf.store import HostStore

WEIGHT = "weight"
_WORD = torch.int64


@dataclass(frozen=True, slots=True)
class _Tile:
    """Rows on their way to the device, for the stream that was current when they were asked for."""

    start: int
    end: int
    values: torch.Tensor
    copied: Any
    stream: Any


class HostMatrix:
    """One matrix of the store, [rows, columns], and its reads.

    Args:
        store: Has an entry `key` with one tensor, `weight`.
        key: EMBEDDING or HEAD.
        runtime: The device.

    Attributes:
        moved_bytes: Copied or gathered from the host so far.
        poison: Overwrite a tile with 0xFF before the copy, so that a read without a wait shows.
        situation: What the model is doing, for errors.
    """

    def __init__(self, store: HostStore, key: str, runtime: Runtime) -> None:
        self.key = key
        self.spec = store.layout(key).specs[WEIGHT]
        self.device = runtime.device
        self.moved_bytes = 0
        self.poison = False
        self.situation = Situation()
        self._store = store
        self._runtime = runtime
        self._lock = threading.RLock()
        self._allocated = runtime.new_event(f"allocated[{key}]")
        self._ahead: _Tile | None = None
        self._latest: StorageWeakRef | None = None
        self._latest_end = 0
        # Sweeps since a decoder layer ran, and before one ran last: backward reads as forward did.
        self._num_sweeps = 0
        self._num_expected = 0
        self._tile_rows = 0
        self._resident: torch.Tensor | None = None
        self._mapped: torch.Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Rows of the whole matrix."""
        return self.spec.shape[0]

    @property
    def is_resident(self) -> bool:
        """Whether the device keeps the whole matrix."""
        return self._resident is not None

    def host(self) -> torch.Tensor:
        """Return the matrix over the store's own memory, on the CPU."""
        return self._store.read(self.key, WEIGHT)

    def rows(self, start: int, end: int) -> torch.Tensor:
        """Return rows `start` to `end` on the device, [end - start, columns].

        Rows that follow those read last are taken for a sweep, and the next ones are staged.

        Raises:
            StreamStateError: The streamer is closed.

        Streams: the current stream waits for these rows' copy; the host does not block.
        """
        with self._lock:
            self._refuse_if_closed()
            if self._resident is not None:
                return self._resident[start:end]
            tile = self._take_ahead(start, end) or self._stage(start, end)
            self._runtime.wait(tile.copied, tile.stream)
            self._look_ahead(tile)
            return tile.values

    def whole(self) -> torch.Tensor:
        """Return all rows on the device; see `rows`."""
        return self.rows(0, self.num_rows)

    def gather(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the row of each id, [*ids.shape, columns], on the device.

        From page-locked memory the device reads the rows itself. From pageable memory the host
        collects them, for which it has to wait for the ids.

        Raises:
            StreamStateError: The streamer is closed.
        """
        with self._lock:
            self._refuse_if_closed()
            if self._resident is not None:
                return torch.nn.functional.embedding(ids, self._resident)
            words = self._readable_words()
        rows = words.index_select(0, ids.reshape(-1).to(words.device)).to(self.device)
        with self._lock:
            self.moved_bytes += rows.nbytes
        return rows.view(self.spec.dtype).view(*ids.shape, self.spec.shape[1])

    def keep_resident(self, wish: bool) -> None:
        """Keep the whole matrix on the device from now on, or give its memory back.

        Streams: blocks the host until the matrix is there: later readers may be on any stream.
        """
        with self._lock:
            if wish and self._resident is None:
                resident = self.whole()
                self._runtime.drain()
                self._resident = resident
            elif not wish:
                self._resident = None

    def end_sweeps(self) -> None:
        """Give back what was staged for a sweep that did not go on: a decoder layer runs."""
        with self._lock:
            self._take_ahead(-1, -1)
            if self._num_sweeps:
                self._num_sweeps, self._num_expected = 0, self._num_sweeps

    def close(self) -> None:
        """Forget all device memory; the store must still be open. Idempotent."""
        with self._lock:
            self.end_sweeps()
            self._resident = self._mapped = None

    def _stage(self, start: int, end: int) -> _Tile:
        source = self.host()[start:end].reshape(-1).view(torch.uint8)
        # Rows come and go between two layers, when nothing of a layer is on the device; the whole
        # matrix may stay.
        is_whole = end - start == self.num_rows
        allocate = self._runtime.allocate if is_whole else self._runtime.allocate_scratch
        with explained(self.situation, f"reading rows {start} to {end} of the {self.key}"):
            memory = allocate(source.numel())
        stream = self._runtime.current_stream()
        copied = self._runtime.new_event(f"copied[{self.key} {start}]")
        self._runtime.record(self._allocated, stream)
        with record_function(f"poros.stage[{self.key} {start}:{end}]"):
            self._runtime.stage(
                source, memory, after=self._allocated, done=copied, poison=self.poison
            )
        self.moved_bytes += source.numel()
        values = memory.view(self.spec.dtype).view(end - start, self.spec.shape[1])
        return _Tile(start, end, values, copied, stream)

    def _take_ahead(self, start: int, end: int) -> _Tile | None:
        """Return the tile that was staged ahead if it is the one asked for, else give it back."""
        tile, self._ahead = self._ahead, None
        if tile is None:
            return None
        is_wanted = (tile.start, tile.end) == (start, end)
        if is_wanted and tile.stream == self._runtime.current_stream():
            return tile
        # Its memory may be somebody else's at once, on this stream, and the copy is under way.
        self._runtime.wait(tile.copied, tile.stream)
        return None

    def _look_ahead(self, tile: _Tile) -> None:
        """In a sweep, stage the next rows, unless the reader holds two tiles already."""
        is_sweep = tile.start in (0, self._latest_end)
        holds_former = self._latest is not None and not self._latest.expired()
        self._latest = StorageWeakRef(tile.values.untyped_storage())
        self._latest_end = tile.end
        if not is_sweep:
            return
        if tile.start == 0:
            self._tile_rows = tile.end
        self._num_sweeps += tile.end == self.num_rows
        start = self._next_start(tile)
        if start is not None and not holds_former:
            self._ahead = self._stage(start, min(start + self._tile_rows, self.num_rows))

    def _next_start(self, tile: _Tile) -> int | None:
        """Return where the rows begin that will be read next; backward reads as forward did."""
        if tile.end < self.num_rows:
            return tile.end
        begins_anew = self._num_sweeps < self._num_expected and self._tile_rows < self.num_rows
        return 0 if begins_anew else None

    def _readable_words(self) -> torch.Tensor:
        """Return the matrix as the widest words that divide a row, where rows are gathered."""
        if self._mapped is None:
            raw = self.host().reshape(-1).view(torch.uint8)
            mapped = self._runtime.map_host(raw) if self._store.is_pinned else None
            raw = raw if mapped is None else mapped
            row_bytes = raw.numel() // self.num_rows
            word = _WORD if row_bytes % _WORD.itemsize == 0 else torch.uint8
            self._mapped = raw.view(word).view(self.num_rows, -1)
        return self._mapped

    def _refuse_if_closed(self) -> None:
        if self._store.is_closed:
            raise StreamStateError(
                "streamer-closed",
                f"the {self.key} was read after the streamer was closed",
                remedies=["load the model again"],
            )
