"""Record what the device does during one step: kernels, copies, and how they lie in time.

[Note: lanes]
A copy from the host to the device is `copy`; every other activity of the device is `compute`.
Activities of one lane that lie over each other count once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.profiler import ProfilerActivity, profile

NUM_BINS = 400
Lane = Literal["copy", "compute"]
Interval = tuple[float, float]  # begin and end, in ms from the first activity
_LAUNCHES = ("cudaLaunchKernel", "cudaGraphLaunch", "cuLaunchKernel")


@dataclass(frozen=True, kw_only=True)
class StepProfile:
    """The device's activities in one step.

    Attributes:
        lanes: Merged intervals of each lane, in order.
        num_kernels: Activities of the lane `compute`.
        num_launches: Calls of the host that started kernels or graphs; graphs alone beside it.
    """

    lanes: dict[Lane, list[Interval]]
    num_kernels: int
    num_launches: int
    num_graph_launches: int

    def figures(self) -> dict[str, float]:
        """Return the busy time of each lane in ms, and the counts."""
        return {
            "kernel_ms": busy_ms(self.lanes["compute"]),
            "copy_ms": busy_ms(self.lanes["copy"]),
            "num_kernels": self.num_kernels,
            "num_launches": self.num_launches,
            "num_graph_launches": self.num_graph_launches,
        }

    def bins(self, count: int = NUM_BINS) -> list[dict[str, float]]:
        """Cut the step into `count` equal spans; each with the busy share of both lanes, 0 to 1."""
        ends = [interval[-1][1] for interval in self.lanes.values() if interval]
        width = max(ends, default=0.0) / count
        shares = {lane: _shares(intervals, width, count) for lane, intervals in self.lanes.items()}
        return [
            {
                "step": index + 1,
                "begin_ms": round(index * width, 4),
                "end_ms": round((index + 1) * width, 4),
                "copy_share": round(shares["copy"][index], 4),
                "compute_share": round(shares["compute"][index], 4),
            }
            for index in range(count)
        ]


def busy_ms(intervals: Iterable[Interval]) -> float:
    """Return the length of intervals that do not overlap."""
    return sum(end - begin for begin, end in intervals)


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Join intervals that touch or overlap."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def _shares(intervals: Sequence[Interval], width: float, count: int) -> list[float]:
    busy = [0.0] * count
    if not width:
        return busy
    for begin, end in intervals:
        first, last = int(begin / width), min(int(end / width), count - 1)
        for index in range(first, last + 1):
            span = min(end, (index + 1) * width) - max(begin, index * width)
            busy[index] += max(span, 0.0) / width
    return [min(share, 1.0) for share in busy]


class StepProfiler:
    """Profiles from `start` to `stop`; on a machine without a GPU, the CPU's operators."""

    def __init__(self) -> None:
        self._on_gpu = torch.cuda.is_available()
        activity = ProfilerActivity.CUDA if self._on_gpu else ProfilerActivity.CPU
        self._profile = profile(activities=[activity])

    def start(self) -> None:
        """Begin to record."""
        self._synchronise()
        self._profile.start()

    def stop(self) -> StepProfile:
        """End the recording and return what was seen."""
        self._synchronise()
        self._profile.stop()
        results: Any = self._profile.profiler
        events = results.kineto_results.events()
        # Ranges that the program named are mirrored onto the device, over the kernels in them.
        seen = [_Event.of(event) for event in events if not event.is_user_annotation()]
        return summarise(seen, on_gpu=self._on_gpu)

    def _synchronise(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()


@dataclass(frozen=True)
class _Event:
    name: str
    on_device: bool
    begin_ns: int
    length_ns: int

    @classmethod
    def of(cls, event: Any) -> _Event:
        on_device = event.device_type().name != "CPU"
        return cls(event.name(), on_device, event.start_ns(), event.duration_ns())


def summarise(events: Sequence[_Event], *, on_gpu: bool) -> StepProfile:
    """Sort the events of a step into lanes, with times from the first one on."""
    active = [event for event in events if event.on_device == on_gpu and event.length_ns > 0]
    origin = min((event.begin_ns for event in active), default=0)
    found: dict[Lane, list[Interval]] = {"copy": [], "compute": []}
    for event in active:
        lane: Lane = "copy" if event.name.startswith("Memcpy HtoD") else "compute"
        begin = (event.begin_ns - origin) / 1e6
        found[lane].append((begin, begin + event.length_ns / 1e6))
    calls = [event.name for event in events if not event.on_device]
    return StepProfile(
        lanes={lane: merge(intervals) for lane, intervals in found.items()},
        num_kernels=len(found["compute"]),
        num_launches=sum(name.startswith(_LAUNCHES) for name in calls),
        num_graph_launches=sum(name.startswith("cudaGraphLaunch") for name in calls),
    )
