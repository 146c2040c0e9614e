"""Run the parity protocol on this machine: every arm in a fresh process, within a time budget.

python -m validation.experiments.parity.run_all --models 32b 72b --artifacts DIR --budget-s 480

Random models are made in a work folder and deleted with it, but with `--work DIR` they stay there
for the next call of this or another experiment; smollm2 needs `--smollm2`, the folder of its NF4
checkpoint (make_checkpoint --source), and `--rows`. An arm that does not fit the remaining time is
named and left out; one that is stopped by it is kept as cancelled, with the steps compared so far.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from validation.experiments.parity import compare
from validation.experiments.parity.checkpoints import (
    LOADING_S,
    NEEDED_GB,
    describe_model,
    random_model,
    work_folders,
)
from validation.experiments.parity.recipe import RESULT, Arm, Model, Recipe, Streaming
from validation.harness import run, schema
from validation.harness.call import Call, Result, Watcher
from validation.harness.partial import write_json

_PACKAGE = "validation.experiments.parity"
# In order of worth, should the time run out.
STREAMED: Mapping[str, Streaming] = {
    "s2-b1": Streaming(),
    "s3-b1": Streaming(num_slots=3),
    "s2-b1-slowcopy": Streaming(delay="copy"),
    "s2-b1-slowcompute": Streaming(delay="compute"),
    "s2-b4": Streaming(block_size=4),
    "s2-b1-r4": Streaming(resident_blocks=4),
}
MODELS = ("toy", "smollm2", "7b", "32b", "72b")
_STEPS_S = 5.0  # behind loading, and for comparing; no arm begins with less
_DESCRIBE = (
    "import json; from validation.harness.machine import describe; print(json.dumps(describe()))"
)


class Bench:
    """Runs the sides of arms in a work folder, writes artifacts, keeps a line about each arm.

    Args:
        call: Whose time it is.
        work: Folder for gradients.
        artifacts: Where the records go.
    """

    def __init__(self, call: Call, work: Path, artifacts: Path) -> None:
        self.lines: list[str] = []
        self.all_equal = True
        self._call = call
        self._work = work
        self._artifacts = artifacts
        self._machine = describe_machine()

    def run_model(self, label: str, model: Model, recipe: Recipe, arms: list[str]) -> None:
        """Run the resident side once, and the self-pair and the streamed arms against it."""
        resident = self._work / f"{label}-resident"
        control = Arm(name=f"{label}-selfpair", model=model, recipe=recipe, streaming=None)
        least_s = LOADING_S[label] + _STEPS_S
        if not self._call.has_time(label, 2 * least_s):  # one side alone shows nothing
            self.all_equal = False
            return
        if self._run_side(control, "resident", resident, lambda _: None)["status"] != "ok":
            error = self._keep(control, resident, resident, None)["error"]
            shutil.rmtree(resident, ignore_errors=True)
            if recipe.strict_determinism and "deterministic implementation" in error:
                self.run_model(label, model, replace(recipe, strict_determinism=False), arms)
            return
        pairs = [control] + [
            Arm(
                name=f"{label}-streamed-{name}",
                model=model,
                recipe=recipe,
                streaming=STREAMED[name],
            )
            for name in arms
        ]
        longest_s = least_s
        for arm in pairs:
            if self._call.has_time(arm.name, 1.2 * longest_s):
                longest_s = max(longest_s, self._run_pair(arm, resident))
            else:
                self.lines.append(f"{arm.name:<36} left out")
        shutil.rmtree(resident)

    def _run_pair(self, arm: Arm, resident: Path) -> float:
        """Run the other side of an arm and compare; return the seconds it took."""
        begin, folder = time.monotonic(), self._work / arm.name
        artifact = run.ArtifactFile(self._artifacts)

        def watch(result: Result) -> None:
            sides = (compare.read_side(resident), result)
            artifact.write(compare.compare_sides(arm, (resident, folder), sides, self._machine))

        self._run_side(arm, "streamed" if arm.streaming else "resident", folder, watch)
        self._keep(arm, resident, folder, artifact)
        shutil.rmtree(folder, ignore_errors=True)
        return time.monotonic() - begin

    def _run_side(self, arm: Arm, side: str, folder: Path, watch: Watcher) -> Result:
        """Run a side, whose result lies in its folder, whatever ended it."""
        path = self._work / f"{arm.name}.json"
        arm.write(path)
        program = [f"{_PACKAGE}.train_side", str(path), str(folder), "--side", side]
        folder.mkdir()
        started = {"started": run.utc_stamp()}
        result = self._call.run_side(
            ["-m", *program],
            folder / RESULT,
            empty={"side": side, "command": [], "samples": []},
            watch=lambda found: watch({**found, **started}),
        )
        result |= started
        write_json(result, folder / RESULT)
        return result

    def _keep(
        self, arm: Arm, resident: Path, folder: Path, artifact: run.ArtifactFile | None
    ) -> schema.Record:
        record = compare.make_record(arm, (resident, folder), self._machine)
        (artifact or run.ArtifactFile(self._artifacts)).write(record)
        self.all_equal &= compare.is_equal(record)
        self.lines.append(compare.verdict(record))
        self._call.say(self.lines[-1])
        return record


def describe_machine() -> dict[str, Any]:
    """Describe this machine from a process of its own: a bench must hold no CUDA context."""
    done = subprocess.run(
        [sys.executable, "-c", _DESCRIBE], check=True, stdout=subprocess.PIPE, text=True
    )
    machine: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return machine


def touch_memory(num_gib: int) -> None:
    """Write to memory once: some virtual machines report it as theirs only then."""
    with ThreadPoolExecutor(8) as pool:
        held = list(pool.map(lambda _: torch.ones(2**30, dtype=torch.uint8), range(num_gib)))
    del held


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, required=True)
    parser.add_argument("--arms", nargs="+", choices=STREAMED, default=list(STREAMED))
    parser.add_argument("--layers", type=int, help="of random models; default: all")
    parser.add_argument("--smollm2", type=Path, help="folder of the NF4 checkpoint")
    parser.add_argument("--rows", type=Path, help="JSON lines that smollm2 trains on")
    parser.add_argument("--num-steps", type=int, default=3)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--budget-s", type=float, default=480.0)
    parser.add_argument("--artifacts", type=Path, default=run.ARTIFACTS)
    parser.add_argument("--work", type=Path, help="where checkpoints are kept between calls")
    parser.add_argument("--touch-gib", type=int, default=0, help="memory to write to at the start")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run what the command line asks for; 0 where every arm that ran is equal."""
    options = parse(arguments)
    needed_gb = max(NEEDED_GB[label] for label in options.models)
    folders = work_folders(options.work, needed_gb)
    with Call(options.budget_s) as call, folders as (checkpoints, work):
        if options.touch_gib:
            touch_memory(options.touch_gib)
        bench = Bench(call, work, options.artifacts)
        for label in options.models:
            length = {"num_steps": options.num_steps, "seq_len": options.seq_len}
            if label == "smollm2":
                model = describe_model(options.smollm2, "SmolLM2-135M-Instruct")
                recipe = Recipe(rows=str(options.rows), batch_size=2, **length)
            else:
                made = random_model(call, checkpoints, label, options.layers)
                if made is None:
                    bench.all_equal = False
                    continue
                model, recipe = made, Recipe(rows="random", **length)
            bench.run_model(label, model, recipe, options.arms)
            if options.work is None and label != "smollm2":
                shutil.rmtree(model.path, ignore_errors=True)
    print(*bench.lines, sep="\n")
    return 0 if bench.all_equal else 1


if __name__ == "__main__":
    raise SystemExit(main())
