"""Run every system on one model, each in a fresh process, and keep an artifact of each length.

    PYTHONPATH=FOLDER_WITH_THE_PACKAGES python -m validation.peers.run --budget-s 240

See validation/protocols/peers.md.
"""

from __future__ import annotations

import argparse
import functools
import json
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from validation.experiments.parity.checkpoints import (
    LOADING_S,
    find_or_make,
    random_model,
    work_folders,
)
from validation.experiments.parity.recipe import Model
from validation.experiments.parity.run_all import describe_machine
from validation.harness import run, schema
from validation.harness.call import Call, Result, Watcher
from validation.peers.contenders import CONTENDERS

NUM_WARMUP, NUM_TIMED, FEWEST_TIMED = 2, 6, 3
LENGTHS = (512, 2048)
# trainstream compiles its extension at the first import, which takes minutes.
DEFAULT = ("resident", "poros", "experts4bit", "soup", "streamft")
_NEEDED_GB_PER_LAYER = {"toy": 0.1, "7b": 1.0, "32b": 1.6}
_NEEDED_GB_BESIDE = 12.0
_CLOSING_S = 8.0
_STEPS_S = 10.0 + _CLOSING_S  # behind loading; no system begins with less
Jobs = tuple[Model, dict[str, str]]


def make_checkpoints(call: Call, shape: str, num_layers: int, work: Path) -> Jobs | None:
    """Write one random model in NF4 and in 16 bits, and hash the former; None where time is over.

    Returns:
        The hashed model, and what every job has: the folders of both.
    """
    model = random_model(call, work, shape, num_layers)
    bf16 = find_or_make(call, work, shape, num_layers, in_16_bits=True)
    if model is None or bf16 is None:
        return None
    return model, {"nf4": model.path, "bf16": str(bf16)}


def run_side(
    call: Call, name: str, folders: Mapping[str, str], options: argparse.Namespace, watch: Watcher
) -> Result:
    """Run a system in a fresh process."""
    with tempfile.TemporaryDirectory(prefix="side-", dir=Path(folders["nf4"]).parent) as work:
        job, result = Path(work, "job.json"), Path(work, "result.json")
        limit_s = min(options.limit_s, call.left_s)
        values = {
            **folders,
            "name": name,
            "work": work,
            "lengths": options.lengths,
            "num_warmup": NUM_WARMUP,
            "num_timed": options.num_timed,
            "end": time.time() + limit_s - _CLOSING_S,
        }
        job.write_text(json.dumps(values))
        return call.run_side(
            ["-m", "validation.peers.side", str(job), str(result)],
            result,
            empty={"lengths": {}, "gradients": {}, "version": "unknown"},
            watch=watch,
            limit_s=limit_s,
            # soup-cli writes below the home or the temporary folder and nowhere else.
            env={"HF_HUB_OFFLINE": "1", "TMPDIR": work},
        )


def run_system(
    call: Call,
    name: str,
    folders: Mapping[str, str],
    options: argparse.Namespace,
    make: Callable[[Result], list[schema.Record]],
) -> tuple[Result, list[schema.Record]]:
    """Run a system; returns its result and the records, which are in their files."""
    files: dict[str, run.ArtifactFile] = {}

    def keep(found: Result) -> list[schema.Record]:
        records = make(found)
        for record in records:
            files.setdefault(record["arm"], run.ArtifactFile(options.artifacts)).write(record)
        return records

    def watch(found: Result) -> None:
        if found["lengths"]:  # before that it is not known which arms there will be
            keep(found)

    found = run_side(call, name, folders, options, watch)
    records = keep(found)
    for record in records:
        call.say(report(record))
    return found, records


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
                    "command": ["python", "-m", "validation.peers.run"],
                    "config": {**fields["config"], "system": name, "version": found["version"]},
                    "checks": {
                        "as_named": found.get("imports_poros_hf") is (name == "poros"),
                        "gradients_equal": counts["num_gradients"] > 0
                        and counts["num_equal_gradients"] == len(resident),
                        "enough_steps": sum("step_ms" in sample for sample in samples)
                        >= FEWEST_TIMED,
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
    parser.add_argument("--work", type=Path, help="where checkpoints are kept between calls")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the systems; 0 where each that was run is ok."""
    options = parse(arguments)
    needed_gb = _NEEDED_GB_PER_LAYER[options.shape] * options.layers
    needed_gb += 0 if options.shape == "toy" else _NEEDED_GB_BESIDE
    records: list[schema.Record] = []
    with Call(options.budget_s) as call, work_folders(options.work, needed_gb) as (checkpoints, _):
        made = make_checkpoints(call, options.shape, options.layers, checkpoints)
        if made is None:
            return 1
        model, folders = made
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
            if not call.has_time(name, LOADING_S[options.shape] + _STEPS_S):
                continue
            stamped = {**fields, "started": run.utc_stamp()}
            make = functools.partial(make_records, name, resident=resident, fields=stamped)
            found, own = run_system(call, name, folders, options, make)
            resident = resident or (found["gradients"] if name == "resident" else {})
            records += own
    print(*map(report, records), sep="\n")
    return 0 if all(record["status"] == "ok" for record in records) else 1


if __name__ == "__main__":
    raise SystemExit(main())
