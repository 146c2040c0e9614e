"""Run the parity protocol on this machine: every arm in a fresh process, within a time budget.

python -m validation.experiments.parity.run_all --models 32b 72b --artifacts DIR --budget-s 480

Random models are made in a work folder and deleted with it; smollm2 needs `--smollm2`, the folder
of its NF4 checkpoint (make_checkpoint --source), and `--rows`. An arm that does not fit the
remaining time is named and left out; one that is stopped by it is kept as cancelled.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from validation.experiments.parity import compare
from validation.experiments.parity.recipe import Arm, Model, Recipe, Streaming
from validation.harness import run, schema

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
# Checkpoint and gradients, in the work folder.
NEEDED_GB = {"toy": 0.1, "smollm2": 1, "7b": 8, "32b": 22, "72b": 46}
_FIRST_ARM_S = 15.0
_DESCRIBE = (
    "import json; from validation.harness.machine import describe; print(json.dumps(describe()))"
)


class Bench:
    """Runs the sides of arms in a work folder, writes artifacts, keeps a line about each arm.

    Args:
        work: Folder for models and gradients.
        artifacts: Where the records go.
        budget_s: Seconds for everything, from now on.
    """

    def __init__(self, work: Path, artifacts: Path, budget_s: float) -> None:
        self.lines: list[str] = []
        self.all_equal = True
        self._work = work
        self._artifacts = artifacts
        self._end = time.monotonic() + budget_s
        self._machine = describe_machine()

    @property
    def left_s(self) -> float:
        """Seconds left of the budget."""
        return self._end - time.monotonic()

    def make_model(self, shape: str, num_layers: int | None) -> Model:
        """Write a random checkpoint and hash it.

        Raises:
            RuntimeError: It could not be written.
        """
        path = self._work / f"{shape}-model"
        layers = [] if num_layers is None else ["--layers", str(num_layers)]
        if not self._call("make_checkpoint", "--shape", shape, "--out", str(path), *layers):
            raise RuntimeError(f"no checkpoint of {shape}")
        return describe_model(path, f"qwen2.5 {shape} shape, random weights")

    def run_model(self, label: str, model: Model, recipe: Recipe, arms: list[str]) -> None:
        """Run the resident side once, and the self-pair and the streamed arms against it."""
        resident = self._work / f"{label}-resident"
        control = Arm(name=f"{label}-selfpair", model=model, recipe=recipe, streaming=None)
        if not self._run_side(control, "resident", resident):
            error = self._keep(control, resident, resident)["error"]
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
        longest_s = _FIRST_ARM_S
        for arm in pairs:
            if self.left_s < 1.2 * longest_s:
                self._note(f"{arm.name:<32} left out, {self.left_s:.0f} s left")
                continue
            longest_s = max(longest_s, self._run_pair(arm, resident))
        shutil.rmtree(resident)

    def _run_pair(self, arm: Arm, resident: Path) -> float:
        """Run the other side of an arm and compare; return the seconds it took."""
        begin, folder = time.monotonic(), self._work / arm.name
        self._run_side(arm, "streamed" if arm.streaming else "resident", folder)
        self._keep(arm, resident, folder)
        shutil.rmtree(folder, ignore_errors=True)
        return time.monotonic() - begin

    def _run_side(self, arm: Arm, side: str, folder: Path) -> bool:
        path = self._work / f"{arm.name}.json"
        arm.write(path)
        return self._call("train_side", str(path), str(folder), "--side", side)

    def _keep(self, arm: Arm, resident: Path, folder: Path) -> schema.Record:
        record = compare.make_record(arm, (resident, folder), self._machine)
        run.write(record, self._artifacts)
        self.all_equal &= compare.is_equal(record)
        self._note(compare.verdict(record))
        return record

    def _note(self, line: str) -> None:
        self.lines.append(line)
        print(f"[{self.left_s:.0f} s left] {line}", flush=True)

    def _call(self, program: str, *arguments: str) -> bool:
        """Run a program of this experiment in its own process; stop it at the end of the budget."""
        command = [sys.executable, "-m", f"{_PACKAGE}.{program}", *arguments]
        try:
            done = subprocess.run(command, check=False, timeout=max(1.0, self.left_s))
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0


def describe_machine() -> dict[str, Any]:
    """Describe this machine from a process of its own: a bench must hold no CUDA context."""
    done = subprocess.run(
        [sys.executable, "-c", _DESCRIBE], check=True, stdout=subprocess.PIPE, text=True
    )
    machine: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return machine


def describe_model(path: Path, identity: str) -> Model:
    """Return a checkpoint with the hash of its shards."""
    digest = run.sha256_of_shards(sorted(path.glob("*.safetensors")))
    return Model(path=str(path), id=identity, sha256=digest)


def choose_work_folder(needed_gb: float, parent: str | None) -> Path:
    """Make a folder in `parent`; where that is None, in memory if it has room, else on disk.

    Raises:
        OSError: There is no room.
    """
    places = ("/dev/shm", tempfile.gettempdir()) if parent is None else (parent,)
    for place in places:
        if Path(place).is_dir() and shutil.disk_usage(place).free > 1e9 * needed_gb:
            return Path(tempfile.mkdtemp(prefix="parity-", dir=place))
    raise OSError(f"{needed_gb} GB free are needed in one of {', '.join(places)}")


def touch_memory(num_gib: int) -> None:
    """Write to memory once: some virtual machines report it as theirs only then."""
    with ThreadPoolExecutor(8) as pool:
        held = list(pool.map(lambda _: torch.ones(2**30, dtype=torch.uint8), range(num_gib)))
    del held


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=NEEDED_GB, required=True)
    parser.add_argument("--arms", nargs="+", choices=STREAMED, default=list(STREAMED))
    parser.add_argument("--layers", type=int, help="of random models; default: all")
    parser.add_argument("--smollm2", type=Path, help="folder of the NF4 checkpoint")
    parser.add_argument("--rows", type=Path, help="JSON lines that smollm2 trains on")
    parser.add_argument("--num-steps", type=int, default=3)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--budget-s", type=float, default=480.0)
    parser.add_argument("--artifacts", type=Path, default=run.ARTIFACTS)
    parser.add_argument("--work", help="where models and gradients go; default: where room is")
    parser.add_argument("--touch-gib", type=int, default=0, help="memory to write to at the start")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run what the command line asks for; 0 where every arm that ran is equal."""
    options = parse(arguments)
    if options.touch_gib:
        touch_memory(options.touch_gib)
    work = choose_work_folder(max(NEEDED_GB[label] for label in options.models), options.work)
    try:
        bench = Bench(work, options.artifacts, options.budget_s)
        for label in options.models:
            length = {"num_steps": options.num_steps, "seq_len": options.seq_len}
            if label == "smollm2":
                model = describe_model(options.smollm2, "SmolLM2-135M-Instruct")
                recipe = Recipe(rows=str(options.rows), batch_size=2, **length)
            else:
                model = bench.make_model(label, options.layers)
                recipe = Recipe(rows="random", **length)
            bench.run_model(label, model, recipe, options.arms)
            shutil.rmtree(work / f"{label}-model", ignore_errors=True)
    finally:
        shutil.rmtree(work)
    print(*bench.lines, sep="\n")
    return 0 if bench.all_equal else 1


if __name__ == "__main__":
    raise SystemExit(main())
