"""The arena has exactly the size asked for, and its memory lives as long as its views."""

from __future__ import annotations

import gc
import logging
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from poros_hf import arena as arena_module
from poros_hf.arena import HostArena
from poros_hf.bounce import CopyRates
from poros_hf.cpu_runtime import CpuRuntime
from poros_hf.environment import HostMemory
from poros_hf.errors import CapacityError, HostSetupError
from poros_hf.units import ALIGNMENT_BYTES, align_up


class LockRecorder(CpuRuntime):
    """Records page locks, and refuses them if told to, or beyond a cap."""

    def __init__(self, *, refuses: bool = False, cap_bytes: int | None = None) -> None:
        super().__init__()
        self.cap_bytes = 0 if refuses else cap_bytes
        self.rates: CopyRates | None = None
        self.locked: list[int] = []
        self.unlocked: list[int] = []
        self.bounced: list[int] = []

    def page_lock(self, buffer: torch.Tensor) -> bool:
        self.locked.append(buffer.nbytes)
        return self.cap_bytes is None or buffer.nbytes <= self.cap_bytes

    def bounce_from(self, buffer: torch.Tensor) -> CopyRates | None:
        self.bounced.append(buffer.nbytes)
        return self.rates

    def page_unlock(self, buffer: torch.Tensor) -> None:
        self.unlocked.append(buffer.nbytes)


def set_available(monkeypatch, available_bytes: int) -> None:
    memory = HostMemory(
        total_bytes=10**12, available_bytes=available_bytes, limited_by="a test limit"
    )
    monkeypatch.setattr(arena_module, "read_host_memory", lambda: memory)


@pytest.mark.parametrize(
    ("num_bytes", "expected"), [(0, 0), (1, 256), (255, 256), (256, 256), (257, 512)]
)
def test_align_up_rounds_to_the_next_multiple(num_bytes, expected):
    assert align_up(num_bytes) == expected


@pytest.mark.parametrize("num_bytes", [1, 255, 4097, 2**20 + 1])
def test_arena_locks_exactly_the_bytes_asked_for(num_bytes):
    runtime = LockRecorder()
    arena = HostArena(num_bytes, runtime)
    assert arena.num_bytes == num_bytes
    assert runtime.locked == [num_bytes]


def test_arena_can_be_empty():
    assert HostArena(0, CpuRuntime()).view(0, 0).numel() == 0


def test_arena_refuses_when_ram_is_too_small(monkeypatch):
    set_available(monkeypatch, 1000)
    with pytest.raises(CapacityError) as caught:
        HostArena(1300, CpuRuntime())
    assert caught.value.slug == "host-memory"
    assert caught.value.details == {
        "needed_bytes": 1300,
        "available_bytes": 1000,
        "short_bytes": 300,
    }


def test_arena_names_what_limits_ram_when_it_refuses(monkeypatch):
    set_available(monkeypatch, 1000)
    with pytest.raises(CapacityError, match="a test limit"):
        HostArena(1300, CpuRuntime())


def test_arena_takes_all_ram_that_is_left(monkeypatch):
    set_available(monkeypatch, 1000)
    assert HostArena(1000, CpuRuntime()).num_bytes == 1000


def test_arena_locks_nothing_when_it_refuses(monkeypatch):
    set_available(monkeypatch, 1000)
    runtime = LockRecorder()
    with pytest.raises(CapacityError):
        HostArena(1300, runtime)
    assert runtime.locked == []


def test_view_reads_what_another_view_wrote():
    arena = HostArena(1024, CpuRuntime())
    arena.view(256, 16).copy_(torch.arange(16, dtype=torch.uint8))
    assert arena.view(260, 4).tolist() == [4, 5, 6, 7]


def test_view_has_a_storage_of_its_own():
    arena = HostArena(1024, CpuRuntime())
    first, second = arena.view(0, 100), arena.view(256, 300)
    assert [view.untyped_storage().nbytes() for view in (first, second)] == [100, 300]
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()


def test_view_is_aligned_when_its_offset_is():
    arena = HostArena(1024, CpuRuntime())
    assert arena.view(512, 8).data_ptr() % ALIGNMENT_BYTES == 0


@pytest.mark.parametrize(("offset", "num_bytes"), [(-1, 4), (1020, 5), (1025, 0), (0, 1025)])
def test_view_refuses_bytes_outside_the_arena(offset, num_bytes):
    arena = HostArena(1024, CpuRuntime())
    with pytest.raises(ValueError, match="outside the arena of 1024"):
        arena.view(offset, num_bytes)


def test_arena_goes_on_with_one_warning_when_page_lock_fails(caplog):
    with caplog.at_level(logging.WARNING, "poros_hf"):
        arena = HostArena(4096, LockRecorder(refuses=True))
    assert not arena.is_pinned
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "4.00 KiB" in caplog.text


def test_arena_is_silent_when_page_lock_works(caplog):
    with caplog.at_level(logging.DEBUG, "poros_hf"):
        arena = HostArena(4096, LockRecorder())
    assert arena.is_pinned
    assert caplog.records == []


def test_arena_raises_when_page_lock_fails_and_pinning_is_demanded():
    with pytest.raises(HostSetupError) as caught:
        HostArena(4096, LockRecorder(refuses=True), must_pin=True)
    assert caught.value.slug == "page-lock"
    assert caught.value.details == {
        "needed_bytes": 4096,
        "lockable_bytes": 0,
        "short_bytes": 4096,
    }


def test_capped_lock_falls_back_to_the_ring_and_says_what_it_costs(caplog):
    runtime = LockRecorder(cap_bytes=2**20)
    runtime.rates = CopyRates(locked_gbps=55.0, bounced_gbps=11.0)
    with caplog.at_level(logging.WARNING, "poros_hf"):
        arena = HostArena(3 * 2**20, runtime)
    assert not arena.is_pinned
    assert runtime.bounced == [3 * 2**20]
    assert runtime.unlocked == [3 * 2**18]  # what the probe had locked
    for word in ("needed 3.00 MiB", "768.00 KiB", "short by 2.25 MiB", "11.0 GB/s", "55.0 GB/s"):
        assert word in caplog.text


def test_capped_lock_is_an_error_with_numbers_when_pinning_is_demanded():
    with pytest.raises(HostSetupError) as caught:
        HostArena(4 * 2**20, LockRecorder(cap_bytes=2**20), must_pin=True)
    assert caught.value.details == {
        "needed_bytes": 4 * 2**20,
        "lockable_bytes": 2**20,
        "short_bytes": 3 * 2**20,
    }


class SlowLock(LockRecorder):
    """Locks when it is told to go on."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.may_lock = threading.Event()

    def page_lock(self, buffer: torch.Tensor) -> bool:
        assert self.may_lock.wait(30.0)
        return super().page_lock(buffer)


@pytest.fixture
def all_in_background(monkeypatch):
    monkeypatch.setattr(arena_module, "_TOUCH_BYTES", 2**16)


@pytest.mark.usefixtures("all_in_background")
def test_large_arena_can_be_written_while_it_is_being_locked():
    runtime = SlowLock()
    arena = HostArena(2**18 + 5, runtime)
    arena.view(0, 2**18 + 5).fill_(9)
    assert runtime.locked == []
    runtime.may_lock.set()
    arena.settle()
    assert arena.is_pinned
    assert runtime.locked == [2**18 + 5]
    assert set(arena.view(0, 2**18 + 5).tolist()) == {9}


@pytest.mark.usefixtures("all_in_background")
def test_refusal_in_the_background_is_told_once_and_not_before_it_is_known(caplog):
    runtime = SlowLock(refuses=True)
    arena = HostArena(2**18, runtime)
    arena.check()
    runtime.may_lock.set()
    arena.settle()
    arena.settle()
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@pytest.mark.usefixtures("all_in_background")
def test_refusal_in_the_background_ends_a_load_that_demands_pinning():
    runtime = SlowLock(refuses=True)
    arena = HostArena(2**18, runtime, must_pin=True)
    arena.check()
    runtime.may_lock.set()
    with pytest.raises(HostSetupError):
        arena.settle()
    with pytest.raises(HostSetupError):
        arena.check()


@pytest.mark.usefixtures("all_in_background")
def test_close_while_it_is_being_locked_leaves_no_lock_and_no_thread():
    runtime = SlowLock()
    arena = HostArena(2**18, runtime)
    runtime.may_lock.set()
    arena.close()
    assert runtime.unlocked == runtime.locked
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith("poros-touch")]


def resident_bytes() -> int:
    return psutil.Process().memory_info().rss


def test_large_arena_takes_what_was_asked_for_and_no_more():
    num_bytes = 200 * 2**20 + 4097
    before = resident_bytes()
    arena = HostArena(num_bytes, CpuRuntime())
    arena.settle()
    grown = resident_bytes() - before
    arena.close()
    assert 0.95 * num_bytes < grown <= 1.02 * num_bytes
    del arena
    gc.collect()
    assert resident_bytes() - before < 0.05 * num_bytes


def test_two_arenas_live_and_die_apart():
    runtime = LockRecorder()
    first, second = HostArena(4096, runtime), HostArena(8192, runtime)
    first.view(0, 4096).fill_(1)
    second.view(0, 8192).fill_(2)
    first.close()
    assert runtime.unlocked == [4096]
    assert second.is_pinned
    assert set(second.view(0, 8192).tolist()) == {2}


def in_child(look: Callable[[], bool]) -> bool:
    """Fork, and return what `look` says in the child."""
    child = os.fork()
    if child == 0:
        os._exit(0 if look() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def has_arena() -> bool:
    return "memfd:poros-store" in Path("/proc/self/maps").read_text()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_forked_process_has_no_arena_and_takes_no_lock_away():
    runtime = LockRecorder()
    arena = HostArena(2**20, runtime)
    assert has_arena()
    assert in_child(lambda: not has_arena())

    def closing_does_nothing() -> bool:
        arena.close()
        return runtime.unlocked == []

    assert in_child(closing_does_nothing)
    arena.close()
    assert runtime.unlocked == [2**20]


def test_close_unlocks_once_when_it_is_called_twice():
    runtime = LockRecorder()
    arena = HostArena(4096, runtime)
    arena.close()
    arena.close()
    assert runtime.unlocked == [4096]


def test_arena_unlocks_when_it_dies_without_close():
    runtime = LockRecorder()
    arena = HostArena(4096, runtime)
    del arena
    gc.collect()
    assert runtime.unlocked == [4096]


def test_close_unlocks_nothing_when_page_lock_failed():
    runtime = LockRecorder(refuses=True)
    HostArena(4096, runtime).close()
    assert runtime.unlocked == []


def test_view_still_reads_after_close():
    arena = HostArena(1024, CpuRuntime())
    view = arena.view(0, 4)
    view.fill_(7)
    arena.close()
    del arena
    gc.collect()
    assert view.tolist() == [7, 7, 7, 7]


def test_memory_goes_when_the_last_view_dies():
    arena = HostArena(1024, CpuRuntime())
    mapping = weakref.ref(arena._mapping)
    views = [arena.view(0, 4), arena.view(4, 4)]
    del arena
    gc.collect()
    alive = [mapping() is not None]
    while views:
        views.pop()
        gc.collect()
        alive.append(mapping() is not None)
    assert alive == [True, True, False]


def test_memory_goes_when_pinning_is_demanded_and_fails():
    runtime = LockRecorder(refuses=True)
    buffers = []
    runtime.page_lock = lambda buffer: buffers.append(weakref.ref(buffer)) is not None
    with pytest.raises(HostSetupError):
        HostArena(4096, runtime, must_pin=True)
    gc.collect()
    assert [buffer() for buffer in buffers] == [None]
