"""Where a callback stands among those of its Trainer.

Trainer puts trackers (`report_to`) ahead of the callbacks that it is given, so that what those add
to a log line comes too late for wandb, TensorBoard and the like.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback


class LogFigures(TrainerCallback):  # type: ignore[misc] # transformers is not typed
    """Adds figures to what is logged with a loss, for trackers and for Trainer's own history.

    Args:
        figures: Makes the figures of a line from what is in it; called once for each.
    """

    def __init__(self, figures: Callable[[dict[str, Any]], dict[str, float]]) -> None:
        self._figures = figures

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        *,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the figures."""
        if logs is None or "loss" not in logs:
            return
        figures = self._figures(logs)
        logs.update(figures)
        if state.log_history:
            state.log_history[-1].update(figures)


def insert_before_trackers(callback: TrainerCallback) -> None:
    """Put a callback ahead of all others but Trainer's own control flow; idempotent.

    Called from within an event of the same Trainer. Trainer hands no event a way to its list of
    callbacks, so the list is found by who is calling; where nobody of that kind is, the event was
    called by hand, and there are no trackers. The event that is under way goes on through the old
    list.
    """
    handler = _calling_handler()
    if handler is None or callback in handler.callbacks:
        return
    is_flow = [isinstance(other, DefaultFlowCallback) for other in handler.callbacks]
    first = is_flow.index(True) + 1 if any(is_flow) else 0
    handler.callbacks = [*handler.callbacks[:first], callback, *handler.callbacks[first:]]


def _calling_handler() -> CallbackHandler | None:
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, CallbackHandler):
            return caller
        frame = frame.f_back
    return None
