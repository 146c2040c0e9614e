"""One exact-size host allocation that the device can copy from.

[Note: preparing] Pages come into being when they are first touched, and locking them takes as long
again. Both happen on threads of their own while the checkpoint is read, so neither costs time. The
memory can be written meanwhile: populating a page does not change what is in it.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import sys
import threading
import weakref
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from poros_hf.bounce import CopyRates
from poros_hf.environment import read_host_memory, read_lock_limit
from poros_hf.errors import CapacityError, HostSetupError
from poros_hf.oom import host_out_of_memory
from poros_hf.runtime_base import Runtime
from poros_hf.units import format_bytes

logger = logging.getLogger(__name__)

_TOUCH_BYTES = 64 * 2**20
_NUM_TOUCHERS = 4
_MADV_POPULATE_WRITE = 23  # of Linux 5.14; Python has no name for it
_MOST_PROBES = 8


class HostArena:
    """Host memory of an exact size, page-locked where the runtime has a device.

    The pages belong to a file without a name in memory, which another process of the host could
    map as well. Forked processes do not have them at all, so that DataLoader workers neither copy
    nor count them. They go back to the system when the last view of them dies.

    Large arenas are made ready in the background; `settle` waits for that.

    Args:
        num_bytes: Size; nothing is added and nothing rounded but to whole pages.
        runtime: Does the page-locking.
        must_pin: Raise where page-locking fails, instead of going on with pageable memory.

    Raises:
        CapacityError: Less RAM is left than is asked for.
        PorosOOMError: The system refused the memory all the same.
        HostSetupError: Page-locking failed and `must_pin` is set (for large arenas: in `settle`).
    """

    def __init__(self, num_bytes: int, runtime: Runtime, *, must_pin: bool = False) -> None:
        check_ram(num_bytes)
        self.num_bytes = num_bytes
        self._must_pin = must_pin
        try:
            self._mapping = _map(max(num_bytes, 1))
        except OSError as error:
            raise host_out_of_memory(num_bytes, "making the host store") from error
        self._buffer = torch.frombuffer(self._mapping, dtype=torch.uint8)
        self._lock = _PageLock(runtime, self._buffer)
        self._unlock = weakref.finalize(self, _PageLock.close, self._lock)
        self._has_warned = False
        if num_bytes <= _TOUCH_BYTES:
            self.settle()

    @property
    def is_pinned(self) -> bool:
        """Whether the memory is page-locked; waits until that is known."""
        self._lock.wait()
        return self._lock.is_locked

    def settle(self) -> None:
        """Wait until the memory is ready, and say so if it could not be page-locked; idempotent.

        Raises:
            HostSetupError: Page-locking failed and `must_pin` is set.
        """
        self._lock.wait()
        if not self._lock.is_locked and (self._must_pin or not self._has_warned):
            self._has_warned = True
            self._report_unpinned()

    def check(self) -> None:
        """Raise what `settle` would, if it is known already; never waits."""
        if self._must_pin and self._lock.has_ended:
            self.settle()

    def view(self, offset_bytes: int, num_bytes: int) -> torch.Tensor:
        """Return uint8 [num_bytes] over the arena's memory, with a storage of its own.

        Serialisation compares tensors by storage, so two views must not look like one tensor.
        The view keeps the pages mapped, yet not page-locked beyond `close`.
        """
        if offset_bytes < 0 or offset_bytes + num_bytes > self.num_bytes:
            raise ValueError(
                f"bytes {offset_bytes} to {offset_bytes + num_bytes} are outside the arena of "
                f"{self.num_bytes} bytes"
            )
        if num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        memory = (ctypes.c_uint8 * num_bytes).from_buffer(self._mapping, offset_bytes)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def close(self) -> None:
        """Release the page lock; idempotent. Copies from the arena must have finished."""
        self._unlock()

    def _report_unpinned(self) -> None:
        lockable = self._lock.lockable_bytes
        text = (
            f"cannot page-lock the host store: needed {format_bytes(self.num_bytes)}, lockable "
            f"about {format_bytes(lockable)}, short by {format_bytes(self.num_bytes - lockable)} "
            f"(ulimit -l: {_describe_limit()})"
        )
        if self._must_pin:
            self.close()
            raise HostSetupError(
                "page-lock",
                text,
                remedies=[
                    "raise the limit on locked memory (ulimit -l, or the container's setting)",
                    "set host_memory='auto' to go on with slower pageable memory",
                ],
                needed_bytes=self.num_bytes,
                lockable_bytes=lockable,
                short_bytes=self.num_bytes - lockable,
            )
        logger.warning(
            "%s; going on %s. Set host_memory='pinned' to make this an error.",
            text,
            self._lock.describe_fallback(),
        )


class _PageLock:
    """Touches and locks the memory of one arena, at once or on a thread of its own."""

    def __init__(self, runtime: Runtime, buffer: torch.Tensor) -> None:
        self.is_locked = False
        self.lockable_bytes = 0
        self.fallback: CopyRates | None = None
        self._runtime = runtime
        self._buffer = buffer
        self._process = os.getpid()
        self._is_cancelled = threading.Event()
        self._background: Future[None] | None = None
        if buffer.numel() <= _TOUCH_BYTES:
            self._lock()
            return
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="poros-lock")
        self._background = thread.submit(self._touch_and_lock)
        thread.shutdown(wait=False)

    @property
    def has_ended(self) -> bool:
        return self._background is None or self._background.done()

    def wait(self) -> None:
        if self._background is not None:
            self._background.result()

    def describe_fallback(self) -> str:
        if self.fallback is None:
            return "with pageable memory, which copies slower and not beside compute"
        return (
            f"through small page-locked buffers, at {self.fallback.bounced_gbps:.1f} GB/s in place "
            f"of {self.fallback.locked_gbps:.1f} GB/s"
        )

    def close(self) -> None:
        if os.getpid() != self._process:
            return  # a forked process has neither the pages nor the lock
        self._is_cancelled.set()
        self.wait()
        if self.is_locked:
            self.is_locked = False
            self._runtime.page_unlock(self._buffer)

    def _touch_and_lock(self) -> None:
        self._touch()
        if not self._is_cancelled.is_set():
            self._lock()

    def _lock(self) -> None:
        self.is_locked = self._runtime.page_lock(self._buffer)
        if not self.is_locked:
            self.lockable_bytes = self._probe()
            self.fallback = self._runtime.bounce_from(self._buffer)

    def _touch(self) -> None:
        """Make all pages exist; where the kernel cannot do it for us, locking will."""
        if sys.platform != "linux":
            return
        begins = range(0, self._buffer.numel(), _TOUCH_BYTES)
        with ThreadPoolExecutor(_NUM_TOUCHERS, thread_name_prefix="poros-touch") as threads:
            list(threads.map(self._touch_one, begins))

    def _touch_one(self, begin: int) -> None:
        if self._is_cancelled.is_set():
            return
        length = min(_TOUCH_BYTES, self._buffer.numel() - begin)
        address = ctypes.c_void_p(self._buffer.data_ptr() + begin)
        ctypes.CDLL(None).madvise(address, ctypes.c_size_t(length), _MADV_POPULATE_WRITE)

    def _probe(self) -> int:
        """Return about how much could be locked: the first of its halves, quarters, ... that is."""
        page = mmap.PAGESIZE
        part = self._buffer.numel()
        for _ in range(_MOST_PROBES):
            part = part // 2 // page * page
            if part == 0 or self._is_cancelled.is_set():
                break
            if self._runtime.page_lock(self._buffer[:part]):
                self._runtime.page_unlock(self._buffer[:part])
                return part
        return 0


def _map(num_bytes: int) -> mmap.mmap:
    """Map memory that is shared, has no name, and is not there in forked processes."""
    if not hasattr(os, "memfd_create"):
        return mmap.mmap(-1, num_bytes)
    file = os.memfd_create("poros-store", os.MFD_CLOEXEC)
    try:
        os.ftruncate(file, num_bytes)
        mapping = mmap.mmap(file, num_bytes)  # with a descriptor of its own
    finally:
        os.close(file)
    mapping.madvise(mmap.MADV_DONTFORK)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def _describe_limit() -> str:
    limit = read_lock_limit()
    return "unlimited" if limit is None else format_bytes(limit)


def check_ram(num_bytes: int) -> None:
    """Check that the host, and every cgroup above the process, has RAM for a store.

    Raises:
        CapacityError: There is less; needed, available and short by are named.
    """
    memory = read_host_memory()
    if num_bytes <= memory.available_bytes:
        return
    raise CapacityError(
        "host-memory",
        f"the host store needs {format_bytes(num_bytes)} of RAM, available "
        f"{format_bytes(memory.available_bytes)} (limited by {memory.limited_by}), short by "
        f"{format_bytes(num_bytes - memory.available_bytes)}",
        remedies=["free RAM or raise the container's memory limit", "use a smaller model"],
        needed_bytes=num_bytes,
        available_bytes=memory.available_bytes,
        short_bytes=num_bytes - memory.available_bytes,
    )
