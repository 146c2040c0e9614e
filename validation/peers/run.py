"""Run every system on one model, each in a fresh process, and keep an artifact of each length.

    PYTHONPATH=FOLDER_WITH_THE_PACKAGES python -m validation.peers.run --budget-s 240

See validation/protocols/peers.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from validation.experiments.parity.recipe import Model
from validation.experiments.parity.run_all import (
    choose_work_folder,
    describe_machine,
    describe_model,
)
from validation.harness import repository, run, schema
from validation.peers.contenders import CONTENDERS

NUM_WARMUP, NUM_TIMED = 2, 6
LENGTHS = (512, 2048)
# trainstream compiles its extension at the first import, which takes minutes.
DEFAULT = ("resident", "poros", "experts4bit", "soup", "streamft")
_NEEDED_GB_PER_LAYER = {"toy": 0.1, "7b": 1.0, "32b": 1.6}
_NEEDED_GB_BESIDE = 12.0
_CLOSING_S = 8.0


def make_checkpoints(shape: str, num_layers: int, work: Path) -> Model:
    """Write one random model in NF4 and in 16 bits, and hash the former."""
    program = "validation.experiments.parity.make_checkpoint"
    for name, extra in (("nf4", []), ("bf16", ["--in-16-bits"])):
        what = ["--shape", shape, "--layers", str(num_layers), "--out", str(work / name)]
        subprocess.run([sys.executable, "-m", program, *what, *extra], check=True)
    return describe_model(work / "nf4", f"qwen2.5 {shape} shape, {num_layers} layers, random")


def run_side(name: str, work: Path, options: argparse.Namespace, end: float) -> dict[str, Any]:
    """Run a system in a fresh process."""
    folder = work / "side"
    folder.mkdir()
    job, result = folder / "job.json", folder / "result.json"
    values = {
        "name": name,
        "nf4": str(work / "nf4"),
        "bf16": str(work / "bf16"),
        "work": str(folder),
        "lengths": options.lengths,
        "num_warmup": NUM_WARMUP,
        "num_timed": options.num_timed,
        "end": end - _CLOSING_S,
    }
    job.write_text(json.dumps(values))
    failure: dict[str, Any] = {"lengths": {}, "gradients": {}, "version": "unknown"}
    command = [sys.executable, "-m", "validation.peers.side", str(job), str(result)]
    try:
        done = subprocess.run(
            command,
            cwd=repository.ROOT,
            # soup-cli writes below the home or the temporary folder and nowhere else.
            env={**os.environ, "HF_HUB_OFFLINE": "1", "TMPDIR": str(folder)},
            check=False,
            timeout=max(1.0, min(end - time.time(), options.limit_s)),
        )
        failure |= {"status": "error", "error": f"exit status {done.returncode}, no result"}
    except subprocess.TimeoutExpired:
        failure |= {"status": "cancelled", "error": "stopped at the end of its time"}
    found: dict[str, Any] = json.loads(result.read_text()) if result.exists() else failure
    shutil.rmtree(folder)
    return found


def compare_gradients(found: Mapping[str, str], resident: Mapping[str, str]) -> dict[str, int]:
    """Count the gradients of both, and those that are equal."""
    equal = sum(found.get(name) == value for name, value in resident.items())
    return {"num_gradients": len(found), "num_equal_gradients": equal if found else 0}


def make_records(
    name: str, found: Mapping[str, Any], resident: Mapping[str, str], fields: Mapping[str, Any]
) -> list[schema.Record]:
    """Return a record for each length, or one of the failure."""
    counts = compare_gradients(found["gradients"], resident)
    lengths = found["lengths"] or {"none": []}
    records = []
    for length, samples in lengths.items():
        is_ok = found["status"] == "ok" and bool(samples)
        error = None if is_ok else (found["error"] or "no step was made")
        records.append(
            run.make_record(
                {
                    **fields,
                    "id": "peers",
                    "arm": f"{fields['config']['shape']}-{name}-{length}",
                    "status": "ok" if is_ok else found["status"].replace("ok", "cancelled"),
                    "error": error,
                    "started": run.utc_stamp(),
                    "command": ["python", "-m", "validation.peers.run"],
                    "config": {**fields["config"], "system": name, "version": found["version"]},
                    "checks": {
                        "as_named": found.get("imports_poros_hf") is (name == "poros"),
                        "gradients_equal": counts["num_gradients"] > 0
                        and counts["num_equal_gradients"] == len(resident),
                        "enough_steps": sum("step_ms" in sample for sample in samples) >= 3,
                    },
                    "samples": [sample | counts for sample in samples],
                }
            )
        )
    return records


def report(record: schema.Record) -> str:
    """Return one line about a record."""
    summary = record["summary"]
    figures = [
        f"{label} {summary[key]['median']:.6g} (to {summary[key]['max']:.6g})"
        for label, key in (
            ("step ms", "step_ms"),
            ("launches", "num_launches"),
            ("allocated", "peak_allocated_bytes"),
            ("reserved", "peak_reserved_bytes"),
            ("host", "peak_host_bytes"),
            ("equal gradients", "num_equal_gradients"),
        )
        if key in summary
    ]
    return f"{record['arm']}: {record['status']}, {', '.join(figures)}"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=_NEEDED_GB_PER_LAYER, default="32b")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--systems", nargs="+", choices=CONTENDERS, default=list(DEFAULT))
    parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS))
    parser.add_argument("--num-timed", type=int, default=NUM_TIMED)
    parser.add_argument("--limit-s", type=float, default=90.0, help="for one system")
    parser.add_argument("--budget-s", type=float, default=240.0)
    parser.add_argument("--artifacts", type=Path, default=run.ARTIFACTS)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the systems; 0 where each that was run is ok."""
    begin, options = time.time(), parse(arguments)
    end = begin + options.budget_s
    needed = _NEEDED_GB_PER_LAYER[options.shape] * options.layers
    work = choose_work_folder(needed + (0 if options.shape == "toy" else _NEEDED_GB_BESIDE), None)
    records: list[schema.Record] = []
    try:
        model = make_checkpoints(options.shape, options.layers, work)
        fields = {
            "environment": describe_machine(),
            "model": {"id": model.id, "sha256": model.sha256},
            "data": {"id": "random ids, seed = length"},
            "config": {
                "shape": f"{options.shape}_l{options.layers}",
                "num_warmup": NUM_WARMUP,
                "num_timed": options.num_timed,
            },
        }
        resident: dict[str, str] = {}
        for name in options.systems:
            found = run_side(name, work, options, end)
            resident = resident or (found["gradients"] if name == "resident" else {})
            for record in make_records(name, found, resident, fields):
                print(run.write(record, options.artifacts))
                print(f"[{end - time.time():.0f} s left] {report(record)}", flush=True)
                records.append(record)
    finally:
        shutil.rmtree(work)
    print(*map(report, records), sep="\n")
    return 0 if all(record["status"] == "ok" for record in records) else 1


if __name__ == "__main__":
    raise SystemExit(main())
