"""CudaRuntime: streams, events and page locks. With recording.py the only module that touches them.

See [Note: two clocks] in runtime_base.py.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

import torch

from poros_hf.bounce import BUFFER_BYTES, NUM_BUFFERS, BounceRing, CopyRates, measure_gbps
from poros_hf.cpu_runtime import CpuRuntime
from poros_hf.errors import HostSetupError
from poros_hf.recording import GraphRecorder, give_back_cached
from poros_hf.runtime_base import POISON, HostRead, Replay, Runtime, TransferTimes

logger = logging.getLogger(__name__)

_MAX_OPEN_TIMINGS = 256
_MEASURED_BYTES = 256 * 2**20
_UNLOADING = 4  # cudaErrorCudartUnloading: the process ends, and all locks with it


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
