"""Fit the terms of poros_hf/memory.py to the 7B and 32B runs, and print them.

    python -m validation.experiments.plan_error.fit

The other shapes are never looked at: their errors are those of a prediction.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from poros_hf.memory import TERMS, MemoryTerms
from poros_hf.units import MIB
from validation.experiments.plan_error.cases import CALIBRATED_ON
from validation.harness import run

# A plan that is too small runs out of memory, one that is too large wastes some.
_HEADROOM = 1.005


def fit_terms(samples: Sequence[Mapping[str, float]]) -> MemoryTerms:
    """Return the factors with which measured peaks are met best, none of them below zero.

    Args:
        samples: With `peak_bytes` and the plan's parts; made with the terms that are in force.
    """
    rows, rest = [], []
    for sample in samples:
        head = sample["planned_head_bytes"] / TERMS.head
        replayed = _replayed_bytes(sample)
        layer = sample["planned_recompute_bytes"] / TERMS.layer
        known = sample["planned_peak_bytes"]
        known -= TERMS.head * head + TERMS.layer * layer + TERMS.workspace_bytes
        known -= TERMS.layer * TERMS.graphs * replayed
        rows.append([layer + replayed, head, float(MIB)])
        rest.append(_HEADROOM * sample["peak_bytes"] - known)
    layer, head, workspace = _nonnegative(rows, rest)
    return MemoryTerms(
        layer=round(layer, 3),
        head=round(head, 3),
        graphs=TERMS.graphs,
        workspace_bytes=round(workspace) * MIB,
    )


def _replayed_bytes(sample: Mapping[str, float]) -> float:
    """Return the part of a layer that decides the size of the records' memory.

    It is nothing where no layer is replayed, or where tiles of the head need more.
    """
    layer = sample["layer_bytes"]
    is_decided = TERMS.layer * TERMS.graphs * layer >= sample["staged_head_bytes"]
    return layer if sample["planned_graphs_bytes"] and is_decided else 0.0


def _nonnegative(rows: list[list[float]], rest: list[float]) -> list[float]:
    """Solve least squares; a column whose factor would be negative, or is empty, gets none."""
    matrix = torch.tensor(rows, dtype=torch.float64)
    target = torch.tensor(rest, dtype=torch.float64)
    free = [index for index in range(matrix.shape[1]) if bool(matrix[:, index].any())]
    while True:
        found = torch.linalg.lstsq(matrix[:, free], target).solution.tolist()
        if min(found) >= 0:
            values = dict(zip(free, found, strict=True))
            return [values.get(index, 0.0) for index in range(matrix.shape[1])]
        free.pop(found.index(min(found)))


def calibration_samples(records: Iterable[Mapping[str, Any]]) -> list[Mapping[str, float]]:
    """Return the measured samples of the newest run of each shape that is calibrated on."""
    newest = {
        record["arm"]: record
        for record in sorted(records, key=lambda record: str(record["started"]))
        if record["id"] == "plan-error" and record["status"] == "ok"
    }
    return [
        sample
        for arm in CALIBRATED_ON
        if arm in newest
        for sample in newest[arm]["samples"]
        if "peak_bytes" in sample
    ]


def main() -> int:
    samples = calibration_samples(record for _, record in run.read_all())
    if not samples:
        print("no runs of plan-error yet: python -m validation.experiments.plan_error.run")
        return 1
    print(f"in force: {TERMS}\nmeasured: {fit_terms(samples)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
