"""Pytest plugin: says how each test ended as soon as it has, and keeps it in a file.

python -m pytest -p validation.experiments.gpu_suite.plugin, with POROS_SUITE_RESULT=FILE
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from validation.harness.partial import PartialResult

RESULT = "POROS_SUITE_RESULT"


class Reporter:
    """Keeps a sample of every test that has ended, and the number of those that are to run."""

    def __init__(self, path: Path) -> None:
        self.samples: list[dict[str, Any]] = []
        self._num_collected = 0
        self._open: dict[str, dict[str, Any]] = {}
        self._kept = PartialResult(path, self._look)

    def _look(self) -> dict[str, Any]:
        return {"samples": self.samples, "num_collected": self._num_collected}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Note how many tests there are."""
        self._num_collected = len(session.items)
        self._kept.write()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a phase of a test to its sample; print the test when it is over."""
        sample = self._open.setdefault(
            report.nodeid,
            {"test": report.nodeid, "outcome": "passed", "failed": 0, "seconds": 0.0},
        )
        sample["seconds"] = round(sample["seconds"] + report.duration, 3)
        if report.outcome != "passed" and not sample["failed"]:
            sample["outcome"] = "skipped" if report.skipped else _name(report)
            sample["failed"] = 1
            print(f"\n{report.nodeid}: {sample['outcome']}\n{report.longreprtext}", flush=True)
        if report.when == "teardown":
            done = self._open.pop(report.nodeid)
            self.samples.append({"step": len(self.samples) + 1, **done})
            self._kept.write()
            print(f"\n{done['seconds']:7.1f} s  {report.nodeid} {done['outcome']}", flush=True)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Close the file with the exit status of the session."""
        self._kept.finish(
            {**self._look(), "status": "ok", "error": None, "exit_status": int(exitstatus)}
        )


def _name(report: pytest.TestReport) -> str:
    return "failure" if report.when == "call" else "error"


def pytest_configure(config: pytest.Config) -> None:
    """Register the reporter."""
    config.pluginmanager.register(Reporter(Path(os.environ[RESULT])))
