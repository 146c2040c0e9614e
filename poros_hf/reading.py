"""Reads the tensors of a checkpoint ahead of whoever asks for them, in memory of a fixed size.

[Note: pieces] A tensor is read in pieces of at most `PIECE_BYTES`, by a few threads, in the order
in which the tensors were announced. A piece goes through one of `NUM_BUFFERS` buffers: to its
place in host memory at once if it has one, else to whoever reads the tensor. So what is in memory
beside the result does not depend on the size of a tensor, a file or the checkpoint.

Files are read past the page cache, which would otherwise grow by the whole checkpoint and count
against the limits of a container; where the file system refuses that, pages are dropped behind us.
Nothing is mapped: mapped pages count as resident.

The order is a hint: a tensor that is asked for early is read at once, with buffers kept for that.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import torch

from poros_hf.errors import CheckpointError
from poros_hf.hub import download_again
from poros_hf.shards import StoredTensor

PIECE_BYTES = 8 * 2**20
NUM_BUFFERS = 16
NUM_THREADS = 4
# Buffers that reading ahead leaves free for what is asked for out of order.
_RESERVED_BUFFERS = NUM_THREADS
# Direct reads need offset, length and memory at multiples of the device's sector.
_SECTOR_BYTES = 4096
_BUFFER_BYTES = PIECE_BYTES + _SECTOR_BYTES
_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
}


def torch_dtype(name: str) -> torch.dtype:
    """Return the type that safetensors calls `name`, such as `BF16`."""
    return _DTYPES[name]


class ShardFile:
    """One open file, read past the page cache where its file system allows that.

    Args:
        path: Of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        try:
            self._descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
            self.is_direct = hasattr(os, "O_DIRECT")
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._descriptor = os.open(path, os.O_RDONLY)
            self.is_direct = False

    def read_into(self, buffer: memoryview, offset_bytes: int, num_bytes: int) -> None:
        """Fill the start of `buffer` with at least `num_bytes` of the file.

        Args:
            buffer: At a multiple of 4096 in memory, and at least that much longer than what is
                asked for.
            offset_bytes: Where to begin, a multiple of 4096.
            num_bytes: How much is needed.

        Raises:
            CheckpointError: The file ends too early.
            OSError: It cannot be read.
        """
        end, done = -(-num_bytes // _SECTOR_BYTES) * _SECTOR_BYTES, 0
        while done < num_bytes:
            start = done - done % _SECTOR_BYTES  # a direct read may stop within a sector
            reached = start + self._read_once(buffer[start:end], offset_bytes + start)
            if reached <= done:
                raise _cut_off(self.path, offset_bytes + num_bytes, offset_bytes + done)
            done = reached
        if not self.is_direct:
            os.posix_fadvise(self._descriptor, offset_bytes, num_bytes, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the file; nobody may be reading it."""
        os.close(self._descriptor)

    def _read_once(self, buffer: memoryview, offset_bytes: int) -> int:
        try:
            return os.preadv(self._descriptor, [buffer], offset_bytes)
        except OSError as error:
            if error.errno != errno.EINVAL or not self.is_direct:
                raise
            self._go_through_cache()
            return os.preadv(self._descriptor, [buffer], offset_bytes)

    def _go_through_cache(self) -> None:
        """Open the file anew for buffered reads, under the number that other threads use."""
        with self._lock:
            if self.is_direct:
                plain = os.open(self.path, os.O_RDONLY)
                os.dup2(plain, self._descriptor, inheritable=False)
                os.close(plain)
                self.is_direct = False


@dataclass(frozen=True, kw_only=True, slots=True)
class WantedTensor:
    """One tensor to be read.

    Attributes:
        name: In the checkpoint.
        path: Its file.
        data_bytes: Where the tensors of that file begin.
        stored: Where it is from there, its type and shape.
        target: Host memory it goes to as soon as it is read: [its elements], of its type or of
            one that it is cast to; None for tensors that somebody takes with `read`.
        is_ahead: Whether it is read before it is asked for, which ties up buffers.
    """

    name: str
    path: Path
    data_bytes: int
    stored: StoredTensor
    target: torch.Tensor | None = None
    is_ahead: bool = True

    @property
    def num_bytes(self) -> int:
        """Its size in the file."""
        return self.stored.end_bytes - self.stored.begin_bytes


@dataclass(eq=False, slots=True)
class _Piece:
    """A run of bytes of one tensor; `is_claimed` once a thread has it or will be given it next."""

    wanted: WantedTensor
    begin: int  # from the start of the tensor, as `end`
    end: int
    is_claimed: bool = False
    is_done: bool = False
    buffer: int | None = None
    error: BaseException | None = None

    @property
    def file_offset(self) -> int:
        return self.wanted.data_bytes + self.wanted.stored.begin_bytes + self.begin

    @property
    def skew(self) -> int:
        """Bytes that precede the piece in its buffer, which begins at a sector."""
        return self.file_offset % _SECTOR_BYTES


def _cut(wanted: WantedTensor) -> list[_Piece]:
    """Cut a tensor where the file has sector boundaries, so that no sector is read twice."""
    start = wanted.data_bytes + wanted.stored.begin_bytes
    pieces, begin = [], 0
    while begin < wanted.num_bytes:
        end = min(wanted.num_bytes, begin + PIECE_BYTES - (start + begin) % _SECTOR_BYTES)
        pieces.append(_Piece(wanted, begin, end))
        begin = end
    return pieces


@dataclass(eq=False)
class _Buffers:
    """Memory of all buffers, page-aligned, and which of them are free."""

    mapping: mmap.mmap = field(default_factory=lambda: mmap.mmap(-1, NUM_BUFFERS * _BUFFER_BYTES))
    free: list[int] = field(default_factory=lambda: list(range(NUM_BUFFERS)))

    def __post_init__(self) -> None:
        self._bytes = torch.frombuffer(self.mapping, dtype=torch.uint8)

    def view(self, index: int) -> memoryview:
        return memoryview(self.mapping)[index * _BUFFER_BYTES : (index + 1) * _BUFFER_BYTES]

    def tensor(self, index: int, skew: int, num_bytes: int) -> torch.Tensor:
        begin = index * _BUFFER_BYTES + skew
        return self._bytes[begin : begin + num_bytes]


class CheckpointReader:
    """Reads announced tensors in order, ahead of who asks for them; use it in a `with` block.

    Args:
        wanted: All tensors, in the order they are likely to be asked for.
        on_bytes: Called with the bytes of each piece once it has been read, by one thread at a
            time.
    """

    def __init__(
        self, wanted: Iterable[WantedTensor], on_bytes: Callable[[int], object] = lambda _: None
    ) -> None:
        self._on_bytes = on_bytes
        self._changed = threading.Condition()
        self._buffers = _Buffers()
        self._files: dict[Path, ShardFile] = {}
        self._tensors: dict[str, WantedTensor] = {}
        self._pieces: dict[str, list[_Piece]] = {}
        self._ahead: deque[_Piece] = deque()
        self._urgent: deque[_Piece] = deque()
        self._is_closed = False
        self._threads: list[threading.Thread] = []
        for tensor in wanted:
            self._tensors[tensor.name] = tensor
            pieces = self._pieces[tensor.name] = _cut(tensor)
            if tensor.is_ahead:
                self._ahead.extend(pieces)

    def __enter__(self) -> Self:
        try:
            for index in range(NUM_THREADS):
                name = f"poros-read-{index}"
                thread = threading.Thread(target=self._work, name=name, daemon=True)
                thread.start()
                self._threads.append(thread)
        except BaseException:  # an interrupt: nobody else will end those that have started
            self.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def is_direct(self) -> bool:
        """Whether every file that was opened is read past the page cache."""
        return all(file.is_direct for file in self._files.values())

    def read(self, name: str, device: torch.device) -> torch.Tensor:
        """Return a tensor without a target, in its stored type and shape, in memory of its own.

        Raises:
            CheckpointError: Its file ends too early.
            OSError: Its file cannot be read.
        """
        pieces = self._pieces[name]
        self._claim(pieces)
        wanted = self._tensors[name]
        raw = torch.empty(wanted.num_bytes, dtype=torch.uint8, device=device)
        for piece in pieces:
            index = self._wait_for(piece)
            length = piece.end - piece.begin
            raw[piece.begin : piece.end].copy_(self._buffers.tensor(index, piece.skew, length))
            self._give_back(piece)
        return raw.view(torch_dtype(wanted.stored.dtype)).view(wanted.stored.shape)

    def settle(self, name: str) -> None:
        """Wait until a tensor with a target is there in full.

        Raises:
            CheckpointError: Its file ends too early.
            OSError: Its file cannot be read.
        """
        pieces = self._pieces[name]
        self._claim(pieces)
        for piece in pieces:
            self._wait_for(piece)

    def close(self) -> None:
        """Stop reading, end the threads and close the files; idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        for file in self._files.values():
            file.close()
        self._files, self._threads = {}, []

    def _claim(self, pieces: list[_Piece]) -> None:
        """Put what no thread has begun with in front of everything else."""
        with self._changed:
            for piece in pieces:
                if not piece.is_claimed:
                    piece.is_claimed = True
                    self._urgent.append(piece)
            self._changed.notify_all()

    def _wait_for(self, piece: _Piece) -> int:
        """Wait for a piece and return its buffer, or -1 if it had a target."""
        with self._changed:
            while not piece.is_done:
                self._changed.wait()
        if piece.error is not None:
            raise piece.error
        return -1 if piece.buffer is None else piece.buffer

    def _give_back(self, piece: _Piece) -> None:
        """Free a piece's buffer; the piece can be read again."""
        with self._changed:
            if piece.buffer is not None:
                self._buffers.free.append(piece.buffer)
            piece.buffer, piece.is_claimed, piece.is_done = None, False, False
            self._changed.notify_all()

    def _work(self) -> None:
        while (piece := self._next()) is not None:
            try:
                self._fill(piece)
            except BaseException as error:  # noqa: BLE001 # whoever asks for the piece raises it
                piece.error = error
            with self._changed:
                if piece.wanted.target is not None or piece.error is not None:
                    self._release_buffer(piece)
                piece.is_done = True
                self._on_bytes(piece.end - piece.begin)
                self._changed.notify_all()

    def _release_buffer(self, piece: _Piece) -> None:
        assert piece.buffer is not None, "a piece was read without a buffer"
        self._buffers.free.append(piece.buffer)
        piece.buffer = None

    def _next(self) -> _Piece | None:
        """Wait for a piece to read and a buffer to read it into; None once closed."""
        with self._changed:
            while not self._is_closed:
                piece = self._pick()
                if piece is not None:
                    piece.buffer = self._buffers.free.pop()
                    return piece
                self._changed.wait()
        return None

    def _pick(self) -> _Piece | None:
        if self._urgent:
            return self._urgent.popleft() if self._buffers.free else None
        while self._ahead and self._ahead[0].is_claimed:
            self._ahead.popleft()
        if not self._ahead or len(self._buffers.free) <= _RESERVED_BUFFERS:
            return None
        piece = self._ahead.popleft()
        piece.is_claimed = True
        return piece

    def _fill(self, piece: _Piece) -> None:
        assert piece.buffer is not None, "a piece is read without a buffer"
        length = piece.end - piece.begin
        buffer = self._buffers.view(piece.buffer)
        file = self._open(piece.wanted.path)
        file.read_into(buffer, piece.file_offset - piece.skew, piece.skew + length)
        target = piece.wanted.target
        if target is not None:
            source = self._buffers.tensor(piece.buffer, piece.skew, length)
            _place(piece, source, target)

    def _open(self, path: Path) -> ShardFile:
        with self._changed:
            file = self._files.get(path)
            if file is None:
                file = self._files[path] = ShardFile(path)
            return file


def can_cast(data_bytes: int, stored: StoredTensor) -> bool:
    """Tell whether pieces of a tensor consist of whole elements, as those are that are cast."""
    return (data_bytes + stored.begin_bytes) % torch_dtype(stored.dtype).itemsize == 0


def _place(piece: _Piece, source: torch.Tensor, target: torch.Tensor) -> None:
    """Put a piece, uint8 [its bytes], where it belongs in its tensor's target."""
    dtype = torch_dtype(piece.wanted.stored.dtype)
    if dtype == target.dtype:
        # torch would copy with threads of its own for each of ours.
        ctypes.memmove(target.data_ptr() + piece.begin, source.data_ptr(), source.nbytes)
        return
    first = piece.begin // dtype.itemsize
    values = source.view(dtype)
    target[first : first + values.numel()].copy_(values)


def _cut_off(path: Path, needed_bytes: int, available_bytes: int) -> CheckpointError:
    return CheckpointError(
        "shard-truncated",
        f"{path} became shorter while it was read: needed {needed_bytes} bytes, available "
        f"{available_bytes}, short by {needed_bytes - available_bytes}",
        remedies=[download_again(path)],
        file=str(path),
        needed_bytes=needed_bytes,
        available_bytes=available_bytes,
        short_bytes=needed_bytes - available_bytes,
    )
