"""The peak of a trace counts a private pool once, whatever is live in it."""

from __future__ import annotations

from validation.harness.device_peak import peak_bytes

POOL = {"address": 1000, "total_size": 100, "segment_pool_id": (0, 7)}
COMMON = {"address": 0, "total_size": 500, "segment_pool_id": (0, 0)}


def event(action: str, address: int, size: int) -> dict[str, object]:
    return {"action": action, "addr": address, "size": size}


def test_peak_is_the_largest_sum_of_what_is_live():
    events = [
        event("segment_alloc", 0, 500),
        event("alloc", 0, 30),
        event("alloc", 40, 20),
        event("free_requested", 0, 30),
        event("free_completed", 0, 30),
        event("alloc", 100, 25),
    ]
    assert peak_bytes(events, [COMMON]) == 50


def test_peak_counts_a_private_pool_once_and_whole():
    events = [
        event("alloc", 0, 30),
        event("segment_alloc", 1000, 100),
        event("alloc", 1000, 60),
        event("free_completed", 1000, 60),
        event("alloc", 1000, 90),
        event("alloc", 40, 5),
    ]
    assert peak_bytes(events, [COMMON, POOL]) == 135


def test_peak_ignores_memory_that_was_there_before_the_trace():
    events = [event("free_completed", 0, 30), event("alloc", 40, 5)]
    assert peak_bytes(events, [COMMON]) == 5
