"""The ring copies the right bytes, never fills a buffer that is being read, and keeps order."""

from __future__ import annotations

import threading

import pytest
import torch

from poros_hf.bounce import BounceRing, measure_gbps


class LateDevice:
    """Copies out of a buffer only when somebody waits for the copy."""

    def __init__(self) -> None:
        self.sent: list[LateCopy] = []

    def send(self, source: torch.Tensor, target: torch.Tensor) -> LateCopy:
        self.sent.append(LateCopy(source, target))
        return self.sent[-1]

    def finish(self) -> None:
        for copy in self.sent:
            copy.synchronize()


class LateCopy:
    def __init__(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self.source, self.target, self.is_done = source, target, False

    def synchronize(self) -> None:
        if not self.is_done:
            self.target.copy_(self.source)
            self.is_done = True


def make_ring(num_buffers: int = 2, buffer_bytes: int = 16) -> tuple[BounceRing, LateDevice]:
    device = LateDevice()
    buffers = [torch.zeros(buffer_bytes, dtype=torch.uint8) for _ in range(num_buffers)]
    return BounceRing(buffers, device.send), device


@pytest.mark.parametrize("num_bytes", [1, 15, 16, 17, 100])
@pytest.mark.parametrize("num_buffers", [1, 2, 3])
def test_ring_copies_every_byte_when_the_device_is_late(num_bytes, num_buffers):
    ring, device = make_ring(num_buffers)
    source = torch.arange(num_bytes).to(torch.uint8)
    target = torch.zeros(num_bytes, dtype=torch.uint8)
    ring.copy(source, target)
    device.finish()
    assert torch.equal(target, source)
    assert len(device.sent) == -(-num_bytes // 16)


def test_ring_waits_for_no_buffer_that_is_free():
    ring, device = make_ring(num_buffers=3)
    ring.copy(torch.ones(48, dtype=torch.uint8), torch.zeros(48, dtype=torch.uint8))
    assert [copy.is_done for copy in device.sent] == [False, False, False]


def test_ring_covers_what_lies_in_its_memory_only():
    ring, _ = make_ring()
    memory = torch.zeros(64, dtype=torch.uint8)
    ring.cover(memory[16:48])
    assert [ring.covers(memory[start:]) for start in (0, 15, 16, 47, 48)] == [
        False,
        False,
        True,
        True,
        False,
    ]


def test_wait_blocks_until_its_own_copy_is_enqueued():
    ring, _ = make_ring()
    may_run, order = threading.Event(), []
    first, second = object(), object()
    ring.submit(first, lambda: order.append(("first", may_run.wait(30.0))))
    ring.submit(second, lambda: order.append(("second", True)))
    assert order == []
    may_run.set()
    ring.wait_for(second)
    assert order == [("first", True), ("second", True)]
    ring.wait_for(first)


def test_wait_for_an_event_that_nobody_records_does_not_block():
    ring, device = make_ring()
    ran: list[str] = []
    ring.submit(object(), lambda: ran.append("copy"))
    ring.wait_for(object())
    ring.drain()
    assert ran == ["copy"]
    ring.wait_for(object())  # behind a drain as well
    assert device.sent == []


def test_error_of_a_copy_reaches_who_waits_for_it():
    ring, _ = make_ring()
    event = object()

    def fail() -> None:
        raise RuntimeError("the copy failed")

    ring.submit(event, fail)
    for _ in range(2):  # it has not come about for those who ask again either
        with pytest.raises(RuntimeError, match="the copy failed"):
            ring.wait_for(event)
    ring.submit(event, lambda: None)
    ring.wait_for(event)


def test_interrupted_wait_is_not_taken_for_one_that_has_ended(monkeypatch):
    ring, _ = make_ring()
    may_run, event, order = threading.Event(), object(), []
    ring.submit(event, lambda: order.append(may_run.wait(30.0)))
    copy = ring._submitted[id(event)]

    def interrupt(timeout: float | None = None) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(copy, "result", interrupt)
    with pytest.raises(KeyboardInterrupt):
        ring.wait_for(event)
    may_run.set()
    ring.wait_for(event)
    assert order == [True]


def test_drain_waits_for_all_of_them():
    ring, _ = make_ring()
    done = []
    for index in range(5):
        ring.submit(object(), lambda index=index: done.append(index))
    ring.drain()
    assert sorted(done) == [0, 1, 2, 3, 4]


def test_rate_is_bytes_over_the_second_copy(monkeypatch):
    clock = iter([10.0, 99.0, 100.0, 100.5])
    monkeypatch.setattr("poros_hf.bounce.time.perf_counter", lambda: next(clock))
    source = torch.zeros(10**6, dtype=torch.uint8)
    rate = measure_gbps(lambda source, target: None, source, source, lambda: None)
    assert rate == pytest.approx(0.002)
