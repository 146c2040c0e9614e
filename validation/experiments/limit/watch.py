"""The watch of a limit arm: that of recipe-32b, and one step more under the profiler."""

from __future__ import annotations

import time
from typing import Any

import torch

from validation.experiments.recipe_32b.watch import StepWatch
from validation.experiments.timeline.record import StepProfile, StepProfiler
from validation.harness.device_peak import PeakTrace


class LimitWatch(StepWatch):
    """Keeps a sample of every step; the step behind the timed ones is profiled, and has no time.

    Args:
        num_warmup: Steps whose time stands apart.
        num_steps: Steps before the profiled one.
        stop_at: Time (`time.time()`) after which the profiled step is the only one to begin.
        link_gbps: Measured host-to-device rate, 1e9 bytes per second; None without a GPU.

    Attributes:
        streaming: The PorosStreaming of a streamed arm, whose plan is compared with what is seen.
        profile: What the device did in the profiled step; None where it was not reached.
    """

    def __init__(
        self, num_warmup: int, num_steps: int, stop_at: float, link_gbps: float | None
    ) -> None:
        super().__init__(num_warmup, num_steps + 1, stop_at)
        self.streaming: Any = None
        self.profile: StepProfile | None = None
        self._num_timed = num_steps
        self._link_gbps = link_gbps
        self._profiler: StepProfiler | None = None
        self._trace = PeakTrace() if torch.cuda.is_available() else None
        self._traced: tuple[int, int] | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """As the base; the profiler starts ahead of the last step.

        Allocations are written down until the warm-up is over, which is when the peak is known.
        """
        if self._trace is not None and len(self.samples) == self._num_warmup:
            self._end_trace()
        super().on_step_begin(args, state, control)
        if len(self.samples) > self._num_timed:
            self._profiler = StepProfiler()
            self._profiler.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """As the base, with what the plan says of copies and peak."""
        if self._profiler is not None:
            self.profile = self._profiler.stop()
            self.samples[-1] |= self.profile.figures()
        super().on_step_end(args, state, control)
        if self._streamer is not None and self._link_gbps is not None:
            least_bytes = self._least_bytes(args.gradient_accumulation_steps)
            self.samples[-1]["link_floor_ms"] = least_bytes / self._link_gbps / 1e6
        plan = self.streaming and self.streaming.plan
        if plan is not None and "peak_bytes" in self.samples[-1]:
            planned_bytes = plan.device.total
            error = planned_bytes / self.samples[-1]["peak_bytes"] - 1
            self.samples[-1]["planned_peak_bytes"] = planned_bytes
            self.samples[-1]["plan_error_percent"] = 100 * abs(error)

    def _is_over(self) -> bool:
        """As the base; where the time is over, one more step is made, and profiled."""
        if len(self.samples) <= self._num_timed and time.time() > self._stop_at:
            self._num_timed = len(self.samples)
            return False
        return super()._is_over()

    def _end_trace(self) -> None:
        assert self._trace is not None
        peak, self._trace = self._trace.stop(), None
        self._traced = (peak, super()._memory_bytes()["peak_bytes"])
        if self.samples:
            self.samples[-1]["peak_bytes"] = peak

    def _memory_bytes(self) -> dict[str, int]:
        """As the base; the peak is that of the trace, and what the counters have grown since."""
        figures = super()._memory_bytes()
        counted = figures.get("peak_bytes", 0)
        if self._trace is not None:
            figures.pop("peak_bytes", None)
        elif self._traced is not None:
            peak, counted_then = self._traced
            figures["peak_bytes"] = peak + counted - counted_then
        return figures

    def _least_bytes(self, num_passes: int) -> int:
        """Return what the placement in force must move in a step: blocks, and a streamed head."""
        least: int = num_passes * self._streamer.plan.moved_bytes_per_step
        plan = self.streaming and self.streaming.plan
        if plan is not None:
            least += plan.moved_bytes - num_passes * plan.stream.moved_bytes_per_step
        return least
