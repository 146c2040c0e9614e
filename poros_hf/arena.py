"""One exact-size host allocation that the device can copy from."""

from __future__ import annotations

import ctypes
import logging
import mmap
import weakref

import torch

from poros_hf.environment import read_host_memory
from poros_hf.errors import CapacityError, HostSetupError
from poros_hf.runtime import Runtime
from poros_hf.units import format_bytes

logger = logging.getLogger(__name__)


class HostArena:
    """Host memory of an exact size, page-locked where the runtime has a device.

    The pages come from an anonymous shared mapping, so that a forked worker neither copies nor
    duplicates them, and they go back to the system when the last view of them dies.

    Args:
        num_bytes: Size; nothing is added and nothing rounded but to whole pages.
        runtime: Does the page-locking.
        must_pin: Raise where page-locking fails, instead of going on with pageable memory.

    Raises:
        CapacityError: Less RAM is left than is asked for.
        HostSetupError: Page-locking failed and `must_pin` is set.
    """

    def __init__(self, num_bytes: int, runtime: Runtime, *, must_pin: bool = False) -> None:
        _check_ram(num_bytes)
        self.num_bytes = num_bytes
        self._mapping = mmap.mmap(-1, max(num_bytes, 1))
        self._buffer = torch.frombuffer(self._mapping, dtype=torch.uint8)
        self.is_pinned = runtime.page_lock(self._buffer)
        self._unlock = weakref.finalize(self, _unlock, runtime, self._buffer, self.is_pinned)
        if not self.is_pinned:
            self._report_unpinned(must_pin)

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

    def _report_unpinned(self, must_pin: bool) -> None:
        text = f"cannot page-lock {format_bytes(self.num_bytes)} of host memory"
        if must_pin:
            self.close()
            raise HostSetupError(
                "page-lock",
                text,
                remedies=[
                    "raise the limit on locked memory (ulimit -l, or the container's setting)",
                    "set host_memory='auto' to go on with slower pageable memory",
                ],
                needed_bytes=self.num_bytes,
            )
        logger.warning(
            "%s; going on with pageable memory, which copies several times slower and does not "
            "overlap with compute. Set host_memory='pinned' to make this an error.",
            text,
        )


def _unlock(runtime: Runtime, buffer: torch.Tensor, is_pinned: bool) -> None:
    if is_pinned:
        runtime.page_unlock(buffer)


def _check_ram(num_bytes: int) -> None:
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
