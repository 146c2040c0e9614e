"""Steps are timed without evaluation and saving, and each line has what is known by then."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from poros_hf.hf.pace import PaceCallback


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def run(callback: PaceCallback, clock: Clock, seconds: list[float], **events: float) -> None:
    """Drive a callback: a step takes `seconds`, what follows it takes what `events` say."""
    state = SimpleNamespace(global_step=0, max_steps=10, is_world_process_zero=True, log_history=[])
    callback.on_train_begin(None, state, None)
    for step, duration in enumerate(seconds, 1):
        clock.now += duration
        state.global_step = step
        callback.on_step_end(None, state, None)
        logs = {"loss": 1.0, "num_tokens": 100.0 * step}
        callback._figures.on_log(None, state, None, logs=logs)
        callback.on_log(None, state, None, logs=logs)
        for name, length in events.items():
            clock.now += length
            getattr(callback, f"on_{name}")(None, state, None)


def test_first_step_stands_apart_from_the_rest() -> None:
    clock = Clock()
    callback = PaceCallback(lambda *line: None, clock)
    run(callback, clock, [9.0, 1.0, 3.0])
    assert callback.pace.first_step_s == 9.0
    assert callback.pace.step_s == 2.0


def test_evaluation_and_saving_are_left_out() -> None:
    clock = Clock()
    callback = PaceCallback(lambda *line: None, clock)
    run(callback, clock, [9.0, 2.0, 2.0], evaluate=50.0, save=70.0)
    assert callback.pace.step_s == 2.0
    assert callback.pace.eta_s == 2.0 * 7
    assert callback.pace.tokens_per_s == 50.0


def test_nothing_is_made_up_before_there_are_steps() -> None:
    pace = PaceCallback(lambda *line: None).pace
    assert (pace.first_step_s, pace.step_s, pace.tokens_per_s, pace.eta_s) == (None,) * 4


def test_lines_have_the_figures_that_are_known_by_then() -> None:
    lines: list[tuple[int, int, dict[str, Any]]] = []
    clock = Clock()
    callback = PaceCallback(lambda *line: lines.append(line), clock)
    run(callback, clock, [9.0, 2.0])
    assert [line[:2] for line in lines] == [(1, 10), (2, 10)]
    assert "poros/step_s" not in lines[0][2]
    assert lines[1][2]["poros/step_s"] == 2.0
    assert lines[1][2]["poros/eta_s"] == 16.0
    assert lines[1][2]["poros/tokens_per_s"] == 50.0
