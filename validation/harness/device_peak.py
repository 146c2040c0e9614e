"""The device memory of a run at its highest, when part of it lies in private pools.

The allocator's own counter adds what is live in a private pool to what is live outside of it. It
is blind to what a CUDA graph uses while it is replayed, so the whole pool has to be added; but then
memory that a run takes out of the pool between replays is counted twice. Here every allocation is
written down, with its address: what lies in a private pool counts once, as part of the pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

_COMMON_POOL = (0, 0)
_MAX_EVENTS = 5_000_000


class PeakTrace:
    """Writes every allocation of the device down, from the moment it is made to `stop`."""

    def __init__(self) -> None:
        self._base_bytes = torch.cuda.memory_allocated()
        torch.cuda.memory._record_memory_history(context=None, max_entries=_MAX_EVENTS)

    def stop(self) -> int:
        """Return the largest sum of private pools and of what was live beside them, in bytes."""
        torch.cuda.synchronize()
        snapshot = torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(enabled=None)
        events = snapshot["device_traces"][torch.cuda.current_device()]
        if len(events) >= _MAX_EVENTS:
            raise RuntimeError(f"more than {_MAX_EVENTS} allocations: the first ones are lost")
        return self._base_bytes + peak_bytes(events, snapshot["segments"])


def peak_bytes(events: Iterable[Mapping[str, Any]], segments: Iterable[Mapping[str, Any]]) -> int:
    """Return the peak of a trace.

    Args:
        events: Of the allocator, in order, with `action`, `addr` and `size`.
        segments: As they are at the end, with `address`, `total_size` and `segment_pool_id`.
    """
    pools = [
        (segment["address"], segment["address"] + segment["total_size"])
        for segment in segments
        if tuple(segment["segment_pool_id"]) != _COMMON_POOL
    ]
    live: dict[int, int] = {}
    now = peak = 0
    for event in events:
        address, size, action = event["addr"], event["size"], event["action"]
        in_pool = any(start <= address < end for start, end in pools)
        if action == "segment_alloc" and in_pool:
            now += size
        elif action == "alloc" and not in_pool:
            live[address] = size
            now += size
        elif action == "free_completed":
            now -= live.pop(address, 0)
        peak = max(peak, now)
    return peak
