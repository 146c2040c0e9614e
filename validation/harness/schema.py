"""The record of one run: which keys it has, and what its summary must be.

A record is a plain dictionary, written as JSON by `run.write` and never changed afterwards.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

SCHEMA = 1
STATUSES = ("ok", "oom", "error", "cancelled")

Record = dict[str, Any]
Sample = Mapping[str, Any]

# Key of a record -> its type; `object` where None or several types are allowed.
FIELDS: Mapping[str, type] = {
    "schema": int,  # SCHEMA of the writer
    "id": str,  # experiment: protocols/<id>.md
    "arm": str,
    "status": str,  # one of STATUSES
    "error": object,  # text where status is not ok, else None
    "started": str,  # UTC, YYYYMMDDThhmmssZ
    "command": list,
    "git": dict,  # commit, dirty
    "environment": dict,  # see machine.describe
    "config": dict,  # fully resolved
    "plan": object,  # what the package planned; None for a resident run
    "model": dict,  # id, sha256
    "data": dict,  # id, sha256
    "checks": dict,  # name -> bool, conditions a claim may require
    "samples": list,  # flat dictionaries, one a step
    "summary": dict,  # summarise(samples), and nothing typed by hand
}
MACHINE_FIELDS = ("hardware", "gpu", "cpu", "ram_bytes", "kernel", "python", "packages")
GPU_FIELDS = ("name", "memory_bytes", "driver", "cuda", "pcie", "h2d_gbps")


def is_number(value: Any) -> bool:
    """Say whether a sample's value is a number to summarise; a bool is none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def summarise(samples: Sequence[Sample]) -> dict[str, dict[str, float]]:
    """Derive median, min and max of every numeric field of the samples."""
    columns: dict[str, list[float]] = {}
    for sample in samples:
        for key, value in sample.items():
            if is_number(value):
                columns.setdefault(key, []).append(value)
    return {
        key: {"median": statistics.median(column), "min": min(column), "max": max(column)}
        for key, column in columns.items()
    }


def problems(record: Mapping[str, Any]) -> list[str]:
    """List what keeps a record from being valid; an empty list means valid."""
    found = [f"missing: {key}" for key in FIELDS if key not in record]
    found += [f"unknown: {key}" for key in record if key not in FIELDS]
    if found:
        return found
    found += [
        f"{key}: {type(record[key]).__name__} is not {kind.__name__}"
        for key, kind in FIELDS.items()
        if not isinstance(record[key], kind)
    ]
    if found:
        return found
    if record["schema"] != SCHEMA:
        found.append(f"schema: {record['schema']} is not {SCHEMA}")
    if record["status"] not in STATUSES:
        found.append(f"status: {record['status']!r} is none of {', '.join(STATUSES)}")
    if (record["status"] == "ok") != (record["error"] is None):
        found.append("error: given exactly where status is not ok")
    return found + _machine_problems(record["environment"]) + _sample_problems(record)


def _machine_problems(machine: Mapping[str, Any]) -> list[str]:
    found = [f"environment: missing {key}" for key in MACHINE_FIELDS if key not in machine]
    gpu = machine.get("gpu")
    if gpu is not None:
        found += [f"environment.gpu: missing {key}" for key in GPU_FIELDS if key not in gpu]
    return found


def _sample_problems(record: Mapping[str, Any]) -> list[str]:
    samples = record["samples"]
    if record["status"] == "ok" and not samples:
        return ["samples: none, though status is ok"]
    found = [
        f"samples[{index}].{key}: not finite"
        for index, sample in enumerate(samples)
        for key, value in sample.items()
        if is_number(value) and not math.isfinite(value)
    ]
    if not found and record["summary"] != summarise(samples):
        found.append("summary: not what the samples give")
    return found
