"""Runs both sides of the matrix, each in a process of its own, and hands out their results."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.parity.cases import Case
from tests.tiny import write_tiny_model

ROOT = Path(__file__).parents[2]
Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the tiny models, each written when a case first asks for it."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def run_sides(
    tiny_models: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., list[Results]]:
    """Return a function that trains cases on the named sides, side by side."""

    def run(
        cases: list[Case],
        sides: list[str],
        *,
        fault: str | None = None,
        launcher: Sequence[str] = (),
    ) -> list[Results]:
        folder = tmp_path_factory.mktemp("parity")
        for family in {case.family for case in cases}:
            if not (tiny_models / family).is_dir():
                write_tiny_model(tiny_models / family, family)
        job = {
            "cases": [case.to_dict() for case in cases],
            "fault": fault,
            "models": str(tiny_models),
            "output": str(folder),
        }
        started = [_start(side, job, folder, launcher) for side in sides]
        results = []
        for process, path, log in started:
            assert process.wait() == 0, log.read_text()[-4000:]
            results.append(json.loads(path.read_text()))
        return results

    return run


def _start(
    side: str, job: dict[str, Any], folder: Path, launcher: Sequence[str]
) -> tuple[subprocess.Popen[bytes], Path, Path]:
    results, log, path = (folder / f"{side}-{name}" for name in ("results.json", "log", "job.json"))
    path.write_text(json.dumps({**job, "results": str(results)}))
    command = [sys.executable, *launcher, "-m", "tests.parity.side", side, str(path)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
    return process, results, log
