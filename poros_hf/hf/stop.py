"""Stop on a signal at the end of a step, with a checkpoint."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from transformers import TrainerCallback

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopOnSignal(TrainerCallback):  # type: ignore[misc] # transformers is not typed
    """Turns the first Ctrl-C or SIGTERM into a checkpoint and an orderly end.

    A second one ends the process at once, as if nobody had been listening. Signals are caught while
    training runs, and only where Python lets a thread catch them: in the main one.

    Args:
        say: Told what is going to happen, from within the signal handler.

    Attributes:
        received: The signal that stopped training, or None.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.received: signal.Signals | None = None
        self._say = say
        self._before: dict[signal.Signals, Any] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start to listen."""
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._receive) for number in _SIGNALS}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ask the Trainer for a checkpoint and for the end."""
        if self.received is not None:
            control.should_save = True
            control.should_training_stop = True

    def stop_listening(self) -> None:
        """Put back what signals meant before; idempotent. Training may end by an exception."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        self._say(
            f"{self.received.name}: saving at the end of this step; once more quits at once "
            "without saving"
        )
