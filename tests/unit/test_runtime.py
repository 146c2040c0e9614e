"""The CPU runtime orders copies as events say, and writes the order down."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from poros_hf.cpu_runtime import CpuRuntime
from poros_hf.errors import HostSetupError, StreamStateError
from poros_hf.runtime import CudaRuntime, runtime_for
from poros_hf.runtime_base import POISON, HostRead, TransferTimes
from tests.unit.blocks import make_streamer

OLD, NEW = 1, 2


def staged(runtime: CpuRuntime, *, poison: bool = False):
    """Stage NEW over OLD and return the target and the event behind the copy."""
    target = torch.full((6,), OLD, dtype=torch.uint8)
    source = torch.full((4,), NEW, dtype=torch.uint8)
    after, done = runtime.new_event("after"), runtime.new_event("done")
    runtime.stage(source, target, after=after, done=done, poison=poison)
    return target, done


def test_stage_copies_at_once_when_the_runtime_is_eager():
    target, _ = staged(CpuRuntime())
    assert target.tolist() == [NEW] * 4 + [OLD] * 2


def test_stage_copies_nothing_yet_when_the_runtime_is_lazy():
    target, _ = staged(CpuRuntime(lazy=True))
    assert target.tolist() == [OLD] * 6


def test_wait_runs_the_copy_when_the_runtime_is_lazy():
    runtime = CpuRuntime(lazy=True)
    target, done = staged(runtime)
    runtime.wait(done, runtime.current_stream())
    assert target.tolist() == [NEW] * 4 + [OLD] * 2


def test_wait_runs_the_copies_before_it_in_order_when_the_runtime_is_lazy():
    runtime = CpuRuntime(lazy=True)
    target = torch.zeros(2, dtype=torch.uint8)
    events = [runtime.new_event(str(value)) for value in range(3)]
    for value, event in enumerate(events):
        source = torch.full((2,), 10 + value, dtype=torch.uint8)
        runtime.stage(source, target, after=runtime.new_event("-"), done=event, poison=False)
    seen = []
    for event in (events[1], events[0], events[2]):
        runtime.wait(event, "compute")
        seen.append(int(target[0]))
    assert seen == [11, 11, 12]


def test_wait_is_a_no_op_when_the_event_was_never_recorded():
    runtime = CpuRuntime(lazy=True)
    target, _ = staged(runtime)
    runtime.wait(runtime.new_event("never"), runtime.current_stream())
    assert target.tolist() == [OLD] * 6


def test_drain_runs_every_copy_when_the_runtime_is_lazy():
    runtime = CpuRuntime(lazy=True)
    target, _ = staged(runtime)
    runtime.drain()
    assert target.tolist() == [NEW] * 4 + [OLD] * 2


def test_stage_poisons_the_whole_slot_before_the_copy():
    target, _ = staged(CpuRuntime(), poison=True)
    assert target.tolist() == [NEW] * 4 + [POISON] * 2


def test_stage_leaves_poison_until_the_wait_when_the_runtime_is_lazy():
    target, _ = staged(CpuRuntime(lazy=True), poison=True)
    assert target.tolist() == [POISON] * 6


def test_runtime_keeps_no_trace_unless_told_to():
    runtime = CpuRuntime()
    staged(runtime)
    assert runtime.trace == []


def test_streamer_orders_wait_copy_wait_record_for_every_fetch():
    runtime = CpuRuntime(keep_trace=True)
    streamer = make_streamer([1, 2, 3], num_slots=1, runtime=runtime)
    runtime.trace.clear()  # of making the slots
    for block in (0, 1):
        with streamer.hold(block):
            pass
    assert (
        runtime.trace
        == [
            ("copy wait", "consumed[0]"),
            ("copy", "copied[0]"),
            ("compute wait", "copied[0]"),
            ("compute record", "consumed[0]"),
        ]
        * 2
    )


def test_streamer_waits_for_the_held_block_before_it_stages_the_next():
    runtime = CpuRuntime(keep_trace=True)
    streamer = make_streamer([1, 2, 3], num_slots=2, runtime=runtime)
    runtime.trace.clear()  # of making the slots
    with streamer.hold(0):
        assert runtime.trace == [
            ("copy wait", "consumed[0]"),
            ("copy", "copied[0]"),
            ("compute wait", "copied[0]"),
            ("copy wait", "consumed[1]"),
            ("copy", "copied[1]"),
        ]


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_streamer_never_copies_into_a_slot_between_wait_and_record(num_slots):
    runtime = CpuRuntime(keep_trace=True)
    streamer = make_streamer([1, 2, 3, 4, 5], num_slots, runtime=runtime)
    for block in [0, 1, 2, 3, 4, 4, 3, 2, 1, 0, 0, 1, 3, 2, 4, 0]:
        with streamer.hold(block), streamer.hold(block):
            pass
    users = dict.fromkeys(range(num_slots), 0)
    for operation, label in runtime.trace:
        slot = int(label.split("[")[1][:-1])
        if operation == "copy":
            assert users[slot] == 0
        elif operation == "compute record":
            users[slot] = 0
        elif operation == "compute wait":
            users[slot] += 1
    assert {operation for operation, _ in runtime.trace} == {
        "copy wait",
        "copy",
        "compute wait",
        "compute record",
    }


def test_streamer_reads_the_old_bytes_when_the_wait_is_missing(monkeypatch):
    runtime = CpuRuntime(lazy=True)
    streamer = make_streamer([1, 1], num_slots=1, runtime=runtime)
    streamer._slots.poison = False
    with streamer.hold(0) as views:
        first = views["w.packed"].clone()
    monkeypatch.setattr(runtime, "wait", lambda event, stream: None)
    with streamer.hold(1) as views:
        assert torch.equal(views["w.packed"], first)


def test_take_times_counts_an_eager_copy_as_stall():
    runtime = CpuRuntime()
    staged(runtime)
    times = runtime.take_times()
    assert times.copy_ms > 0
    assert times.stall_ms == times.copy_ms
    assert times.overlap_percent == 0.0


def test_take_times_starts_anew_when_it_was_called():
    runtime = CpuRuntime()
    staged(runtime)
    runtime.take_times()
    assert runtime.take_times() == TransferTimes()


@pytest.mark.parametrize(
    ("copy_ms", "stall_ms", "expected"),
    [(0.0, 0.0, 0.0), (10.0, 0.0, 100.0), (10.0, 4.0, 60.0), (10.0, 12.0, 0.0)],
)
def test_overlap_percent_is_the_share_that_compute_did_not_wait_for(copy_ms, stall_ms, expected):
    assert TransferTimes(copy_ms=copy_ms, stall_ms=stall_ms).overlap_percent == expected


def test_read_later_gives_the_value_of_the_moment():
    value = torch.tensor([1.0])
    read = CpuRuntime().read_later(value)
    value.fill_(2.0)
    assert read.is_done
    assert read.get().tolist() == [1.0]


class FakeEvent:
    """A CUDA event as far as HostRead looks at it."""

    def __init__(self) -> None:
        self.is_reached = False

    def query(self) -> bool:
        return self.is_reached

    def synchronize(self) -> None:
        self.is_reached = True


def test_host_read_is_not_done_before_its_event():
    assert not HostRead(torch.zeros(1), FakeEvent()).is_done


def test_host_read_waits_for_its_event_when_it_is_asked_early():
    event = FakeEvent()
    read = HostRead(torch.tensor([3.0]), event)
    assert read.get().tolist() == [3.0]
    assert read.is_done


def test_runtime_for_gives_an_eager_cpu_runtime_without_a_gpu():
    runtime = runtime_for(torch.device("cpu"))
    assert isinstance(runtime, CpuRuntime)
    assert not runtime.lazy
    assert runtime.device == torch.device("cpu")


def test_runtime_for_refuses_another_device():
    with pytest.raises(HostSetupError) as caught:
        runtime_for(torch.device("mps"))
    assert caught.value.slug == "device-type"
    assert caught.value.details == {"device": "mps"}


def test_page_lock_works_without_a_gpu():
    assert CpuRuntime().page_lock(torch.zeros(4, dtype=torch.uint8))


class FakeDriver:
    """The CUDA runtime API as far as page locks need it."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.asked: list[tuple[int, int, int]] = []
        self.unregistered: list[int] = []

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        self.asked.append((address, num_bytes, flags))
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        self.unregistered.append(address)
        return self.code


def cuda_runtime(monkeypatch, code: int):
    """Return a CUDA runtime without a device, its driver, and the sticky errors it cleared."""
    runtime = object.__new__(CudaRuntime)
    runtime.device = torch.device("cuda", 0)
    driver, cleared = FakeDriver(code), []
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(runtime, "_clear_sticky_error", lambda: cleared.append(True))
    return runtime, driver, cleared


def test_page_lock_registers_the_buffer_in_place(monkeypatch):
    runtime, driver, cleared = cuda_runtime(monkeypatch, code=0)
    buffer = torch.zeros(1001, dtype=torch.uint8)
    assert runtime.page_lock(buffer)
    assert driver.asked == [(buffer.data_ptr(), 1001, 0)]
    assert cleared == []


def test_page_lock_answers_no_and_clears_the_error_when_the_driver_refuses(monkeypatch):
    runtime, _, cleared = cuda_runtime(monkeypatch, code=2)
    assert not runtime.page_lock(torch.zeros(1001, dtype=torch.uint8))
    assert cleared == [True]


def test_page_unlock_is_silent_when_the_driver_agrees(monkeypatch, caplog):
    runtime, driver, cleared = cuda_runtime(monkeypatch, code=0)
    buffer = torch.zeros(1001, dtype=torch.uint8)
    runtime.page_unlock(buffer)
    assert driver.unregistered == [buffer.data_ptr()]
    assert (cleared, caplog.records) == ([], [])


@pytest.mark.parametrize(("code", "num_warnings"), [(1, 1), (4, 0)])
def test_page_unlock_tells_every_code_but_that_of_an_ending_process(
    monkeypatch, caplog, code, num_warnings
):
    runtime, _, cleared = cuda_runtime(monkeypatch, code=code)
    runtime.page_unlock(torch.zeros(1001, dtype=torch.uint8))
    assert len(caplog.records) == len(cleared) == num_warnings


def test_clear_sticky_error_swallows_the_error_of_the_next_launch(monkeypatch):
    runtime = object.__new__(CudaRuntime)
    runtime.device = torch.device("cpu")
    launches = []

    def zeros(*args, **kwargs):
        launches.append(args)
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "zeros", zeros)
    runtime._clear_sticky_error()
    assert launches == [(1,)]


def test_scratch_that_is_gone_is_forgotten_without_a_replay():
    runtime = CpuRuntime()
    kept = runtime.allocate_scratch(8)
    for _ in range(100):
        runtime.allocate_scratch(8)
    assert len(runtime._scratch) <= 2
    with pytest.raises(StreamStateError, match="rows of the head"):
        runtime.refuse_kept_scratch()
    del kept
    runtime.refuse_kept_scratch()
    assert runtime._scratch == []


def test_record_is_not_run_until_it_is_replayed_and_works_on_its_own_addresses():
    runtime = CpuRuntime()
    source, target = torch.zeros(3), torch.zeros(3)
    record = runtime.record_work(lambda: target.copy_(source))
    source.fill_(1.0)
    assert not target.any()
    record.replay()
    assert torch.equal(target, source)
    source.fill_(2.0)
    record.replay()
    assert torch.equal(target, source)


def test_random_numbers_are_drawn_again_from_a_state():
    runtime = CpuRuntime()
    state = runtime.rng_state()
    first = torch.rand(5)
    behind = runtime.rng_state()
    with runtime.rng_at(state):
        assert torch.equal(torch.rand(5), first)
        torch.rand(7)
    assert runtime.is_rng_state(behind)
    runtime.set_rng_state(state)
    assert torch.equal(torch.rand(5), first)


def test_random_numbers_go_on_where_they_were_after_an_error():
    runtime = CpuRuntime()
    state = runtime.rng_state()
    torch.rand(5)
    behind = runtime.rng_state()
    with pytest.raises(KeyError), runtime.rng_at(state):
        raise KeyError
    assert runtime.is_rng_state(behind)


def test_state_of_random_numbers_tells_whether_any_was_drawn():
    runtime = CpuRuntime()
    state = runtime.rng_state()
    torch.zeros(3).exp()
    assert runtime.is_rng_state(state)
    torch.rand(1)
    assert not runtime.is_rng_state(state)
