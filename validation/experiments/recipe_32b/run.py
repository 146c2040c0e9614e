"""Run recipes/sft_32b.py on a checkpoint of that shape, and the same training resident.

    python -m validation.experiments.recipe_32b.run --budget-s 400

The checkpoint and the rows are made in a work folder and deleted with it; `--checkpoint` takes one
that the limit protocol made. Every arm is a fresh process under `accelerate launch`. The resident
arm is first; the streamed one ends before the budget is spent, whatever step it has reached.
See validation/protocols/recipe-32b.md.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from validation.experiments.parity.recipe import Model, Recipe
from validation.experiments.parity.rows import load_rows
from validation.experiments.parity.run_all import (
    choose_work_folder,
    describe_machine,
    describe_model,
    touch_memory,
)
from validation.experiments.parity.shapes import SHAPES
from validation.harness import repository, run, schema

NEEDED_GB: Mapping[str, float] = {"toy": 0.1, "7b": 8, "32b": 22}
_ROWS_GB = 0.1
NUM_WARMUP = 5
# Kept free at the end of an arm for saving, and at the end of everything for the artifact.
_CLOSING_S = 15.0
_RESIDENT_S = 120.0
Side = Literal["streamed", "resident"]
SIDES: tuple[Side, Side] = ("resident", "streamed")
FEWEST_STEPS: Mapping[Side, int] = {"streamed": 100, "resident": 20}


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What both arms share.

    Attributes:
        shape: Name of the model's shape.
        num_steps: Optimizer steps that each arm is to make.
        fewest_steps: Optimizer steps below which an arm proves nothing.
        end: Time (`time.time()`) at which everything has to be over.
    """

    shape: str
    seq_len: int
    num_steps: Mapping[Side, int]
    fewest_steps: Mapping[Side, int]
    work: Path
    machine: Mapping[str, Any]
    model: Model
    rows: Path
    data: Mapping[str, str]
    end: float

    def run_arm(self, side: Side, artifacts: Path) -> schema.Record:
        """Run an arm in a fresh process and write its artifact."""
        started, now = run.utc_stamp(), time.time()
        limit = min(self.end, now + _RESIDENT_S) if side == "resident" else self.end
        command = self._command(side, limit - _CLOSING_S)
        try:
            done = subprocess.run(
                [sys.executable, *command],
                cwd=repository.ROOT,
                env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(self.work)},
                check=False,
                timeout=max(1.0, limit + _CLOSING_S - now),
            )
            failure = {"status": "error", "error": f"exit status {done.returncode}, no result"}
        except subprocess.TimeoutExpired:
            failure = {"status": "cancelled", "error": "stopped at the end of the budget"}
        result = self._read_result(side) or {**failure, "samples": [], "resolved": {}}
        record = self._make_record(side, started, command, result)
        print(run.write(record, artifacts))
        return record

    def _command(self, side: Side, stop_at: float) -> list[str]:
        config = "one_gpu.yaml" if self.machine["gpu"] else "cpu.yaml"
        return [
            *("-m", "accelerate.commands.launch"),
            *("--config_file", f"recipes/accelerate/{config}"),
            *("-m", "validation.experiments.recipe_32b.side", side),
            str(self._result_path(side)),
            *("--num-warmup", str(NUM_WARMUP), "--num-steps", str(self.num_steps[side])),
            *("--stop-at", f"{stop_at:.0f}", "--"),
            *("--model", self.model.path, "--dataset", str(self.rows)),
            *("--output_dir", str(self.work / f"{side}-adapter")),
            # One row a step, as the claims say; the same schedule on both sides.
            *("--gradient_accumulation_steps", "1", "--max_length", str(self.seq_len)),
            # Else the spare memory of a large card holds the whole base.
            *("--resident_blocks", "0"),
            *("--max_steps", str(self.num_steps["streamed"])),
            *("--logging_steps", "1", "--disable_tqdm", "true"),
        ]

    def _result_path(self, side: Side) -> Path:
        return self.work / f"{side}.json"

    def _read_result(self, side: Side) -> dict[str, Any] | None:
        path = self._result_path(side)
        return json.loads(path.read_text()) if path.exists() else None

    def _make_record(
        self, side: Side, started: str, command: list[str], result: Mapping[str, Any]
    ) -> schema.Record:
        samples, resolved = result["samples"], dict(result["resolved"])
        plan = resolved.pop("plan", None)
        return run.make_record(
            {
                "id": "recipe-32b",
                "arm": f"{self.shape}-{side}-{self.seq_len}",
                "status": result["status"],
                "error": result["error"],
                "started": started,
                "command": ["python", *(word.replace(str(self.work), "WORK") for word in command)],
                "environment": dict(self.machine),
                "config": {"recipe": "recipes/sft_32b.yaml", **resolved},
                "plan": plan,
                "model": {"id": self.model.id, "sha256": self.model.sha256},
                "data": dict(self.data),
                "checks": self._make_checks(side, result),
                "samples": samples,
            }
        )

    def _make_checks(self, side: Side, result: Mapping[str, Any]) -> dict[str, bool]:
        """Return the conditions that claims require, and whether all steps were made."""
        samples = result["samples"]
        moved = sum(sample.get("h2d_bytes", 0) for sample in samples)
        is_streamed = result.get("imports_poros_hf") is True and moved > 0
        is_stock = result.get("imports_poros_hf") is False and moved == 0
        return {
            "as_named": is_streamed if side == "streamed" else is_stock,
            "under_accelerate": result.get("under_accelerate") is True,
            "enough_steps": len(samples) >= self.fewest_steps[side],
            "all_steps": len(samples) == self.num_steps[side],
        }


def make_model(shape: str, num_layers: int | None, work: Path) -> Model:
    """Write a random NF4 checkpoint from a process of its own, and hash it."""
    path = work / "model"
    layers = [] if num_layers is None else ["--layers", str(num_layers)]
    program = "validation.experiments.parity.make_checkpoint"
    command = [sys.executable, "-m", program, "--shape", shape, "--out", str(path), *layers]
    subprocess.run(command, check=True)
    return describe_model(path, f"qwen2.5 {shape} shape, random weights")


def find_model(options: argparse.Namespace, work: Path) -> Model:
    """Return the checkpoint that the command line names, or one that is made here."""
    if options.checkpoint is None:
        return make_model(options.shape, options.layers, work)
    return describe_model(options.checkpoint, f"qwen2.5 {options.shape} shape, random weights")


def make_rows(options: argparse.Namespace, work: Path) -> tuple[Path, dict[str, str]]:
    """Write as many rows of random tokens as the streamed arm takes."""
    recipe = Recipe(rows="random", num_steps=options.num_steps, seq_len=options.seq_len)
    rows, data = load_rows(recipe, SHAPES[options.shape]["vocab_size"])
    path = work / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path, data


def report(record: schema.Record) -> str:
    """Return one line about an arm."""
    summary = record["summary"]
    figures = [
        f"{name} {summary[name]['median']:.4g} ({summary[name]['min']:.4g} to"
        f" {summary[name]['max']:.4g})"
        for name in ("step_ms", "peak_bytes", "peak_host_bytes")
        if name in summary
    ]
    failed = [name for name, passed in record["checks"].items() if not passed]
    return (
        f"{record['arm']}: {record['status']}, {len(record['samples'])} steps, "
        + ", ".join(figures)
        + (f", NOT {', '.join(failed)}" if failed else "")
    )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=NEEDED_GB, default="32b")
    parser.add_argument("--layers", type=int, help="default: all of the shape")
    parser.add_argument("--checkpoint", type=Path, help="of that shape; default: made here")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--num-steps", type=int, default=200, help="of the streamed arm")
    parser.add_argument("--num-resident-steps", type=int, default=30)
    parser.add_argument("--fewest-steps", type=int, help="of either arm; default: the protocol's")
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--budget-s", type=float, default=400.0)
    parser.add_argument("--artifacts", type=Path, default=run.ARTIFACTS)
    parser.add_argument("--work", help="where the model goes; default: where room is")
    parser.add_argument("--touch-gib", type=int, default=0, help="memory to write to at the start")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run both arms; 0 where each is ok and passes every check."""
    end, options = time.time(), parse(arguments)
    end += options.budget_s
    if options.touch_gib:
        touch_memory(options.touch_gib)
    machine = describe_machine()
    needed_gb = NEEDED_GB[options.shape] if options.checkpoint is None else _ROWS_GB
    work = choose_work_folder(needed_gb, options.work)
    try:
        rows, data = make_rows(options, work)
        bench = Bench(
            shape=options.shape,
            seq_len=options.seq_len,
            num_steps={"streamed": options.num_steps, "resident": options.num_resident_steps},
            fewest_steps={
                side: options.fewest_steps or fewest for side, fewest in FEWEST_STEPS.items()
            },
            work=work,
            machine=machine,
            model=find_model(options, work),
            rows=rows,
            data=data,
            end=end,
        )
        records = [bench.run_arm(side, options.artifacts) for side in options.sides]
    finally:
        shutil.rmtree(work)
    print(*map(report, records), sep="\n")
    return 0 if all(r["status"] == "ok" and all(r["checks"].values()) for r in records) else 1


if __name__ == "__main__":
    raise SystemExit(main())
