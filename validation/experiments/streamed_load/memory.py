"""Memory of this process and of its cgroup, looked at from a thread while it loads and trains."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

_STATUS = {
    "VmRSS": "resident_bytes",
    "RssAnon": "anonymous_bytes",
    "RssFile": "file_mapped_bytes",
    "RssShmem": "shared_bytes",
    "VmHWM": "peak_host_bytes",
}
_CGROUP = Path("/sys/fs/cgroup")
_USAGE = ("memory.current", "memory/memory.usage_in_bytes")
_PEAK = ("memory.peak", "memory/memory.max_usage_in_bytes")
_LIMIT = ("memory.max", "memory/memory.limit_in_bytes")


def process_bytes() -> dict[str, int]:
    """Return the resident set of this process by kind, and its peak."""
    text = Path("/proc/self/status").read_text()
    found = dict(re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE))
    return {field: 1024 * int(found[name]) for name, field in _STATUS.items()}


def cgroup_bytes() -> dict[str, int]:
    """Return usage, page cache and peak of the cgroup that is mounted here, as far as it says."""
    figures = {}
    for field, names in (
        ("cgroup_bytes", _USAGE),
        ("cgroup_peak_bytes", _PEAK),
        ("cgroup_limit_bytes", _LIMIT),
    ):
        text = next((_read(_CGROUP / name) for name in names if _read(_CGROUP / name)), "")
        if text.strip().isdigit():
            figures[field] = int(text)
    match = re.search(r"^file (\d+)$", _read(_CGROUP / "memory.stat"), re.MULTILINE)
    if match:
        figures["cgroup_page_cache_bytes"] = int(match.group(1))
    return figures


def device_bytes() -> dict[str, int]:
    """Return the device memory that torch has in use, now and at most."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return {}
    return {
        "allocated_bytes": torch.cuda.memory_allocated(),
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
    }


class MemorySampler:
    """Takes a sample every `interval_s` seconds until it is stopped; use it in a `with` block.

    Attributes:
        samples: One a look, with `seconds` since the start and the `phase` of the moment.
        phase: What the process is doing, set by who does it.
        on_look: Called behind every look of the thread.
    """

    def __init__(self, interval_s: float) -> None:
        self.samples: list[dict[str, float | str]] = []
        self.phase = "start"
        self.on_look: Callable[[], None] = lambda: None
        self._interval_s = interval_s
        self._start = time.perf_counter()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> MemorySampler:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_over.set()
        self._thread.join()
        self.look()

    def look(self) -> dict[str, float | str]:
        """Take one sample now and return it."""
        sample: dict[str, float | str] = {
            "seconds": time.perf_counter() - self._start,
            "phase": self.phase,
            **process_bytes(),
            **cgroup_bytes(),
            **device_bytes(),
        }
        self.samples.append(sample)
        return sample

    def _work(self) -> None:
        while not self._is_over.wait(self._interval_s):
            self.look()
            self.on_look()


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
