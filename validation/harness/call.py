"""One call of a driver: its time, its processes, and being told to stop.

A side is the process of one arm. It leaves its result in a file, all of it at the end and what it
has seen so far before that (`partial.PartialResult`). Whatever ends a side or the call, the record
of the arm is made from what is there.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from validation.harness import partial, repository

# What a process of these experiments needs to import its libraries and to start CUDA.
STARTUP_S = 15.0
_LOOK_S = 3.0
_WAIT_S = 0.1
# Between being told to stop and being killed.
_GRACE_S = 3.0
# Longer than the longest load.
_HANG_S = 120.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
Result = dict[str, Any]
Watcher = Callable[[Result], Any]


class Call:
    """The time budget of a call; use it in a `with` block, where signals end it in good order.

    Args:
        budget_s: Seconds for everything, from now on.

    Attributes:
        end: Time (`time.time()`) at which everything has to be over.
        is_stopped: A signal has said so; no further arm begins.
    """

    def __init__(self, budget_s: float) -> None:
        self.end = time.time() + budget_s
        self.is_stopped = False
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Call:
        for number in partial.SIGNALS:
            self._handlers[number] = signal.signal(number, self._stop)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.is_stopped = True

    @property
    def left_s(self) -> float:
        """Seconds left of the budget; none once the call was told to stop."""
        return 0.0 if self.is_stopped else self.end - time.time()

    def has_time(self, what: str, needed_s: float) -> bool:
        """Say whether so many seconds are left; where not, print that `what` is left out."""
        if self.left_s >= needed_s:
            return True
        self.say(f"{what}: left out, it needs {needed_s:.0f} s")
        return False

    def say(self, line: str) -> None:
        """Print a line at once, with the seconds that are left."""
        print(f"[{self.left_s:.0f} s left] {line}", flush=True)

    def run(self, command: Sequence[str]) -> int | None:
        """Run a Python program; returns its exit status, None where it was ended here."""
        return self._wait(self._start(command), self.end, lambda: None)

    def run_side(
        self,
        command: Sequence[str],
        result: Path,
        *,
        empty: Mapping[str, Any],
        watch: Watcher,
        limit_s: float = float("inf"),
        env: Mapping[str, str] | None = None,
    ) -> Result:
        """Run a side and return its result; one that was ended, or failed, has one as well.

        Args:
            command: Of the Python that runs this, without the interpreter.
            result: File that the side leaves; none is there before.
            empty: What a result holds besides status and error where nothing was seen.
            watch: Called at the start and every few seconds with the result so far.
            limit_s: Seconds for this side, if the budget leaves as many.
            env: Added to the environment.
        """
        watch({**empty, "status": "cancelled", "error": partial.RUNNING})
        seen, looked = 0, time.monotonic()

        def look() -> None:
            nonlocal seen, looked
            if time.monotonic() - looked < _LOOK_S or not result.exists():
                return
            looked, changed = time.monotonic(), result.stat().st_mtime_ns
            if changed != seen:
                seen = changed
                watch(_read(result))

        begin = time.time()
        end = min(self.end, begin + limit_s)
        status = self._wait(self._start(command, env=env), end, look)
        found = _read(result) if result.exists() else {**empty, "status": "cancelled", "error": ""}
        if found["status"] != "cancelled":
            return found
        idle_s = time.time() - (result.stat().st_mtime if result.exists() else begin)
        return {**found, **self._failure(status, found["error"], idle_s)}

    def _failure(self, status: int | None, said: str, idle_s: float) -> dict[str, str]:
        """Say why a side did not come to its end.

        SIGKILL is an error: a host that is out of memory sends it, and that would be a result. So
        is a side that stood still.
        """
        if self.is_stopped:
            return {"status": "cancelled", "error": "the call was told to stop"}
        if status is None and idle_s > _HANG_S:
            return {"status": "error", "error": f"nothing was seen for {idle_s:.0f} s"}
        if status is None:
            return {"status": "cancelled", "error": "stopped at the end of its time"}
        if -status in partial.SIGNALS or said.startswith(partial.STOPPED):
            return {"status": "cancelled", "error": said or f"ended by signal {-status}"}
        return {"status": "error", "error": f"exit status {status}, no result"}

    def _start(
        self, command: Sequence[str], env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, *command],
            cwd=repository.ROOT,
            env={**os.environ, **(env or {})},
            start_new_session=True,  # a launcher and what it launches are ended together
            preexec_fn=_end_with_driver,
        )

    def _wait(
        self, process: subprocess.Popen[bytes], end: float, look: Callable[[], None]
    ) -> int | None:
        """Wait for a process until `end`; return its exit status, None where it was ended."""
        try:
            while not self.is_stopped and time.time() < end:
                try:
                    return process.wait(_WAIT_S)
                except subprocess.TimeoutExpired:
                    look()
            return None
        finally:
            _end_group(process)


def _end_with_driver() -> None:
    """Ask the kernel to end this process when the driver is gone, which may not have time to."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started, each with time to write down what it saw."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        end = time.monotonic() + _GRACE_S
        is_there = _signal_group(process.pid, number)
        while is_there and time.monotonic() < end:
            process.poll()  # a process that has ended is of its group until someone asks for it
            is_there = _signal_group(process.pid, 0)
            time.sleep(_WAIT_S / 10)
        if not is_there:
            break
    process.wait()


def _signal_group(group: int, number: int) -> bool:
    """Send a signal; False where the group has no process any more."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


def _read(path: Path) -> Result:
    found: Result = json.loads(path.read_text())
    return found
