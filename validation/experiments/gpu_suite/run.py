"""Run the tests that need a GPU and keep the result as an artifact.

    python -m validation.experiments.gpu_suite.run --budget-s 300
    python -m validation.experiments.gpu_suite.run --select test_head --select "replay and not rows"

A test is printed when it has ended, with its failure, and is in the artifact from then on. With
`--select` some of the tests are run: the files of tests/gpu whose name begins so, and where there
is none, what pytest's `-k` takes. That is no suite, and the artifact says so.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from validation.experiments.gpu_suite.plugin import RESULT
from validation.experiments.parity.run_all import describe_machine
from validation.harness import repository, run, schema
from validation.harness.call import STARTUP_S, Call, Result

FOLDER = "tests/gpu"
_COMMAND = ("-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "--tb=no", "-rN")
_PLUGIN = ("-p", "validation.experiments.gpu_suite.plugin")
SUITE, PART = "suite", "part"


def choose_tests(select: Sequence[str], folder: Path) -> list[str]:
    """Return pytest's arguments for what is selected; everything where nothing is."""
    files: list[str] = []
    words: list[str] = []
    for item in select:
        found = sorted(folder.glob(f"{item}*.py"))
        files += [str(path.relative_to(repository.ROOT)) for path in found]
        words += [] if found else [f"({item})"]
    return [*(files or [str(folder.relative_to(repository.ROOT))]), "-k", " or ".join(words)]


def make_record(
    select: Sequence[str],
    command: Sequence[str],
    result: Result,
    machine: Mapping[str, Any],
    started: str,
) -> schema.Record:
    """Turn what the plugin left into a record."""
    samples, status, error = result["samples"], result["status"], result["error"]
    num_failed = sum(sample["failed"] for sample in samples)
    if status == "ok" and not samples:
        status, error = "error", "no test ran"
    if status == "cancelled" and num_failed:
        status, error = "error", f"{num_failed} tests failed; {error}"
    is_complete = status == "ok" and len(samples) == result["num_collected"]
    return run.make_record(
        {
            "id": "gpu-suite",
            "arm": PART if select else SUITE,
            "status": status,
            "error": error,
            "started": started,
            "command": ["python", *command],
            "environment": dict(machine),
            "config": {
                "POROS_REQUIRE_GPU": "1",
                "select": list(select),
                "num_collected": result["num_collected"],
            },
            "model": {},
            "data": {},
            "checks": {
                "all_passed": is_complete and num_failed == 0,
                "all_ran": is_complete,
                "whole_suite": not select,
            },
            "samples": samples,
        }
    )


def report(record: schema.Record) -> str:
    """Return one line about a record, and one for each test that failed or took long."""
    samples = record["samples"]
    failed = [sample["test"] for sample in samples if sample["failed"]]
    slow = sorted(samples, key=lambda sample: -sample["seconds"])[:5]
    total = sum(sample["seconds"] for sample in samples)
    lines = [
        f"{record['arm']}: {record['status']}, {len(samples)} of"
        f" {record['config']['num_collected']} tests in {total:.0f} s, {len(failed)} failed"
    ]
    lines += [f"  failed: {name}" for name in failed]
    lines += [f"  {sample['seconds']:.1f} s: {sample['test']}" for sample in slow]
    return "\n".join(lines)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--select", action="append", default=[], help="a file, or as pytest's -k")
    parser.add_argument("--budget-s", type=float, default=420.0)
    parser.add_argument("--artifacts", type=Path, default=run.ARTIFACTS)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None, folder: Path = repository.ROOT / FOLDER) -> int:
    """Write the artifact; 0 where every test that was to run passed."""
    options = parse(arguments)
    command = [*_COMMAND, *choose_tests(options.select, folder)]
    with Call(options.budget_s) as call, tempfile.TemporaryDirectory() as work:
        if not call.has_time("tests", STARTUP_S):
            return 1
        started, machine = run.utc_stamp(), describe_machine()
        artifact = run.ArtifactFile(options.artifacts)

        def keep(result: Result) -> schema.Record:
            record = make_record(options.select, command, result, machine, started)
            artifact.write(record)
            return record

        path = Path(work, "result.json")
        result = call.run_side(
            [*command, *_PLUGIN],
            path,
            empty={"samples": [], "num_collected": 0},
            watch=keep,
            env={"POROS_REQUIRE_GPU": "1", RESULT: str(path)},
        )
        record = keep(result)
        call.say(report(record))
    return 0 if record["checks"]["all_passed"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
