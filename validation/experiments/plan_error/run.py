"""Measure the plan's error on eight shapes, one process each.

    python -m validation.experiments.plan_error.run --budget-s 240

See validation/protocols/plan-error.md. A shape whose time is over is named and left out.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from validation.experiments.parity.checkpoints import work_folders
from validation.experiments.parity.run_all import describe_machine
from validation.experiments.plan_error.cases import CASES, SHAPES
from validation.harness import run, schema
from validation.harness.call import STARTUP_S, Call, Result, Watcher

NEEDED_GB = 24.0
_LEAST_S = STARTUP_S + 15.0  # no shape begins with less


def run_shape(call: Call, shape: str, work: Path, watch: Watcher) -> Result:
    """Run a shape in a fresh process and return its result; one that failed is a result as well."""
    with tempfile.TemporaryDirectory(prefix=f"{shape}-", dir=work) as name:
        result = Path(name, "result.json")
        return call.run_side(
            ["-m", "validation.experiments.plan_error.side", shape, str(result), name],
            result,
            empty={"samples": []},
            watch=watch,
            env={"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": name},
        )


def make_record(
    shape: str, result: dict[str, Any], machine: dict[str, Any], started: str
) -> schema.Record:
    """Return the artifact of a shape."""
    return run.make_record(
        {
            "id": "plan-error",
            "arm": shape,
            "status": result["status"],
            "error": result["error"],
            "started": started,
            "command": ["python", "-m", "validation.experiments.plan_error.run", "--shapes", shape],
            "environment": machine,
            "config": {"cases": [list(case) for case in CASES], "poros": {"resident_blocks": 0}},
            "model": {"id": f"{shape} shape, random weights", "config": dict(SHAPES[shape])},
            "data": {"id": "random ids"},
            "checks": {"all_cases": result["status"] == "ok"},
            "samples": result["samples"],
        }
    )


def report(record: schema.Record) -> str:
    """Return one line a length: what was planned over what was measured."""
    lines = [f"{record['arm']}: {record['status']} {record['error'] or ''}"]
    lines += [
        f"  {sample['tokens']:.0f} tokens: {sample['full_peak_bytes'] / 1e9:.3f} GB at full depth,"
        f" planned {sample['planned_full_peak_bytes'] / 1e9:.3f}:"
        f" {sample['error_percent']:+.2f} %"
        for sample in record["samples"]
        if "error_percent" in sample
    ]
    return "\n".join(lines)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    shapes = [shape for shape in SHAPES if shape != "toy"]
    parser.add_argument("--shapes", default=",".join(shapes), help="separated by commas")
    parser.add_argument("--budget-s", type=float, default=240.0)
    parser.add_argument("--artifacts", type=Path, default=run.ARTIFACTS)
    parser.add_argument("--work", type=Path, help="folder for what is made and deleted")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the shapes; 0 where each is ok."""
    options, is_ok = parse(arguments), True
    folders = work_folders(options.work, NEEDED_GB if options.shapes != "toy" else 0.1)
    with Call(options.budget_s) as call, folders as (_, work):
        machine = describe_machine()
        for shape in options.shapes.split(","):
            if not call.has_time(shape, _LEAST_S):
                is_ok = False
                continue
            artifact, started = run.ArtifactFile(options.artifacts), run.utc_stamp()

            def keep(
                result: Result,
                shape: str = shape,
                to: run.ArtifactFile = artifact,
                started: str = started,
            ) -> schema.Record:
                record = make_record(shape, result, machine, started)
                to.write(record)
                return record

            record = keep(run_shape(call, shape, work, keep))
            call.say(report(record))
            is_ok = is_ok and record["status"] == "ok"
    return 0 if is_ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
