"""The disk under a checkpoint: how fast it reads, and whether the page cache has the files."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

_BLOCK_BYTES = 16 * 2**20
_NUM_THREADS = 4
_WINDOW_BYTES = 2**30


def evict(paths: Sequence[Path]) -> int:
    """Write files out, drop their pages from the page cache, and return the bytes still in it."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    return sum(map(cached_bytes, paths))


def cached_bytes(path: Path) -> int:
    """Return how much of a file is in the page cache, as mincore(2) says."""
    libc = ctypes.CDLL(None, use_errno=True)
    size, count = path.stat().st_size, 0
    with path.open("rb") as file:
        for offset in range(0, size, _WINDOW_BYTES):
            length = min(_WINDOW_BYTES, size - offset)
            with mmap.mmap(file.fileno(), length, mmap.MAP_PRIVATE, offset=offset) as window:
                count += _resident_pages(libc, window, length)
    return count * mmap.PAGESIZE


def _resident_pages(libc: ctypes.CDLL, window: mmap.mmap, length: int) -> int:
    pages = -(-length // mmap.PAGESIZE)
    states = (ctypes.c_ubyte * pages)()
    start = (ctypes.c_ubyte * length).from_buffer(window)
    failed = libc.mincore(ctypes.byref(start), ctypes.c_size_t(length), states)
    del start  # the window cannot be closed while something refers to it
    if failed:
        raise OSError(ctypes.get_errno(), "mincore failed")
    return sum(state & 1 for state in bytes(states))


def is_in_memory(path: Path) -> bool:
    """Tell whether a file is on a file system in memory, which is no disk."""
    best, kind = "", ""
    for line in Path("/proc/mounts").read_text().splitlines():
        _, place, file_system, *_ = line.split()
        inside = path.resolve().is_relative_to(place)
        if inside and len(place) >= len(best):
            best, kind = place, file_system
    return kind in ("tmpfs", "ramfs")


def read_rate_gbps(paths: Sequence[Path], num_bytes: int) -> float:
    """Return the sequential O_DIRECT rate, 1e9 bytes per second: the better of 1 and 4 threads.

    Args:
        paths: Files, read one behind the other in blocks of 16 MiB.
        num_bytes: How much each of the two measurements reads at most.
    """
    return max(_rate(paths, num_bytes, threads) for threads in (1, _NUM_THREADS))


def _rate(paths: Sequence[Path], num_bytes: int, num_threads: int) -> float:
    blocks = itertools.islice(_blocks(paths), -(-num_bytes // _BLOCK_BYTES))
    lock, read = threading.Lock(), []

    def work() -> None:
        buffer = mmap.mmap(-1, _BLOCK_BYTES)
        while True:
            with lock:
                block = next(blocks, None)
            if block is None:
                return
            descriptor, offset = block
            read.append(os.preadv(descriptor, [buffer], offset))

    start = time.perf_counter()
    threads = [threading.Thread(target=work) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(read) / (time.perf_counter() - start) / 1e9


def _blocks(paths: Sequence[Path]) -> Iterator[tuple[int, int]]:
    """Yield descriptor and offset of every block; it stays open."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        for offset in range(0, path.stat().st_size, _BLOCK_BYTES):
            yield descriptor, offset
