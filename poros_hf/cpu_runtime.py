"""CpuRuntime: the runtime without a device, whose copies can be as late as their events allow.

By default its copies run at once. With `lazy=True` a copy runs when compute waits for it and not
before, so that a missing wait reads what the slot held before. It also writes down the order of
operations.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from poros_hf.bounce import CopyRates
from poros_hf.runtime_base import POISON, HostRead, Replay, Runtime, TransferTimes


@dataclass(eq=False)
class CpuEvent:
    """An event of `CpuRuntime`: a name for the trace, and the copy it stands behind."""

    label: str
    pending: _PendingCopy | None = None


class CpuStream:
    """A compute stream of `CpuRuntime`.

    Compared with None it is neither equal nor unequal, as streams of torch are, so that code
    which trips over that does so without a GPU.
    """

    def __eq__(self, other: object) -> bool:
        return other is self

    def __ne__(self, other: object) -> bool:
        return other is not None and other is not self

    __hash__ = object.__hash__


@dataclass(eq=False)
class _PendingCopy:
    source: torch.Tensor
    target: torch.Tensor


@dataclass(frozen=True, slots=True)
class CpuReplay:
    """A record of `CpuRuntime`: the function itself, which must depend on fixed addresses only."""

    replay: Callable[[], None]


@dataclass
class CpuRuntime(Runtime):
    """The runtime without a GPU: one compute stream that runs at once, one queue of copies.

    Args:
        lazy: Run each copy only when compute waits for it.
        keep_trace: Write the order of operations into `trace`, for tests.
    """

    lazy: bool = False
    keep_trace: bool = False
    trace: list[tuple[str, str]] = field(default_factory=list)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    _stream: CpuStream = field(default_factory=CpuStream)
    _queue: deque[_PendingCopy] = field(default_factory=deque)
    _times: TransferTimes = field(default_factory=TransferTimes)
    _scratch: list[StorageWeakRef] = field(default_factory=list)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return uninitialised memory, uint8 [num_bytes]."""
        with torch.inference_mode(False):  # slots are written to outside of it as well
            return torch.empty(num_bytes, dtype=torch.uint8)

    def new_event(self, label: str) -> CpuEvent:
        """Make an event that has not been recorded."""
        return CpuEvent(label)

    def current_stream(self) -> CpuStream:
        """Return the one compute stream."""
        return self._stream

    def stage(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        *,
        after: CpuEvent,
        done: CpuEvent,
        poison: bool,
    ) -> None:
        """See `Runtime.stage`; the copy itself runs now, or at the wait if lazy."""
        self._note("copy wait", after.label)
        if poison:
            target.fill_(POISON)
        self._note("copy", done.label)
        done.pending = _PendingCopy(source, target)
        self._queue.append(done.pending)
        if not self.lazy:
            # Compute stands still while the host copies, so nothing of it is hidden.
            self._times.stall_ms += self._run_until(done.pending)

    def wait(self, event: CpuEvent, stream: CpuStream) -> None:
        """See `Runtime.wait`."""
        self._note("compute wait", event.label)
        if event.pending is not None:
            self._times.stall_ms += self._run_until(event.pending)

    def record(self, event: CpuEvent, stream: CpuStream) -> None:
        """See `Runtime.record`."""
        self._note("compute record", event.label)

    def take_times(self) -> TransferTimes:
        """See `Runtime.take_times`."""
        times, self._times = self._times, TransferTimes()
        return times

    def read_later(self, value: torch.Tensor) -> HostRead:
        """See `Runtime.read_later`; it is here already."""
        return HostRead(value.clone())

    def page_lock(self, buffer: torch.Tensor) -> bool:
        """Do nothing: there is no device to copy to."""
        return True

    def page_unlock(self, buffer: torch.Tensor) -> None:
        """Do nothing."""

    def bounce_from(self, buffer: torch.Tensor) -> CopyRates | None:
        """Do nothing: there is no link that a page lock would speed up."""
        return None

    def release_records(self) -> None:
        """Do nothing: a record here is a function."""

    def allocate_scratch(self, num_bytes: int) -> torch.Tensor:
        """See `Runtime.allocate_scratch`."""
        memory = self.allocate(num_bytes)
        self._note_scratch(memory)
        return memory

    def record_work(self, work: Callable[[], None]) -> Replay:
        """See `Runtime.record_work`; a replay calls `work` again."""
        return CpuReplay(work)

    def rng_state(self) -> torch.Tensor:
        """See `Runtime.rng_state`; uint8 [state size]."""
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        """See `Runtime.set_rng_state`."""
        torch.set_rng_state(state)

    def is_rng_state(self, state: torch.Tensor) -> bool:
        """See `Runtime.is_rng_state`."""
        return torch.equal(torch.get_rng_state(), state)

    def map_host(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the buffer: host and device are the same here."""
        return buffer

    def trim(self) -> None:
        """Do nothing: the host's allocator keeps little."""

    def drain(self) -> None:
        """Run every copy that is still queued."""
        while self._queue:
            self._run_until(self._queue[0])

    def _run_until(self, last: _PendingCopy) -> float:
        """Run queued copies up to `last` in order and return the milliseconds they took."""
        start = time.perf_counter()
        while last in self._queue:
            copy = self._queue.popleft()
            copy.target[: copy.source.numel()].copy_(copy.source)
        elapsed_ms = 1e3 * (time.perf_counter() - start)
        self._times.copy_ms += elapsed_ms
        return elapsed_ms

    def _note(self, operation: str, label: str) -> None:
        if self.keep_trace:
            self.trace.append((operation, label))
