"""How fast a training goes: its first step apart from the rest, evaluation and saving left out."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import TrainerCallback

from poros_hf.hf.callback_order import LogFigures, insert_before_trackers
from poros_hf.units import GB


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """What a run has shown so far.

    Attributes:
        first_step_s: Seconds of the first step, which warms up kernels and caches.
        step_s: Seconds of a step, the mean of all others; None before the second.
        tokens_per_s: Tokens without padding, from the first line with a loss to the last.
        eta_s: Seconds of training that are left; evaluation and saving come on top.
        peak_bytes: Most device memory that the process has held, caches and the pools of replayed
            layers included, which the counter of allocated bytes does not see; 0 without GPU.
    """

    first_step_s: float | None
    step_s: float | None
    tokens_per_s: float | None
    eta_s: float | None
    peak_bytes: int


class PaceCallback(TrainerCallback):  # type: ignore[misc] # transformers is not typed
    """Times steps, adds what it finds to the logs, and hands each log line on.

    A step counts from the end of what came before it (a step, or a log line, an evaluation or a
    checkpoint behind one) to its own end: fetching rows is part of it. Nothing here waits for the
    device; a step that returns before its kernels are done is charged to the next one.

    Args:
        on_line: Called with step, steps in all, and the figures of each line with a loss.
        clock: Seconds.
    """

    def __init__(
        self,
        on_line: Callable[[int, int, dict[str, Any]], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._on_line = on_line
        self._clock = clock
        self._figures = LogFigures(self._log_figures)
        self._mark = 0.0
        self._first_step_s: float | None = None
        self._steady_s = 0.0
        self._num_steady = 0
        self._counts: list[tuple[float, float]] = []  # tokens and seconds at each line
        self._steps_left = 0

    @property
    def pace(self) -> Pace:
        """What the run has shown so far."""
        step_s = self._steady_s / self._num_steady if self._num_steady else None
        first, last = (self._counts[0], self._counts[-1]) if self._counts else ((0, 0), (0, 0))
        seconds = last[1] - first[1]
        return Pace(
            first_step_s=self._first_step_s,
            step_s=step_s,
            tokens_per_s=(last[0] - first[0]) / seconds if seconds else None,
            eta_s=step_s * self._steps_left if step_s else None,
            peak_bytes=torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0,
        )

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock."""
        insert_before_trackers(self._figures)
        self._mark = self._clock()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count a step."""
        now = self._clock()
        if self._first_step_s is None:
            self._first_step_s = now - self._mark
        else:
            self._steady_s += now - self._mark
            self._num_steady += 1
        self._mark = now
        self._steps_left = max(0, state.max_steps - state.global_step)

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        *,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Hand the line on, once all figures are in it."""
        if logs is not None and "loss" in logs and state.is_world_process_zero:
            self._on_line(state.global_step, state.max_steps, logs)
        self._mark = self._clock()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the evaluation out."""
        self._mark = self._clock()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the checkpoint out."""
        self._mark = self._clock()

    def _log_figures(self, logs: dict[str, Any]) -> dict[str, float]:
        tokens = logs.get("num_tokens")  # SFTTrainer's, padding left out, since training began
        if tokens is not None:
            self._counts.append((float(tokens), self._steady_s))
        pace = self.pace
        figures = {
            "poros/step_s": pace.step_s,
            "poros/tokens_per_s": pace.tokens_per_s,
            "poros/eta_s": pace.eta_s,
            "poros/peak_gb": pace.peak_bytes / GB if pace.peak_bytes else None,
        }
        return {name: round(value, 4) for name, value in figures.items() if value is not None}
