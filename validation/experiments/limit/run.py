"""Run arms of the limit protocol, each in a fresh process, and keep an artifact of each.

    python -m validation.experiments.limit.run --arms 32b-resident-512,32b-auto-512 --budget-s 300
    python -m validation.experiments.limit.run --list

Arms of one shape run behind each other and share a checkpoint, which is made at the first of them.
With `--rounds 2` they run once, in their order, and then once more: arms that are compared
alternate, and a pair of runs of one arm is the measure of noise.
With `--work DIR` checkpoints stay there and the next call finds them. An arm that is not likely to
end within the budget is named and left out. See validation/protocols/limit.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from validation.experiments.limit.arms import PROTOCOL, REAL, LimitArm, parse_arm
from validation.experiments.parity.recipe import Model
from validation.experiments.parity.run_all import (
    choose_work_folder,
    describe_machine,
    describe_model,
    touch_memory,
)
from validation.harness import repository, run, schema

NUM_WARMUP = 5
# Fewer steps prove nothing; one of many rows is long, and varies less.
FEWEST_STEPS, FEWEST_LONG_STEPS, FEWEST_RISING_STEPS = 20, 8, 2
MANY_ROWS = 8
ROWS = repository.ROOT / "recipes" / "data" / "humaneval_sft.jsonl"
_NEEDED_GB = {"toy": 0.1, REAL: 0.5, "7b": 8, "14b": 12, "32b": 22, "72b": 46}
# Kept free at the end of an arm for profiling and for the artifact.
_CLOSING_S = 10.0
_FIRST_ARM_S = 30.0  # below this no arm begins: loading alone takes as long


@dataclass(kw_only=True)
class Bench:
    """What the arms of one call share.

    Attributes:
        work: Folder for checkpoints, a folder for each.
        real: Folder of SmolLM2's NF4 checkpoint.
        end: Time (`time.time()`) at which everything has to be over.
        records: Of the arms that have been run.
    """

    work: Path
    artifacts: Path
    machine: Mapping[str, Any]
    real: Path | None
    end: float
    num_warmup: int = NUM_WARMUP
    records: list[schema.Record] = field(default_factory=list)
    _models: dict[str, Model] = field(default_factory=dict)

    @property
    def left_s(self) -> float:
        """Seconds left of the budget."""
        return self.end - time.time()

    def run_arm(self, arm: LimitArm) -> None:
        """Run an arm in a fresh process and write its artifacts."""
        model = self._model_of(arm)
        if self.left_s < _FIRST_ARM_S:
            print(f"{arm.name}: left out, {self.left_s:.0f} s left", flush=True)
            return
        started, folder = run.utc_stamp(), self.work / "side"
        folder.mkdir()
        try:
            result = self._run_side(arm, model, folder)
        finally:
            shutil.rmtree(folder)
        record = make_record(arm, model, result, self.machine, started)
        print(run.write(record, self.artifacts))
        print(f"[{self.left_s:.0f} s left] {report(record)}", flush=True)
        if result["bins"] is not None:
            run.write(make_timeline(record, result["bins"]), self.artifacts)
        self.records.append(record)

    def _run_side(self, arm: LimitArm, model: Model, folder: Path) -> dict[str, Any]:
        job, result = folder / "job.json", folder / "result.json"
        values = {
            "arm": asdict(arm),
            "model": model.path,
            "rows": str(ROWS) if arm.shape == REAL else None,
            "work": str(folder),
            "num_warmup": self.num_warmup,
            "stop_at": self.end - _CLOSING_S,
        }
        job.write_text(json.dumps(values))
        command = ["-m", "validation.experiments.limit.side", str(job), str(result)]
        failure: dict[str, Any] = {"samples": [], "resolved": {}, "data": {}, "bins": None}
        try:
            done = subprocess.run(
                [sys.executable, *command],
                cwd=repository.ROOT,
                env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder)},
                check=False,
                timeout=max(1.0, self.left_s),
            )
        except subprocess.TimeoutExpired:
            failure |= {"status": "cancelled", "error": "stopped at the end of the budget"}
            return failure
        if result.exists():
            found: dict[str, Any] = json.loads(result.read_text())
            return found
        return {**failure, "status": "error", "error": f"exit status {done.returncode}, no result"}

    def _model_of(self, arm: LimitArm) -> Model:
        """Return the arm's checkpoint, made here if need be; it is hashed once."""
        if arm.model_name not in self._models:
            self._models[arm.model_name] = self._find_or_make(arm)
        return self._models[arm.model_name]

    def _find_or_make(self, arm: LimitArm) -> Model:
        if arm.shape == REAL:
            if self.real is None:
                raise SystemExit(f"{arm.name} needs --smollm2, the folder of its NF4 checkpoint")
            return describe_model(self.real, "SmolLM2-135M-Instruct")
        path = self.work / arm.model_name
        known = path / "described.json"
        if not known.exists():
            shutil.rmtree(path, ignore_errors=True)
            make_checkpoint(arm, path)
            model = describe_model(path, f"qwen2.5 {arm.model_name} shape, random weights")
            known.write_text(json.dumps(asdict(model)))
        return Model(**json.loads(known.read_text()))


def make_checkpoint(arm: LimitArm, path: Path) -> None:
    """Write a random NF4 checkpoint from a process of its own."""
    layers = [] if arm.num_layers is None else ["--layers", str(arm.num_layers)]
    program = "validation.experiments.parity.make_checkpoint"
    command = [sys.executable, "-m", program, "--shape", arm.shape, "--out", str(path), *layers]
    subprocess.run(command, check=True)


def make_record(
    arm: LimitArm,
    model: Model,
    result: Mapping[str, Any],
    machine: Mapping[str, Any],
    started: str,
) -> schema.Record:
    """Turn what a side left into a record."""
    resolved = dict(result["resolved"])
    plan = resolved.pop("plan", None)
    status, error = result["status"], result["error"]
    if status == "oom" and arm.seq_len is None and len(result["samples"]) > 1:
        status, error = "ok", None  # a rising arm ends so
    return run.make_record(
        {
            "id": "limit",
            "arm": arm.name,
            "status": status,
            "error": error,
            "started": started,
            "command": ["python", "-m", "validation.experiments.limit.run", "--arms", arm.name],
            "environment": dict(machine),
            "config": {"arm": asdict(arm), **resolved},
            "plan": plan,
            "model": {"id": model.id, "sha256": model.sha256},
            "data": dict(result["data"]),
            "checks": make_checks(arm, result),
            "samples": result["samples"],
        }
    )


def make_checks(arm: LimitArm, result: Mapping[str, Any]) -> dict[str, bool]:
    """Return the conditions that claims require."""
    samples = result["samples"]
    imports = result.get("imports_poros_hf")
    timed = sum("step_ms" in sample for sample in samples)
    return {
        "as_named": imports is (arm.streaming is not None),
        "enough_steps": timed > 0 and len(samples) >= fewest_steps(arm),
        "all_steps": len(samples) == arm.num_steps + 1,
        "ended_by_memory": result["status"] == "oom",
        "no_growth": has_settled(samples),
    }


def fewest_steps(arm: LimitArm) -> int:
    """Return the steps below which an arm proves nothing."""
    if arm.seq_len is None:
        return FEWEST_RISING_STEPS
    return FEWEST_LONG_STEPS if arm.rows_per_step >= MANY_ROWS else FEWEST_STEPS


def has_settled(samples: Sequence[Mapping[str, Any]]) -> bool:
    """Say whether the allocator reserved no more memory in the second half of the steps."""
    reserved = [sample.get("peak_reserved_bytes") for sample in samples]
    return len(reserved) > 1 and reserved[-1] == reserved[len(reserved) // 2]


def make_timeline(record: schema.Record, bins: list[dict[str, float]]) -> schema.Record:
    """Return the profiled step of an arm as a record of its own, one sample a span of time."""
    fields = {key: record[key] for key in schema.FIELDS if key not in ("schema", "git", "summary")}
    figures = record["samples"][-1]
    checks = {**record["checks"], "has_graphs": figures["num_graph_launches"] > 0}
    return run.make_record({**fields, "id": "timeline", "samples": bins, "checks": checks})


def report(record: schema.Record) -> str:
    """Return one line about an arm."""
    summary, checks = record["summary"], record["checks"]
    figures = [
        f"{label} {summary[name]['median'] / scale:.4g} (to {summary[name]['max'] / scale:.4g})"
        for label, name, scale in (
            ("step ms", "step_ms", 1),
            ("kernels ms", "kernel_ms", 1),
            ("launches", "num_launches", 1),
            ("link ms", "link_floor_ms", 1),
            ("moved GB", "h2d_bytes", 1e9),
            ("peak GB", "peak_bytes", 1e9),
            ("reserved GB", "peak_reserved_bytes", 1e9),
            ("host GB", "peak_host_bytes", 1e9),
        )
        if name in summary
    ]
    missing = [name for name in ("as_named", "enough_steps") if not checks[name]]
    return (
        f"{record['arm']}: {record['status']}, {len(record['samples'])} steps, "
        + ", ".join(figures)
        + (f", NOT {', '.join(missing)}" if missing else "")
    )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arms", default="", help="names, with commas between them")
    parser.add_argument("--list", action="store_true", help="name the arms of the protocol")
    parser.add_argument("--rounds", type=int, default=1, help="times that all arms are run")
    parser.add_argument("--steps", type=int, help="of every arm; default: the protocol's")
    parser.add_argument("--warmup", type=int, default=NUM_WARMUP)
    parser.add_argument("--budget-s", type=float, default=580.0)
    parser.add_argument("--smollm2", type=Path, help="folder of the NF4 checkpoint")
    parser.add_argument("--artifacts", type=Path, default=run.ARTIFACTS)
    parser.add_argument("--work", type=Path, help="where checkpoints are kept between calls")
    parser.add_argument("--touch-gib", type=int, default=0, help="memory to write to at the start")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the arms; 0 where each that was run is ok."""
    begin, options = time.time(), parse(arguments)
    if options.list or not options.arms:
        print(*PROTOCOL, sep="\n")
        return 0
    arms = [parse_arm(name, options.steps) for name in options.arms.split(",")]
    if options.touch_gib:
        touch_memory(options.touch_gib)
    work = options.work or choose_work_folder(max(_NEEDED_GB[a.shape] for a in arms), None)
    work.mkdir(parents=True, exist_ok=True)
    bench = Bench(
        work=work,
        artifacts=options.artifacts,
        machine=describe_machine(),
        real=options.smollm2,
        end=begin + options.budget_s,
        num_warmup=options.warmup,
    )
    try:
        for name in dict.fromkeys(arm.model_name for arm in arms):
            group = [arm for arm in arms if arm.model_name == name]
            for arm in group * options.rounds:
                bench.run_arm(arm)
            if options.work is None:
                shutil.rmtree(work / name, ignore_errors=True)
    finally:
        if options.work is None:
            shutil.rmtree(work)
    print(*map(report, bench.records), sep="\n")
    return 0 if all(record["status"] == "ok" for record in bench.records) else 1


if __name__ == "__main__":
    raise SystemExit(main())
