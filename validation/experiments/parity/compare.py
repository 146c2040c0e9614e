"""Compare two sides of an arm tensor by tensor and write the artifact.

python -m validation.experiments.parity.compare ARM.json RESIDENT_DIR OTHER_DIR --artifacts DIR
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from validation.experiments.parity.recipe import RESULT, Arm, gradient_file, read_arm
from validation.harness import machine, run, schema

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
# Numbers of a side's samples that stand in the artifact, with the side behind their name.
_COPIED = (
    "loss",
    "num_tokens_seen",
    "grad_norm",
    "step_ms",
    "dump_ms",
    "h2d_bytes",
    "h2d_gbps",
    "stall_ms",
    "overlap_percent",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "device_used_bytes",
    "peak_host_bytes",
)
Side = Mapping[str, Any]


def compare_tensors(first: Path, second: Path) -> dict[str, float]:
    """Compare two safetensors files.

    Returns:
        `max_abs_diff` of any element, `num_unequal` tensors that differ in any bit, `num_tensors`.

    Raises:
        ValueError: They do not hold the same names, shapes and types.
    """
    largest, unequal = 0.0, 0
    with safe_open(first, "pt") as left, safe_open(second, "pt") as right:
        names = sorted(left.keys())
        if names != sorted(right.keys()):
            raise ValueError(f"{first} and {second} hold different names")
        for name in names:
            a, b = left.get_tensor(name), right.get_tensor(name)
            if a.shape != b.shape or a.dtype != b.dtype:
                raise ValueError(f"{name}: {a.dtype} {a.shape} against {b.dtype} {b.shape}")
            integers = _INTEGERS[a.element_size()]
            if not torch.equal(a.view(integers), b.view(integers)):
                unequal += 1
                largest = max(largest, (a.double() - b.double()).abs().max().item())
    return {"max_abs_diff": largest, "num_unequal": unequal, "num_tensors": len(names)}


def read_side(folder: Path) -> dict[str, Any]:
    """Read what a side left; one that left nothing was stopped and counts as cancelled."""
    path = folder / RESULT
    if not path.exists():
        error = f"{folder.name} was stopped"
        return {"status": "cancelled", "error": error, "command": [], "samples": []}
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def make_samples(folders: tuple[Path, Path], sides: tuple[Side, Side]) -> list[dict[str, Any]]:
    """Compare step by step; the second side of a self-pair is called `again`."""
    labels = (sides[0]["side"], sides[1]["side"])
    labels = labels if labels[0] != labels[1] else (labels[0], "again")
    samples = []
    # A side that was stopped has fewer.
    for pair in zip(sides[0]["samples"], sides[1]["samples"], strict=False):
        step = pair[0]["step"]
        files = [gradient_file(folder, step) for folder in folders]
        sample = {"step": step, "grad_max_abs": pair[0]["grad_max_abs"]}
        sample |= compare_tensors(files[0], files[1])
        for label, values in zip(labels, pair, strict=True):
            sample |= {f"{key}_{label}": values[key] for key in _COPIED if key in values}
        samples.append(sample)
    return samples


def make_checks(sides: tuple[Side, Side], samples: list[dict[str, Any]]) -> dict[str, bool]:
    """Return the conditions that claims require."""
    first, second = sides
    losses = [[sample["loss"] for sample in side["samples"]] for side in sides]
    return {
        "adapter_bytes_equal": first["adapter_sha256"] == second["adapter_sha256"],
        "losses_equal": losses[0] == losses[1],
        # Each side refuses any single tensor of zeros as it is written.
        "nonzero_gradients": all(sample["grad_max_abs"] > 0 for sample in samples),
        "resident_is_stock": first["side"] == "resident" and not first["imports_poros_hf"],
        "data_equal": first["data"] == second["data"],
        "deterministic": not first["nondeterministic"] and not second["nondeterministic"],
    }


def make_record(
    arm: Arm, folders: tuple[Path, Path], described: Mapping[str, Any]
) -> schema.Record:
    """Compare two folders and build the artifact; failed sides give a record that says so."""
    sides = (read_side(folders[0]), read_side(folders[1]))
    return compare_sides(arm, folders, sides, described)


def compare_sides(
    arm: Arm, folders: tuple[Path, Path], sides: tuple[Side, Side], described: Mapping[str, Any]
) -> schema.Record:
    """Build the artifact of two results and of the gradients in their folders.

    A side that was stopped leaves the steps until then; if they differ, that is an error and not
    only a run that was stopped.
    """
    failed = next((side for side in sides if side["status"] != "ok"), None)
    status, error = (failed["status"], failed["error"]) if failed else ("ok", None)
    is_compared = status in ("ok", "cancelled") and all(side["samples"] for side in sides)
    samples = make_samples(folders, sides) if is_compared else []
    if status == "cancelled" and any(sample["num_unequal"] for sample in samples):
        status, error = "error", f"gradients differ; {error}"
    if status == "ok" and len(sides[0]["samples"]) != len(sides[1]["samples"]):
        status, error = "error", "one side made more steps than the other"
    resolved = {"recipe": asdict(arm.recipe)} | {
        "streaming": arm.streaming and asdict(arm.streaming),
        "num_layers": sides[1].get("num_layers"),
        "trainer": sides[1].get("trainer"),
        "nondeterministic": sides[1].get("nondeterministic"),
    }
    return run.make_record(
        {
            "id": "parity",
            "arm": arm.name,
            "status": status,
            "error": error,
            "started": sides[1].get("started", run.utc_stamp()),
            "command": [side["command"] for side in sides],
            "environment": dict(described),
            "config": resolved,
            "plan": sides[1].get("plan"),
            "model": {"id": arm.model.id, "sha256": arm.model.sha256},
            "data": sides[1].get("data", {}),
            "checks": {} if failed else make_checks(sides, samples),
            "samples": samples,
        }
    )


def is_equal(record: schema.Record) -> bool:
    """Say whether both sides ran, passed every check, and agree in every bit."""
    unequal = any(sample["num_unequal"] for sample in record["samples"])
    return record["status"] == "ok" and all(record["checks"].values()) and not unequal


def verdict(record: schema.Record) -> str:
    """Return one line about a record."""
    if record["status"] != "ok":
        return f"{record['arm']:<36} {record['status']}"
    worst = max(sample["max_abs_diff"] for sample in record["samples"])
    unequal = max(sample["num_unequal"] for sample in record["samples"])
    failed = [name for name, passed in record["checks"].items() if not passed]
    return (
        f"{record['arm']:<36} max |diff| {worst:.3g}, {unequal} of "
        f"{record['samples'][0]['num_tensors']} unequal, {len(record['samples'])} steps"
        + (f", FAILED {', '.join(failed)}" if failed else "")
    )


def main() -> int:
    """Write the artifact; 0 only where everything is equal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("arm", type=Path)
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    parser.add_argument("--machine", type=Path, help="JSON of machine.describe(); else described")
    parser.add_argument("--artifacts", type=Path, default=run.ARTIFACTS)
    arguments = parser.parse_args()
    described = (
        json.loads(arguments.machine.read_text()) if arguments.machine else machine.describe()
    )
    folders = (arguments.first, arguments.second)
    record = make_record(read_arm(arguments.arm), folders, described)
    path = run.write(record, arguments.artifacts)
    print(verdict(record))
    print(path)
    return 0 if is_equal(record) else 1


if __name__ == "__main__":
    raise SystemExit(main())
