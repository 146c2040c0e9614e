"""BounceRing: copies from memory that could not be page-locked, without standing in the way.

A copy from pageable memory stops the host until it is done. Here a thread of its own fills a few
small page-locked buffers by turns, and the device copies from those beside compute. The host is
stopped only where a block is used before its last piece has been enqueued.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch

from poros_hf.units import GB

NUM_BUFFERS = 3
BUFFER_BYTES = 32 * 2**20


class Waitable(Protocol):
    """What stands behind a copy that was enqueued."""

    def synchronize(self) -> object:
        """Block the host until the copy has finished."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyRates:
    """Host to device, 1e9 bytes per second, from page-locked memory and through the ring."""

    locked_gbps: float
    bounced_gbps: float


class BounceRing:
    """A few page-locked buffers and the thread that copies through them.

    Args:
        buffers: Page-locked host memory, each uint8 [the same size].
        send: Enqueues a copy from the first argument, in such a buffer, to the second, on the
            device, and returns what stands behind it.
    """

    def __init__(
        self,
        buffers: Sequence[torch.Tensor],
        send: Callable[[torch.Tensor, torch.Tensor], Waitable],
    ) -> None:
        self._buffers = buffers
        self._send = send
        self._sent: list[Waitable | None] = [None] * len(buffers)
        self._turn = 0
        self._covered: list[range] = []
        self._submitted: dict[int, Future[None]] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="poros-bounce")

    def cover(self, memory: torch.Tensor) -> None:
        """Take charge of copies out of `memory`, uint8 [n]."""
        self._covered.append(range(memory.data_ptr(), memory.data_ptr() + memory.nbytes))

    def covers(self, source: torch.Tensor) -> bool:
        """Tell whether `source` is in memory that the ring has charge of."""
        return any(source.data_ptr() in addresses for addresses in self._covered)

    def submit(self, event: object, work: Callable[[], None]) -> None:
        """Run `work`, which calls `copy` and records `event`, behind what was submitted before."""
        self._submitted[id(event)] = self._thread.submit(work)

    def wait_for(self, event: object) -> None:
        """Block the host until `event` has been recorded, if a submitted copy is to record it.

        Raises what the copy has raised, each time that it is waited for.
        """
        copy = self._submitted.get(id(event))
        if copy is not None:
            copy.result()
            # Forgotten last: nobody may read what an interrupted wait did not wait for.
            self._submitted.pop(id(event), None)

    def drain(self) -> None:
        """Block the host until everything that was submitted has been enqueued."""
        while self._submitted:
            self._submitted.popitem()[1].result()

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Enqueue the copy of host bytes, uint8 [n], to the device, uint8 [n].

        Blocks until the last piece is enqueued, so it is for the ring's own thread.
        """
        step = self._buffers[0].numel()
        for begin in range(0, source.numel(), step):
            length = min(step, source.numel() - begin)
            piece = self._buffers[self._turn][:length]
            before = self._sent[self._turn]
            if before is not None:
                before.synchronize()  # the device may still be reading the buffer
            piece.copy_(source[begin : begin + length])
            self._sent[self._turn] = self._send(piece, target[begin : begin + length])
            self._turn = (self._turn + 1) % len(self._buffers)


def measure_gbps(
    copy: Callable[[torch.Tensor, torch.Tensor], object],
    source: torch.Tensor,
    target: torch.Tensor,
    finish: Callable[[], None],
) -> float:
    """Return the rate of `copy` in 1e9 bytes per second; `finish` waits for the device."""
    for _ in range(2):  # the first one also sets things up
        finish()
        start = time.perf_counter()
        copy(source, target)
        finish()
        seconds = time.perf_counter() - start
    return source.nbytes / seconds / GB
