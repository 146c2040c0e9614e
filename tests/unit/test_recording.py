"""What torch is asked for while graphs are recorded, above all where recording fails."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from poros_hf import recording
from poros_hf.recording import GraphRecorder


class FakeTorch:
    """CUDA graphs and the allocator as far as the recorder drives them.

    Attributes:
        underway: Pools into which the allocator takes memory to be recorded.
        is_invalid: The device has called the present capture invalid.
        cached_bytes: What the allocator has cached outside of the pool.
        calls: What was asked for, in order.
    """

    def __init__(self) -> None:
        self.underway: list[Any] = []
        self.users: dict[Any, int] = {}
        self.is_invalid = False
        self.is_generator_recording = False
        self.cached_bytes = 0
        self.calls: list[str] = []
        self.handles = itertools.count(1)

    def empty_cache(self) -> None:
        assert not self.underway, "captures_underway.empty() INTERNAL ASSERT FAILED"
        self.calls.append("empty_cache")
        self.cached_bytes = 0

    def end_pool(self, index: int, pool: Any) -> None:
        if pool not in self.underway:
            raise RuntimeError("not currently recording to mempool_id")
        self.underway.remove(pool)

    def release_pool(self, index: int, pool: Any) -> None:
        self.users[pool] -= 1

    @contextlib.contextmanager
    def use_mem_pool(self, pool: Any, device: Any) -> Iterator[None]:
        self.underway.append(pool.id)
        try:
            yield
        finally:
            self.underway.remove(pool.id)


class FakeGraph:
    """Ends a capture as torch 2.11 to 2.13 do: the device first, then allocator and generator."""

    torch: FakeTorch

    def capture_begin(self, *, pool: Any, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        assert pool not in self.torch.underway, "already recording to mempool_id"
        self.pool = pool
        self.torch.is_invalid = False
        self.torch.underway.append(pool)
        self.torch.users[pool] = self.torch.users.get(pool, 0) + 1
        self.torch.is_generator_recording = True

    def capture_end(self) -> None:
        if self.torch.is_invalid:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.torch.underway.remove(self.pool)
        self.torch.is_generator_recording = False


class FakeStream:
    """A stream that may wait."""

    def wait_stream(self, stream: Any) -> None:
        """Do nothing."""


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    fake = FakeTorch()
    monkeypatch.setattr(FakeGraph, "torch", fake, raising=False)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: FakeStream())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, next(fake.handles)))
    monkeypatch.setattr(torch.cuda, "empty_cache", fake.empty_cache)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", fake.use_mem_pool)
    for name, call in {
        "_cuda_endAllocateToPool": fake.end_pool,
        "_cuda_releasePool": fake.release_pool,
        "_cuda_clearCublasWorkspaces": lambda: fake.calls.append("clear workspaces"),
    }.items():
        monkeypatch.setattr(torch._C, name, call, raising=False)
    monkeypatch.setattr(recording, "_broken", [])
    return fake


@pytest.fixture
def recorder(fake: FakeTorch) -> GraphRecorder:
    return GraphRecorder(torch.device("cpu", 0), FakeStream())


def test_whole_captures_share_one_pool(fake: FakeTorch, recorder: GraphRecorder) -> None:
    pools = [recorder.record(lambda: None).pool for _ in range(3)]
    assert len(set(pools)) == 1
    assert fake.underway == []
    assert recording._broken == []


@pytest.mark.parametrize("error", [RuntimeError("a wait"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("is_invalid", [True, False])
def test_failed_capture_leaves_allocator_and_generator_as_they_were(
    fake: FakeTorch, recorder: GraphRecorder, error: BaseException, is_invalid: bool
) -> None:
    before = recorder.record(lambda: None)

    def work() -> None:
        fake.is_invalid = is_invalid
        raise error

    with pytest.raises(type(error)):
        recorder.record(work)
    assert fake.underway == []
    assert not fake.is_generator_recording
    fake.empty_cache()
    after = recorder.record(lambda: None)
    # The allocator of page-locked memory would refuse the pool of a broken capture.
    assert (after.pool != before.pool) == is_invalid
    assert len(recording._broken) == is_invalid


def test_capture_that_is_broken_from_outside_is_found_at_its_end(
    fake: FakeTorch, recorder: GraphRecorder
) -> None:
    def work() -> None:
        fake.is_invalid = True

    with pytest.raises(RuntimeError, match="previous error"):
        recorder.record(work)
    assert fake.underway == []
    assert not fake.is_generator_recording


def test_workspaces_go_after_every_capture_that_failed_too(
    fake: FakeTorch, recorder: GraphRecorder
) -> None:
    recorder.record(lambda: None)
    fake.calls.clear()

    def work() -> None:
        raise TypeError

    with pytest.raises(TypeError):
        recorder.record(work)
    assert fake.calls == ["clear workspaces"]


def short_of_room(fake: FakeTorch) -> Callable[[], None]:
    """Return work that takes memory, of which there is none as long as anything is cached."""
    fake.cached_bytes = 1

    def work() -> None:
        if fake.cached_bytes:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    return work


def test_memory_that_is_cached_elsewhere_makes_room_for_a_record(
    fake: FakeTorch, recorder: GraphRecorder
) -> None:
    recorder.record(short_of_room(fake))
    assert "empty_cache" in fake.calls


def test_memory_that_is_cached_elsewhere_makes_room_for_scratch(
    fake: FakeTorch, recorder: GraphRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = short_of_room(fake)
    storage = torch.UntypedStorage(8)

    def take(num_bytes: int, device: Any) -> torch.UntypedStorage:
        check()
        return storage

    monkeypatch.setattr(torch, "UntypedStorage", take)
    assert recorder.allocate(8) is storage


def test_memory_that_is_not_there_is_asked_for_twice(
    fake: FakeTorch, recorder: GraphRecorder
) -> None:
    asked = []

    def work() -> None:
        asked.append(1)
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(torch.OutOfMemoryError):
        recorder.record(work)
    assert len(asked) == 2
    assert fake.underway == []


def test_released_pool_is_given_back_at_once(fake: FakeTorch, recorder: GraphRecorder) -> None:
    first = recorder.record(lambda: None).pool
    recorder.release()
    assert fake.calls[-1] == "empty_cache"
    assert recorder.record(lambda: None).pool != first


def test_pool_that_was_never_used_costs_nothing_to_release(
    fake: FakeTorch, recorder: GraphRecorder
) -> None:
    recorder.release()
    assert fake.calls == []


@pytest.mark.parametrize("was_on", [True, False])
def test_garbage_is_not_collected_during_a_capture(recorder: GraphRecorder, was_on: bool) -> None:
    seen = []
    before = gc.isenabled()
    try:
        (gc.enable if was_on else gc.disable)()
        recorder.record(lambda: seen.append(gc.isenabled()))
        assert gc.isenabled() == was_on
    finally:
        (gc.enable if before else gc.disable)()
    assert seen == [False]
