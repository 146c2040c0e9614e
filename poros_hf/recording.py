"""GraphRecorder: CUDA graphs in one memory pool, and what a failed recording must not leave behind.

[Note: a broken capture]
torch ends a capture that the device calls invalid halfway: the allocator goes on as if it were
under way, so that it refuses to give anything back, and so does the generator, which then draws no
number. The first is ended by hand; the second is set right by the next capture that is whole. The
allocator of page-locked memory cannot be told, so the next capture is into another pool.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

import torch

_T = TypeVar("_T")
# That allocator asks the graphs of broken captures for ever whether they are recording.
_broken: list[torch.cuda.CUDAGraph] = []


class Stream(Protocol):
    """What a recorder asks of a stream."""

    def wait_stream(self, stream: Any) -> object:
        """Make this stream wait for what is enqueued on another."""


class GraphRecorder:
    """Records work as CUDA graphs that share one memory pool.

    Args:
        device: CUDA device, with its index.
        stream: Recorded on; the default stream cannot be.
    """

    def __init__(self, device: torch.device, stream: Stream) -> None:
        self._device = device
        self._stream: Any = stream
        self._pool = _Pool(torch.cuda.graph_pool_handle())
        self._anchor: torch.cuda.CUDAGraph | None = None

    def record(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Record the kernels that `work` launches; see `Runtime.record_work`."""
        try:
            return self._with_room(lambda: self._capture(work))
        except BaseException:
            self._keep_pool()  # a whole capture behind the broken one
            raise

    def allocate(self, num_bytes: int) -> torch.UntypedStorage:
        """Return memory of the pool, which belongs to the stream of the records.

        Of another stream's no record would ever use what was given back. It is a storage because
        `torch.empty` fills memory under deterministic algorithms, on the stream that is current,
        for which nobody waits.
        """
        return self._with_room(lambda: self._take(num_bytes))

    def release(self) -> None:
        """Give the pool back; its graphs are gone. Blocks the host, once."""
        if self._anchor is not None:
            self._leave_pool()
            give_back_cached(self._device)

    def _with_room(self, take: Callable[[], _T]) -> _T:
        """Take memory from the pool, and once more with room for it if there is none.

        While memory comes from a pool, torch gives back nothing of what it has cached elsewhere.
        """
        with contextlib.suppress(torch.OutOfMemoryError):
            self._keep_pool()
            return take()
        give_back_cached(self._device)
        self._keep_pool()
        return take()

    def _keep_pool(self) -> None:
        """Make sure of a graph that keeps the pool, which would go for good with its last one."""
        if self._anchor is None:
            flag = torch.zeros(1, device=self._device)

            def work() -> None:
                flag.zero_()

            self._anchor = self._capture(work)

    def _leave_pool(self) -> None:
        """Take another pool from now on; the memory of this one goes with its last graph."""
        self._anchor = None
        self._pool = _Pool(torch.cuda.graph_pool_handle())

    def _take(self, num_bytes: int) -> torch.UntypedStorage:
        pool = cast("torch.cuda.MemPool", self._pool)
        with torch.cuda.stream(self._stream), torch.cuda.use_mem_pool(pool, self._device):
            return torch.UntypedStorage(num_bytes, device=self._device)

    def _capture(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(stream)
        with torch.cuda.stream(self._stream), _without_collector():
            try:
                # Other threads may allocate or wait meanwhile, as DataLoader's pinning thread does.
                graph.capture_begin(pool=self._pool.id, capture_error_mode="thread_local")
                work()
                graph.capture_end()
            except BaseException:
                self._abandon(graph)
                raise
            finally:
                # cuBLAS keeps a workspace for every stream it has seen, and would keep this one in
                # the records' memory for good.
                torch._C._cuda_clearCublasWorkspaces()
        stream.wait_stream(self._stream)
        return graph

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture that has failed; see [Note: a broken capture]."""
        try:
            graph.capture_end()
        except RuntimeError:  # says only that the capture is broken
            _broken.append(graph)
            index, pool = self._device.index, self._pool.id
            with contextlib.suppress(RuntimeError):  # there is nothing to end where none began
                torch._C._cuda_endAllocateToPool(index, pool)
                torch._C._cuda_releasePool(index, pool)
            self._leave_pool()


def give_back_cached(device: torch.device) -> None:
    """Give back what the allocator has cached and does not use; blocks the host, once."""
    with torch.cuda.device(device):
        torch.cuda.empty_cache()


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Keep the garbage collector from running, in any thread.

    What it frees may wait for the device, which breaks a capture that is under way.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@dataclass(frozen=True, slots=True)
class _Pool:
    """A memory pool: all that `torch.cuda.use_mem_pool` looks at is its id."""

    id: Any
