"""Run the tests that need a GPU and keep the result as an artifact.

python -m validation.experiments.gpu_suite.run [--artifacts DIR]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from validation.harness import machine, repository, run

_COMMAND = ("-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "tests/gpu")


def run_tests(report: Path) -> int:
    """Run the suite, write a JUnit report and return pytest's exit status."""
    done = subprocess.run(
        [sys.executable, *_COMMAND, f"--junitxml={report}"],
        cwd=repository.ROOT,
        env={**os.environ, "POROS_REQUIRE_GPU": "1"},
        check=False,
    )
    return done.returncode


def read_samples(report: Path) -> list[dict[str, Any]]:
    """Turn a JUnit report into one sample a test; `failed` is 0 or 1."""
    samples = []
    for step, case in enumerate(ET.parse(report).iter("testcase"), 1):
        outcomes = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        samples.append(
            {
                "step": step,
                "test": f"{case.get('classname')}::{case.get('name')}",
                "outcome": outcomes[0] if outcomes else "passed",
                "failed": len(outcomes[:1]),
                "seconds": round(float(case.get("time", "0")), 3),
            }
        )
    return samples


def main(arguments: list[str] | None = None) -> int:
    """Write the artifact; pytest's exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--artifacts", type=Path, default=run.ARTIFACTS)
    options = parser.parse_args(arguments)
    started = run.utc_stamp()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        status = run_tests(report)
        samples = read_samples(report)
    record = run.make_record(
        {
            "id": "gpu-suite",
            "arm": "suite",
            "status": "ok" if samples else "error",
            "error": None if samples else "no test ran",
            "started": started,
            "command": ["python", *_COMMAND],
            "environment": machine.describe(),
            "config": {"POROS_REQUIRE_GPU": "1"},
            "model": {},
            "data": {},
            "checks": {"all_passed": status == 0},
            "samples": samples,
        }
    )
    print(run.write(record, options.artifacts))
    return status


if __name__ == "__main__":
    raise SystemExit(main())
