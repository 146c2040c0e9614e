"""What a profiled step becomes: lanes, busy time, spans."""

from __future__ import annotations

import pytest

from validation.experiments.timeline.record import StepProfile, _Event, merge, summarise

MS = 1_000_000


def event(name: str, begin: float, length: float, *, on_device: bool = True) -> _Event:
    return _Event(name, on_device, int(begin * MS), int(length * MS))


@pytest.fixture
def step() -> StepProfile:
    return summarise(
        [
            event("cudaLaunchKernel", 9, 1, on_device=False),
            event("cudaGraphLaunch", 10, 1, on_device=False),
            event("cudaEventRecord", 11, 1, on_device=False),
            event("Memcpy HtoD (Pinned -> Device)", 10, 4),
            event("gemm", 12, 2),
            event("gemm", 13, 3),
            event("Memcpy DtoD (Device -> Device)", 18, 2),
        ],
        on_gpu=True,
    )


def test_copies_from_the_host_have_a_lane_of_their_own(step: StepProfile) -> None:
    assert step.lanes == {"copy": [(0.0, 4.0)], "compute": [(2.0, 6.0), (8.0, 10.0)]}


def test_busy_time_counts_an_overlap_once(step: StepProfile) -> None:
    figures = step.figures()
    assert (figures["kernel_ms"], figures["copy_ms"]) == (6.0, 4.0)


def test_launches_are_counted_on_the_host(step: StepProfile) -> None:
    figures = step.figures()
    counts = [figures[f"num_{name}"] for name in ("kernels", "launches", "graph_launches")]
    assert counts == [3, 2, 1]


def test_spans_hold_the_busy_share(step: StepProfile) -> None:
    spans = step.bins(5)
    assert [span["copy_share"] for span in spans] == [1, 1, 0, 0, 0]
    assert [span["compute_share"] for span in spans] == [0, 1, 1, 0, 1]
    assert (spans[0]["begin_ms"], spans[-1]["end_ms"]) == (0, 10)


def test_spans_keep_the_busy_time(step: StepProfile) -> None:
    spans = step.bins(7)
    busy = sum(s["compute_share"] * (s["end_ms"] - s["begin_ms"]) for s in spans)
    assert busy == pytest.approx(step.figures()["kernel_ms"], rel=1e-3)


def test_intervals_that_touch_are_one() -> None:
    assert merge([(2, 3), (0, 1), (1, 2), (5, 6)]) == [(0, 3), (5, 6)]
