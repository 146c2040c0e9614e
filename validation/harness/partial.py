"""What a side has seen so far, in a file: a run may be ended from outside at any moment."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

INTERVAL_S = 3.0
RUNNING = "still running when this was written"
STOPPED = "told to stop"
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def write_json(value: Mapping[str, Any], path: Path, *, allow_nan: bool = True) -> None:
    """Write a file as a whole: whoever reads it finds the last one or this one, never a part."""
    new = path.with_name(f"{path.name}.{threading.get_ident()}.new")
    new.write_text(json.dumps(value, indent=1, allow_nan=allow_nan) + "\n")
    os.replace(new, path)


class PartialResult:
    """The result file of a side, which says `cancelled` until the side says how it ended.

    Being told to stop by a signal writes it once more, and then ends the process by that signal.

    Args:
        path: Of the result.
        look: Returns what was seen so far, without status and error; called between any two
            instructions of the main thread.
    """

    def __init__(self, path: Path, look: Callable[[], Mapping[str, Any]]) -> None:
        self._path = path
        self._look = look
        self._written = time.monotonic()
        self._parent = os.getppid()
        for number in SIGNALS:
            signal.signal(number, self._stop)

    def tick(self) -> None:
        """Write the file where the last time is some seconds ago; end where nobody reads it."""
        if os.getppid() != self._parent:
            self._stop(signal.SIGTERM, None)
        if time.monotonic() - self._written > INTERVAL_S:
            self.write()

    def write(self, why: str = RUNNING) -> None:
        """Write what was seen so far."""
        write_json({"status": "cancelled", "error": why, **self._look()}, self._path)
        self._written = time.monotonic()

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write the result, with its status and error; from here on signals change nothing."""
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        write_json(result, self._path)

    def _stop(self, number: int, frame: object) -> None:
        self.write(f"{STOPPED} by {signal.Signals(number).name}")
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
