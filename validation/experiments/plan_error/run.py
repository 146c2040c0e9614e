"""Measure the plan's error on eight shapes, one process each.

    python -m validation.experiments.plan_error.run --budget-s 240

See validation/protocols/plan-error.md. A shape whose time is over is named and left out.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from validation.experiments.parity.run_all import choose_work_folder, describe_machine
from validation.experiments.plan_error.cases import CASES, SHAPES
from validation.harness import repository, run, schema

NEEDED_GB = 24.0
_LEAST_S = 20.0


def run_shape(shape: str, work: Path, limit_s: float) -> dict[str, Any]:
    """Run a shape in a fresh process and return its result; one that failed is a result as well."""
    folder = work / shape
    folder.mkdir()
    result = folder / "result.json"
    program = "validation.experiments.plan_error.side"
    try:
        done = subprocess.run(
            [sys.executable, "-m", program, shape, str(result), str(folder)],
            cwd=repository.ROOT,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder)},
            check=False,
            timeout=limit_s,
            capture_output=True,
            text=True,
        )
        if result.exists():
            values: dict[str, Any] = json.loads(result.read_text())
            return {"status": "ok", "error": None, **values}
        print(done.stderr[-4000:], file=sys.stderr)
        return {"status": "error", "error": f"exit status {done.returncode}", "samples": []}
    except subprocess.TimeoutExpired:
        return {"status": "cancelled", "error": "stopped at the end of the budget", "samples": []}
    finally:
        shutil.rmtree(folder)


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
            "checks": {"all_cases": len(result["samples"]) >= len(CASES)},
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
    parser.add_argument("--work", help="where the models go; default: where room is")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the shapes; 0 where each is ok."""
    end, options = time.time(), parse(arguments)
    end += options.budget_s
    work = choose_work_folder(NEEDED_GB if options.shapes != "toy" else 0.1, options.work)
    machine, is_ok = describe_machine(), True
    try:
        for shape in options.shapes.split(","):
            left_s = end - time.time()
            if left_s < _LEAST_S:
                print(f"{shape}: left out, {left_s:.0f} s left", flush=True)
                is_ok = False
                continue
            started = run.utc_stamp()
            record = make_record(shape, run_shape(shape, work, left_s), machine, started)
            print(run.write(record, options.artifacts))
            print(report(record), flush=True)
            is_ok = is_ok and record["status"] == "ok"
    finally:
        shutil.rmtree(work)
    return 0 if is_ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
