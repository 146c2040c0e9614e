"""Streams, events and page locks: the only module that touches them.

[Note: two clocks]
The host enqueues; the device executes. Work on the compute stream and work on the copy stream is
ordered by events alone, and nothing on the step path makes the host wait. `Runtime` has four
verbs: `stage` (on the copy stream: wait, copy, record), `wait` and `record` (on a compute stream)
and `close`.

`CpuRuntime` has the same verbs without a device. By default its copies run at once; with
`lazy=True` a copy runs as late as its events allow, so that a missing wait reads what the slot
held before. It also writes down the order of operations.
"""

from __future__ import annotations

import contextlib
import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from poros_hf.bounce import BUFFER_BYTES, NUM_BUFFERS, BounceRing, CopyRates, measure_gbps
from poros_hf.errors import HostSetupError, StreamStateError
from poros_hf.recording import GraphRecorder, give_back_cached

logger = logging.getLogger(__name__)

POISON = 0xFF
_MAX_OPEN_TIMINGS = 256
_MEASURED_BYTES = 256 * 2**20
_UNLOADING = 4  # cudaErrorCudartUnloading: the process ends, and all locks with it


@dataclass(kw_only=True)
class TransferTimes:
    """Time of finished copies since the counters were last taken.

    `stall_ms` is the part of `copy_ms` for which compute had to wait.
    """

    copy_ms: float = 0.0
    stall_ms: float = 0.0

    @property
    def overlap_percent(self) -> float:
        """Share of the copy time that was hidden behind compute, 0 to 100."""
        if self.copy_ms == 0.0:
            return 0.0
        return 100.0 * max(0.0, 1.0 - self.stall_ms / self.copy_ms)


class HostRead:
    """A small device tensor on its way to the host.

    Args:
        value: Host tensor; meaningful once `is_done`.
        event: Recorded behind the copy; None where the value is there already.
    """

    def __init__(self, value: torch.Tensor, event: torch.cuda.Event | None = None) -> None:
        self._value = value
        self._event = event

    @property
    def is_done(self) -> bool:
        """Whether the value has arrived; never waits."""
        return self._event is None or bool(self._event.query())

    def get(self) -> torch.Tensor:
        """Return the value, waiting for it if it has not arrived."""
        if self._event is not None:
            self._event.synchronize()
        return self._value


class Replay(Protocol):
    """Work that was recorded once, to be done again at the same addresses."""

    def replay(self) -> None:
        """Enqueue the work on the current stream; the host does not block."""


class Runtime(ABC):
    """The verbs that the streamer needs from a device.

    Events and streams are opaque to callers: they come from `new_event` and `current_stream` and
    go back into `stage`, `wait` and `record`.
    """

    device: torch.device
    _scratch: list[StorageWeakRef]

    @abstractmethod
    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return uninitialised device memory, uint8 [num_bytes]."""

    @abstractmethod
    def new_event(self, label: str) -> Any:
        """Make an event that has not been recorded; waiting for it is a no-op."""

    @abstractmethod
    def current_stream(self) -> Any:
        """Return the compute stream that is current for the calling thread."""

    @abstractmethod
    def stage(
        self, source: torch.Tensor, target: torch.Tensor, *, after: Any, done: Any, poison: bool
    ) -> None:
        """Copy host bytes into a slot on the copy stream.

        Args:
            source: Host memory, uint8 [n].
            target: Device memory, uint8 [m], m >= n; the first n bytes are written.
            after: Event that the copy stream waits for first.
            done: Event recorded behind the copy.
            poison: Overwrite all of `target` with 0xFF before the copy.

        Streams: copy stream waits `after`, records `done`. The host does not block.
        """

    @abstractmethod
    def wait(self, event: Any, stream: Any) -> None:
        """Make `stream` wait for `event`; the host does not block."""

    @abstractmethod
    def record(self, event: Any, stream: Any) -> None:
        """Record `event` behind everything enqueued on `stream` so far."""

    @abstractmethod
    def take_times(self) -> TransferTimes:
        """Return the times of copies that have finished, and start counting anew."""

    @abstractmethod
    def read_later(self, value: torch.Tensor) -> HostRead:
        """Start reading a small device tensor; the host does not block."""

    @abstractmethod
    def page_lock(self, buffer: torch.Tensor) -> bool:
        """Page-lock host memory in place; False where the system refuses."""

    @abstractmethod
    def page_unlock(self, buffer: torch.Tensor) -> None:
        """Undo `page_lock`."""

    @abstractmethod
    def bounce_from(self, buffer: torch.Tensor) -> CopyRates | None:
        """Copy through a small page-locked ring whatever is staged out of `buffer` from now on.

        Args:
            buffer: Host memory that could not be page-locked, uint8 [n], n > 0; one a runtime.

        Returns:
            What that costs, measured; None where not even the ring could be page-locked.
        """

    @abstractmethod
    def map_host(self, buffer: torch.Tensor) -> torch.Tensor | None:
        """Return page-locked bytes, uint8 [n], as a tensor that kernels of the device can read.

        It is the same memory, read over the link, and valid until `page_unlock`. None where the
        device cannot do that.
        """

    @abstractmethod
    def release_records(self) -> None:
        """Give the memory of records back; all of them are gone, and so is scratch memory.

        Streams: blocks the host, once.
        """

    @abstractmethod
    def allocate_scratch(self, num_bytes: int) -> torch.Tensor:
        """Return device memory that records use as well, uint8 [num_bytes].

        It must be gone before the next replay, which would overwrite it; see
        `refuse_kept_scratch`.
        """

    def _note_scratch(self, memory: torch.Tensor) -> None:
        # Where no layer is replayed nobody asks, and the list would grow for ever.
        self._scratch = [kept for kept in self._scratch if not kept.expired()]
        self._scratch.append(StorageWeakRef(memory.untyped_storage()))

    def refuse_kept_scratch(self) -> None:
        """Refuse to go on to a replay while somebody holds memory of `allocate_scratch`.

        Raises:
            StreamStateError: Somebody does.
        """
        if any(not kept.expired() for kept in self._scratch):
            raise StreamStateError(
                "rows-kept",
                "rows of the head or the embedding were kept while a decoder layer ran, which "
                "would overwrite them",
                remedies=["keep a copy of them: weight[start:end].clone()"],
            )
        self._scratch.clear()

    @abstractmethod
    def record_work(self, work: Callable[[], None]) -> Replay:
        """Record the kernels that `work` launches, without running them.

        Memory that `work` allocates is shared by all records: it holds nothing between replays,
        and replays must not overlap.

        Raises:
            RuntimeError: `work` does what cannot be recorded, such as waiting for the device.
        """

    @abstractmethod
    def rng_state(self) -> Any:
        """Return where the device's random numbers stand."""

    @abstractmethod
    def set_rng_state(self, state: Any) -> None:
        """Go back to where `rng_state` was."""

    def is_rng_state(self, state: Any) -> bool:
        """Tell whether no number has been drawn since `state`."""
        return bool(self.rng_state() == state)

    @contextlib.contextmanager
    def rng_at(self, state: Any) -> Iterator[None]:
        """Draw the numbers behind `state` again, and go on afterwards where it was."""
        before = self.rng_state()
        self.set_rng_state(state)
        try:
            yield
        finally:
            self.set_rng_state(before)

    @abstractmethod
    def trim(self) -> None:
        """Give memory back that is cached and not in use; blocks the host, once."""

    @abstractmethod
    def drain(self) -> None:
        """Block the host until every copy and kernel has finished; never on the step path."""


class CudaRuntime(Runtime):
    """One CUDA device with one copy stream.

    Args:
        device: CUDA device; its index defaults to the current one.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = torch.empty(0, device=device).device  # with its index
        # Copies must not queue behind kernels, so they have a stream of their own.
        self._copy_stream = torch.cuda.Stream(self.device)
        self._recorder = GraphRecorder(self.device, torch.cuda.Stream(self.device))
        self._scratch = []
        self._free_pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._open_copies: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._open_stalls: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._times = TransferTimes()
        self._ring: BounceRing | None = None

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return uninitialised device memory, uint8 [num_bytes]."""
        with torch.inference_mode(False):  # slots are written to outside of it as well
            return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def new_event(self, label: str) -> torch.cuda.Event:
        """Make an event without timing; `label` is for the CPU runtime only."""
        return torch.cuda.Event()

    def current_stream(self) -> torch.cuda.Stream:
        """Return the calling thread's current stream of this device."""
        return torch.cuda.current_stream(self.device)

    def stage(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        *,
        after: torch.cuda.Event,
        done: torch.cuda.Event,
        poison: bool,
    ) -> None:
        """See `Runtime.stage`."""
        pair = self._timing_pair()

        def enqueue(copy: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
            with torch.cuda.stream(self._copy_stream):
                self._copy_stream.wait_event(after)
                if poison:
                    target.fill_(POISON)
                pair[0].record(self._copy_stream)
                copy(source, target[: source.numel()])
                pair[1].record(self._copy_stream)
                done.record(self._copy_stream)
            self._open_copies.append(pair)

        ring = self._ring
        if ring is not None and ring.covers(source):
            ring.submit(done, lambda: enqueue(ring.copy))
        else:
            enqueue(lambda source, target: target.copy_(source, non_blocking=True))

    def wait(self, event: torch.cuda.Event, stream: torch.cuda.Stream) -> None:
        """See `Runtime.wait`; the wait is timed on the stream itself."""
        if self._ring is not None:
            self._ring.wait_for(event)
        before, behind = self._timing_pair()
        before.record(stream)
        stream.wait_event(event)
        behind.record(stream)
        self._open_stalls.append((before, behind))

    def record(self, event: torch.cuda.Event, stream: torch.cuda.Stream) -> None:
        """See `Runtime.record`."""
        event.record(stream)

    def take_times(self) -> TransferTimes:
        """See `Runtime.take_times`; asks events, never waits for them."""
        self._times.copy_ms += self._collect(self._open_copies)
        self._times.stall_ms += self._collect(self._open_stalls)
        times, self._times = self._times, TransferTimes()
        return times

    def read_later(self, value: torch.Tensor) -> HostRead:
        """See `Runtime.read_later`."""
        target = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        target.copy_(value, non_blocking=True)
        event = torch.cuda.Event()
        event.record(self.current_stream())
        return HostRead(target, event)

    def page_lock(self, buffer: torch.Tensor) -> bool:
        """Register `buffer` with the driver, in place and without a second copy."""
        with torch.cuda.device(self.device):
            code = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)
            if int(code) == 0:
                return True
            logger.info("cudaHostRegister of %d bytes returned %s", buffer.nbytes, code)
            self._clear_sticky_error()
        return False

    def page_unlock(self, buffer: torch.Tensor) -> None:
        """Unregister `buffer`; copies from it must have finished."""
        code = torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())
        if int(code) not in (0, _UNLOADING):
            logger.warning("cudaHostUnregister of %d bytes returned %s", buffer.nbytes, code)
            self._clear_sticky_error()

    def bounce_from(self, buffer: torch.Tensor) -> CopyRates | None:
        """See `Runtime.bounce_from`; blocks the host while it measures."""
        with torch.cuda.device(self.device):
            try:
                buffers = [
                    torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True)
                    for _ in range(NUM_BUFFERS)
                ]
            except RuntimeError:
                self._clear_sticky_error()
                return None
            ring = BounceRing(buffers, self._send)
            ring.cover(buffer)
            source = buffer[:_MEASURED_BYTES]
            target = self.allocate(source.numel())
            rates = CopyRates(
                locked_gbps=measure_gbps(self._send, buffers[0], target, self.drain),
                bounced_gbps=measure_gbps(ring.copy, source, target, self.drain),
            )
        self._ring = ring
        return rates

    def _send(self, source: torch.Tensor, target: torch.Tensor) -> torch.cuda.Event:
        """Enqueue one copy on the copy stream and return an event behind it."""
        with torch.cuda.stream(self._copy_stream):
            target[: source.numel()].copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._copy_stream)
        return event

    def record_work(self, work: Callable[[], None]) -> Replay:
        """See `Runtime.record_work`; the record is a CUDA graph."""
        return self._recorder.record(work)

    def release_records(self) -> None:
        """See `Runtime.release_records`."""
        self._recorder.release()

    def allocate_scratch(self, num_bytes: int) -> torch.Tensor:
        """See `Runtime.allocate_scratch`; from the memory pool of the records."""
        storage = self._recorder.allocate(num_bytes)
        with torch.inference_mode(False):
            memory = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
        self._note_scratch(memory)
        return memory

    def rng_state(self) -> tuple[int, int]:
        """See `Runtime.rng_state`; seed and offset of the device's generator."""
        generator = self._generator()
        return generator.initial_seed(), int(generator.get_offset())

    def set_rng_state(self, state: tuple[int, int]) -> None:
        """See `Runtime.set_rng_state`."""
        generator = self._generator()
        seed, offset = state
        if seed != generator.initial_seed():
            generator.manual_seed(seed)
        generator.set_offset(offset)

    def _generator(self) -> torch.Generator:
        return torch.cuda.default_generators[self.device.index]

    def map_host(self, buffer: torch.Tensor) -> torch.Tensor | None:
        """See `Runtime.map_host`; what is registered has one address for host and device."""
        try:
            mapped = torch.as_tensor(_DeviceBytes(buffer), device=self.device)
        except RuntimeError:
            return None
        return mapped if mapped.data_ptr() == buffer.data_ptr() else None

    def trim(self) -> None:
        """See `Runtime.trim`."""
        give_back_cached(self.device)

    def drain(self) -> None:
        """Wait for everything on the device, and for what is still to be enqueued."""
        if self._ring is not None:
            self._ring.drain()
        torch.cuda.synchronize(self.device)

    def _clear_sticky_error(self) -> None:
        # A refused registration stays in the driver's last-error slot, where the next launch would
        # report it as its own failure. That next launch is this one.
        try:
            torch.zeros(1, device=self.device)
        except RuntimeError:
            return

    def _timing_pair(self) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        if len(self._open_copies) > _MAX_OPEN_TIMINGS:
            self._times.copy_ms += self._collect(self._open_copies)
            self._times.stall_ms += self._collect(self._open_stalls)
        if self._free_pairs:
            return self._free_pairs.pop()
        return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def _collect(self, pairs: deque[tuple[torch.cuda.Event, torch.cuda.Event]]) -> float:
        total_ms = 0.0
        while pairs and pairs[0][1].query():
            pair = pairs.popleft()
            total_ms += pair[0].elapsed_time(pair[1])
            self._free_pairs.append(pair)
        return total_ms


class _DeviceBytes:
    """Host bytes that are announced as device memory.

    Source: the CUDA Array Interface, version 3, of numba's documentation.
    """

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer
        self.__cuda_array_interface__ = {
            "shape": tuple(buffer.shape),
            "typestr": "|u1",
            "data": (buffer.data_ptr(), False),
            "version": 3,
        }


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


def runtime_for(device: torch.device) -> Runtime:
    """Return the runtime of a compute device.

    Raises:
        HostSetupError: The device is neither CUDA nor the CPU.
    """
    if device.type == "cuda":
        return CudaRuntime(device)
    if device.type == "cpu":
        return CpuRuntime()
    raise HostSetupError(
        "device-type",
        f"cannot stream to a {device.type!r} device",
        remedies=["use a CUDA device", "use the CPU to try things out"],
        device=str(device),
    )
