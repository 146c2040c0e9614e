"""Run recipes/sft_32b.py on a checkpoint of that shape, and the same training resident.

    python -m validation.experiments.recipe_32b.run --budget-s 400

The rows are made in a work folder and deleted with it; so is the checkpoint, but with `--work DIR`
it stays there, and the next call of this or another experiment finds it. Every arm is a fresh
process under `accelerate launch`. The resident arm is first; the streamed one ends before the
budget is spent, whatever step it has reached. What an arm has seen is in its artifact every few
seconds, whatever ends it. See validation/protocols/recipe-32b.md.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from validation.experiments.parity.checkpoints import (
    LOADING_S,
    NEEDED_GB,
    random_model,
    work_folders,
)
from validation.experiments.parity.recipe import Model, Recipe
from validation.experiments.parity.rows import load_rows
from validation.experiments.parity.run_all import describe_machine, touch_memory
from validation.experiments.parity.shapes import SHAPES
from validation.harness import run, schema
from validation.harness.call import Call, Result

NUM_WARMUP = 5
# Kept free at the end of an arm for saving, and at the end of everything for the artifact.
_CLOSING_S = 15.0
_RESIDENT_S = 120.0
_STEPS_S = 30.0  # behind loading, to make the fewest steps; no arm begins with less
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
        work: Folder that is deleted at the end.
    """

    call: Call
    shape: str
    seq_len: int
    num_steps: Mapping[Side, int]
    fewest_steps: Mapping[Side, int]
    work: Path
    machine: Mapping[str, Any]
    model: Model
    rows: Path
    data: Mapping[str, str]

    def run_arm(self, side: Side, artifacts: Path) -> schema.Record | None:
        """Run an arm in a fresh process and write its artifact; None where there is no time."""
        if not self.call.has_time(self._arm(side), LOADING_S[self.shape] + _STEPS_S + _CLOSING_S):
            return None
        started, artifact = run.utc_stamp(), run.ArtifactFile(artifacts)
        limit_s = min(self.call.left_s, _RESIDENT_S if side == "resident" else float("inf"))
        command = self._command(side, time.time() + limit_s - _CLOSING_S)

        def keep(result: Result) -> schema.Record:
            record = self._make_record(side, started, command, result)
            artifact.write(record)
            return record

        result = self.call.run_side(
            command,
            self._result_path(side),
            empty={"samples": [], "resolved": {}},
            watch=keep,
            limit_s=limit_s + _CLOSING_S,
            env={"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(self.work)},
        )
        record = keep(result)
        self.call.say(report(record))
        return record

    def _arm(self, side: Side) -> str:
        return f"{self.shape}-{side}-{self.seq_len}"

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

    def _make_record(
        self, side: Side, started: str, command: list[str], result: Mapping[str, Any]
    ) -> schema.Record:
        samples, resolved = result["samples"], dict(result["resolved"])
        plan = resolved.pop("plan", None)
        return run.make_record(
            {
                "id": "recipe-32b",
                "arm": self._arm(side),
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
    parser.add_argument("--shape", choices=("toy", "7b", "32b"), default="32b")
    parser.add_argument("--layers", type=int, help="default: all of the shape")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--num-steps", type=int, default=200, help="of the streamed arm")
    parser.add_argument("--num-resident-steps", type=int, default=30)
    parser.add_argument("--fewest-steps", type=int, help="of either arm; default: the protocol's")
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--budget-s", type=float, default=400.0)
    parser.add_argument("--artifacts", type=Path, default=run.ARTIFACTS)
    parser.add_argument("--work", type=Path, help="where checkpoints are kept between calls")
    parser.add_argument("--touch-gib", type=int, default=0, help="memory to write to at the start")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run both arms; 0 where each is ok and passes every check."""
    options = parse(arguments)
    folders = work_folders(options.work, NEEDED_GB[options.shape])
    with Call(options.budget_s) as call, folders as (checkpoints, work):
        if options.touch_gib:
            touch_memory(options.touch_gib)
        machine = describe_machine()
        rows, data = make_rows(options, work)
        model = random_model(call, checkpoints, options.shape, options.layers)
        if model is None:
            return 1
        bench = Bench(
            call=call,
            shape=options.shape,
            seq_len=options.seq_len,
            num_steps={"streamed": options.num_steps, "resident": options.num_resident_steps},
            fewest_steps={
                side: options.fewest_steps or fewest for side, fewest in FEWEST_STEPS.items()
            },
            work=work,
            machine=machine,
            model=model,
            rows=rows,
            data=data,
        )
        records = [bench.run_arm(side, options.artifacts) for side in options.sides]
    is_good = [r is not None and r["status"] == "ok" and all(r["checks"].values()) for r in records]
    return 0 if all(is_good) else 1


if __name__ == "__main__":
    raise SystemExit(main())
