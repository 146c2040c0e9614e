"""Runtime: the verbs that the streamer needs from a device, whichever it is.

[Note: two clocks]
The host enqueues; the device executes. Work on the compute stream and work on the copy stream is
ordered by events alone, and nothing on the step path makes the host wait. The verbs are `stage` (on
the copy stream: wait, copy, record), `wait` and `record` (on a compute stream), and `record_work`
with its replays.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from poros_hf.bounce import CopyRates
from poros_hf.errors import StreamStateError

POISON = 0xFF


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

    def __init__(self, value: torch.Tensor, event: Any = None) -> None:
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
