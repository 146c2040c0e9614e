"""Records and repositories for the tests of the validation harness."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from validation.harness import run

MACHINE = {
    "hardware": "test-gpu",
    "gpu": {
        "name": "Test GPU",
        "memory_bytes": 1,
        "driver": "1",
        "cuda": "1",
        "pcie": {},
        "h2d_gbps": 50.0,
    },
    "cpu": {"model": "test", "count": 2},
    "ram_bytes": 1,
    "kernel": "1",
    "python": "3",
    "packages": {},
}


def make_record(arm: str = "toy-a", values: tuple[float, ...] = (1.0, 3.0), **changes: Any) -> Any:
    """Return a valid record whose samples hold `values` as step_ms."""
    fields = {
        "id": "speed",
        "arm": arm,
        "status": "ok",
        "started": "20300101T000000Z",
        "command": ["x"],
        "git": {"commit": "0" * 40, "dirty": False},
        "environment": MACHINE,
        "config": {},
        "model": {},
        "data": {},
        "checks": {"sound": True},
        "samples": [{"step": step, "step_ms": value} for step, value in enumerate(values, 1)],
    }
    return run.make_record({**fields, **changes})


def commit_all(root: Path, message: str = "x") -> str:
    """Commit everything in `root`, a repository made here if need be; return the commit."""
    git = ["git", "-C", str(root), "-c", "user.name=t", "-c", "user.email=t@t"]
    for command in (
        ["init", "-q"],
        ["add", "-A"],
        ["commit", "-q", "--allow-empty", "-m", message],
    ):
        subprocess.run([*git, *command], check=True)
    done = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    return done.stdout.strip()
