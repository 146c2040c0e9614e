"""Run arms of the limit protocol, each in a fresh process, and keep an artifact of each.

    python -m validation.experiments.limit.run --arms 32b-resident-512,32b-auto-512 --budget-s 300
    python -m validation.experiments.limit.run --list

Arms of one shape run behind each other and share a checkpoint, which is made at the first of them.
With `--rounds 2` they run once, in their order, and then once more: arms that are compared
alternate, and a pair of runs of one arm is the measure of noise.
With `--work DIR` checkpoints stay there, and the next call of this or another experiment finds
them. An arm that is not likely to end within the budget is named and left out; what an arm has seen
is in its artifact every few seconds, whatever ends it. See validation/protocols/limit.md.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from validation.experiments.limit.arms import PROTOCOL, REAL, LimitArm, parse_arm
from validation.experiments.parity.checkpoints import (
    LOADING_S,
    NEEDED_GB,
    describe_model,
    folder_of,
    making_s,
    random_model,
    work_folders,
)
from validation.experiments.parity.checkpoints import is_made as checkpoint_is_made
from validation.experiments.parity.recipe import Model
from validation.experiments.parity.run_all import describe_machine, touch_memory
from validation.harness import repository, run, schema
from validation.harness.call import Call, Result

NUM_WARMUP = 5
# Fewer steps prove nothing; one of many rows is long, and varies less.
FEWEST_STEPS, FEWEST_LONG_STEPS, FEWEST_RISING_STEPS = 20, 8, 2
MANY_ROWS = 8
ROWS = repository.ROOT / "recipes" / "data" / "humaneval_sft.jsonl"
# Kept free at the end of an arm for profiling and for the artifact.
_CLOSING_S = 10.0
_STEPS_S = 20.0 + _CLOSING_S  # behind loading; no arm begins with less


@dataclass(kw_only=True)
class Bench:
    """What the arms of one call share.

    Attributes:
        checkpoints: Folder with a folder for each.
        scratch: Folder for everything else.
        real: Folder of SmolLM2's NF4 checkpoint.
        records: Of the arms that have been run.
    """

    call: Call
    checkpoints: Path
    scratch: Path
    artifacts: Path
    machine: Mapping[str, Any]
    real: Path | None
    num_warmup: int = NUM_WARMUP
    records: list[schema.Record] = field(default_factory=list)

    def run_arm(self, arm: LimitArm) -> None:
        """Run an arm in a fresh process and write its artifacts."""
        path = folder_of(self.checkpoints, arm.shape, arm.num_layers)
        is_made = arm.shape == REAL or checkpoint_is_made(path)
        needed_s = 0.0 if is_made else making_s(arm.shape, arm.num_layers)
        if not self.call.has_time(arm.name, needed_s + LOADING_S[arm.shape] + _STEPS_S):
            return
        model = self._model_of(arm)
        if model is None:
            return
        started, artifact = run.utc_stamp(), run.ArtifactFile(self.artifacts)

        def keep(result: Result) -> schema.Record:
            record = make_record(arm, model, result, self.machine, started)
            artifact.write(record)
            return record

        result = self._run_side(arm, model, keep)
        record = keep(result)
        self.call.say(report(record))
        if result["bins"] is not None:
            run.write(make_timeline(record, result["bins"]), self.artifacts)
        self.records.append(record)

    def _run_side(
        self, arm: LimitArm, model: Model, keep: Callable[[Result], schema.Record]
    ) -> Result:
        with tempfile.TemporaryDirectory(prefix="side-", dir=self.scratch) as name:
            job, result = Path(name, "job.json"), Path(name, "result.json")
            values = {
                "arm": asdict(arm),
                "model": model.path,
                "rows": str(ROWS) if arm.shape == REAL else None,
                "work": name,
                "num_warmup": self.num_warmup,
                "stop_at": self.call.end - _CLOSING_S,
            }
            job.write_text(json.dumps(values))
            return self.call.run_side(
                ["-m", "validation.experiments.limit.side", str(job), str(result)],
                result,
                empty={"samples": [], "resolved": {}, "data": {}, "bins": None},
                watch=keep,
                env={"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": name},
            )

    def _model_of(self, arm: LimitArm) -> Model | None:
        """Return the arm's checkpoint, made here if need be; it is hashed once."""
        if arm.shape != REAL:
            return random_model(self.call, self.checkpoints, arm.shape, arm.num_layers)
        if self.real is None:
            raise SystemExit(f"{arm.name} needs --smollm2, the folder of its NF4 checkpoint")
        return describe_model(self.real, "SmolLM2-135M-Instruct")


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
    options = parse(arguments)
    if options.list or not options.arms:
        print(*PROTOCOL, sep="\n")
        return 0
    arms = [parse_arm(name, options.steps) for name in options.arms.split(",")]
    needed_gb = max(NEEDED_GB[arm.shape] for arm in arms)
    with Call(options.budget_s) as call, work_folders(options.work, needed_gb) as folders:
        if options.touch_gib:
            touch_memory(options.touch_gib)
        bench = Bench(
            call=call,
            checkpoints=folders[0],
            scratch=folders[1],
            artifacts=options.artifacts,
            machine=describe_machine(),
            real=options.smollm2,
            num_warmup=options.warmup,
        )
        for name in dict.fromkeys(arm.model_name for arm in arms):
            group = [arm for arm in arms if arm.model_name == name]
            for arm in group * options.rounds:
                bench.run_arm(arm)
            if options.work is None:
                shutil.rmtree(folders[0] / name, ignore_errors=True)
    print(*map(report, bench.records), sep="\n")
    return 0 if all(record["status"] == "ok" for record in bench.records) else 1


if __name__ == "__main__":
    raise SystemExit(main())
